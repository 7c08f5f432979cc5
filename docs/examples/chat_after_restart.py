"""A chat goes on after a restart: its second turn does not compute the first one again.

    python docs/examples/chat_after_restart.py [MODEL]

The daemon stops between the turns, so only the disk still has the cache of the first turn.
"""

from __future__ import annotations

import tempfile

from small_model import answer, load

from kvtier import Client
from kvtier_transformers import attach

HISTORY = (
    "User: please read this report. " + "The machine ran without a fault for another day. " * 24
)
QUESTION = "\nUser: how many days was that?\nModel:"

model, tokenizer = load()
with tempfile.TemporaryDirectory() as folder:
    with Client.embedded(warm="256MiB", cold=folder) as client, attach(model, client):
        reply, seconds = answer(model, tokenizer, HISTORY)
        print(f"first turn: {seconds:.2f} s")
    # The daemon has ended, as after a restart of the host.

    chat = HISTORY + reply + QUESTION
    with Client.embedded(warm="256MiB", cold=folder) as client, attach(model, client) as attached:
        continued, seconds = answer(model, tokenizer, chat)
        counts = attached.counts
    print(f"second turn: {seconds:.2f} s")
    print(f"loaded {counts['loaded_tokens']} of {counts['prompt_tokens']} tokens of its prompt")

    computed, seconds = answer(model, tokenizer, chat)
    print(f"second turn without kvtier: {seconds:.2f} s")
    print("the answers are equal:", continued == computed)

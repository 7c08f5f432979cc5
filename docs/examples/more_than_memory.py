"""A session with more documents than the memory has room for: the disk keeps the others.

    python docs/examples/more_than_memory.py [MODEL]

Memory has room for two of the four documents. In the second round each document comes from memory or from
disk, and none is computed again.
"""

from __future__ import annotations

import tempfile

from small_model import answer, load

from kvtier import Client
from kvtier_transformers import attach

WORDS = ("river", "bridge", "harbour", "tunnel")
DOCUMENTS = [f"Chapter about a {word}. " + f"The {word} is old. " * 50 for word in WORDS]

model, tokenizer = load()
config = model.config
head_dim = config.hidden_size // config.num_attention_heads
token_bytes = (
    2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
)
document_bytes = token_bytes * len(tokenizer.encode(DOCUMENTS[0]))
memory = max(2 * document_bytes, 16 << 20)

with (
    tempfile.TemporaryDirectory() as folder,
    Client.embedded(warm=memory, cold=folder) as client,
    attach(model, client, patience_ms=10_000) as attached,
):
    print(f"{len(DOCUMENTS)} documents of {document_bytes >> 20} MiB, {memory >> 20} MiB of memory")
    for turn in ("first", "second"):
        for word, document in zip(WORDS, DOCUMENTS, strict=True):
            before = attached.counts["loaded_tokens"]
            prompt = document + f"{turn} question"
            _, seconds = answer(model, tokenizer, prompt)
            loaded = attached.counts["loaded_tokens"] - before
            total = len(tokenizer.encode(prompt))
            print(f"{turn} round, {word}: loaded {loaded} of {total} tokens, {seconds:.2f} s")
    print(f"read from disk: {client.stats()['tiers']['cold']['bytes']['read'] >> 20} MiB")

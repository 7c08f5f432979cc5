"""Questions about retrieved documents share a system prompt, which is computed once.

    python docs/examples/shared_prompt.py [MODEL]

Each prompt is the system prompt, one document, and one question about it. Two questions are about the same
document, so the second of them also finds the document.
"""

from __future__ import annotations

from small_model import answer, load

from kvtier import Client
from kvtier_transformers import attach

SYSTEM = "You answer questions about documents, in short sentences. " * 14
DOCUMENTS = {
    "rivers": "A river carries water from the mountains to the sea. " * 6,
    "bridges": "A bridge carries a road across a river or a valley. " * 6,
}
QUESTIONS = [
    ("rivers", "Where does the water go?"),
    ("bridges", "What does it cross?"),
    ("rivers", "Where does the water come from?"),
]

model, tokenizer = load()
with Client.embedded(warm="256MiB") as client, attach(model, client) as attached:
    for name, question in QUESTIONS:
        before = attached.counts["loaded_tokens"]
        prompt = SYSTEM + DOCUMENTS[name] + question
        _, seconds = answer(model, tokenizer, prompt)
        loaded = attached.counts["loaded_tokens"] - before
        total = len(tokenizer.encode(prompt))
        print(f"{name}: loaded {loaded} of {total} tokens, {seconds:.2f} s")

"""Requests that share prefixes: read from a file or made up, and what an LRU of whole blocks hits of them.

A request is a list of numbers, each the name of a prefix that ends with that block. The same number is the
same prefix.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

Request = list[int]


def read(path: Path, most: int) -> list[Request]:
    """The first requests of a file with a JSON object a line, whose `hash_ids` are a request."""
    with path.open() as file:
        return [json.loads(line)["hash_ids"] for line, _ in zip(file, range(most), strict=False)]


def made_up(requests: int, seed: int = 1) -> list[Request]:
    """A chat service: one of 20 system prompts, popular ones far more often; then a user's own words, 1 to
    40 blocks. Two of five requests go on with one of the last 2,000 conversations, most often a late one, and
    have all of it before their own words. A third of the prefixes comes again."""
    chance = random.Random(seed)
    new = iter(range(10**9))
    prompts = [[next(new) for _ in range(chance.randint(1, 8))] for _ in range(20)]
    popular = [1 / (place + 1) for place in range(len(prompts))]
    open_: list[Request] = []
    found = []
    for _ in range(requests):
        if open_ and chance.random() < 0.4:
            late = min(len(open_), 1 + int(chance.expovariate(1 / 500)))
            before = open_.pop(-late)
        else:
            [before] = chance.choices(prompts, popular)
        request = before + [next(new) for _ in range(chance.randint(1, 40))]
        found.append(request)
        open_ = [*open_, request][-2000:]
    return found


def lru_hits(requests: Sequence[Request], blocks: int) -> int:
    """Blocks found by an LRU of so many: a block counts if every block before it in its request does. A
    request's blocks are wanted last first, so that a prefix outlives what follows it."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for name in request:
            if name not in held:
                break
            hits += 1
        for name in reversed(request):
            held[name] = None
            held.move_to_end(name)
        while len(held) > blocks:
            held.popitem(last=False)
    return hits

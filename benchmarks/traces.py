"""Requests that share prefixes: read from a file or made up, and what an LRU of whole blocks hits of them.

A request is a list of numbers, each the name of a prefix that ends with that block. The same number is the
same prefix.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

Request = list[int]
Timed = tuple[float, Request]  # seconds since the first


def read(path: Path, most: int) -> list[Request]:
    """The first requests of a file with a JSON object a line, whose `hash_ids` are a request."""
    with path.open() as file:
        return [json.loads(line)["hash_ids"] for line, _ in zip(file, range(most), strict=False)]


def read_timed(path: Path) -> list[Timed]:
    """The same with times: `timestamp` is in milliseconds."""
    with path.open() as file:
        return [(one["timestamp"] / 1000, one["hash_ids"]) for one in map(json.loads, file)]


def made_up(requests: int, seed: int = 1) -> list[Request]:
    """A chat service: one of 20 system prompts, popular ones far more often; then the text of a user, 1 to
    40 blocks. Two of five requests continue one of the last 2,000 conversations, usually a recent one, and
    begin with all of it. A third of the prefixes is requested again."""
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
    """Return the hits of an LRU with this many blocks: a block counts if every block before it in its
    request does. A request's blocks are touched in reverse order, so that a prefix outlives what follows
    it."""
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


# --- made up, with times -------------------------------------------------------------------------


def chat(requests: int, seed: int = 1, a_second: float = 1.0, pause_s: float = 60.0) -> list[Timed]:
    """System prompts, popular ones more often, then a user's words; most users go on after a while."""
    chance, new = random.Random(seed), itertools.count(1)
    prompts = [[next(new) for _ in range(chance.randint(1, 8))] for _ in range(20)]
    popular = [1 / (place + 1) for place in range(len(prompts))]
    waiting: list[tuple[float, int, Request]] = []
    found: list[Timed] = []
    now = 0.0

    def ask(when: float, request: Request, goes_on: float) -> None:
        found.append((when, request))
        if chance.random() < goes_on:
            back = when + chance.lognormvariate(math.log(pause_s), 1)
            heapq.heappush(waiting, (back, len(found), request))

    while len(found) < requests:
        now += chance.expovariate(a_second)
        while waiting and waiting[0][0] < now:
            when, _, before = heapq.heappop(waiting)
            ask(when, before + [next(new) for _ in range(chance.randint(1, 12))], 0.7)
        [prompt] = chance.choices(prompts, popular)
        ask(now, prompt + [next(new) for _ in range(chance.randint(1, 40))], 0.6)
    return found[:requests]


def slow_chat(requests: int, seed: int = 1) -> list[Timed]:
    """Chat with a request every ten seconds, and a quarter of an hour between turns."""
    return chat(requests, seed, 0.1, 900.0)


def agents(requests: int, seed: int = 1) -> list[Timed]:
    """Some twenty agents at a time, with the long prompts of eight tools, that go on step by step."""
    chance, new = random.Random(seed), itertools.count(1)
    tools = [[next(new) for _ in range(30)] for _ in range(8)]
    working: list[Request] = []
    found: list[Timed] = []
    now = 0.0
    while len(found) < requests:
        now += chance.expovariate(3)
        if len(working) < 20:
            working.append(chance.choice(tools) + [next(new) for _ in range(3)])
        at = chance.randrange(len(working))
        working[at] = working[at] + [next(new) for _ in range(chance.randint(1, 3))]
        found.append((now, working[at]))
        if chance.random() < 0.05:
            working.pop(at)
    return found


def documents(requests: int, seed: int = 1) -> list[Timed]:
    """A question about one of 3,000 documents, by Zipf's law."""
    chance, new = random.Random(seed), itertools.count(10**7)
    texts = [
        [1, 2, 3, 4] + [1000 + 10 * at + part for part in range(4 + at % 6)] for at in range(3000)
    ]
    popular = [1 / (at + 1) ** 0.9 for at in range(len(texts))]
    asked = chance.choices(texts, popular, k=requests)
    return [(at / 4, [*text, next(new), next(new)]) for at, text in enumerate(asked)]


def loop(requests: int, seed: int = 1) -> list[Timed]:
    """Some 300 prompts in turn."""
    number = 300 + seed % 10
    prompts = [[1 + 20 * at + part for part in range(20)] for at in range(number)]
    return [(at * 0.3, prompts[at % number]) for at in range(requests)]


def scans(requests: int, seed: int = 1) -> list[Timed]:
    """Popular prompts, and from time to time 400 long ones that are never requested again."""
    chance, new = random.Random(seed), itertools.count(10**7)
    prompts = [[1 + 12 * at + part for part in range(12)] for at in range(200)]
    popular = [1 / (at + 1) ** 0.8 for at in range(len(prompts))]
    found: list[Timed] = []
    for at in range(requests):
        scan = at // 400 % 3 == 2
        [prompt] = chance.choices(prompts, popular)
        own = [next(new) for _ in range(30 if scan else 2)]
        found.append((at * 0.3, own if scan else prompt + own))
    return found


def fashions(requests: int, seed: int = 1) -> list[Timed]:
    """The popular prompts change every 1,500 requests."""
    chance, new = random.Random(seed), itertools.count(10**7)
    found: list[Timed] = []
    for at in range(requests):
        which = (int(chance.paretovariate(0.6)) + at // 1500 * 331) % 1000
        text = [1 + 10 * which + part for part in range(8)]
        found.append((at / 3, [*text, next(new), next(new)]))
    return found


def mixed(requests: int, seed: int = 1) -> list[Timed]:
    """Chat, agents and documents at the same time."""
    return _together(
        [
            chat(requests // 2, seed),
            agents(requests // 4, seed),
            documents(requests // 4, seed),
        ]
    )


def turns(requests: int, seed: int = 1) -> list[Timed]:
    """As chat services report it: nearly all share one block, prompts are as long as log-normal numbers, a
    third of the conversations goes on, an answer and a question longer each time, after half a minute to
    half an hour; who went on once does it more often."""
    chance, new = random.Random(seed), itertools.count(2)
    waiting: list[tuple[float, int, int, Request]] = []
    found: list[Timed] = []
    now = 0.0
    while len(found) < requests:
        now += chance.expovariate(1.5)
        turn, before = 0, [1] if chance.random() < 0.95 else []
        when = now
        if waiting and waiting[0][0] < now:
            when, _, turn, before = heapq.heappop(waiting)
        length = max(1, int(chance.lognormvariate(1.8 if turn == 0 else 0.7, 1.2)))
        chain = before + [next(new) for _ in range(min(length, 250))]
        found.append((when, chain))
        if chance.random() < (0.35 if turn == 0 else 0.75):
            back = when + chance.lognormvariate(math.log(120), 1.3)
            # The end of a prompt is seldom the beginning of the next one's block.
            heapq.heappush(waiting, (back, len(found), turn + 1, chain[:-1] or chain))
    return sorted(found)


def tools(requests: int, seed: int = 1) -> list[Timed]:
    """Agents again, of 60 kinds by Zipf's law: prompts of 5 to 60 blocks with equal beginnings, calls within
    seconds, some to some hundred steps per run, and results that are too long to be requested again."""
    chance, new = random.Random(seed), itertools.count(1)
    families = [[next(new) for _ in range(chance.randint(2, 20))] for _ in range(8)]
    kinds = [
        families[at % 8] + [next(new) for _ in range(chance.randint(3, 40))] for at in range(60)
    ]
    popular = [1 / (at + 1) for at in range(len(kinds))]
    calls: list[tuple[float, int, int, Request]] = []
    found: list[Timed] = []
    now = 0.0
    while len(found) < requests:
        now += chance.expovariate(0.25)
        [prompt] = chance.choices(kinds, popular)
        steps = min(200, int(chance.paretovariate(0.9)))
        heapq.heappush(calls, (now, len(found), steps, [*prompt, next(new)]))
        while calls and calls[0][0] <= now and len(found) < requests:
            when, _, left, chain = heapq.heappop(calls)
            found.append((when, chain))
            if left > 1:
                longer = chain + [next(new) for _ in range(int(chance.paretovariate(1.2)) % 30 + 1)]
                soon = when + chance.lognormvariate(math.log(8), 0.8)
                heapq.heappush(calls, (soon, len(found), left - 1, longer[:400]))
    return sorted(found)


def retrieval(requests: int, seed: int = 1) -> list[Timed]:
    """A system prompt, then three of 2,000 passages by Zipf's law, the most popular first, then a question;
    what is popular drifts."""
    chance, new = random.Random(seed), itertools.count(10**9)
    system = [1, 2]
    known: dict[tuple[int, ...], int] = {}
    weights = list(itertools.accumulate(1 / (at + 1) for at in range(2000)))
    found: list[Timed] = []
    for at in range(requests):
        picked = sorted(set(chance.choices(range(2000), cum_weights=weights, k=3)))
        texts = tuple((one + at // 40) % 2000 for one in picked)
        chain = list(system)
        for part in range(1, len(texts) + 1):
            first = known.setdefault(texts[:part], 1000 + 4 * len(known))
            chain += range(first, first + 4)
        found.append((at * 0.5, [*chain, next(new)]))
    return found


def scan(requests: int, seed: int = 1) -> list[Timed]:
    """Nothing comes twice."""
    chance, new = random.Random(seed), itertools.count(1)
    return [(at * 0.2, [next(new) for _ in range(chance.randint(1, 30))]) for at in range(requests)]


def phases(requests: int, seed: int = 1) -> list[Timed]:
    """Conversations, and from the middle on documents by popularity alone."""
    first = chat(requests // 2, seed)
    end = first[-1][0]
    second = [
        (end + when, [10**8 + name for name in request])
        for when, request in documents(requests - len(first), seed)
    ]
    return first + second


def giants(requests: int, seed: int = 1) -> list[Timed]:
    """Chat, and every 700 requests one of 3,000 blocks that comes once."""
    new = itertools.count(10**8)
    return [
        (when, [next(new) for _ in range(3000)] if at % 700 == 350 else request)
        for at, (when, request) in enumerate(chat(requests, seed))
    ]


def batches(requests: int, seed: int = 1) -> list[Timed]:
    """Jobs that ask one prompt some 100 times in a row, each with its own words, some of them at a time, and
    never again."""
    chance, new = random.Random(seed), itertools.count(1)
    jobs: list[tuple[Request, int]] = []
    found: list[Timed] = []
    for at in range(requests):
        while len(jobs) < 6:
            prompt = [next(new) for _ in range(chance.randint(2, 40))]
            jobs.append((prompt, chance.randint(20, 200)))
        which = chance.randrange(len(jobs))
        prompt, left = jobs[which]
        found.append((at * 0.4, prompt + [next(new) for _ in range(chance.randint(1, 6))]))
        jobs[which] = (prompt, left - 1)
        if left == 1:
            jobs.pop(which)
    return found


# Harder kinds, among them what the ones above have in common.


def sweeps(requests: int, seed: int = 1) -> list[Timed]:
    """A job that reads 250 documents repeatedly, each time in another order, while chats run."""
    chance, new = random.Random(seed), itertools.count(1)
    texts = [[next(new) for _ in range(chance.randint(4, 30))] for _ in range(250)]
    read: list[Timed] = []
    while len(read) < requests // 2:
        chance.shuffle(texts)
        read += [((len(read) + at) * 2.0, [*text, next(new)]) for at, text in enumerate(texts)]
    return _together([read[: requests // 2], chat(requests - requests // 2, seed)])


def zipf(requests: int, seed: int = 1) -> list[Timed]:
    """The same prompts repeatedly by Zipf's law, without continuations."""
    chance, new = random.Random(seed), itertools.count(1)
    texts = [[next(new) for _ in range(chance.randint(1, 24))] for _ in range(4000)]
    popular = list(itertools.accumulate(1 / (at + 1) for at in range(len(texts))))
    asked = chance.choices(texts, cum_weights=popular, k=requests)
    return [(at * 0.5, list(text)) for at, text in enumerate(asked)]


def tenants(requests: int, seed: int = 1) -> list[Timed]:
    """Chat of 40 tenants with prompts of 10 to 60 blocks; who of them is busy changes by and by."""
    chance, new = random.Random(seed), itertools.count(1)
    prompts = [[next(new) for _ in range(chance.randint(10, 60))] for _ in range(40)]
    waiting: list[tuple[float, int, Request]] = []
    found: list[Timed] = []
    now = 0.0
    while len(found) < requests:
        now += chance.expovariate(0.5)
        while waiting and waiting[0][0] < now and len(found) < requests:
            when, _, before = heapq.heappop(waiting)
            chain = before + [next(new) for _ in range(chance.randint(1, 4))]
            found.append((when, chain))
            if chance.random() < 0.75:
                back = when + chance.lognormvariate(math.log(90), 1)
                heapq.heappush(waiting, (back, len(found), chain))
        busy = [(1.1 + math.sin(now / 600 + at)) / (at % 13 + 1) for at in range(len(prompts))]
        [prompt] = chance.choices(prompts, busy)
        heapq.heappush(waiting, (now, len(found), prompt))
    return sorted(found)


def branches(requests: int, seed: int = 1) -> list[Timed]:
    """Searches by agents: each goes on from some step of its tree, most often a late one, and tries several
    ways from there; a search ends after some hundred steps."""
    chance, new = random.Random(seed), itertools.count(1)
    tools = [next(new) for _ in range(12)]
    trees: list[tuple[list[Request], int]] = []
    found: list[Timed] = []
    now = 0.0
    while len(found) < requests:
        now += chance.expovariate(2)
        if len(trees) < 12:
            first = tools + [next(new) for _ in range(chance.randint(2, 30))]
            trees.append(([first], int(chance.paretovariate(0.8) * 20) % 400))
        which = chance.randrange(len(trees))
        steps, left = trees[which]
        before = steps[-min(len(steps), int(chance.paretovariate(0.9)))]
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            chain = before + [next(new) for _ in range(chance.randint(1, 5))]
            steps.append(chain[:500])
            found.append((now, chain[:500]))
            now += 0.2
            left -= 1
        trees[which] = (steps, left)
        if left <= 0:
            trees.pop(which)
    return found[:requests]


def drift(requests: int, seed: int = 1) -> list[Timed]:
    """Prompts by Zipf's law, of which each becomes more popular and less by and by."""
    chance, new = random.Random(seed), itertools.count(1)
    texts = [[next(new) for _ in range(chance.randint(2, 16))] for _ in range(1500)]
    found: list[Timed] = []
    for at in range(requests):
        place = min(len(texts) - 1, int(chance.paretovariate(0.7)) - 1)
        found.append((at * 0.4, [*texts[place], *(next(new) for _ in range(chance.randint(0, 3)))]))
        if at % 5 == 0:
            one = chance.randrange(len(texts) - 1)
            other = min(len(texts) - 1, int(one * chance.lognormvariate(0, 1)))
            texts[one], texts[other] = texts[other], texts[one]
    return found


def bursts(requests: int, seed: int = 1) -> list[Timed]:
    """Chat in bursts of some hundred requests a few times faster than the rest, with half an hour of nothing
    between some of them."""
    chance = random.Random(seed)
    found: list[Timed] = []
    before = now = 0.0
    pace = 1.0
    for at, (when, request) in enumerate(chat(requests, seed)):
        if at % 300 == 0:
            pace = chance.choice((0.1, 0.3, 1.0, 5.0))
            now += 1800 if chance.random() < 0.2 else 0
        now += (when - before) * pace
        before = when
        found.append((now, request))
    return found


def once(requests: int, seed: int = 1) -> list[Timed]:
    """Nine of ten requests come once; the tenth is one of 150 prompts."""
    chance, new = random.Random(seed), itertools.count(1)
    texts = [[next(new) for _ in range(chance.randint(2, 20))] for _ in range(150)]
    popular = [1 / (at + 1) ** 0.7 for at in range(len(texts))]
    found: list[Timed] = []
    for at in range(requests):
        [text] = chance.choices(texts, popular)
        own = [next(new) for _ in range(chance.randint(1, 20))]
        found.append((at * 0.3, text + own[:2] if chance.random() < 0.1 else own))
    return found


def questions(requests: int, seed: int = 1) -> list[Timed]:
    """A handful of questions each about long texts that are new, some texts at a time; and short chats."""
    chance, new = random.Random(seed), itertools.count(1)
    asked: list[tuple[float, int, Request]] = []
    found: list[Timed] = []
    now = 0.0
    while len(asked) < requests:
        now += chance.expovariate(0.2)
        if chance.random() < 0.3:
            chain: Request = []
            for turn in range(chance.randint(1, 6)):
                chain = chain + [next(new) for _ in range(chance.randint(1, 3))]
                asked.append((now + turn * chance.lognormvariate(4, 0.7), len(asked), chain))
        else:
            text = [next(new) for _ in range(int(chance.lognormvariate(3.2, 0.8)))]
            for _ in range(chance.randint(1, 15)):
                when = now + chance.expovariate(1 / 150)
                asked.append((when, len(asked), [*text, next(new)]))
    found = [(when, chain) for when, _, chain in sorted(asked)]
    return found[:requests]


def two_services(requests: int, seed: int = 1) -> list[Timed]:
    """Agents' calls and popular prompts by turns, some 500 requests of each."""
    parts = [iter(tools(requests, seed)), iter(zipf(requests, seed))]
    found: list[Timed] = []
    shift = [0.0, 0.0]
    now = 0.0
    while len(found) < requests:
        which = len(found) // 500 % 2
        for at in range(min(500, requests - len(found))):
            when, chain = next(parts[which])
            if at == 0:
                shift[which] = now - when
            now = max(now, when + shift[which])
            found.append((now, [2 * name + which for name in chain]))
    return found


def few(requests: int, seed: int = 1) -> list[Timed]:
    """Some 30 prompts that end alike or not, so that a hundredth of them is a block or two."""
    chance, new = random.Random(seed), itertools.count(1)
    texts = [[next(new) for _ in range(chance.randint(1, 10))] for _ in range(30)]
    ends = [[[*text, next(new)] for _ in range(3)] for text in texts]
    popular = [1 / (at + 1) for at in range(len(texts))]
    found: list[Timed] = []
    for at in range(requests):
        [some] = chance.choices(ends, popular)
        found.append((at * 0.5, list(chance.choice(some))))
    return found


def long_contexts(requests: int, seed: int = 1) -> list[Timed]:
    """Conversations about texts of 40 to 1,500 blocks; many are asked once, some again and again."""
    chance, new = random.Random(seed), itertools.count(1)
    waiting: list[tuple[float, int, Request]] = []
    found: list[Timed] = []
    now = 0.0
    while len(found) < requests:
        now += chance.expovariate(0.3)
        chain = [next(new) for _ in range(min(1500, int(40 * chance.paretovariate(1))))]
        while waiting and waiting[0][0] < now and len(found) < requests:
            when, _, before = heapq.heappop(waiting)
            longer = before + [next(new) for _ in range(chance.randint(1, 9))]
            found.append((when, longer))
            if chance.random() < 0.8:
                back = when + chance.lognormvariate(math.log(200), 1)
                heapq.heappush(waiting, (back, len(found), longer))
        found.append((now, chain))
        if chance.random() < 0.4:
            back = now + chance.lognormvariate(math.log(200), 1)
            heapq.heappush(waiting, (back, len(found), chain))
    return sorted(found[:requests])


def _together(parts: Sequence[list[Timed]]) -> list[Timed]:
    """At the same time, as long as the first; names of one are no names of another."""
    end = parts[0][-1][0]
    found = [
        (when * end / part[-1][0], [len(parts) * name + at for name in request])
        for at, part in enumerate(parts)
        for when, request in part
    ]
    return sorted(found)


KINDS: dict[str, Callable[[int, int], list[Timed]]] = {
    "chat": chat,
    "slow chat": slow_chat,
    "agents": agents,
    "documents": documents,
    "loop": loop,
    "scans": scans,
    "fashions": fashions,
    "mixed": mixed,
    "turns": turns,
    "tools": tools,
    "retrieval": retrieval,
    "scan": scan,
    "phases": phases,
    "giants": giants,
    "batches": batches,
    "sweeps": sweeps,
    "zipf": zipf,
    "tenants": tenants,
    "branches": branches,
    "drift": drift,
    "bursts": bursts,
    "once": once,
    "questions": questions,
    "two services": two_services,
    "few": few,
    "long contexts": long_contexts,
}

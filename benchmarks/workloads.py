"""Requests of six kinds of services, each in two variants: one to tune policies with, one that stays unseen.

Tune with TUNED, the seeds TUNED_SEEDS and the first half of a recorded trace. UNSEEN, with the seeds
UNSEEN_SEEDS, and the second half are for results only: no constant is chosen by them. Each part has half of
the kinds of `traces.KINDS`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator

from traces import KINDS, Request, Timed

TUNED_SEEDS, UNSEEN_SEEDS = (1, 2), (91, 92)


class Later:
    """Requests that wait for their time, in the order of time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, object]] = []
        self._number = itertools.count()

    def add(self, when: float, what: object) -> None:
        heapq.heappush(self._waiting, (when, next(self._number), what))

    def due(self, now: float) -> Iterator[tuple[float, object]]:
        while self._waiting and self._waiting[0][0] <= now:
            when, _, what = heapq.heappop(self._waiting)
            yield when, what


def zipf(many: int, power: float = 1.0) -> list[float]:
    return list(itertools.accumulate((at + 1) ** -power for at in range(many)))


# --- to tune with --------------------------------------------------------------------------------


def tool_calls(requests: int, seed: int) -> list[Timed]:
    """Agents of 16 applications with long tool descriptions. Each step appends the result of a tool after its
    latency; a long context is replaced by a summary; some steps start an agent of their own."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    apps = [[next(new) for _ in range(chance.randint(6, 40))] for _ in range(16)]
    popular, found, now = zipf(len(apps)), [], 0.0
    while len(found) < requests:
        now += chance.expovariate(0.12)
        [app] = chance.choices(apps, cum_weights=popular)
        later.add(now, (app, [*app, *(next(new) for _ in range(chance.randint(1, 6)))], 0))
        for when, (app, chain, step) in later.due(now):
            found.append((when, chain))
            if chance.random() > 0.9 or step > 80:
                continue
            result = [next(new) for _ in range(min(40, int(chance.lognormvariate(1.0, 1.0)) + 1))]
            chain = [*chain, *result]
            if len(chain) > 160:
                chain = [*app, *(next(new) for _ in range(6))]
            soon = when + chance.lognormvariate(1.5, 1.2)
            later.add(soon, (app, chain, step + 1))
            if chance.random() < 0.05:
                later.add(soon, (app, [*app, *(next(new) for _ in range(3))], 40))
    return sorted(found[:requests])


def passages(requests: int, seed: int) -> list[Timed]:
    """Retrieval: a system prompt, then four passages of one of 150 topics, the most relevant first, then a
    question. A third of the users asks again with the whole context. Topics come and go."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    system = [[next(new) for _ in range(2)] for _ in range(3)]
    known: dict[tuple[int, ...], Request] = {}
    popular, found, now = zipf(150), [], 0.0
    while len(found) < requests:
        now += chance.expovariate(1.5)
        [topic] = chance.choices(range(150), cum_weights=popular)
        topic = (topic + int(now / 400) * 7) % 150
        which = chance.randrange(3)
        path: tuple[int, ...] = (which,)
        chain = list(system[which])
        for _ in range(4):
            path = (*path, 20 * topic + min(19, int(chance.paretovariate(0.8)) - 1))
            if path not in known:
                known[path] = [next(new) for _ in range(chance.randint(1, 3))]
            chain += known[path]
        later.add(now, [*chain, next(new)])
        for when, chain in later.due(now):
            found.append((when, chain))
            if chance.random() < 0.33:
                later.add(when + chance.lognormvariate(3.5, 1), [*chain, next(new), next(new)])
    return sorted(found[:requests])


def long_documents(requests: int, seed: int) -> list[Timed]:
    """Questions about documents of 50 to 900 blocks: some in a row, a new document now and then, and popular
    ones that several users read."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    shelf: list[Request] = []
    found, now = [], 0.0
    while len(found) < requests:
        now += chance.expovariate(0.1)
        if not shelf or chance.random() < 0.35:
            length = min(900, int(50 * chance.paretovariate(1.1)))
            shelf = [[next(new) for _ in range(length)], *shelf][:300]
        text = shelf[min(len(shelf), int(chance.paretovariate(0.5))) - 1]
        when = now
        chain = [*text]
        for _ in range(1 + int(chance.expovariate(1 / 4))):
            chain = [*chain, next(new)] if chance.random() < 0.6 else [*text, next(new)]
            later.add(when, chain)
            when += chance.lognormvariate(3.6, 0.9)
        found += list(later.due(now))
    return sorted(found[:requests])


def batch_jobs(requests: int, seed: int) -> list[Timed]:
    """Jobs that read thousands of texts once below one instruction, or ask three questions about each text,
    at the same time as a chat."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    prompts = [[next(new) for _ in range(chance.randint(2, 10))] for _ in range(8)]
    found, now, job = [], 0.0, [next(new) for _ in range(8)]
    thrice = False
    while len(found) < requests:
        now += chance.expovariate(2)
        if chance.random() < 0.002:
            job, thrice = [next(new) for _ in range(chance.randint(2, 30))], chance.random() < 0.5
        if chance.random() < 0.5:
            text = [next(new) for _ in range(chance.randint(4, 40))]
            asked = [[*text, next(new)] for _ in range(3)] if thrice else [[*job, *text]]
            for at, chain in enumerate(asked):
                later.add(now + at * 20.0, (chain, False))
        else:
            [prompt] = chance.choices(prompts, cum_weights=zipf(len(prompts)))
            later.add(now, ([*prompt, *(next(new) for _ in range(chance.randint(1, 10)))], True))
        for when, (chain, chats) in later.due(now):
            found.append((when, chain))
            if chats and chance.random() < 0.7:
                longer = [*chain, *(next(new) for _ in range(chance.randint(1, 4)))]
                later.add(when + chance.lognormvariate(4, 1), (longer, True))
    return sorted(found[:requests])


def completion(requests: int, seed: int) -> list[Timed]:
    """Editors that ask each second for the rest of a line: the file up to the cursor. An edit makes the
    blocks after it new; users change between their files, and pause."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    found, now = [], 0.0
    for user in range(40):
        files = [[next(new) for _ in range(chance.randint(3, 60))] for _ in range(6)]
        later.add(chance.uniform(0, 600), (user, files, 0, 3))
    while len(found) < requests:
        now += 1.0
        for when, (user, files, at, cursor) in later.due(now):
            text = files[at]
            if chance.random() < 0.4:
                text[cursor:] = [next(new) for _ in text[cursor:]] or [next(new)]
            found.append((when, text[: cursor + 1]))
            pause = chance.lognormvariate(0.8, 0.7)
            if chance.random() < 0.06:
                at, pause = chance.randrange(len(files)), chance.lognormvariate(4, 1.2)
                cursor = chance.randrange(len(files[at]))
            elif chance.random() < 0.2:
                cursor = min(cursor + 1, len(text) - 1)
            later.add(when + pause, (user, files, at, cursor))
    return sorted(found[:requests])


def day_and_night(requests: int, seed: int) -> list[Timed]:
    """Two days: chat by day, with other popular prompts in the evening; at night a job that reads a corpus,
    the same one each night."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    prompts = [[next(new) for _ in range(chance.randint(1, 12))] for _ in range(60)]
    corpus = [[next(new) for _ in range(chance.randint(2, 12))] for _ in range(requests // 8)]
    popular, found = zipf(30), []
    at = 0
    for step in range(40 * requests):
        if len(found) >= requests:
            break
        now = step * 172800 / (1.3 * requests)
        hour = now / 3600 % 24
        if hour < 6:
            later.add(now, ([*corpus[at % len(corpus)], next(new)], False))
            at += 1
        elif chance.random() < 0.15 + 0.6 * math.sin((hour - 6) / 18 * math.pi):
            [which] = chance.choices(range(30), cum_weights=popular)
            prompt = prompts[which + (30 if hour > 17 else 0)]
            later.add(now, ([*prompt, *(next(new) for _ in range(chance.randint(1, 12)))], True))
        for when, (chain, chats) in later.due(now):
            found.append((when, chain))
            if chats and chance.random() < 0.6:
                longer = [*chain, *(next(new) for _ in range(chance.randint(1, 6)))]
                later.add(when + chance.lognormvariate(5, 1), (longer, True))
    return sorted(found[:requests])


# --- unseen --------------------------------------------------------------------------------------


def tool_agents(requests: int, seed: int) -> list[Timed]:
    """Short runs of 200 kinds of agents by Zipf's law, with equal beginnings in families, long inputs that
    are unique, and calls that are made again because they failed."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    families = [[next(new) for _ in range(chance.randint(1, 10))] for _ in range(12)]
    kinds = [
        [*chance.choice(families), *(next(new) for _ in range(chance.randint(1, 14)))]
        for _ in range(200)
    ]
    popular, found, now = zipf(len(kinds), 1.1), [], 0.0
    while len(found) < requests:
        now += chance.expovariate(2)
        [kind] = chance.choices(kinds, cum_weights=popular)
        own = min(120, int(chance.lognormvariate(1.6, 1.1)) + 1)
        later.add(now, [*kind, *(next(new) for _ in range(own))])
        for when, chain in later.due(now):
            found.append((when, chain))
            goes = chance.random()
            if goes < 0.08:
                later.add(when + chance.expovariate(1 / 10), chain)
            elif goes < 0.45:
                more = [next(new) for _ in range(chance.randint(1, 8))]
                later.add(when + chance.lognormvariate(2.2, 1), [*chain, *more])
    return sorted(found[:requests])


def search_answers(requests: int, seed: int) -> list[Timed]:
    """Retrieval with passages in the order of their numbers: many users ask the same, all the more while a
    subject is in the news."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    known: dict[tuple[int, ...], Request] = {}
    subjects = [tuple(sorted(chance.sample(range(600), 5))) for _ in range(1200)]
    popular, found, now, news = zipf(len(subjects), 0.8), [], 0.0, 0
    while len(found) < requests:
        now += chance.expovariate(2)
        if chance.random() < 0.004:
            news = chance.randrange(len(subjects))
        which = news
        if chance.random() > 0.2:
            [which] = chance.choices(range(len(subjects)), cum_weights=popular)
        texts = [one for one in subjects[which] if chance.random() < 0.9]
        chain = [0]
        for end in range(1, len(texts) + 1):
            path = tuple(texts[:end])
            if path not in known:
                known[path] = [next(new) for _ in range(2)]
            chain += known[path]
        if chance.random() < 0.7:
            chain.append(next(new))
        later.add(now, chain)
        for when, asked in later.due(now):
            found.append((when, asked))
            if chance.random() < 0.15:
                later.add(when + chance.lognormvariate(4, 1), [*asked, next(new)])
    return sorted(found[:requests])


def contracts(requests: int, seed: int) -> list[Timed]:
    """Documents that are read part by part, each part for several questions, and then as a whole for some
    hours."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    rules = [[next(new) for _ in range(chance.randint(4, 20))] for _ in range(5)]
    found, now = [], 0.0
    while len(found) < requests:
        now += chance.expovariate(0.02)
        rule, when = chance.choice(rules), now
        parts = [
            [next(new) for _ in range(chance.randint(8, 40))] for _ in range(chance.randint(2, 14))
        ]
        for part in parts:
            for _ in range(chance.randint(1, 4)):
                later.add(when, [*rule, *part, next(new)])
                when += chance.expovariate(1 / 6)
        whole = [*rule, *parts[0], *(next(new) for part in parts[1:] for _ in part)]
        for _ in range(int(chance.expovariate(1 / 6))):
            when += chance.lognormvariate(5, 1.2)
            whole = [*whole, next(new)]
            later.add(when, whole)
        found += list(later.due(now))
    return sorted(found[:requests])


def evaluation(requests: int, seed: int) -> list[Timed]:
    """Suites of questions with long examples before them, each question five times; all suites are run again
    for each version of a model, in another order, while popular prompts are asked."""
    chance, new = random.Random(seed), itertools.count(1)
    suites = [
        (
            [next(new) for _ in range(chance.randint(4, 30))],
            [
                [next(new) for _ in range(chance.randint(1, 6))]
                for _ in range(chance.randint(20, 90))
            ],
        )
        for _ in range(14)
    ]
    prompts = [[next(new) for _ in range(chance.randint(3, 15))] for _ in range(50)]
    popular, found, now = zipf(len(prompts)), [], 0.0
    while len(found) < requests:
        chance.shuffle(suites)
        for examples, questions in suites:
            for question in questions:
                for _ in range(chance.choice((1, 1, 5))):
                    now += chance.expovariate(3)
                    found.append((now, [*examples, *question]))
                    if chance.random() < 0.3:
                        [prompt] = chance.choices(prompts, cum_weights=popular)
                        found.append((now, [*prompt, next(new), next(new)]))
    return found[:requests]


def fill_in(requests: int, seed: int) -> list[Timed]:
    """Completion with text of the project first, which its users share and which changes with each commit,
    then of other files, then of the file at the cursor."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    heads = [[next(new) for _ in range(chance.randint(4, 25))] for _ in range(10)]
    found, now = [], 0.0
    for user in range(60):
        later.add(chance.expovariate(1 / 900), (user % 10, None, 0, 0))
    while len(found) < requests:
        now += 1.0
        if chance.random() < 0.003:
            head = chance.choice(heads)
            cut = chance.randrange(len(head))
            head[cut:] = [next(new) for _ in head[cut:]]
        for when, (project, context, left, below) in later.due(now):
            if not context or below != heads[project][-1] or chance.random() < 0.1:
                context = [next(new) for _ in range(chance.randint(1, 8))]
                left = int(chance.expovariate(1 / 15)) + 1
            found.append((when, [*heads[project], *context, next(new)]))
            pause = chance.lognormvariate(1.2, 0.8) if left > 1 else chance.lognormvariate(5.5, 1)
            below = heads[project][-1]
            later.add(when + pause, (project, context if left > 1 else None, left - 1, below))
    return sorted(found[:requests])


def weekdays(requests: int, seed: int) -> list[Timed]:
    """Thirty customers in three time zones, each with prompts and users of its own, that work eight hours a
    day; reports at night read what was asked by day."""
    chance, new, later = random.Random(seed), itertools.count(1), Later()
    prompts = [
        [[next(new) for _ in range(chance.randint(2, 20))] for _ in range(6)] for _ in range(30)
    ]
    found, now, day, asked = [], 0.0, 0, []
    while len(found) < requests:
        now += chance.expovariate(requests / 400000)
        if int(now / 86400) > day:
            day = int(now / 86400)
            for at, chain in enumerate(chance.sample(asked, min(len(asked), requests // 25))):
                later.add(now + at * 2.0, ([*chain, next(new)], 0.0))
            asked = []
        working = [one for one in range(30) if (now / 3600 + 8 * (one % 3)) % 24 < 8 + one % 4] or [
            0
        ]
        prompt = prompts[chance.choice(working)][min(5, int(chance.paretovariate(0.9)) - 1)]
        later.add(now, ([*prompt, *(next(new) for _ in range(chance.randint(1, 9)))], 0.65))
        for when, (chain, goes_on) in later.due(now):
            found.append((when, chain))
            asked.append(chain)
            if chance.random() < goes_on:
                longer = [*chain, *(next(new) for _ in range(chance.randint(1, 4)))]
                later.add(when + chance.lognormvariate(4.5, 1.1), (longer, goes_on))
    return sorted(found[:requests])


Kinds = dict[str, Callable[[int, int], list[Timed]]]
TUNED: Kinds = {
    "tool calls": tool_calls,
    "passages": passages,
    "long documents": long_documents,
    "batch jobs": batch_jobs,
    "completion": completion,
    "day and night": day_and_night,
    **dict(itertools.islice(KINDS.items(), 0, None, 2)),
}
UNSEEN: Kinds = {
    "tool agents": tool_agents,
    "search answers": search_answers,
    "contracts": contracts,
    "evaluation": evaluation,
    "fill in": fill_in,
    "weekdays": weekdays,
    **dict(itertools.islice(KINDS.items(), 1, None, 2)),
}

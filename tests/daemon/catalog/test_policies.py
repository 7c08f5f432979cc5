"""Every policy, native and in Python: the conformance suite, and both step by step on random traces."""

import random
import resource
import struct
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance import policy_tests
from tests.conformance.policy_tests import EVENTS, pack, unpack

from kvtier_daemon.catalog.policy import NAMED, NO_PARENT, make
from models.policies.arc import Arc, ArcModel
from models.policies.attention import Attention, AttentionModel
from models.policies.lfu import Lfu, LfuModel
from models.policies.lru import Lru, LruModel
from models.policies.prefix import Prefix, PrefixModel
from models.policies.s3fifo import S3Fifo, S3FifoModel
from models.policies.value import Value, ValueModel
from support.effort import ALL, effort

PAIRS = [
    (Lru, LruModel), (Lfu, LfuModel), (Arc, ArcModel), (S3Fifo, S3FifoModel),
    (Prefix, PrefixModel), (Attention, AttentionModel), (Value, ValueModel),
]  # fmt: skip
EXAMPLES = effort(4, 15, 15)
BY_CHAINS = [kind for pair in PAIRS[4:] for kind in pair]


@pytest.mark.parametrize("kind", [kind for pair in PAIRS for kind in pair])
class TestPolicies(policy_tests.PolicyTests):
    @pytest.fixture
    def policy(self, kind):
        return kind()


class Cache:
    """A cache of `blocks` blocks, filled by requests as a catalog does it, for a policy and its model
    at the same time."""

    def __init__(self, policies, blocks):
        self.policies, self.blocks = policies, blocks
        self.at, self.names, self.parents = {}, {}, {}
        self.spare = list(reversed(range(blocks)))
        self.hits = self.asked = 0

    def tell(self, event, ids, *more):
        for policy in self.policies:
            getattr(policy, event)(pack(*ids), *more)

    def victims(self, n):
        named, *others = [policy.victims(n) for policy in self.policies]
        assert all(other == named for other in others)
        return unpack(named)

    def request(self, now, chain):
        for policy in self.policies:
            policy.now(now)
        found = []
        for name in chain:
            if name not in self.at:
                break
            found.append(self.at[name])
        self.asked += len(chain)
        self.hits += len(found)
        self.tell("wanted", found, packed([self.names[one] for one in found]))
        here = [self.at[name] for name in chain if name in self.at]
        self.tell("held", here)
        new = [name for name in chain if name not in self.at][: self.blocks - len(here)]
        self.evict(len(new) - len(self.spare))
        new = new[: len(self.spare)]
        ids = [self.spare.pop() for _ in new]
        self.at.update(zip(new, ids, strict=True))
        self.names.update(zip(ids, new, strict=True))
        before = dict(zip(chain[1:], chain, strict=False))
        self.parents.update(
            (self.at[name], self.at.get(before.get(name), NO_PARENT)) for name in new
        )
        self.tell("freed", here)
        self.tell("added", ids, packed(new), pack(*(self.parents[one] for one in ids)))
        self.tell("refreshed", here)

    def evict(self, n):
        if n <= 0:
            return
        victims = self.victims(n)
        for one in victims:
            del self.at[self.names.pop(one)]
            self.spare.append(one)
        self.tell("gone", victims)


def packed(names):
    return struct.pack(f"<{len(names)}Q", *names)


def conversations(rnd, requests, names=1):
    """Chains that fork and grow: a few beginnings, and turns that continue one of the last ones."""
    made = iter(range(names, 1 << 40))
    starts = [[next(made) for _ in range(rnd.randint(1, 4))] for _ in range(4)]
    last = []
    for _ in range(requests):
        before = rnd.choice(last[-6:]) if last and rnd.random() < 0.5 else rnd.choice(starts)
        chain = before + [next(made) for _ in range(rnd.randint(0, 7))]
        last.append(chain)
        yield chain


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("native", "model"), PAIRS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from([16, 40, 200]))
def test_native_and_model_evict_the_same_of_conversations(native, model, seed, blocks):
    rnd = random.Random(seed)
    cache = Cache([native(), model()], blocks)
    now = 0.0
    for chain in conversations(rnd, 120):
        now += rnd.expovariate(rnd.choice([0.03, 1, 20]))
        cache.request(now, chain)
        if rnd.random() < 0.1:
            cache.victims(rnd.randrange(blocks + 5))


@pytest.mark.parametrize(("native", "model"), PAIRS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_native_and_model_agree_on_random_events(native, model, seed):
    rnd = random.Random(seed)
    policies, parents, now = [native(), model()], {}, 0.0
    for _ in range(300):
        now += rnd.choice([0.0, 0.2, 3.0, 100.0])
        ids = list(dict.fromkeys(rnd.randrange(60) for _ in range(rnd.randrange(7))))
        event = rnd.choice(["added", "added", "added", *EVENTS, "demoted", "hinted", "now"])
        more = []
        if event == "added":
            for one in ids:
                parents[one] = rnd.choice([NO_PARENT, one - 1 if one else NO_PARENT])
            more = [packed([one % 41 for one in ids]), pack(*(parents[one] for one in ids))]
        elif event == "hinted":
            more = [rnd.choice([0.1, 0.5, 1.0]), packed([one % 41 for one in ids])]
        for policy in policies:
            if event == "now":
                policy.now(now)
            else:
                getattr(policy, event)(pack(*ids), *more)
        n = rnd.randrange(70)
        assert policies[0].victims(n) == policies[1].victims(n)
        assert len(policies[0]) == len(policies[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", BY_CHAINS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_parent_is_evicted_before_its_children(kind, seed):
    rnd = random.Random(seed)
    cache = Cache([kind()], 60)
    for step, chain in enumerate(conversations(rnd, 80)):
        cache.request(step * rnd.choice([0.1, 5]), chain)
        children, gone = defaultdict(set), set()
        for child in cache.names:
            children[cache.parents[child]].add(child)
        for one in cache.victims(60):
            assert children[one] <= gone
            gone.add(one)
        assert len(gone) == len(cache.names)


def test_value_samples_fewer_names_if_there_are_many_and_stops_watching_in_time():
    """More names than the policy can watch, during more than the hour for which it watches them."""
    cache = Cache([Value(), ValueModel()], 64)
    rnd = random.Random(3)
    made = iter(range(1, 1 << 40))
    known = [[next(made) for _ in range(8)] for _ in range(40)]
    for at in range(effort(1150, 1500, 1500)):
        chain = [*rnd.choice(known), *(next(made) for _ in range(60 - 8 * (at % 2)))]
        cache.request(at * 4.0, chain[: 8 if at % 5 == 0 else None])
    assert cache.hits > 0


def test_value_and_its_model_agree_in_a_tier_where_orders_are_compared_on_a_sample():
    cache = Cache([Value(), ValueModel()], 4200)
    rnd = random.Random(4)
    made = iter(range(1, 1 << 40))
    known = [[next(made) for _ in range(30)] for _ in range(100)]
    for at in range(effort(100, 160, 160)):
        cache.request(at * 2.0, [*known[int(rnd.paretovariate(0.6)) % 100], next(made)])
        cache.request(at * 2.0 + 1, [next(made) for _ in range(40)])
    assert cache.hits > 0


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_value_hits_about_as_much_as_the_best_policy_for_a_workload(kind):
    """Prompts by popularity only, mixed with unique prompts; and conversations that continue soon."""
    rnd, made = random.Random(6), iter(range(10_000, 1 << 40))
    open_ = [[next(made) for _ in range(4)] for _ in range(12)]
    chains = []
    for at in range(4000):
        if kind is Lfu:
            prompt = int(rnd.paretovariate(0.3)) % 300 * 8
            chains.append(
                [*range(prompt, prompt + 8)] if at % 4 else [next(made) for _ in range(20)]
            )
        else:
            open_[at % 12] = [*open_[at % 12], next(made)]
            chains.append(open_[at % 12])
            if rnd.random() < 0.1:
                open_[at % 12] = [next(made) for _ in range(4)]
    caches = [Cache([kind()], 200), Cache([Value()], 200)]
    for cache in caches:
        for at, chain in enumerate(chains):
            cache.request(at * 0.25, chain)
    assert caches[0].hits > 0.1 * caches[0].asked
    assert caches[1].hits > caches[0].hits - 0.01 * caches[0].asked


def hits_of(policy, blocks, requests):
    cache = Cache([policy], blocks)
    for now, chain in requests:
        cache.request(now, chain)
    return cache.hits / cache.asked


def test_value_distinguishes_blocks_with_large_use_counts():
    """Thirty prompts in a tier for a few: all blocks that may stay have large counts."""
    rnd = random.Random(1)
    prompts = [[100 * at + part for part in range(3 + at % 6)] for at in range(1, 31)]
    popular = [1 / at for at in range(1, 31)]
    requests = [
        (at * 0.5, prompt) for at, prompt in enumerate(rnd.choices(prompts, popular, k=5000))
    ]
    assert hits_of(Value(), 24, requests) > hits_of(Lfu(), 24, requests) - 0.01


@pytest.mark.parametrize(("blocks", "asked"), [(64, 700), (100, 1500)])
def test_value_compares_orders_by_requests_if_one_request_fills_half_of_the_tier(blocks, asked):
    """A few hits of them are little evidence, and if evidence were weighed by blocks, it would fade
    before the next hits."""
    rnd, made = random.Random(4), iter(range(1, 1 << 40))
    prompts = [[next(made) for _ in range(rnd.randint(10, 60))] for _ in range(12)]
    popular = [1 / at for at in range(1, 13)]
    open_, requests = [], []
    for at in range(asked):
        if open_ and rnd.random() < 0.5:
            chain = [*open_.pop(rnd.randrange(len(open_))), next(made)]
        else:
            [chain] = rnd.choices(prompts, popular)
        open_ = [*open_, chain][-8:]
        requests.append((at * 0.5, chain[:blocks]))
    assert hits_of(Value(), blocks, requests) > hits_of(Lfu(), blocks, requests) - 0.01


def test_value_ranks_by_use_counts_before_it_has_many_observations():
    """Texts by popularity only; the other orders are disabled."""
    rnd, made = random.Random(1), iter(range(10**6, 1 << 40))
    texts = [[20 * at + part for part in range(4 + at % 6)] for at in range(1, 1001)]
    popular = [1 / at for at in range(1, 1001)]
    requests = [
        (at / 4, [*text, next(made), next(made)])
        for at, text in enumerate(rnd.choices(texts, popular, k=1000))
    ]
    learned = Value(to_leave=1e9)
    assert hits_of(learned, 400, requests) > hits_of(Lfu(), 400, requests) - 0.01


def test_value_counts_a_run_of_blocks_as_one_observation():
    """Popular prompts mixed with long unique ones; the other orders are disabled."""
    learned = frequent = 0.0
    for seed in (1, 2, 3):
        rnd, made = random.Random(seed), iter(range(10**6, 1 << 40))
        prompts = [[1 + 12 * at + part for part in range(12)] for at in range(200)]
        popular = [1 / (at + 1) ** 0.8 for at in range(200)]
        requests = []
        for at in range(600):
            [prompt] = rnd.choices(prompts, popular)
            once = at // 100 % 3 == 2
            own = [next(made) for _ in range(30 if once else 2)]
            requests.append((at * 0.3, own if once else prompt + own))
        learned += hits_of(Value(to_leave=1e9), 100, requests)
        frequent += hits_of(Lfu(), 100, requests)
    assert learned > 0.88 * frequent


def test_value_adapts_when_the_workload_changes():
    """First, chains of two blocks are repeated after a minute; later, chains of four. The other chains
    are unique."""
    made, waiting, requests = iter(range(1, 1 << 40)), [], []
    for at in range(1500):
        back, once = (2, 4) if at < 500 else (4, 2)
        while waiting and waiting[0][0] <= at:
            requests.append((at, waiting.pop(0)[1]))
        requests.append((at + 0.2, [next(made) for _ in range(once)]))
        chain = [next(made) for _ in range(back)]
        requests.append((at + 0.4, chain))
        waiting.append((at + 60, chain))
    assert hits_of(Value(to_leave=1e9), 150, requests) > 0.104


def test_value_uses_recency_while_the_clock_does_not_advance():
    """Searches that continue from one of their last steps."""
    rnd, made = random.Random(2), iter(range(1, 1 << 40))
    searches, requests = [], []
    while len(requests) < 1200:
        if len(searches) < 12:
            searches.append([[next(made) for _ in range(rnd.randint(2, 20))]])
        at = rnd.randrange(len(searches))
        steps = searches[at]
        before = steps[-min(len(steps), int(rnd.paretovariate(0.9)))]
        for _ in range(rnd.choice((1, 1, 2, 4))):
            steps.append([*before, *(next(made) for _ in range(rnd.randint(1, 4)))])
            requests.append((0.0, steps[-1]))
        if len(steps) > 30:
            searches.pop(at)
    assert hits_of(Value(), 400, requests) > hits_of(Lru(), 400, requests) - 0.01


def test_hints_keep_important_chains_and_evict_unimportant_ones_first():
    for kind in (Attention, AttentionModel, Value, ValueModel):
        policy = kind()
        chains = [list(range(first, first + 4)) for first in (0, 10, 20)]
        for at, chain in enumerate(chains):
            policy.now(10.0 * at)
            policy.added(pack(*chain), packed(chain), pack(NO_PARENT, *chain[:-1]))
        policy.now(100.0)
        oldest, middle, newest = (chain[::-1] for chain in chains)
        assert unpack(policy.victims(12)) == oldest + middle + newest
        policy.hinted(pack(*chains[0]), 1.0, packed(chains[0]))
        policy.hinted(pack(*chains[2]), 0.1, packed(chains[2]))
        assert unpack(policy.victims(12)) == newest + middle + oldest


def hits_with_hints(importance):
    """The hits of conversations of which every other one goes on after 20 requests. `importance` is reported
    when one begins, given whether it goes on; None is no hint."""
    policies = [make("auto"), *([ValueModel()] if ALL else [])]
    rnd, cache, open_ones = random.Random(7), Cache(policies, 120), []
    for number in range(600):
        chain = list(range(number * 100, number * 100 + 6))
        cache.request(float(number), chain)
        here = [name for name in chain if name in cache.at]
        goes_on = rnd.random() < 0.5
        told = importance(goes_on, rnd)
        if told is not None:
            cache.tell("hinted", [cache.at[name] for name in here], told, packed(here))
        open_ones += [chain] * goes_on
        if len(open_ones) > 20:
            cache.request(number + 0.5, open_ones.pop(0))
    return cache.hits


def test_auto_uses_hints_that_tell_what_is_used_again_and_learns_which_ones_are_wrong():
    without = hits_with_hints(lambda goes_on, _: None)
    right = hits_with_hints(lambda on, _: 1.0 if on else 0.1)
    wrong = hits_with_hints(lambda on, _: 0.1 if on else 1.0)
    noise = hits_with_hints(lambda _, rnd: rnd.choice([0.1, 1.0]))
    print(f"hits: {without} without hints, {right} right, {wrong} wrong, {noise} random ones")
    assert right > 1.5 * without
    assert wrong > 1.2 * without
    assert noise > 0.95 * without


def test_auto_learns_what_a_hint_of_medium_importance_tells():
    without = hits_with_hints(lambda goes_on, _: None)
    for told in (lambda on, _: None if on else 0.5, lambda on, _: 0.5 if on else None):
        assert hits_with_hints(told) > 1.2 * without
    all_alike = hits_with_hints(lambda goes_on, _: 0.5)
    assert 0.95 * without < all_alike < 1.05 * without


def test_blocks_shared_by_chains_outlive_a_newer_chain():
    for kind in (Prefix, PrefixModel, Attention, AttentionModel):
        policy = kind()
        policy.now(0.0)
        policy.added(pack(1, 2), packed([1, 2]), pack(NO_PARENT, 1))
        for first in (10, 20):
            policy.added(pack(first), packed([first]), pack(2))
        policy.gone(pack(10, 20))
        policy.now(50.0)
        policy.added(pack(30), packed([30]))
        policy.now(70.0)
        assert unpack(policy.victims(3)) == [30, 2, 1]


def test_make_creates_every_policy_and_lists_them_for_an_unknown_name():
    for name in NAMED:
        assert len(make(name)) == 0
    with pytest.raises(
        ValueError, match="known: lru, lfu, arc, s3fifo, prefix, attention, value, auto"
    ):
        make("lur")


class Stream:
    """A tier of `blocks` blocks that receives batches: each batch evicts the coldest one."""

    def __init__(self, policy, blocks, batch):
        self.policy, self.blocks, self.batch, self.now = policy, blocks, batch, 0.0

    def come(self, first):
        """Add a batch of new names that begins with this number."""
        names = range(first, first + self.batch)
        if len(self.policy) + self.batch > self.blocks:
            gone = self.policy.victims(self.batch)
            self.policy.gone(gone)
            ids = unpack(gone)
        else:
            ids = list(range(len(self.policy), len(self.policy) + self.batch))
        self.now += 0.1
        self.policy.now(self.now)
        self.policy.added(pack(*ids), packed(names), pack(NO_PARENT, *ids[:-1]))
        self.policy.wanted(pack(*ids[: self.batch // 2]), packed(names[: self.batch // 2]))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


NATIVES = [native for native, _ in PAIRS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", NATIVES)
def test_store_and_policy_use_at_most_128_bytes_per_block(kind):
    """Without frames, at a million blocks, the store uses 94 of these bytes."""
    blocks = 1 << 18
    stream = Stream(kind(), blocks, 4096)
    before = resident_bytes()
    for first in range(0, effort(2, 4, 4) * blocks, 4096):
        stream.come(first)
    assert len(stream.policy) == blocks
    fixed = 2 << 20  # per tenant, independent of the number of blocks
    assert stream.policy.memory_bytes() <= 34 * blocks + fixed
    assert resident_bytes() - before <= 36 * blocks + 3 * fixed


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", NATIVES)
@pytest.mark.parametrize("names", [1 << 30, 2048])
def test_the_memory_of_a_policy_does_not_grow_with_time(kind, names):
    """With names that are always new, and with repeated names."""
    stream = Stream(kind(), 1024, 64)
    stream.come(1 << 40)
    half = effort(1 << 17, 1 << 18, 1 << 18)
    for first in range(0, half, 64):
        stream.come(first % names)
    known, before = stream.policy.memory_bytes(), resident_bytes()
    for first in range(half, effort(1 << 18, 1 << 20, 1 << 20), 64):
        stream.come(first % names)
    assert stream.policy.memory_bytes() <= known + 1024
    assert resident_bytes() - before < 4 << 20


@pytest.mark.parametrize("kind", [Lfu, pytest.param(LfuModel, marks=pytest.mark.slow)])
def test_counts_are_halved_from_time_to_time(kind):
    """The block that was used most, long ago, is evicted before the one that is used now."""
    policy = kind()
    policy.added(pack(1, 2), packed([1, 2]))
    for _ in range(200):
        policy.wanted(pack(1))
    policy.wanted(pack(2, 2))
    assert unpack(policy.victims(2)) == [2, 1]
    many = pack(*[2] * 4096)
    for _ in range(10 * 64):
        policy.wanted(many)
        policy.added(pack(3), packed([3]))
        policy.gone(pack(3))
    assert unpack(policy.victims(2)) == [1, 2]

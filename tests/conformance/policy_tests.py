"""The contract of policies. A test class inherits PolicyTests and creates a policy.

The order of victims is left to the policy, except that demoted blocks are evicted first, and that held
or absent blocks are never victims."""

import random
import struct

import pytest

from kvtier_daemon.catalog.policy import NO_PARENT

EVENTS = ["wanted", "refreshed", "held", "freed", "left", "gone"]


def pack(*ids):
    return b"".join(struct.pack("<I", i) for i in ids)


def unpack(ids):
    return [i for (i,) in struct.iter_unpack("<I", ids)]


class PolicyTests:
    def make_policy(self):
        raise NotImplementedError

    @pytest.fixture
    def policy(self):
        return self.make_policy()

    def test_a_new_policy_is_empty(self, policy):
        assert len(policy) == 0
        assert policy.victims(10) == b""

    def test_victims_are_those_added_and_each_only_once(self, policy):
        policy.added(pack(*range(100)))
        assert sorted(unpack(policy.victims(1000))) == list(range(100))
        assert len(policy) == 100

    def test_it_names_as_many_victims_as_were_asked_for(self, policy):
        policy.added(pack(*range(50)))
        assert [len(policy.victims(n)) // 4 for n in (0, 1, 49, 50, 51)] == [0, 1, 49, 50, 50]

    def test_naming_victims_changes_nothing(self, policy):
        policy.added(pack(*range(30)))
        assert policy.victims(7) == policy.victims(7)
        assert len(policy) == 30

    def test_a_held_block_is_not_a_victim_until_it_is_freed(self, policy):
        policy.added(pack(1, 2, 3))
        policy.held(pack(2))
        policy.wanted(pack(1, 2))
        policy.refreshed(pack(2))
        policy.demoted(pack(2))
        assert sorted(unpack(policy.victims(9))) == [1, 3]
        assert len(policy) == 2
        policy.freed(pack(2))
        assert sorted(unpack(policy.victims(9))) == [1, 2, 3]

    def test_an_evicted_or_removed_block_is_not_a_victim(self, policy):
        policy.added(pack(1, 2, 3, 4, 5))
        policy.held(pack(4, 5))
        policy.left(pack(2, 4))
        policy.gone(pack(3, 5))
        policy.wanted(pack(2, 3, 4, 5))
        policy.freed(pack(2, 3, 4, 5))
        assert unpack(policy.victims(9)) == [1]
        assert len(policy) == 1

    def test_an_evicted_block_may_be_added_again(self, policy):
        policy.added(pack(1, 2, 3))
        policy.left(pack(2))
        policy.gone(pack(3))
        policy.added(pack(2, 3))
        assert sorted(unpack(policy.victims(9))) == [1, 2, 3]

    def test_a_block_that_was_evicted_and_removed_is_a_victim_after_it_is_added_again(self, policy):
        policy.added(pack(1, 2))
        policy.left(pack(2))
        policy.gone(pack(2))
        policy.added(pack(2))
        assert sorted(unpack(policy.victims(9))) == [1, 2]

    def test_adding_twice_holds_it_once(self, policy):
        policy.added(pack(1, 2, 1))
        policy.added(pack(1))
        assert sorted(unpack(policy.victims(9))) == [1, 2]
        assert len(policy) == 2

    def test_demoted_blocks_go_first(self, policy):
        policy.added(pack(*range(20)))
        policy.wanted(pack(15, 16, 17))
        policy.demoted(pack(16, 17, 3))
        assert set(unpack(policy.victims(3))) == {16, 17, 3}

    def test_unknown_ids_are_ignored(self, policy):
        policy.added(pack(1))
        for stranger in (2, 10**6, 2**31, 2**32 - 1):
            for event in (*EVENTS, "demoted"):
                getattr(policy, event)(pack(stranger))
            policy.hinted(pack(stranger), 0.5)
        assert policy.victims(9) == pack(1)

    def test_hints_lose_no_block(self, policy):
        policy.added(pack(*range(10)))
        for importance in (0.0, 0.5, 1.0, 100.0, -1.0):
            policy.hinted(pack(3, 4), importance)
        assert sorted(unpack(policy.victims(99))) == list(range(10))

    def test_a_torn_batch_is_refused(self, policy):
        for event in ("added", *EVENTS, "demoted"):
            with pytest.raises(ValueError):
                getattr(policy, event)(b"\0\0\0\0\0")
        assert len(policy) == 0

    def test_it_reports_its_memory(self, policy):
        policy.added(pack(*range(1000)))
        assert policy.memory_bytes() > 0

    def test_victims_are_exactly_the_evictable_blocks_after_random_events(self, policy):
        rnd = random.Random(5)
        known, held = set(), set()
        for step in range(2000):
            policy.now(step / 3)
            ids = [rnd.randrange(200) for _ in range(rnd.randrange(6))]
            event = rnd.choice(["added", "added", "added", *EVENTS, "demoted"])
            if event == "added":
                ids = [one for one in dict.fromkeys(ids) if one not in known]
                policy.added(pack(*ids), *names_and_parents(ids, rnd))
                known.update(ids)
            else:
                getattr(policy, event)(pack(*ids))
            if event == "held":
                held.update(known.intersection(ids))
            if event in ("freed", "left", "gone"):
                held.difference_update(ids)
            if event in ("left", "gone"):
                known.difference_update(ids)
            assert len(policy) == len(known - held)
            if step % 50 == 0:
                assert set(unpack(policy.victims(1000))) == known - held
        assert set(unpack(policy.victims(1000))) == known - held


def names_and_parents(ids, rnd):
    """Names and parents of new blocks: some continue a chain, some are roots."""
    names = struct.pack(f"<{len(ids)}Q", *(one * 0x9E3779B97F4A7C15 % 2**64 for one in ids))
    parents = [rnd.choice([NO_PARENT, before]) for before in [NO_PARENT, *ids][: len(ids)]]
    return names, pack(*parents)

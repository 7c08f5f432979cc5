"""LRU: the native list and its model."""

import random

import pytest
from tests.conformance import policy_tests
from tests.conformance.policy_tests import pack, unpack

from kvtier.policy.base import make
from kvtier.policy.lru import Lru, LruModel


class TestLru(policy_tests.PolicyTests):
    def make_policy(self):
        return Lru()


class TestLruModel(policy_tests.PolicyTests):
    def make_policy(self):
        return LruModel()


@pytest.mark.parametrize("policy", [Lru, LruModel])
def test_earlier_in_a_batch_is_more_recent(policy):
    lru = policy()
    lru.added(pack(4, 3, 2, 1))
    assert unpack(lru.victims(4)) == [1, 2, 3, 4]
    lru.wanted(pack(1, 2))
    assert unpack(lru.victims(4)) == [3, 4, 2, 1]
    lru.demoted(pack(1, 4))
    assert unpack(lru.victims(4)) == [1, 4, 3, 2]
    lru.held(pack(1, 4))
    lru.freed(pack(4, 1))
    assert unpack(lru.victims(4)) == [3, 2, 1, 4]


def test_native_and_model_name_the_same_victims():
    rnd = random.Random(7)
    native, model = Lru(), LruModel()
    for _ in range(5000):
        ids = pack(
            *(rnd.randrange(300_000) // rnd.choice([1, 3000]) for _ in range(rnd.randrange(8)))
        )
        event = rnd.choice(["added", "added", *policy_tests.EVENTS, "demoted"])
        getattr(native, event)(ids)
        getattr(model, event)(ids)
        n = rnd.randrange(50)
        assert native.victims(n) == model.victims(n)
    assert native.victims(10**6) == model.victims(10**6)


def test_make_knows_lru_and_says_what_else_there_is():
    assert isinstance(make("lru"), Lru)
    with pytest.raises(ValueError, match="there is: lru"):
        make("lur")

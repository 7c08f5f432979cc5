"""LRU: the order of recency within a batch."""

import pytest
from tests.conformance.policy_tests import pack, unpack

from models.policies.lru import Lru, LruModel


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

"""Tracking of pages that are not known to be valid, through the steps that load into them and compute
from them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.layout import Kind
from kvtier_vllm.layout import Cached, Layout, Shards
from kvtier_vllm.loads import UnverifiedPages
from support.fake_engine import BLOCK, layout_of


class Scene:
    """An engine's requests, the tokens that each had before any load, and their pages."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.doubts = UnverifiedPages(layout or layout_of())
        self.prompts: dict[str, Any] = {}
        self.tables: dict[str, list[int]] = {}

    def request(self, name: str, own: int, computed: int, pages: Sequence[int]) -> None:
        self.tables[name] = [*pages]
        asked = SimpleNamespace(request_id=name, num_computed_tokens=computed)
        self.prompts[name] = SimpleNamespace(request=asked, lookup=SimpleNamespace(computed=own))

    def step(
        self, number: int, first: str = "", loads: bool = False, ours: str = "",
        given: dict[str, list[int]] | None = None, fresh: Sequence[int] = (), **tokens: int,
    ) -> None:  # fmt: skip
        """`first` are scheduled for the first time; with `loads`, their blocks are loaded within this
        step. `given`: pages that other requests get in addition."""
        given = given or {}
        scheduled = SimpleNamespace(
            has_sync_kv_loads=loads, num_scheduled_tokens=tokens,
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in first],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[*given], new_block_ids=[(pages,) for pages in given.values()],
                resumed_req_ids=set(),
            ),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (self.tables[name],)),
        )  # fmt: skip
        for name, pages in given.items():
            self.tables.get(name, []).extend(pages)
        self.doubts.begun(number, scheduled, self.prompts, ours, {*fresh})
        for name, count in tokens.items():
            self.prompts[name].request.num_computed_tokens += count

    def back_to(self, name: str, tokens: int) -> None:
        """The engine recomputes this request from this token on."""
        self.prompts[name].request.num_computed_tokens = tokens

    def sure(self, name: str, start: int = 0) -> int:
        return self.doubts.verified_until([self.tables[name]], start, len(self.tables[name]))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def with_one(kind: Kind, window_tokens: int) -> Layout:
    group = Cached(0, kind, window_tokens, (("0", 64),))
    return Layout(BLOCK, BLOCK, (group,), Shards(1, 1))


def test_doubtful_pages_are_not_saved_before_they_are_known_to_be_good(scene: Scene) -> None:
    """Pages of another connector's load, and pages computed from them; pages of this connector's load
    only after it failed."""
    # One block of a was stored, two are loaded, two computed. b shares three of its five pages.
    scene.request("a", BLOCK, 3 * BLOCK, range(1, 6))
    scene.request("b", 3 * BLOCK, 3 * BLOCK, [1, 2, 3, 8, 9])
    scene.request("c", 0, 0, range(10, 12))
    scene.step(1, "abc", loads=True, a=2 * BLOCK, b=2 * BLOCK - 5, c=2 * BLOCK)
    assert (
        scene.sure("a"),
        scene.sure("b"),
        scene.sure("c"),
        len(scene.doubts),
    ) == (1, 1, 2, 6)
    scene.step(2, b=5)
    scene.doubts.reported(1, {77})
    assert (scene.sure("a"), scene.sure("b"), len(scene.doubts)) == (5, 5, 0)
    # With this connector's loads: the ranks save nothing in that step, and after a failure no
    # request's pages are saved.
    scene.request("a", BLOCK, 3 * BLOCK, range(1, 6))
    scene.step(3, "a", loads=True, ours="a", a=2 * BLOCK)
    assert (scene.sure("a"), len(scene.doubts)) == (5, 4)
    scene.doubts.reported(3, {2, 3})
    assert (scene.sure("a"), scene.sure("b")) == (1, 1)
    # a is recomputed, step by step. b shares the other pages, and computes from invalid data.
    scene.back_to("a", BLOCK)
    scene.request("b", 5 * BLOCK, 5 * BLOCK, range(1, 7))
    scene.step(4, "b", loads=True, a=2 * BLOCK, b=BLOCK)
    scene.doubts.reported(4, set())
    assert (scene.sure("a"), scene.sure("b")) == (3, 3)
    scene.step(5, a=2 * BLOCK)
    scene.doubts.reported(5, set())
    assert (scene.sure("a"), scene.sure("b"), len(scene.doubts)) == (5, 5, 1)
    # The page belongs to another request now.
    scene.step(6, given={"d": [7]})
    assert len(scene.doubts) == 1
    scene.step(7, given={"d": [6]})
    assert not len(scene.doubts)


def failed(scene: Scene) -> None:
    """The load of a's four pages failed: a is computed from the beginning."""
    scene.request("a", 0, 4 * BLOCK, range(1, 8))
    scene.step(1, "a", loads=True, ours="a", a=BLOCK)
    scene.doubts.reported(1, {1, 2, 3, 4})
    scene.back_to("a", 0)


def test_a_partly_recomputed_page_is_valid_only_for_the_request_that_recomputes_it(
    scene: Scene,
) -> None:
    failed(scene)
    scene.step(2, a=BLOCK + 3)
    scene.step(3, a=2)
    assert scene.sure("a") == 1
    # r finds the whole second page in the engine's cache, and computes from tokens that are not yet
    # valid.
    scene.request("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 20, 21])
    scene.step(4, "r", r=2 * BLOCK)
    assert scene.sure("r") == 1
    scene.step(5, a=2 * BLOCK)
    assert (scene.sure("a"), scene.sure("r")) == (3, 2)
    # Some of its tokens were speculative, and are recomputed.
    scene.back_to("a", 3 * BLOCK + 2)
    scene.step(6, a=BLOCK)
    assert (scene.sure("a"), scene.sure("r")) == (4, 2)
    scene.step(7, a=2 * BLOCK)
    assert (scene.sure("a"), scene.sure("r")) == (7, 2)


def test_a_partly_recomputed_page_is_not_valid_beyond_the_recomputed_tokens(scene: Scene) -> None:
    failed(scene)
    scene.step(2, a=BLOCK + 3)
    scene.back_to("a", BLOCK + 4)
    scene.step(3, a=BLOCK)
    assert scene.sure("a") == 1


def test_a_partly_recomputed_page_is_not_valid_for_other_requests(scene: Scene) -> None:
    failed(scene)
    scene.step(2, a=BLOCK + 3)
    scene.request("s", BLOCK + 3, BLOCK + 3, [1, 2, 22])
    scene.step(3, "s", s=BLOCK)
    assert scene.sure("s") == 1


def test_a_partly_recomputed_page_that_becomes_unverified_again_is_recomputed_from_its_start(
    scene: Scene,
) -> None:
    """More is computed into the page from invalid data, and the recomputed part becomes invalid before
    the request continues."""
    failed(scene)
    scene.step(2, a=BLOCK + 8)
    scene.request("b", 0, BLOCK, [1, 9])
    scene.step(3, "b", loads=True, ours="b", b=2)
    scene.back_to("a", BLOCK)
    scene.step(4, a=8)
    scene.doubts.reported(3, {1})
    scene.back_to("b", 0)
    scene.step(5, b=BLOCK)
    scene.step(6, a=BLOCK)
    assert scene.sure("a") == 1


@pytest.mark.parametrize(
    ("kind", "window", "pages", "computed", "sure"),
    [
        ("window", 2 * BLOCK, [0, 0, 3, 4, 5, 6], 2, 2),
        ("window", 2 * BLOCK, [0, 0, 3, 4, 5, 6], 3, 3),
        ("window", 2 * BLOCK, [0, 0, 3, 4, 5, 6], 0, 2),
        ("window", 2 * BLOCK, [0, 0, 3, 4, 5, 6], 4, 6),
        ("window", 2 * BLOCK - 1, [0, 0, 3, 4, 5, 6], 4, 6),
        ("window", 2 * BLOCK + 1, [0, 0, 3, 4, 5, 6], 4, 4),
        ("window", 9 * BLOCK, [1, 2, 3, 4, 5, 6], 2, 6),
        ("state", 0, [0, 0, 0, 4, 5, 6], 3, 3),
        ("state", 0, [0, 0, 0, 4, 5, 6], 4, 6),
        ("state", 0, [1, 2, 3, 4, 5, 6], 0, 6),
    ],
)
def test_blocks_computed_without_their_predecessors_are_never_saved(
    kind: Kind, window: int, pages: list[int], computed: int, sure: int
) -> None:
    """If a load of a window or a state fails, the engine continues there without the blocks before it."""
    scene = Scene(with_one(kind, window))
    scene.request("a", 0, 4 * BLOCK, pages[:5])
    scene.step(1, "a", loads=True, a=BLOCK)
    scene.doubts.reported(1, {page for page in pages[computed:4] if page} or {5})
    scene.back_to("a", computed * BLOCK)
    scene.step(2, given={"a": [6]}, a=(5 - computed) * BLOCK)
    scene.doubts.reported(2, set())
    scene.step(3, a=BLOCK)
    scene.doubts.reported(3, set())
    assert scene.sure("a", computed) == sure


def test_the_null_page_is_never_unverified() -> None:
    """Every page table contains page 0 where a window has released pages."""
    scene = Scene(layout_of([2 * BLOCK]))
    scene.request("a", 0, 4 * BLOCK, [0, 0, 3, 4, 5])
    scene.step(1, "a", loads=True, a=BLOCK)
    assert len(scene.doubts) == 3
    scene.doubts.reported(1, {3, 4})
    scene.request("b", 0, 3 * BLOCK, [0, 7, 8, 9])
    scene.step(2, "b", b=BLOCK)
    assert scene.sure("b") == 4


def test_a_load_in_the_same_step_as_a_failed_load_is_valid(scene: Scene) -> None:
    """In the same step, or in a step that had begun: pages computed from it stay unverified."""
    scene.request("a", 0, 4 * BLOCK, range(1, 6))
    scene.request("b", 2 * BLOCK, 4 * BLOCK, [1, 2, 13, 14, 15])
    scene.request("c", 0, 2 * BLOCK + 4, range(21, 25))
    scene.step(1, "abc", loads=True, ours="a", a=BLOCK, b=BLOCK, c=BLOCK)
    scene.request("d", 0, 2 * BLOCK, range(31, 34))
    scene.step(2, "d", loads=True, d=BLOCK)
    scene.doubts.reported(1, {13, 14})
    # More tokens were computed into c's third page.
    assert [scene.sure(name) for name in "abc"] == [4, 2, 2]
    assert scene.sure("d") == 0
    scene.doubts.reported(2, set())
    assert scene.sure("d") == 2
    scene.request("x", 4 * BLOCK, 4 * BLOCK, [1, 2, 3, 4, 41])
    scene.step(3, "x", x=BLOCK)
    assert scene.sure("x") == 5


def test_reused_pages_are_no_longer_unverified(scene: Scene) -> None:
    """To be computed, or for another connector's load between two steps."""
    failed(scene)
    scene.request("n", BLOCK, 3 * BLOCK, [30, 1, 2, 3])
    scene.step(2, "n", n=BLOCK)
    assert scene.sure("n") == 4
    # One of them is still unverified: the page that the engine had.
    scene.request("m", BLOCK, 2 * BLOCK, [4, 31, 32])
    scene.step(3, "m", m=BLOCK)
    assert (scene.sure("m"), scene.sure("m", 1)) == (0, 2)


def test_a_resumed_request_keeps_its_unverified_pages(scene: Scene) -> None:
    """The engine did not look up its blocks again, so nothing was loaded."""
    failed(scene)
    scene.back_to("a", 2 * BLOCK)
    scene.step(2, "a", a=BLOCK)
    assert scene.sure("a") == 0


def test_a_report_without_news_scans_no_pages(scene: Scene) -> None:
    """Pages that were not filled may stay in the engine's cache for a long time."""
    failed(scene)
    before = scene.doubts._step_of
    for number in range(2, 5):
        scene.doubts.reported(number, set())
    assert scene.doubts._step_of is before
    # Later loads are reported.
    scene.request("b", 0, BLOCK, range(11, 13))
    scene.step(5, "b", loads=True, b=BLOCK)
    scene.doubts.reported(5, set())
    assert scene.sure("b") == 2

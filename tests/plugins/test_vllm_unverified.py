"""Pages that are not known to be good, through the steps that load into them and compute from them."""

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
    """An engine's requests, what of each was here before any load, and their pages."""

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
        """`first` are served for the first time; with `loads`, what these have was loaded within this step.
        `given`: pages that others get besides."""
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
        """The engine computes this request once more from here on."""
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
    """Those of another's load, and what is computed from them; of one of ours only once it has failed."""
    # One block of a was here, two are loaded, two computed. b shares three of its five.
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
    # Of ours: the ranks save nothing with that step, and when it has failed, nobody does.
    scene.request("a", BLOCK, 3 * BLOCK, range(1, 6))
    scene.step(3, "a", loads=True, ours="a", a=2 * BLOCK)
    assert (scene.sure("a"), len(scene.doubts)) == (5, 4)
    scene.doubts.reported(3, {2, 3})
    assert (scene.sure("a"), scene.sure("b")) == (1, 1)
    # Computed once more, a step at a time: who shares the rest computes from nothing.
    scene.back_to("a", BLOCK)
    scene.request("b", 5 * BLOCK, 5 * BLOCK, range(1, 7))
    scene.step(4, "b", loads=True, a=2 * BLOCK, b=BLOCK)
    scene.doubts.reported(4, set())
    assert (scene.sure("a"), scene.sure("b")) == (3, 3)
    scene.step(5, a=2 * BLOCK)
    scene.doubts.reported(5, set())
    assert (scene.sure("a"), scene.sure("b"), len(scene.doubts)) == (5, 5, 1)
    # Its page is somebody else's.
    scene.step(6, given={"d": [7]})
    assert len(scene.doubts) == 1
    scene.step(7, given={"d": [6]})
    assert not len(scene.doubts)


def failed(scene: Scene) -> None:
    """The load of a's four pages came to nothing: it begins anew."""
    scene.request("a", 0, 4 * BLOCK, range(1, 8))
    scene.step(1, "a", loads=True, ours="a", a=BLOCK)
    scene.doubts.reported(1, {1, 2, 3, 4})
    scene.back_to("a", 0)


def test_a_page_that_was_computed_anew_in_part_is_good_for_who_does_that_alone(
    scene: Scene,
) -> None:
    failed(scene)
    scene.step(2, a=BLOCK + 3)
    scene.step(3, a=2)
    assert scene.sure("a") == 1
    # r finds all of the second page in the engine's cache, and computes from what is not there yet.
    scene.request("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 20, 21])
    scene.step(4, "r", r=2 * BLOCK)
    assert scene.sure("r") == 1
    scene.step(5, a=2 * BLOCK)
    assert (scene.sure("a"), scene.sure("r")) == (3, 2)
    # Some of what it had computed was a guess, and is computed once more.
    scene.back_to("a", 3 * BLOCK + 2)
    scene.step(6, a=BLOCK)
    assert (scene.sure("a"), scene.sure("r")) == (4, 2)
    scene.step(7, a=2 * BLOCK)
    assert (scene.sure("a"), scene.sure("r")) == (7, 2)


def test_what_was_computed_in_part_is_good_no_further_than_that(scene: Scene) -> None:
    failed(scene)
    scene.step(2, a=BLOCK + 3)
    scene.back_to("a", BLOCK + 4)
    scene.step(3, a=BLOCK)
    assert scene.sure("a") == 1


def test_what_was_computed_in_part_is_good_for_nobody_else(scene: Scene) -> None:
    failed(scene)
    scene.step(2, a=BLOCK + 3)
    scene.request("s", BLOCK + 3, BLOCK + 3, [1, 2, 22])
    scene.step(3, "s", s=BLOCK)
    assert scene.sure("s") == 1


def test_what_was_computed_in_part_is_forgotten_where_that_page_is_doubted_again(
    scene: Scene,
) -> None:
    """More is computed into it from what isn't good, and that was computed anew before it goes on."""
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
def test_what_is_computed_without_all_that_is_before_it_is_never_saved(
    kind: Kind, window: int, pages: list[int], computed: int, sure: int
) -> None:
    """A window, or a state, that a load was to bring has nothing before it, and the engine goes on there."""
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


def test_what_stands_for_no_page_is_never_doubted() -> None:
    """Every table has it, where a window has left pages behind."""
    scene = Scene(layout_of([2 * BLOCK]))
    scene.request("a", 0, 4 * BLOCK, [0, 0, 3, 4, 5])
    scene.step(1, "a", loads=True, a=BLOCK)
    assert len(scene.doubts) == 3
    scene.doubts.reported(1, {3, 4})
    scene.request("b", 0, 3 * BLOCK, [0, 7, 8, 9])
    scene.step(2, "b", b=BLOCK)
    assert scene.sure("b") == 4


def test_what_was_loaded_beside_a_load_that_failed_is_good(scene: Scene) -> None:
    """In the same step, or in the one that had begun: what was computed from it stays doubtful."""
    scene.request("a", 0, 4 * BLOCK, range(1, 6))
    scene.request("b", 2 * BLOCK, 4 * BLOCK, [1, 2, 13, 14, 15])
    scene.request("c", 0, 2 * BLOCK + 4, range(21, 25))
    scene.step(1, "abc", loads=True, ours="a", a=BLOCK, b=BLOCK, c=BLOCK)
    scene.request("d", 0, 2 * BLOCK, range(31, 34))
    scene.step(2, "d", loads=True, d=BLOCK)
    scene.doubts.reported(1, {13, 14})
    # Into c's third page more was computed.
    assert [scene.sure(name) for name in "abc"] == [4, 2, 2]
    assert scene.sure("d") == 0
    scene.doubts.reported(2, set())
    assert scene.sure("d") == 2
    scene.request("x", 4 * BLOCK, 4 * BLOCK, [1, 2, 3, 4, 41])
    scene.step(3, "x", x=BLOCK)
    assert scene.sure("x") == 5


def test_pages_that_are_given_out_again_are_no_longer_doubted(scene: Scene) -> None:
    """To be computed, or for another's load between two steps."""
    failed(scene)
    scene.request("n", BLOCK, 3 * BLOCK, [30, 1, 2, 3])
    scene.step(2, "n", n=BLOCK)
    assert scene.sure("n") == 4
    # One of them is still doubtful: that one the engine had.
    scene.request("m", BLOCK, 2 * BLOCK, [4, 31, 32])
    scene.step(3, "m", m=BLOCK)
    assert (scene.sure("m"), scene.sure("m", 1)) == (0, 2)


def test_who_comes_back_with_doubtful_pages_has_them_still(scene: Scene) -> None:
    """The engine has not asked again what there is of it, so nothing was loaded."""
    failed(scene)
    scene.back_to("a", 2 * BLOCK)
    scene.step(2, "a", a=BLOCK)
    assert scene.sure("a") == 0


def test_a_report_looks_through_nothing_where_it_can_tell_nothing_new(scene: Scene) -> None:
    """Pages that were not filled may lie in the engine's cache for long."""
    failed(scene)
    before = scene.doubts._step_of
    for number in range(2, 5):
        scene.doubts.reported(number, set())
    assert scene.doubts._step_of is before
    # What is loaded later is told of.
    scene.request("b", 0, BLOCK, range(11, 13))
    scene.step(5, "b", loads=True, b=BLOCK)
    scene.doubts.reported(5, set())
    assert scene.sure("b") == 2

"""Each packed layout that the store and Python exchange is defined once in the product."""

from __future__ import annotations

import ast
import re
import struct
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from kvtier_daemon.catalog import frames
from kvtier_daemon.catalog.frames import FRAME, FramedBlocks, StoredFrame, segments_of

ROOT = Path(__file__).parents[3]
CALLS = {"Struct", "pack", "pack_into", "unpack", "unpack_from", "iter_unpack", "calcsize"}
CALLED = re.compile(rf"\b({'|'.join(CALLS)})\(")


@cache
def spelled() -> dict[str, set[str]]:
    """The modules that contain each struct format, without byte order and padding at the end."""
    found = defaultdict(set)
    for folder in ("kvtier", "plugins", "daemon", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if CALLED.search(text) else ():
                if not (isinstance(node, ast.Call) and node.args):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                first = node.args[0]
                if name in CALLS and isinstance(first, ast.Constant) and type(first.value) is str:
                    form = re.sub(r"x+$", "", first.value.lstrip("<>=!@"))
                    found[form].add(str(path.relative_to(ROOT)))
    return found


FRAMES, WIRE = "daemon/kvtier_daemon/catalog/frames.py", "kvtier/kvtier/wire.py"
INDEX = "daemon/kvtier_daemon/tiers/cold/index.py"  # two lengths, which are no place


@pytest.mark.parametrize(
    ("forms", "owners"),
    [
        (("IIIBBB", "IIIBBBB", "3I3B", "3I4B"), {FRAMES}),
        (("II", "2I"), {FRAMES, INDEX}),
        (("IIQQ", "2I2Q"), {WIRE}),
        (("I12",), set()),  # with "x" after it: a column of frames
    ],
    ids=["frame", "place", "slot", "column"],
)
def test_a_packed_layout_has_one_owner(forms: tuple[str, ...], owners: set[str]) -> None:
    found = spelled()
    assert found[forms[0]] == owners
    assert not any(found[form] for form in forms[1:]), "the layout is spelled again"


def test_the_columns_are_those_of_the_struct() -> None:
    packed = FRAME.pack(7, 3, 5000, 2, 1, 2) + FRAME.pack(8, 4, 4096, 0, 1, 0)
    words = memoryview(packed).cast("I")
    assert words[frames.SEGMENTS].tolist() == [7, 8]
    assert words[frames.PAYLOAD_SIZES].tolist() == [5000, 4096]
    assert list(packed[frames.CODECS]) == [2, 0]
    assert packed[: frames.PLACE_BYTES] == frames.PLACE.pack(7, 3)
    assert segments_of(packed) == {7, 8} and segments_of(b"") == set()


def test_frames_of_blocks_are_listed_with_their_size() -> None:
    first, second = FRAME.pack(7, 3, 5000, 2, 1, 2), FRAME.pack(8, 4, 4096, 0, 2, 0)
    blocks = FramedBlocks(struct.pack("<II", 5, 6), first + second, b"a" * 16 + b"b" * 16)
    assert list(blocks) == [(5, first, b"a" * 16), (6, second, b"b" * 16)]
    sizes = [StoredFrame.unpack(packed).nbytes for _, packed, _ in blocks]
    assert sizes == [3 * 4096, 3 * 4096]
    assert [StoredFrame.unpack(packed).is_lossy for _, packed, _ in blocks] == [True, False]
    assert StoredFrame.unpack(first) == (7, 3, 5000, 2, 1, 2)
    assert not list(FramedBlocks())

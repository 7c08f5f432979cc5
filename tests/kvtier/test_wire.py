"""The wire format: messages arrive as they were sent, and invalid data is refused."""

from __future__ import annotations

import contextlib
from typing import Union

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import wire
from kvtier.errors import ProtocolError


def bodies(data: bytes, framer: wire.Framer | None = None) -> list[bytes]:
    return list((framer or wire.Framer()).feed(data))


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 97))
def test_framer_finds_every_frame_however_the_stream_is_cut(
    payloads: list[bytes], cut: int
) -> None:
    stream = b"".join(wire.LENGTH.pack(len(p)) + p for p in payloads)
    framer = wire.Framer()
    found = [
        body for at in range(0, len(stream), cut) for body in framer.feed(stream[at : at + cut])
    ]
    assert found == payloads


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), max_size=9))
def test_framer_returns_a_lone_frame_without_a_copy(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(wire.LENGTH.pack(len(p)) + p for p in payloads)
    framer, found = wire.Framer(), []
    for cut in [*cuts, len(stream)]:
        body = framer.push_and_take(memoryview(stream[:cut]))
        stream = stream[cut:]
        while body is not None:
            found.append(bytes(body))
            body = framer.take()
    assert found == payloads
    lone = framer.push_and_take(memoryview(wire.LENGTH.pack(3) + b"abc"))
    assert isinstance(lone, memoryview) and lone == b"abc" and not framer.held_bytes


def test_framer_refuses_an_excessive_length_before_its_bytes_arrive() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        bodies(wire.LENGTH.pack(wire.LIMIT_FRAME_BYTES + 1))


def test_framer_returns_frames_before_a_bad_length() -> None:
    framer = wire.Framer()
    found = []
    with pytest.raises(ProtocolError):
        for body in framer.feed(wire.LENGTH.pack(2) + b"ab" + wire.LENGTH.pack(1 << 31)):
            found.append(body)
    assert found == [b"ab"]


def test_messages_are_plain_msgpack_arrays() -> None:
    (body,) = bodies(wire.encode(wire.MatchPrefix(7, 3, b"k" * 32)))
    assert msgpack.unpackb(body) == [3, 7, 3, b"k" * 32, 0, 0, 0, b"", 0, False]


EXAMPLES = [
    wire.Hello(1, b"s" * 32, "me"),
    wire.MatchPrefix(2, 0, b""),
    wire.MatchPrefix(2, 0, b"k" * 64, 0, 0, 0, b"o" * 64, 2),
    wire.Load(3, 1, b"k" * 64, 500, [0, 1]),
    wire.Load(3, 1, b"k" * 64, 500, [0, 1], 17, 2000, 30),
    wire.Load(3, 1, b"k" * 64, 500, [0, 1], 17, 2000, 30, 50, 1, False),
    wire.Cancel(0, 17),
    wire.Prefill(0, 2, 1e-5, 2.5e-9),
    wire.Locate(4, 1, b"k" * 64, b"\2\0\0\0"),
    wire.Unpin(4, 1, b"k" * 32),
    wire.Explain(4, 0, b"k" * 32),
    wire.Spaces(4, "somebody", 64),
    wire.List(4, "", 3, 4096, 100),
    wire.Purge(4, "", 3, 4096),
    wire.Monitor(4, ["lookup"]),
    wire.Adopt(4, b"t" * 16, [0]),
    wire.Release(0, 9),
    wire.Reserve(5, 0, 0, 0, b"", b"k" * 32),
    wire.Commit(6, 1, 0, 4, b"c" * 64),
    wire.Bye(0),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_decoded_requests_equal_the_encoded_ones(message: wire.Message) -> None:
    (body,) = bodies(wire.encode(message))
    assert wire.decode_request(body) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb({"id": 1}),
        msgpack.packb([99, 1]),
        msgpack.packb([3, 1, "0", b""]),
        msgpack.packb([3, 1, 0, "text"]),
        msgpack.packb([3, 1, 0, b"", "more"]),
        msgpack.packb([3, 1]),
        msgpack.packb([34, 1, 0, 0, 0.0]),
        b"\x91" * 5000,
    ],
    ids=["nothing", "never used", "map", "tag", "type", "text", "more", "fewer", "reply", "deep"],
)
def test_invalid_requests_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_request(body)


def test_a_message_too_long_to_send_is_refused_by_its_sender() -> None:
    with pytest.raises(ProtocolError):
        wire.encode(wire.MatchPrefix(1, 0, bytes(wire.LIMIT_FRAME_BYTES)))


def test_limits_leave_room_for_the_largest_messages() -> None:
    keys = bytes(32 * wire.LIMIT_KEYS)
    wire.encode(wire.Reserve(1, 0, 0, 0, bytes(32), keys))
    slots = bytes(wire.SLOT_BYTES * wire.LIMIT_KEYS)
    wire.encode(wire.Reserved(1, 1, bytes(wire.LIMIT_KEYS), slots))
    wire.encode(wire.Commit(1, 1, 0, wire.LIMIT_KEYS, bytes(16 * wire.LIMIT_KEYS)))


def test_schema_digest_changes_with_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wire.schema_digest()
    assert before == wire.SCHEMA
    monkeypatch.setattr(wire, "LIMIT_KEYS", 1)
    assert wire.schema_digest() != before
    monkeypatch.undo()
    monkeypatch.setitem(wire.MatchPrefix.__annotations__, "space", "str")
    assert wire.schema_digest() != before


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_but_protocol_errors(body: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_reply):
        with contextlib.suppress(ProtocolError):
            decode(body)


@pytest.mark.parametrize("kind", sorted(wire._PLAIN, key=lambda kind: kind.__name__))
def test_a_plain_request_can_be_decoded_and_one_of_another_type_is_not_plain(
    kind: type[wire.Message],
) -> None:
    shards = list(range(wire.LIMIT_SHARDS_TOLD))
    most = {
        int: (1 << 64) - 1, float: float("inf"), bool: True, str: "\0é", bytes: bytes(70_000), list: shards,
    }  # fmt: skip
    types = wire._PLAIN[kind]
    sent = kind(*(most[each] for each in types))
    assert wire.is_plain(sent)
    body = msgspec.msgpack.encode(sent)
    decoded = msgspec.structs.astuple(wire.decode_request(body))
    assert decoded == msgspec.structs.astuple(sent)
    for at in range(len(types)):
        fields = list(msgspec.structs.astuple(sent))
        fields[at] = True if types[at] is int else None
        assert not wire.is_plain(kind(*fields))
    for shards in ([0] * (wire.LIMIT_SHARDS_TOLD + 1), [True], [0, None], [0.0]):
        fields = [shards if each is list else most[each] for each in types]
        assert wire.is_plain(kind(*fields)) == (list not in types)


def test_a_frame_in_a_reused_buffer_does_not_depend_on_its_earlier_content() -> None:
    frame = bytearray(wire.LENGTH.size)
    for nbytes in (0, 32, 32 * 1024, 64, 1 << 20):
        sent = wire.MatchPrefix(7, 1, bytes(nbytes))
        wire.encode_into(sent, frame)
        assert frame == wire.encode(sent)
    for large in (wire.MatchPrefix(7, 1, bytes(5 << 20)), wire.Tier(7, "warm" * (1 << 15))):
        with pytest.raises(ProtocolError, match="at most"):
            wire.encode_into(large, frame)


def test_an_optional_request_is_no_part_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and daemons of other versions go on together: it is only sent to a daemon that shows `hot`."""
    assert wire.Resident in wire.OPTIONAL
    without = wire.Request
    for kind in wire.OPTIONAL:
        without = Union[tuple(one for one in without.__args__ if one is not kind)]  # noqa: UP007
    monkeypatch.setattr(wire, "Request", without)
    monkeypatch.setattr(wire, "OPTIONAL", frozenset())
    assert wire.schema_digest() == wire.SCHEMA


def test_a_large_report_of_an_engine_fits() -> None:
    keys = bytes(32 * wire.LIMIT_RESIDENT)
    frame = wire.encode(wire.Resident(0, 1, 0, keys, b""))
    (body,) = bodies(frame)
    assert wire.decode_request(body) == wire.Resident(0, 1, 0, keys, b"")

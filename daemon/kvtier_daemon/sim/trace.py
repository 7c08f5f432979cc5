"""A trace of requests: a file with one JSON object per line, in the format that Mooncake publishes.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds and never decreases, lengths are in tokens, and an id names a block with all
blocks before it. Traces of `kvtier record` also contain `block_tokens`, `saved` for blocks that were saved
and not looked up, and `importance` for a hint about the importance of these blocks. `announced` is for blocks
that a client prefetches before the request that needs them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from kvtier.errors import ConfigError
from kvtier_kernels import Trace

BLOCK_TOKENS = 512
LIMIT_LINE_BYTES = 64 << 20
ANNOUNCED = 2.0  # instead of an importance
Ids = list[int]


class TraceLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Ids
    block_tokens: int = 0
    saved: bool = False
    importance: float | None = None
    announced: bool = False


@dataclass(frozen=True)
class TraceRequests:
    """A complete trace."""

    path: Path
    native: Trace
    seconds: array[float]
    inputs: array[int]
    lengths: array[int]  # in blocks
    saved: bytes  # 1 for blocks that were saved, and not looked up; 2 for a hint or an announcement
    hints: array[float]  # the importance of the blocks; -1 if it is no hint, or ANNOUNCED
    block_tokens: int

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def looked_up_blocks(self) -> int:
        return sum(n for n, saved in zip(self.lengths, self.saved, strict=True) if not saved)

    @property
    def span_s(self) -> float:
        return self.seconds[-1] - self.seconds[0] if self.seconds else 0.0


def read(path: Path, block_tokens: int = 0) -> TraceRequests:
    """Read a trace. Raises ConfigError with the number of the first invalid line."""
    decode = msgspec.json.Decoder(TraceLine).decode
    names, lengths, lines = array("Q"), array("I"), array("I")
    seconds, inputs, saved, hints = array("d"), array("Q"), bytearray(), array("d")
    told = 0

    def wrong(number: int, why: object) -> ConfigError:
        return ConfigError(f"{path}:{number}: {why}")

    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(LIMIT_LINE_BYTES):
                number += 1
                if text.isspace():
                    continue
                try:
                    line = decode(text)
                    names.extend(line.hash_ids)
                    inputs.append(line.input_length)
                except msgspec.MsgspecError as error:
                    raise wrong(number, error) from None
                except (OverflowError, UnicodeDecodeError, RecursionError) as error:
                    raise wrong(number, f"a number is out of range: {error}") from None
                if not 0 <= line.timestamp < 1e15 or line.output_length < 0:
                    raise wrong(number, "a time or a length is out of range")
                if seconds and line.timestamp / 1000 < seconds[-1]:
                    raise wrong(number, "its timestamp is before that of the line before it")
                if line.block_tokens < 0 or (seconds and line.block_tokens != told):
                    raise wrong(number, f"block_tokens={line.block_tokens} after {told}")
                hint = -1 if line.importance is None else line.importance
                if line.importance is not None and not 0 <= hint <= 1:
                    raise wrong(number, f"importance={hint}, it must be 0 to 1")
                if line.announced:
                    hint = ANNOUNCED
                told = line.block_tokens
                seconds.append(line.timestamp / 1000)
                lengths.append(len(line.hash_ids))
                lines.append(number)
                saved.append(line.saved if hint < 0 else 2)
                hints.append(hint)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not names:
        raise ConfigError(f"{path}: contains no requests")
    native = Trace(names.tobytes(), lengths.tobytes(), seconds.tobytes(), hints.tobytes())
    if native.repeats is not None:
        raise wrong(lines[native.repeats], "hash_ids has a block twice")
    return TraceRequests(
        path, native, seconds, inputs, lengths, bytes(saved), hints,
        block_tokens or told or BLOCK_TOKENS,
    )  # fmt: skip

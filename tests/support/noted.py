"""One file on its own FUSE file system, which records the kernel's requests. Other files of the process are
not recorded."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.one_file import NoMount, OneFile


class Noted(OneFile):
    """`requests` has writes (offset, bytes) and flushes in order; `flush_error` answers the next flushes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.text = bytearray()
        self.requests: list[str | tuple[int, int]] = []
        self.flush_error = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while self.serve():
            pass

    @property
    def size(self) -> int:
        return len(self.text)

    def resize(self, size: int) -> None:
        self.text = self.text[:size].ljust(size, b"\0")

    def read(self, at: int, size: int) -> bytes:
        return bytes(self.text[at : at + size])

    def write(self, unique: int, at: int, data: memoryview) -> bool:
        self.resize(max(len(self.text), at + len(data)))
        self.text[at : at + len(data)] = data
        self.requests.append((at, len(data)))
        return True

    def flush(self) -> None:
        self.requests.append("flush")
        if self.flush_error:
            raise OSError(self.flush_error, os.strerror(self.flush_error))


@contextlib.contextmanager
def noted(folder: Path) -> Iterator[Noted]:
    try:
        file = Noted(folder / "noted")
    except NoMount as error:
        pytest.skip(str(error))
    try:
        yield file
    finally:
        file.unmount()
        file.join()
        os.close(file.fd)

"""The connection that the plugin keeps."""

from __future__ import annotations

import pytest

from daemons import Daemon
from kvtier_vllm.line import Line
from specs import spec_of


def test_a_session_that_was_lost_is_closed_where_no_other_is_made(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end may come before the thread that would have made one."""
    line = Line(shared_daemon.socket, spec_of("line"), "line", populate=False)
    session = line.first()
    assert session is not None
    with monkeypatch.context() as late:
        late.setattr(line._wanted, "set", lambda: None)
        line.lost(session, "for this test")
    line.close()
    line._thread.join(20)
    assert session.client.fileno() == -1

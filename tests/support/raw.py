"""A client without the library, for requests that the library never sends."""

from __future__ import annotations

import os
import socket

from kvtier import wire
from support.daemons import Daemon


class Raw:
    """A connection that sends any request and returns every answer."""

    def __init__(self, daemon: Daemon, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(daemon.socket)
        self.framer = wire.Framer()
        self.waiting: list[wire.Reply] = []
        if hello:
            self.send(wire.Hello(1, wire.SCHEMA, "raw"))
            welcome = self.answer()
            if not isinstance(welcome, wire.Welcome):
                self.sock.close()
                raise AssertionError(f"turned away: {welcome}")

    def send(self, *messages: wire.Message) -> None:
        self.sock.sendall(b"".join(map(wire.encode, messages)))

    def answer(self) -> wire.Reply | None:
        """Return the next reply that is not an announcement; None at the end."""
        while True:
            while self.waiting:
                reply = self.waiting.pop(0)
                if not isinstance(reply, wire.ExtentAdded):
                    return reply
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 16)
            except ConnectionResetError:
                return None
            for fd in fds:
                os.close(fd)
            if not data:
                return None
            self.waiting += [wire.decode_reply(body) for body in self.framer.feed(data)]

    def ask(self, message: wire.Message) -> wire.Reply | None:
        self.send(message)
        return self.answer()

    def refusal(self, message: wire.Message) -> str:
        reply = self.ask(message)
        assert isinstance(reply, wire.Failed), reply
        assert reply.id == message.id
        assert not reply.fatal
        return reply.code

    def ends_with(self, code: str) -> None:
        reply = self.answer()
        assert isinstance(reply, wire.Failed), reply
        assert (reply.code, reply.fatal) == (code, True)
        assert self.answer() is None
        self.sock.close()

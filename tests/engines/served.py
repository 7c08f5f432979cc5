"""An engine that takes requests from many threads, with `serving.py`, and records of its loads."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from support.daemons import Daemon

ANSWER_S = 120.0


class Served:
    """Orders are sent immediately, and each answer is returned to its caller."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.engine.process.stdout:
            body = json.loads(line)
            self._waiting.pop(body.pop("id")).set_result(body)
        for waiting in list(self._waiting.values()):
            waiting.set_exception(
                AssertionError(f"it ended:\n{self.engine.log.read_text()[-4000:]}")
            )

    def order(self, do: str, **order: Any) -> Future[dict[str, Any]]:
        with self._lock:
            number = next(self._numbers)
            answer = self._waiting[number] = Future()
            self.engine.order(id=number, do=do, **order)
        return answer

    def begin(self, prompt: list[int], tokens: int, **more: Any) -> Future[dict[str, Any]]:
        return self.order("serve", prompt=prompt, tokens=tokens, **more)

    def serve(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        return self.begin(prompt, tokens, **more).result(ANSWER_S)

    def compute(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """The expected answers: computed one at a time, and without kvtier."""
        no = {"kvtier": {"load": False, "save": False}}
        return [self.serve(prompt, tokens, parameters=no) for prompt in prompts]

    def state(self) -> dict[str, Any]:
        return self.order("state").result(ANSWER_S)

    def reset(self, **more: bool) -> bool:
        return bool(self.order("reset", **more).result(ANSWER_S)["done"])

    def check_nothing_is_held(self, daemon: Daemon) -> dict[str, Any]:
        """Verify that no page of the engine, no lease, and no slot of an unfinished save is held.
        Returns the state."""
        for _ in range(100):
            # The end of a save is reported with the next step.
            self.serve([5, 6, 7], 1)
            state = self.state()
            if not any(state["held"].values()):
                break
        assert not any(state["held"].values()), state
        assert (state["free"], state["requests"]) == (state["pages"], 0)

        def free(stats: dict[str, Any]) -> bool:
            states = stats["tiers"]["warm"]["states"]
            busy = states["writing"] + states["doomed"] + states["quarantined"]
            return not stats["tenants"]["default"]["leases"] and not busy

        daemon.wait_for(free)
        return state


class Records:
    """The saved and loaded pages, read while they are recorded. A block may have been saved several
    times. Its last bits depend on the other requests of the batch, so a load must equal one of the
    saves as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = defaultdict(int)
        self._saved: dict[tuple[Any, ...], set[tuple[str, ...]]] = defaultdict(set)
        self._wanted: dict[tuple[Any, ...], str] = {}
        self._loaded: list[dict[str, Any]] = []
        self.compared = 0
        self.longest_wait_s = 0.0
        self.longest_calls: dict[str, float] = {}
        self.waits: list[dict[str, Any]] = []

    def wrong(self) -> list[dict[str, Any]]:
        """The pages loaded since the last call that differ from those that were saved under their name."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[path] += len(line)
                    self._take(json.loads(line))
        loaded, self._loaded, wrong = self._loaded, [], []
        for one in loaded:
            key = self._wanted.get((one["load"], one["group"], one["page"]))
            saved = self._saved.get((one["shard"], one["group"], key))
            if key is None or saved is None:
                # The save is in a file that was read before this one; the next call finds it.
                if "late" in one:
                    wrong.append(one)
                else:
                    self._loaded.append(one | {"late": True})
                continue
            self.compared += 1
            if tuple(one["layers"]) not in saved:
                wrong.append(one)
        return wrong

    def _take(self, one: dict[str, Any]) -> None:
        if one["what"] == "saved":
            self._saved[one["shard"], one["group"], one["key"]].add(tuple(one["layers"]))
        elif one["what"] == "wanted":
            for page, key in zip(one["pages"], one["keys"], strict=True):
                self._wanted[one["load"], one["group"], page] = key
        elif one["what"] == "loaded":
            self._loaded.append(one)
        elif one["what"] == "waited":
            self.longest_wait_s = max(self.longest_wait_s, one["seconds"])
        elif one["what"] == "waits":
            self.waits.append(one)
        elif one["what"] == "called":
            known = self.longest_calls.get(one["name"], 0.0)
            self.longest_calls[one["name"]] = max(known, one["seconds"])

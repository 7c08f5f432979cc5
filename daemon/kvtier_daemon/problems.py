"""What stands in the way of a start, collected: one start is enough to learn all of it."""

import contextlib
from collections.abc import Iterator

from kvtier.errors import ConfigError


class Refusal(ConfigError):  # noqa: N818
    """What stands in the way, in a line; `problems` has each by itself."""

    def __init__(self, text: str, problems: tuple[str, ...]) -> None:
        super().__init__(text)
        self.problems = problems


class Problems:
    """Notes what is wrong, each problem once; `what` is what several of them are called in sum."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._noted: dict[str, None] = {}

    def note(self, problem: object) -> None:
        self._noted[str(problem)] = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the ConfigError that is raised inside, and go on after it."""
        try:
            yield
        except ConfigError as error:
            self.note(error)

    def refuse(self) -> None:
        """Raise ConfigError, in one line, if anything was noted; a single problem stands by itself."""
        noted = tuple(self._noted)
        if len(noted) == 1:
            raise Refusal(noted[0], noted)
        if self._noted:
            numbered = (f"({number}) {text}" for number, text in enumerate(self._noted, 1))
            raise Refusal(f"{len(noted)} {self._what}: {' '.join(numbered)}", noted)

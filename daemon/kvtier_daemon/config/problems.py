"""Collects problems that prevent a start, so that one attempt to start shows all of them."""

import contextlib
from collections.abc import Iterator

from kvtier.errors import ConfigError


class Refusal(ConfigError):  # noqa: N818
    """The problems in one line; `problems` has each of them. If it `passes`, another start may succeed."""

    def __init__(self, text: str, problems: tuple[str, ...], passes: bool) -> None:
        super().__init__(text)
        self.problems = problems
        self.passes = passes


class Problems:
    """Collects each problem once; `what` names several of them in the message."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._noted: dict[str, None] = {}

    def note(self, problem: object) -> None:
        self._noted[str(problem)] = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Add the ConfigError that is raised in the `with` block, and continue after it."""
        try:
            yield
        except ConfigError as error:
            self.note(error)

    def refuse(self, passes: bool = False) -> None:
        """Raise a ConfigError with all problems in one line, if there are any."""
        noted = tuple(self._noted)
        if len(noted) == 1:
            raise Refusal(noted[0], noted, passes)
        if self._noted:
            numbered = (f"({number}) {text}" for number, text in enumerate(self._noted, 1))
            raise Refusal(f"{len(noted)} {self._what}: {' '.join(numbered)}", noted, passes)

"""Schedules: which stream runs next, and how late. Each is deterministic, so a failing one replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from offload_ref.simulator.core import Stream


class Schedule(Protocol):
    """Picks the next stream to run among those whose first work item is ready; None: nothing more for now."""

    def pick(self, ready: Sequence[Stream]) -> Stream | None:
        """The stream to run one item of, or None to let all of them wait."""


class Eager:
    """Every item runs as soon as it is ready: the device is never behind the host."""

    def pick(self, ready: Sequence[Stream]) -> Stream | None:
        """The first ready stream."""
        return ready[0]

    def __repr__(self) -> str:
        return "Eager()"


class Lazy:
    """Nothing runs until something must finish; then only what that depends on."""

    def pick(self, ready: Sequence[Stream]) -> Stream | None:  # noqa: ARG002 - the protocol's argument
        """No stream."""
        return None

    def __repr__(self) -> str:
        return "Lazy()"


class Starve:
    """One stream is as late as the program allows, the others run at once.

    Args:
        stream: a stream, its name or its index (0 is the default stream).
    """

    def __init__(self, stream: Stream | str | int) -> None:
        self.stream = stream

    def pick(self, ready: Sequence[Stream]) -> Stream | None:
        """The first ready stream that is not the starved one."""
        return next((stream for stream in ready if not self._starves(stream)), None)

    def _starves(self, stream: Stream) -> bool:
        return self.stream is stream or self.stream in (stream.name, stream.index, f"stream{stream.index}")

    def __repr__(self) -> str:
        return f"Starve({getattr(self.stream, 'name', self.stream)!r})"


class Tape:
    """Decisions read from a list of small integers, over and over; an empty list is Eager.

    A decision d picks ready stream d modulo their number if d is below twice that number, else nothing. A test
    that draws the list shrinks towards zeros, which is Eager.
    """

    def __init__(self, decisions: Sequence[int]) -> None:
        self.decisions = tuple(decisions)
        self._next = 0

    def pick(self, ready: Sequence[Stream]) -> Stream | None:
        """The stream that the next decision names."""
        if not self.decisions:
            return ready[0]
        decision = self.decisions[self._next % len(self.decisions)]
        self._next += 1
        return ready[decision % len(ready)] if decision < 2 * len(ready) else None

    def __repr__(self) -> str:
        return f"Tape({list(self.decisions)!r})"

"""Happens-before: two conflicting accesses that no chain of waits orders are a race, in whichever schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload_ref.simulator.core import HOST, Clock
from offload_ref.simulator.sites import Site

if TYPE_CHECKING:
    from offload_ref.simulator.core import Machine
    from offload_ref.simulator.memory import Block

READ, WRITE, REUSE = "reads", "writes", "reuses"
"""Kinds of access; REUSE is a write into memory that the allocator may have taken from a freed block."""


@dataclass(slots=True, eq=False)
class Access:
    """One access to bytes [low, high) of a block, by an actor at its tick."""

    actor: int
    tick: int
    kind: str
    low: int
    high: int
    op: str
    site: Site
    layout: tuple[int, tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(frozen=True, slots=True)
class RacyAccess:
    """One side of a race, in words.

    Attributes:
        actor: the stream's name, or ``host``.
        kind: ``reads``, ``writes`` or ``reuses``.
        op: the operator or copy.
        site: file, line and function of the user's program.
    """

    actor: str
    kind: str
    op: str
    site: str

    def __str__(self) -> str:
        return f"{self.actor} {self.kind} in {self.op} [{self.site}]"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to one block that nothing orders.

    Attributes:
        first, second: the accesses, in the order in which the host issued them.
        block: which memory, its size in bytes and where it was allocated.
        missing_edge: the call that would order them.
    """

    first: RacyAccess
    second: RacyAccess
    block: str
    missing_edge: str

    def __str__(self) -> str:
        return (
            f"race on {self.block}\n  first:   {self.first}\n  second:  {self.second}\n  missing: {self.missing_edge}"
        )


@dataclass(slots=True)
class RaceDetector:
    """Compares each access with those before it on the same block."""

    machine: Machine
    races: list[Race] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)

    def access(self, block: Block, new: Access, clock: Clock) -> None:
        """Check ``new``, whose actor has seen ``clock``, and remember it in the block."""
        if block.hazards and new.kind is WRITE:
            self._check_reuse(block, new, clock)
        kept = []
        for old in block.accesses:
            if old.high <= new.low or new.high <= old.low:
                kept.append(old)
                continue
            ordered = old.tick <= clock[old.actor]
            conflict = new.kind is WRITE or old.kind is WRITE
            if conflict and not ordered and not _disjoint(old, new):
                self._report(block, old, new)
            covered = new.low <= old.low and old.high <= new.high
            superseded = new.kind is WRITE or (old.kind is READ and old.actor == new.actor)
            if not (ordered and covered and superseded and new.layout is None):
                kept.append(old)
        kept.append(new)
        block.accesses = kept

    def _check_reuse(self, block: Block, new: Access, clock: Clock) -> None:
        """The memory may be that of a freed block: its accesses must be ordered before the first write."""
        if new.actor in block.reuse_checked:
            return
        block.reuse_checked.add(new.actor)
        for freed, old in block.hazards.values():
            if old.tick > clock[old.actor]:
                self._report(freed, old, new, REUSE)

    def _report(self, block: Block, old: Access, new: Access, kind: str | None = None) -> None:
        key = (old.actor, old.op, old.site, old.kind, new.actor, new.op, new.site, kind or new.kind)
        if key in self._seen:
            return
        self._seen.add(key)
        first, second = self._describe(old, old.kind), self._describe(new, kind or new.kind)
        self.races.append(Race(first, second, str(block), _missing_edge(first, second, kind)))

    def _describe(self, access: Access, kind: str) -> RacyAccess:
        actor = "host" if access.actor == HOST else self.machine.streams[access.actor - 1].name
        return RacyAccess(actor, kind, access.op, str(access.site))


def _missing_edge(first: RacyAccess, second: RacyAccess, kind: str | None) -> str:
    event = f"an event recorded on {first.actor} after it"
    if kind is REUSE:
        return f"tensor.record_stream({first.actor}) before the block was freed, or {second.actor}.wait_event({event})"
    if second.actor == "host":
        return f"event.synchronize() on the host, of {event}"
    return f"{second.actor}.wait_event({event})"


def _disjoint(old: Access, new: Access) -> bool:
    """Whether two accesses with overlapping byte ranges touch no common byte (columns of a matrix)."""
    if old.layout is None and new.layout is None:
        return False
    return not (_touched(old) & _touched(new))


def _touched(access: Access) -> set[int]:
    """Offsets of the bytes that an access touches."""
    if access.layout is None:
        return set(range(access.low, access.high))
    itemsize, shape, stride, start = access.layout
    offsets = {start}
    for size, step in zip(shape, stride, strict=True):
        offsets = {offset + i * step for offset in offsets for i in range(size)}
    return {offset * itemsize + byte for offset in offsets for byte in range(itemsize)}

"""Happens-before: two conflicting accesses that no chain of waits orders are a race, in whichever schedule.

The one exception is a write into device memory that a copy to the host may still be reading: ``landings`` tells
whether that is a race or a stale copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload_ref.simulator.core import HOST, Clock
from offload_ref.simulator.landings import Landing, Pair, StaleCopy, overwrites
from offload_ref.simulator.sites import Site

if TYPE_CHECKING:
    from offload_ref.simulator.core import Machine
    from offload_ref.simulator.memory import Block

READ, WRITE, REUSE = "reads", "writes", "reuses"
"""Kinds of access; REUSE is a write into memory that the allocator may have taken from a freed block."""

Layout = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Item size in bytes, and shape, strides and offset in elements, of an access with gaps."""


@dataclass(slots=True, eq=False)
class Access:
    """One access to bytes [low, high) of a block, by an actor at its tick; a copy to pinned memory has a landing."""

    actor: int
    tick: int
    kind: str
    low: int
    high: int
    op: str
    site: Site
    layout: Layout | None = None
    landing: Landing | None = None

    @property
    def may_be_stale(self) -> bool:
        """Whether this reads for a copy to the host that nobody has read yet."""
        return self.kind is READ and self.landing is not None and self.landing.reader is None


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
        reader: who has read the spoiled bytes, if the first is a copy to the host and the second an edit.
    """

    first: RacyAccess
    second: RacyAccess
    block: str
    missing_edge: str
    reader: RacyAccess | None = None

    def __str__(self) -> str:
        accesses = f"  first:   {self.first}\n  second:  {self.second}\n"
        reader = "" if self.reader is None else f"  then:    {self.reader}\n"
        return f"race on {self.block}\n{accesses}{reader}  missing: {self.missing_edge}"


@dataclass(slots=True)
class RaceDetector:
    """Compares each access with those before it on the same block."""

    machine: Machine
    races: list[Race] = field(default_factory=list)
    _seen: set[Pair] = field(default_factory=set)
    _stale: dict[Pair, StaleCopy] = field(default_factory=dict)
    _times_stale: Counter[Pair] = field(default_factory=Counter)

    @property
    def stale_copies(self) -> list[StaleCopy]:
        """Copies that may be spoiled and that nobody has read so far, in the order found."""
        return [stale for pair, stale in self._stale.items() if self._times_stale[pair]]

    def access(self, block: Block, new: Access, clock: Clock) -> None:
        """Check ``new``, whose actor has seen ``clock``, and remember it in the block."""
        if block.hazards and new.kind is WRITE:
            self._check_reuse(block, new, clock)
        if block.landings:
            self._update_landings(block, new)
        kept = []
        for old in block.accesses:
            if old.high <= new.low or new.high <= old.low:
                kept.append(old)
                continue
            ordered = old.tick <= clock[old.actor]
            conflict = new.kind is WRITE or old.kind is WRITE
            if conflict and not ordered and not _disjoint(old, new):
                self._judge(block, old, new)
            if not (ordered and _supersedes(new, old)):
                kept.append(old)
        kept.append(new)
        block.accesses = kept
        if new.kind is WRITE and new.landing is not None:
            self._place(new.landing, block, new)

    def _check_reuse(self, block: Block, new: Access, clock: Clock) -> None:
        """The memory may be that of a freed block: its accesses must be ordered before the first write."""
        if new.actor in block.reuse_checked:
            return
        block.reuse_checked.add(new.actor)
        for freed, old in block.hazards.values():
            if old.tick > clock[old.actor]:
                self._report(freed, old, new, REUSE)

    # Copies to the host

    def _place(self, landing: Landing, block: Block, write: Access) -> None:
        landing.place(block, write)
        if block.alias is not None:
            self._note_reader(landing, block.alias)
        elif not landing.is_gone:
            block.landings.append(landing)

    def _update_landings(self, block: Block, new: Access) -> None:
        """Let the access read or overwrite what copies have brought; only what is left whole and unread stays."""
        for landing in block.landings:
            if not landing.overlaps(new):
                continue
            if new.kind is WRITE and overwrites(new):
                landing.overwrite(new)
            else:
                self._note_reader(landing, self._describe(new, READ))
        block.landings = [one for one in block.landings if one.reader is None and not one.is_gone]

    def _note_reader(self, landing: Landing, reader: RacyAccess) -> None:
        """What was suspected of a copy is a race now that the copy is read."""
        landing.reader = reader
        for pair, stale in landing.suspicions.items():
            self._times_stale[pair] -= 1
            self._add(pair, Race(stale.first, stale.second, stale.block, stale.missing_edge, reader))
        landing.suspicions.clear()
        source = landing.source()
        if source is not None:
            _forget_earlier_reads(source, landing)

    # Verdicts

    def _judge(self, block: Block, old: Access, new: Access) -> None:
        landing = old.landing
        if landing is None or not old.may_be_stale:
            self._report(block, old, new)
            return
        pair = _pair(old, new, new.kind)
        if pair in landing.suspicions:
            return
        first, second = self._describe(old, old.kind), self._describe(new, new.kind)
        stale = StaleCopy(first, second, str(block), landing.where, _missing_edge(first, second, None))  # ORD-17
        self._stale.setdefault(pair, stale)
        self._times_stale[pair] += 1
        if not landing.is_gone:
            landing.suspicions[pair] = stale

    def _report(self, block: Block, old: Access, new: Access, kind: str | None = None) -> None:
        pair = _pair(old, new, kind or new.kind)
        if pair in self._seen:
            return
        first, second = self._describe(old, old.kind), self._describe(new, kind or new.kind)
        reader = old.landing.reader if old.landing is not None and old.kind is READ else None
        self._add(pair, Race(first, second, str(block), _missing_edge(first, second, kind), reader))

    def _add(self, pair: Pair, race: Race) -> None:
        if pair not in self._seen:
            self._seen.add(pair)
            self.races.append(race)

    def _describe(self, access: Access, kind: str) -> RacyAccess:
        actor = "host" if access.actor == HOST else self.machine.streams[access.actor - 1].name
        return RacyAccess(actor, kind, access.op, str(access.site))


def _pair(old: Access, new: Access, kind: str) -> Pair:
    return (old.actor, old.op, old.site, old.kind, new.actor, new.op, new.site, kind)


def _supersedes(new: Access, old: Access) -> bool:
    """Whether an access ordered after ``old`` conflicts with all that ``old`` does, and no verdict is milder."""
    if new.low > old.low or old.high > new.high or (new.layout is not None and new.layout != old.layout):
        return False
    if new.kind is WRITE:
        return True
    if old.kind is not READ or old.actor != new.actor:
        return False
    return not new.may_be_stale or (old.landing is not None and old.may_be_stale and old.landing.is_gone)


def _forget_earlier_reads(block: Block, landing: Landing) -> None:
    """A copy that has been read supersedes the reads before it, as it could not while it might have been stale."""
    new = next((one for one in block.accesses if one.landing is landing), None)
    if new is not None:
        block.accesses = [one for one in block.accesses if one.tick >= new.tick or not _supersedes(new, one)]


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

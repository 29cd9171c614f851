"""Where copies to the host land, and whether anybody reads what has landed: it tells a stale copy from a race.

An edit that is not ordered after a copy to the host may spoil what the copy brings. As long as nobody reads the
bytes where it lands, no value depends on the order: the copy is stale. It stays stale when those bytes are
overwritten or freed first, and becomes a race when they are read, before the edit or at any time after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import weakref

    from offload_ref.simulator.memory import Block
    from offload_ref.simulator.races import Access, Layout, RacyAccess

OVERWRITING = frozenset({"copy_", "_to_copy", "fill_", "zero_", "normal_", "uniform_", "random_", "_foreach_copy_"})
"""Operators that write without reading what was there; any other write counts as a read too."""

Pair = tuple[object, ...]
"""Two accesses, by actor, operator and call site: what is reported once."""


@dataclass(frozen=True, slots=True)
class StaleCopy:
    """A copy to the host that an edit may have spoiled, where nobody has read what it brought.

    Attributes:
        first: the copy's read of the device memory.
        second: the edit, which nothing orders after it.
        block: which device memory, its size in bytes and where it was allocated.
        destination: which bytes of which host memory hold the copy.
        missing_edge: the call that would order the two.
    """

    first: RacyAccess
    second: RacyAccess
    block: str
    destination: str
    missing_edge: str

    def __str__(self) -> str:
        return (
            f"stale copy of {self.block}\n  first:   {self.first}\n  second:  {self.second}\n"
            f"  unread:  {self.destination}\n  missing: {self.missing_edge}"
        )


@dataclass(slots=True, eq=False)
class Landing:
    """Bytes [low, high) of a pinned block that a copy from a device block wrote, and what has become of them.

    Attributes:
        source: the device block.
        where: the bytes in words.
        reader: who has read some of the bytes since they landed.
        suspicions: edits that may have spoiled the bytes.
    """

    source: weakref.ref[Block]
    low: int = 0
    high: int = 0
    layout: Layout | None = None
    where: str = ""
    reader: RacyAccess | None = None
    suspicions: dict[Pair, StaleCopy] = field(default_factory=dict)

    @property
    def is_gone(self) -> bool:
        """Whether no byte is left that can be read."""
        return self.low >= self.high

    def place(self, block: Block, write: Access) -> None:
        """Say where the copy writes; from now on its bytes can be read."""
        self.low, self.high, self.layout = write.low, write.high, write.layout
        self.where = f"bytes [{self.low}, {self.high}) of {block}"

    def overlaps(self, other: Access) -> bool:
        """Whether the ranges have a byte in common; gaps between strided elements count."""
        return self.low < other.high and other.low < self.high

    def overwrite(self, write: Access) -> None:
        """Take away what a write leaves nothing of: all, the beginning or the end."""
        if write.layout is not None:
            if write.layout == self.layout:
                self.end()
        elif write.low <= self.low:
            self.low = write.high
        elif write.high >= self.high:
            self.high = write.low
        if self.is_gone:
            self.end()

    def end(self) -> None:
        """No byte is left: what was stale stays stale."""
        self.low = self.high
        self.suspicions.clear()


def overwrites(access: Access) -> bool:
    """Whether a write reads nothing of what was there."""
    return access.op.partition(" ")[0].partition(".")[0] in OVERWRITING

"""Blocks of simulated memory: who owns the bytes, when they are freed, when they may be used again.

A block's bytes belong to the simulator. The program gets a second storage over the same bytes, and that storage's
death is the free: so a free is seen at once while queued work still reads the bytes. Freed device memory may come
back only in a later allocation of the same stream (torch's caching allocator); just before the first write into
such an allocation the freed bytes are poisoned with NaN, and the race detector checks who may still use them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from offload_ref.simulator.core import Machine, Stream
from offload_ref.simulator.landings import Landing
from offload_ref.simulator.races import Access, RacyAccess
from offload_ref.simulator.sites import Site, call_site

DEVICE, PINNED = "device", "pinned"
"""The two spaces that have blocks; pageable host memory has none."""

ALIGNMENT_BYTES = 512
"""torch's device allocator aligns every block to this."""

POISON = 0xFF
"""Every byte of memory that holds no value: NaN in each floating dtype."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""Flat bytes."""


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to the program's storage that knows its block."""

    __slots__ = ("address", "block")
    block: Block
    address: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Block:
    """One allocation.

    Attributes:
        memory: capacity bytes, owned by the simulator; the program's storage is an alias of the first nbytes.
        stream: the stream that was current at the allocation.
        recorded: actors named by ``record_stream``.
        accesses: what the race detector still has to remember.
        hazards: accesses to blocks freed earlier, whose bytes this block may have got.
        victims: bytes of blocks freed earlier, to be poisoned before the first write.
        landings: what copies to the host have brought here that nobody has read or overwritten.
        alias: the host's way to the bytes that no operator sees (numpy, dlpack), if it has one.
    """

    number: int
    space: str
    nbytes: int
    memory: Bytes
    stream: Stream
    site: Site
    flat: torch.Tensor
    reference: _StorageReference | None = None
    freed: bool = False
    recorded: set[int] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)
    hazards: dict[tuple[int, str], tuple[Block, Access]] = field(default_factory=dict)
    reuse_checked: set[int] = field(default_factory=set)
    victims: list[Bytes] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    alias: RacyAccess | None = None

    def __str__(self) -> str:
        return f"{self.space} block #{self.number} ({self.nbytes} bytes, allocated at {self.site})"


@dataclass(slots=True)
class Ledger:
    """Live and peak bytes of one space, as requested (torch's own allocator rounds up to 512)."""

    live: int = 0
    peak: int = 0
    allocations: int = 0
    allocated_bytes: int = 0

    def add(self, nbytes: int) -> None:
        """Account for an allocation."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        self.allocations += 1
        self.allocated_bytes += nbytes

    def subtract(self, nbytes: int) -> None:
        """Account for a free."""
        self.live -= nbytes


@dataclass(slots=True)
class _Reclaim:
    """Freed bytes that stay out of the pool until the recorded streams have passed these positions."""

    positions: list[tuple[Stream, int]]
    stream: Stream
    memory: Bytes


@dataclass(eq=False)
class Memory:
    """All blocks of a simulator."""

    machine: Machine
    check: bool
    capacity_bytes: int
    device: Ledger = field(default_factory=Ledger)
    pinned: Ledger = field(default_factory=Ledger)
    blocks: dict[int, Block] = field(default_factory=dict)
    _freed: deque[_StorageReference] = field(default_factory=deque)
    _count: int = 0
    _hazards: dict[Stream, dict[tuple[int, str], tuple[Block, Access]]] = field(default_factory=dict)
    _victims: dict[Stream, list[Bytes]] = field(default_factory=dict)
    _reclaims: list[_Reclaim] = field(default_factory=list)

    # Allocating

    def allocate(self, nbytes: int, space: str) -> Block:
        """A block of poisoned bytes on the current stream."""
        self.reap()
        if space is DEVICE:
            self._check_capacity(nbytes)
        stream = self.machine.current
        memory = _aligned(nbytes)
        self._count += 1
        site = call_site()
        with torch.inference_mode(mode=False):
            flat = torch.from_numpy(memory)
        block = Block(self._count, space, nbytes, memory, stream, site, flat)
        self._ledger(space).add(nbytes)
        if space is DEVICE:
            self._return_reclaims()
            block.hazards = dict(self._hazards.get(stream, {}))
            block.victims = self._victims.pop(stream, [])
        return block

    def _check_capacity(self, nbytes: int) -> None:
        if self.device.live + nbytes > self.capacity_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes. The simulated device has a total "
                f"capacity of {self.capacity_bytes} bytes of which {self.device.live} bytes are allocated."
            )

    def program_tensor(
        self, block: Block, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """The tensor that the program gets; when its storage dies, the block is freed."""
        if block.nbytes:
            flat = torch.from_numpy(block.memory[: block.nbytes]).view(dtype)
            tensor = torch.as_strided(flat, size, stride, 0)
        else:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        self.register(block, tensor.untyped_storage())
        return tensor

    def register(self, block: Block, storage: torch.UntypedStorage) -> None:
        """Make ``storage`` the program's side of the block."""
        reference = _StorageReference(storage, self._freed.append)
        reference.block, reference.address = block, storage._cdata
        block.reference = reference
        self.blocks[storage._cdata] = block

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block behind a tensor; None: pageable host memory."""
        return self.blocks.get(tensor.untyped_storage()._cdata)

    # Freeing

    def reap(self) -> None:
        """Free the blocks whose storage has died since the last call."""
        while self._freed:
            reference = self._freed.popleft()
            if self.blocks.get(reference.address) is reference.block:
                del self.blocks[reference.address]
            self.free(reference.block)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Free the block behind a storage that lives on, empty (``storage.resize_(0)``)."""
        self.reap()
        self.free(self.blocks.pop(storage._cdata))

    def free(self, block: Block) -> None:
        """Give a block's bytes back: at once in the ledger, by stream order in the pool."""
        if block.freed:
            return
        block.freed = True
        self._ledger(block.space).subtract(block.nbytes)
        for landing in block.landings:
            landing.end()
        block.landings.clear()
        if block.space is not DEVICE:
            return
        stream = block.stream
        hazards = self._hazards.setdefault(stream, {})
        for access in block.accesses:
            key = (access.actor, access.kind)
            if access.actor not in block.recorded and (key not in hazards or hazards[key][1].tick < access.tick):
                hazards[key] = (block, access)
        positions = [(s, s.enqueued) for s in self.machine.streams if s.actor in block.recorded]
        self._reclaims.append(_Reclaim(positions, stream, block.memory))
        if block.victims:
            self._victims.setdefault(stream, []).extend(block.victims)
        block.accesses, block.hazards = [], {}  # or each freed block would keep the one before it

    def _return_reclaims(self) -> None:
        waiting = []
        for reclaim in self._reclaims:
            if all(stream.done >= position for stream, position in reclaim.positions):
                self._victims.setdefault(reclaim.stream, []).append(reclaim.memory)
            else:
                waiting.append(reclaim)
        self._reclaims = waiting

    def poison_victims(self, block: Block) -> Callable[[], None] | None:
        """What has to run before the first write into the block."""
        if not block.victims:
            return None
        victims, block.victims = block.victims, []

        def poison() -> None:
            for memory in victims:
                memory.fill(POISON)

        return poison

    def _ledger(self, space: str) -> Ledger:
        return self.device if space is DEVICE else self.pinned


def _aligned(nbytes: int) -> Bytes:
    """Poisoned bytes whose address and number are multiples of the alignment."""
    capacity = -(-max(nbytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    raw = np.full(capacity + ALIGNMENT_BYTES, POISON, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return raw[start : start + capacity]

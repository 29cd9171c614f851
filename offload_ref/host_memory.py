"""Host memory for copies: pinned buffers that know their last use, in a pool that counts its bytes."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def allocate_host(nbytes: int, *, pin: bool = True) -> torch.Tensor:
    """A flat uint8 host tensor of ``nbytes`` bytes; if pinning fails, one warning and pageable memory."""
    if not pin or nbytes == 0:
        return torch.empty(nbytes, dtype=torch.uint8)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as failure:
        warnings.warn(f"host memory cannot be pinned ({failure}): pageable memory is used", stacklevel=2)
        return torch.empty(nbytes, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A flat uint8 buffer and the event after which its bytes may be overwritten (None: at once)."""

    memory: torch.Tensor
    last_use: torch.Event | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.numel()

    def shaped_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The buffer as a contiguous tensor of another one's dtype and shape."""
        return self.memory.view(tensor.dtype).view(tensor.shape)


@dataclass(slots=True)
class PinnedPool:
    """Pinned host buffers, handed out by exact size.

    A buffer comes back with the event of its last use, and whoever leases it next makes the writing stream
    wait for that event (ORD-6): the pool itself never waits and never relies on the order of its queues.

    Attributes:
        retain: keep free buffers for ever, or (default) only while some buffer is leased.
        leased_bytes, free_bytes: the ledger, in bytes.
        allocations: how many buffers were ever allocated.
    """

    retain: bool = False
    leased_bytes: int = 0
    free_bytes: int = 0
    allocations: int = 0
    _free: defaultdict[int, list[HostBuffer]] = field(default_factory=lambda: defaultdict(list))

    def lease(self, nbytes: int) -> HostBuffer:
        """A buffer of exactly ``nbytes`` bytes, reused where one is free."""
        self.leased_bytes += nbytes
        if self._free[nbytes]:
            self.free_bytes -= nbytes
            return self._free[nbytes].pop()
        self.allocations += 1
        return HostBuffer(allocate_host(nbytes))

    def give_back(self, buffer: HostBuffer, last_use: torch.Event) -> None:
        """Take a buffer back that may be overwritten once ``last_use`` has passed (MEM-5).

        Buffers that are dropped go to torch's own host allocator, which waits for the copies that still use them.
        """
        buffer.last_use = last_use
        self.leased_bytes -= buffer.nbytes
        self.free_bytes += buffer.nbytes
        self._free[buffer.nbytes].append(buffer)
        if self.leased_bytes == 0 and not self.retain:
            self._free.clear()
            self.free_bytes = 0


def carve(likes: Sequence[tuple[torch.Size, torch.dtype]], *, pin: bool) -> list[torch.Tensor]:
    """Contiguous host tensors of the given shapes and dtypes, side by side in one flat buffer without gaps.

    Wider dtypes come first, so that every tensor is aligned to its elements (MEM-11).
    """
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in likes]
    flat = allocate_host(sum(sizes), pin=pin)
    tensors: dict[int, torch.Tensor] = {}
    begin = 0
    for i in sorted(range(len(likes)), key=lambda i: -likes[i][1].itemsize):
        shape, dtype = likes[i]
        tensors[i] = flat[begin : begin + sizes[i]].view(dtype).view(shape)
        begin += sizes[i]
    return [tensors[i] for i in range(len(likes))]

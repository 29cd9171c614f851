"""What happens to a saved tensor: its view of a storage, its copy on the host, its handle, its forward pass.

``activation`` decides which tensors leave; here they are copied, released, brought back and handed out again:

- a ``Handle`` is what autograd keeps instead of the tensor;
- a ``HostCopy`` is shared by the handles of all views of one storage, and lives exactly as long as they do;
- a ``ForwardPass`` is what the handles of one forward pass share, so several passes never meet.

No state is global, and nothing says "the current layer" in backward: each handle holds what it needs.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from offload_ref.errors import InPlaceEditError, LayerCountError, require
from offload_ref.host_memory import HostBuffer, PinnedPool
from offload_ref.schedule import Schedule

ALIGNMENT_BYTES = 512
"""Kernels are chosen by a pointer's alignment; the device allocators that torch uses align blocks to this."""

WHOLE_STORAGE_SHARE = 1 / 4
"""A tensor that covers at least this share of its storage has the whole storage copied."""


@dataclass(frozen=True, slots=True)
class View:
    """A strided tensor without its bytes; size, stride and offset are in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """How the tensor lies in its storage."""
        return cls(tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """This view of the storage behind ``memory``, on its device."""
        empty = memory.new_empty(0, dtype=self.dtype)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)

    def moved(self, nbytes: int) -> View:
        """The same view, ``nbytes`` bytes further on."""
        return replace(self, offset=self.offset + nbytes // self.dtype.itemsize)

    def unexpanded(self) -> View:
        """The same elements, each once: expanded dimensions (stride 0) count one."""
        size = tuple(1 if step == 0 else n for n, step in zip(self.size, self.stride, strict=True))
        return replace(self, size=size)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, repetitions counted."""
        return math.prod(self.size) * self.dtype.itemsize

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def overlaps_itself(self) -> bool:
        """Whether two index tuples may mean one element, as in sliding windows (may err towards yes)."""
        reach = 0
        for step, n in sorted((step, n) for n, step in zip(self.size, self.stride, strict=True) if n > 1):
            if step <= reach:
                return True
            reach += (n - 1) * step
        return False


def packed_view(tensor: torch.Tensor) -> View | None:
    """The distinct elements to copy on their own, or None if the whole storage is to be copied."""
    view = View.of(tensor).unexpanded()
    if view.nbytes >= WHOLE_STORAGE_SHARE * tensor.untyped_storage().nbytes():  # ACT-15
        return None
    return None if view.overlaps_itself() else view


@dataclass(slots=True)
class ActivationStats:
    """What has crossed since construction (copies, bytes), and how many saved tensors stayed, by reason."""

    copies_to_host: int = 0
    copies_to_device: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    kept: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Link:
    """The way between one device and the host: a stream per direction, so that both are busy at once."""

    device: torch.device
    pool: PinnedPool
    stats: ActivationStats
    d2h: torch.Stream
    h2d: torch.Stream

    def to_host(self, source: torch.Tensor, compute: torch.Stream) -> tuple[HostBuffer, torch.Event]:
        """Copy a contiguous tensor that ``compute`` has produced; the event tells when it has been read."""
        buffer = self.pool.lease(source.nbytes)
        # WAIT
        self.d2h.wait_event(compute.record_event())  # ORD-1
        if buffer.last_use is not None:
            self.d2h.wait_event(buffer.last_use)
        # COPY
        with self.d2h:
            buffer.shaped_like(source).copy_(source, non_blocking=True)
        self.stats.copies_to_host += 1
        self.stats.bytes_to_host += source.nbytes
        # RECORD
        return buffer, self.d2h.record_event()

    def to_device(
        self, target: torch.Tensor, buffer: HostBuffer, copied: torch.Event, compute: torch.Stream
    ) -> torch.Event:
        """Copy a buffer filled at ``copied`` (ORD-3) into fresh memory of ``compute``; returns the end."""
        # WAIT
        self.h2d.wait_event(compute.record_event())  # ORD-4
        self.h2d.wait_event(copied)
        # COPY
        with self.h2d:
            target.copy_(buffer.shaped_like(target), non_blocking=True)
        self.stats.copies_to_device += 1
        self.stats.bytes_to_device += buffer.nbytes
        # RECORD
        return self.h2d.record_event()


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostCopy:
    """One storage (or its packed part) on its way: resident, then on the host, then reloaded.

    Before device memory that a side stream may still touch is given up, ``compute``, the stream that owns the
    memory, is made to wait for ``unsettled``: so the allocator may reuse it in that stream's order.
    """

    link: Link
    origin: weakref.ref[torch.UntypedStorage]
    origin_bytes: int
    padding: int
    packed: View | None
    source: torch.Tensor | None
    buffer: HostBuffer | None
    copied: torch.Event
    compute: torch.Stream
    unsettled: torch.Event | None
    alias: torch.Tensor
    version: int | None
    arrived: torch.Event | None = None
    reload: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    reload_bytes: int = 0
    shift: int = 0
    layer: int = -1

    @classmethod
    def of(cls, tensor: torch.Tensor, packed: View | None, link: Link, alias: torch.Tensor) -> HostCopy:
        """Start copying the tensor's storage, or its packed elements; ``alias`` shares its version counter."""
        storage = tensor.untyped_storage()
        source = _as_bytes(storage, link.device) if packed is None else packed.on(tensor).contiguous()
        compute = torch.accelerator.current_stream(link.device)
        buffer, copied = link.to_host(source, compute)
        return cls(
            link=link,
            origin=weakref.ref(storage),
            origin_bytes=storage.nbytes(),
            padding=(storage.data_ptr() if packed is None else tensor.data_ptr()) % ALIGNMENT_BYTES,
            packed=packed,
            source=source,
            buffer=buffer,
            copied=copied,
            compute=compute,
            unsettled=copied,
            alias=alias,
            version=version_of(tensor),
        )

    def release(self) -> None:
        """Let the device memory go, once its copy to the host has been read (MEM-2)."""
        self._settle()
        self.source = None

    def fetch(self) -> torch.Tensor:
        """Device memory with the bytes: where they still are, or where a copy back brings them."""
        if self.buffer is not None:
            storage = self.origin()
            if storage is None:
                self._copy_back(self.buffer)
            else:
                self.reload = _as_bytes(storage, self.link.device)
            self._give_buffer_back(self.arrived or self.copied)
        return self.reload

    def _copy_back(self, buffer: HostBuffer) -> None:
        """Reload into memory of the compute stream, as far off 512 bytes as the data were."""
        self.compute = torch.accelerator.current_stream(self.link.device)
        payload_bytes, self.shift = self.origin_bytes, self.padding  # ACT-22
        if self.packed is not None:
            payload_bytes = self.packed.extent_bytes
            self.shift -= self.packed.offset * self.packed.dtype.itemsize
        self.reload_bytes = self.padding + payload_bytes
        self.reload = torch.empty(self.reload_bytes, dtype=torch.uint8, device=self.link.device)
        target = self.reload[self.padding :]
        if self.packed is not None:
            target = self.packed.moved(self.shift).on(self.reload)
        self.arrived = self.unsettled = self.link.to_device(target, buffer, self.copied, self.compute)

    def read(self, view: View) -> torch.Tensor:
        """The saved tensor, its bytes in place on the stream that asks."""
        reload = self.fetch()
        stream = torch.accelerator.current_stream(self.link.device)
        if self.arrived is not None:
            stream.wait_event(self.arrived)  # ORD-5
            if stream == self.compute:
                self.unsettled = None
            else:
                reload.record_stream(stream)
        return view.moved(self.shift).on(reload)

    def _settle(self) -> None:
        if self.unsettled is not None:
            self.compute.wait_event(self.unsettled)  # ORD-2
            self.unsettled = None

    def _give_buffer_back(self, last_use: torch.Event) -> None:
        if self.buffer is not None:
            self.link.pool.give_back(self.buffer, last_use)
            self.buffer = None

    def __del__(self) -> None:
        """Leave nothing behind (ACT-31): no host buffer, and no device memory that a copy may still touch."""
        self._settle()
        self._give_buffer_back(self.copied)


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


@dataclass(slots=True, eq=False)
class Handle:
    """What autograd holds in place of a saved tensor.

    ``alias`` shares the tensor's version counter; it has the bytes only where ``copy`` is None.
    """

    forward: ForwardPass
    layer: int
    alias: torch.Tensor
    version: int | None
    copy: HostCopy | None = None
    view: View | None = None

    def unpack(self) -> torch.Tensor:
        """The saved tensor; any number of times (ACT-23)."""
        self.forward.enter_backward(self.layer)
        if version_of(self.alias) != self.version:  # ACT-24
            view = self.view or View.of(self.alias)
            what = f"saved tensor of layer {self.layer} ({view.dtype}, shape {view.size}) was modified in place"
            seen, required = f"version {self.alias._version}", f"version {self.version}"
            raise InPlaceEditError(what, seen=seen, required=required, rule="ACT-24")
        if self.copy is None or self.view is None:
            return self.alias
        return self.copy.read(self.view)


def version_of(tensor: torch.Tensor) -> int | None:
    """The count of in-place edits, or None for the kinds of tensor that have none."""
    return None if tensor.is_inference() or tensor.layout is not torch.strided else tensor._version


class ForwardPass:
    """The copies of one forward pass, by layer and by storage; weakly, for handles own them."""

    def __init__(self, schedule: Schedule, *, counts_layers: bool = False) -> None:
        self.schedule = schedule
        self.entered = -1
        self.layers_met: int | None = 0 if counts_layers else None
        self.released = 0
        self.awaited = schedule.num_layers
        self.by_layer: list[list[weakref.ref[HostCopy]]] = [[] for _ in range(schedule.num_layers)]
        self.by_storage: weakref.WeakKeyDictionary[
            torch.UntypedStorage, dict[tuple[int | None, View | None], weakref.ref[HostCopy]]
        ] = weakref.WeakKeyDictionary()

    def enter_layer(self, layer: int) -> None:
        """Forward starts the layer: release the one whose time it is (ACT-3), with any that was skipped."""
        self.entered = layer
        due = self.schedule.released_when_entering(layer)
        if due is not None:
            self.release_before(due + 1)

    def release_before(self, layer: int) -> None:
        """Release every offloaded layer below ``layer``."""
        for i in range(self.released, layer):
            for copy in self.copies_of(i):
                copy.release()
        self.released = max(self.released, layer)

    def enter_backward(self, layer: int) -> None:
        """Backward reads a tensor of the layer: start the copies back that are due (ACT-4), nearest first."""
        self._check_layers_met()
        due = self.schedule.due_back_when_backward_of(layer)
        if due is None:
            return
        for i in reversed(range(due, self.awaited)):
            for copy in self.copies_of(i):
                if version_of(copy.alias) == copy.version:  # ORD-17
                    copy.fetch()
        self.awaited = min(self.awaited, due)

    def _check_layers_met(self) -> None:
        declared = self.schedule.model_layers
        fits = self.layers_met is None or self.layers_met >= declared
        what = "layers met before backward (a forward that stops early calls context.reset())"
        require(fits, LayerCountError, what, self.layers_met, f"{declared}, as declared", "ACT-6")

    def copies_of(self, layer: int) -> Iterator[HostCopy]:
        """The layer's copies that are still alive; one shared with a later layer counts there."""
        for reference in self.by_layer[layer]:
            copy = reference()
            if copy is not None and copy.layer == layer:
                yield copy

    def find(self, storage: torch.UntypedStorage, version: int | None, packed: View | None) -> HostCopy | None:
        """The copy that holds these bytes already (ACT-14): the whole storage's, or the same part's."""
        known = self.by_storage.get(storage, {})
        for key in ((version, None), (version, packed)):
            if key in known and (copy := known[key]()) is not None:
                return copy
        return None

"""Per-layer activation offloading: what the first K of L layers save for backward waits on the host.

While an offloaded layer runs forward, each tensor that autograd saves is copied to pinned host memory on a
stream of its own. Its device memory is released a few layers later, and reloaded a few layers before backward
needs it: ``schedule`` says when, ``saved_tensor`` does it, and this module decides which tensors leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload_ref import errors
from offload_ref.errors import require, whole_number
from offload_ref.host_memory import PinnedPool
from offload_ref.saved_tensor import ActivationStats, ForwardPass, Handle, HostCopy, Link, View, packed_view, version_of
from offload_ref.schedule import Schedule

DEFAULT_MIN_OFFLOAD_BYTES = 1 << 20
"""Smaller tensors stay on the device: below a MiB a copy costs more than it saves."""

_marks: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
"""Storages that the user has marked, with ``offload`` or ``keep``."""


def mark_offload(tensor: torch.Tensor) -> None:
    """Have every view of the tensor's storage offloaded where it is saved, however small it is (ACT-12)."""
    _mark(tensor, "offload")


def mark_keep(tensor: torch.Tensor) -> None:
    """Have every view of the tensor's storage stay on the device, whatever else is said of it (ACT-12)."""
    _mark(tensor, "keep")


def _mark(tensor: torch.Tensor, mark: str) -> None:
    fits = getattr(tensor, "layout", None) is torch.strided
    require(fits, errors.OffloadTypeError, "marked tensor", tensor, "a dense tensor", "ACT-12")
    _marks[tensor.untyped_storage()] = mark


class ActivationOffload:
    """Activation offloading of the first ``num_layers`` of ``model_layers`` layers.

    Args:
        num_layers: K, the number of offloaded layers; 0 is off.
        model_layers: L, the number of layers; K = L - 1 is legal but leaves nothing to overlap with.
        min_offload_bytes: smaller saved tensors stay on the device.
        double_buffering: refused in this version.
        retain_pinned_cpu_buffers: keep free pinned buffers for the next step.
        offload_weights: refused in this version.

    Raises:
        LayerCountError: K outside 0 <= K < L (ACT-5).
        NoAcceleratorError: K > 0 with neither an accelerator nor a simulator (ACT-16).
        UnsupportedError: an option that this version does not offer (ACT-17).
        OffloadValueError: ``min_offload_bytes`` is no whole number of at least 0.
    """

    def __init__(
        self,
        num_layers: int,
        model_layers: int,
        *,
        min_offload_bytes: int = DEFAULT_MIN_OFFLOAD_BYTES,
        double_buffering: bool = False,
        retain_pinned_cpu_buffers: bool = False,
        offload_weights: bool = False,
    ) -> None:
        self.schedule = Schedule(num_layers, model_layers)
        _refuse("double_buffering", double_buffering)
        _refuse("offload_weights", offload_weights)
        usable = self.schedule.num_layers == 0 or torch.accelerator.is_available()
        required = "an accelerator, or an active offload_ref.simulator.Simulator"
        require(usable, errors.NoAcceleratorError, "activation offloading", None, required, "ACT-16")
        fits = type(min_offload_bytes) is int and min_offload_bytes >= 0
        required = "a whole number of bytes, at least 0"
        require(fits, errors.OffloadValueError, "min_offload_bytes", min_offload_bytes, required, "ACT-10")
        self.min_offload_bytes = min_offload_bytes
        _check_switch("retain_pinned_cpu_buffers", retain_pinned_cpu_buffers)
        self.pool = PinnedPool(retain=retain_pinned_cpu_buffers)
        self.stats = ActivationStats()
        self._current: ForwardPass | None = None
        self._copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._links: dict[torch.device, Link] = {}
        self._counters: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._weights: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    # What the ledger needs

    def bytes_out(self) -> int:
        """Device bytes of offloaded storages that are gone, which a run without offloading would hold."""
        gone = {id(copy.origin): copy.origin_bytes for copy in self._copies if copy.origin() is None}
        return sum(gone.values())

    def bytes_held(self) -> int:
        """Device bytes of offloaded storages that are still there: not released yet, or held by user code."""
        held = {id(copy.origin()): copy.origin_bytes for copy in self._copies if copy.origin() is not None}
        return sum(held.values())

    def bytes_back(self) -> int:
        """Device bytes of reloads: copies back that are under way, or that backward has not finished with."""
        return sum(copy.reload_bytes for copy in self._copies)

    # Layers

    @contextmanager
    def layer(self, layer: int) -> Iterator[None]:
        """Run one layer's forward inside. A layer at or before the last one begins another forward pass."""
        number, required = whole_number(layer), f"a layer in [0, {self.schedule.model_layers})"
        fits = number is not None and 0 <= number < self.schedule.model_layers
        require(fits, errors.LayerCountError, "layer entered", layer, required, "ACT-6")
        if not self._records():
            yield
            return
        if self._current is None or layer <= self._current.entered:
            self.reset()
            self._current = ForwardPass(self.schedule)
        try:
            with self._hooks(self._current, layer):
                yield
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """End the forward pass here; the next layer begins another. What was saved is good for backward."""
        if self._current is not None:
            self._current.release_before(self.schedule.num_layers)
            self._current = None

    def note_weights(self, module: torch.nn.Module) -> None:
        """Learn which storages are weights now: of parameters and of buffers (ACT-11)."""
        self._weights.update(p.untyped_storage() for p in module.parameters() if p.layout is torch.strided)
        self._weights.update(b.untyped_storage() for b in module.buffers() if b.layout is torch.strided)

    def _records(self) -> bool:
        return self.schedule.num_layers > 0 and torch.is_grad_enabled()  # ACT-2

    def _hooks(self, forward: ForwardPass, layer: int) -> saved_tensors_hooks:
        """Hooks for one layer of one forward pass, which has entered the layer."""
        _refuse_compositions()
        forward.enter_layer(layer)
        return saved_tensors_hooks(partial(self._pack, forward, layer), Handle.unpack)

    # Saving

    def _pack(self, forward: ForwardPass, layer: int, tensor: torch.Tensor) -> Handle:
        """Take a tensor that autograd saves."""
        version = version_of(tensor)
        if forward.schedule.offloads(layer):
            reason = self._reason_to_keep(tensor)
            if reason is None:
                alias = self._version_counter(tensor)
                copy = self._copy_of(tensor, forward, layer, alias)
                return Handle(forward, layer, alias, version, copy, View.of(tensor))
            self.stats.kept[reason] += 1
        return Handle(forward, layer, tensor.detach(), version)  # ACT-13

    def _reason_to_keep(self, tensor: torch.Tensor) -> str | None:
        """Why a saved tensor stays on the device, or None if it is to be offloaded (ACT-10)."""
        if (kind := _kind_that_stays(tensor)) is not None:
            return kind
        mark = _mark_of(tensor)
        if mark == "keep":
            return "marked"
        if self._is_weight(tensor):
            return "weight"
        small = View.of(tensor).unexpanded().nbytes < self.min_offload_bytes
        return "small" if tensor.numel() == 0 or (small and mark is None) else None

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            self._weights.add(storage)
        return storage in self._weights  # ACT-11

    def _copy_of(self, tensor: torch.Tensor, forward: ForwardPass, layer: int, alias: torch.Tensor) -> HostCopy:
        """The copy of the tensor's storage in this forward pass, made now if there is none yet."""
        storage, packed, version = tensor.untyped_storage(), packed_view(tensor), version_of(tensor)
        copy = forward.find(storage, version, packed)
        if copy is None:
            with torch.no_grad():
                copy = HostCopy.of(tensor, packed, self._link(tensor.device), alias)
            self._copies.add(copy)
            forward.by_storage.setdefault(storage, {})[version, packed] = weakref.ref(copy)
        copy.layer = layer
        forward.by_layer[layer].append(weakref.ref(copy))
        return copy

    def _version_counter(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias that shares the tensor's version counter but none of its bytes."""
        alias = tensor.detach()
        kind = (tensor.dtype, tensor.device)
        if kind not in self._counters:
            self._counters[kind] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.data = self._counters[kind]
        return alias

    def _link(self, device: torch.device) -> Link:
        if device not in self._links:
            d2h, h2d = torch.Stream(device), torch.Stream(device)
            self._links[device] = Link(device, self.pool, self.stats, d2h=d2h, h2d=h2d)
        return self._links[device]


def _kind_that_stays(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor that is never offloaded; None for a dense floating-point tensor on the device."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return "subclass"
    if tensor.layout is not torch.strided:
        return "layout"
    if not tensor.is_floating_point():
        return "dtype"
    accelerator = torch.accelerator.current_accelerator()
    return "host" if accelerator is None or tensor.device.type != accelerator.type else None


def _mark_of(tensor: torch.Tensor) -> str | None:
    """The user's mark: by storage, or Megatron's attribute on the tensor or on the one that it views."""
    mark = _marks.get(tensor.untyped_storage())
    if mark is None and any(getattr(t, "activation_offloading", False) for t in (tensor, tensor._base)):
        return "offload"
    return mark


def _check_switch(name: str, value: object) -> None:
    require(isinstance(value, bool), errors.OffloadTypeError, name, value, "True or False", "ACT-17")


def _refuse(option: str, value: object) -> None:
    require(value is False, errors.UnsupportedError, option, value, "False in this version", "ACT-17")


def _refuse_compositions() -> None:
    """Refuse what this version would do wrongly: checkpointed layers, and capture of a device graph."""
    top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # no public name tells
    in_backward = torch._C._current_graph_task_id() != -1
    checkpointed = in_backward or (top_hooks is not None and top_hooks[0].__module__ == "torch.utils.checkpoint")
    required = "no checkpoint around an offloaded layer"
    require(not checkpointed, errors.UnsupportedError, "activation checkpointing", "a checkpoint", required, "ACT-17")
    required = "no capture during an offloaded forward"
    require(not _is_capturing(), errors.UnsupportedError, "device graphs", "a capture", required, "ACT-17")


def _is_capturing() -> bool:
    stream = torch.accelerator.current_stream()
    if hasattr(stream, "is_capturing"):
        return bool(stream.is_capturing())
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()  # torch < 2.13 has no other name


@contextmanager
def offload_layers(layers: Iterable[torch.nn.Module], num_layers: int, **options: Any) -> Iterator[ActivationOffload]:
    """Offload the first ``num_layers`` of the modules in ``layers`` whenever they run forward inside.

    Layers are recognised by module identity, so a forward may stop early or skip layers. Backward may run inside or
    outside. Options are the keywords of ActivationOffload. Raises what it raises, and OffloadTypeError for what is no
    module.
    """
    iterable, required = hasattr(layers, "__iter__") and not isinstance(layers, type), "torch.nn.Module objects"
    require(iterable, errors.OffloadTypeError, "layers", layers, required, "ACT-1")
    modules = list(layers)
    for module in modules:
        require(isinstance(module, torch.nn.Module), errors.OffloadTypeError, "layers", module, required, "ACT-1")
    offload = ActivationOffload(num_layers, len(modules), **options)
    with ExitStack() as stack:
        stack.callback(offload.reset)
        _hook_modules(modules, offload, stack)
        yield offload


def _hook_modules(modules: list[torch.nn.Module], offload: ActivationOffload, stack: ExitStack) -> None:
    """Open a layer before each module's forward and close it after, also when forward raises."""
    positions: dict[torch.nn.Module, list[int]] = {}
    for position, module in enumerate(modules):
        positions.setdefault(module, []).append(position)
    running: list[tuple[torch.nn.Module, ExitStack]] = []

    def open_layer(module: torch.nn.Module, _arguments: object) -> None:
        if module not in positions:  # a copy of a layer, which has come with its hooks
            return
        entered = -1 if offload._current is None else offload._current.entered
        later = [p for p in positions[module] if p > entered]
        offload.note_weights(module)
        opened = ExitStack()
        opened.enter_context(offload.layer((later or positions[module])[0]))
        running.append((module, opened))

    def close_layer(module: torch.nn.Module, _arguments: object, _output: object) -> None:
        if running and running[-1][0] is module:
            running.pop()[1].close()

    @stack.callback
    def close_interrupted() -> None:
        while running:
            running.pop()[1].close()

    for module in positions:
        stack.callback(module.register_forward_pre_hook(open_layer).remove)
        stack.callback(module.register_forward_hook(close_layer, always_call=True).remove)


class CpuOffloadContext:
    """TransformerEngine's calling convention: enter it around each layer, and ``sync`` between layers."""

    inside_context = False
    """TransformerEngine's flag; never True, or megatron-core raises where TransformerEngine is absent."""

    def __init__(self, offload: ActivationOffload | None) -> None:
        self._offload = offload
        self._forward: ForwardPass | None = None
        self._hooks: list[saved_tensors_hooks | None] = []

    def __enter__(self) -> Self:
        hooks = None
        if self._offload is not None and self._offload._records():
            if self._forward is None:
                self._forward = ForwardPass(self._offload.schedule, counts_layers=True)
            hooks = self._offload._hooks(self._forward, self._forward.layers_met or 0)
            hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks = self._hooks.pop()
        if hooks is not None:
            hooks.__exit__(kind, error, trace)
        if error is not None:
            self.reset()

    def sync(self, output: torch.Tensor) -> torch.Tensor:
        """Count a layer as done and pass its output on; the last layer ends the forward pass."""
        if self._forward is not None and self._forward.layers_met is not None and torch.is_grad_enabled():
            self._forward.layers_met += 1
            if self._forward.layers_met == self._forward.schedule.model_layers:
                self._forward = None
        return output

    def reset(self) -> None:
        """End a forward that stops early: its backward is legal then, and layer 0 comes next (ACT-6)."""
        if self._forward is not None:
            self._forward.layers_met = None
            self._forward.release_before(self._forward.schedule.num_layers)
            self._forward = None


def get_cpu_offload_context(
    enabled: bool,
    num_layers: int,
    model_layers: int,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    *,
    min_offload_bytes: int = DEFAULT_MIN_OFFLOAD_BYTES,
) -> tuple[CpuOffloadContext, Callable[[torch.Tensor], torch.Tensor]]:
    """A context for each layer's forward, and a function for its output: TransformerEngine's convention.

    Layers are counted by ``sync`` while gradients are enabled. An exception inside the context resets the
    count; a forward that stops early calls ``context.reset()``. Buffers of modules are not known here,
    parameters are. ``min_offload_bytes`` is our own addition. Raises what ActivationOffload raises.
    """
    _check_switch("enabled", enabled)
    fits, required = offload_activations is True or not enabled, "True: activations are what this version offloads"
    require(fits, errors.UnsupportedError, "offload_activations", offload_activations, required, "ACT-17")
    options = {
        "min_offload_bytes": min_offload_bytes,
        "double_buffering": double_buffering,
        "retain_pinned_cpu_buffers": retain_pinned_cpu_buffers,
        "offload_weights": offload_weights,
    }
    offload = ActivationOffload(num_layers, model_layers, **options) if enabled else None  # type: ignore[arg-type]
    context = CpuOffloadContext(offload)
    return context, context.sync

"""The dispatch mode: every operator on a simulated device tensor becomes work on the current stream."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from offload_ref.simulator.errors import NotSimulatedError
from offload_ref.simulator.landings import Landing
from offload_ref.simulator.memory import DEVICE, PINNED, Block
from offload_ref.simulator.operators import (
    INDEXING,
    METADATA_ONLY,
    Operator,
    aten,
    map_tensors,
    operator_of,
    tensors_in,
)

if TYPE_CHECKING:
    from offload_ref.simulator.simulator import Simulator

HOST_DEVICE = torch.device("cpu")
"""Where host tensors are."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Size, stride and dtype of a result."""

_CACHE_LIMIT = 4096
"""Entries of the cache of result layouts; beyond it the cache starts anew."""


class DispatchMode(TorchDispatchMode):
    """Sees every operator below autograd, and runs those on device tensors on simulated streams."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.simulator = simulator
        self.memory = simulator.memory
        self._layouts: dict[Any, Any] = {}
        self._newest_node = 0
        self._host_nodes: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.memory.reap()
        operator = operator_of(function)
        handler = _SPECIAL.get(function)
        if handler is not None:
            return handler(self, *args, **kwargs)
        tensors = tensors_in((*args, *kwargs.values()))
        blocks = [self.memory.block_of(t) if t.layout is torch.strided else None for t in tensors]
        on_device = any(b is not None and b.space is DEVICE for b in blocks)
        self._note_node(on_device)
        if operator.takes_device:
            return self._factory(operator, args, kwargs, on_device)
        if operator.is_view:
            return function(*args, **kwargs)
        if not on_device:
            if any(b is not None for b in blocks):
                self._host_access(operator, args, kwargs)
            return function(*args, **kwargs)
        if operator.namespace not in ("aten", "prims", "prim"):
            raise NotSimulatedError(str(function))
        self._check_devices(operator, args, kwargs)
        return self._kernel(operator, args, kwargs)

    # Whose autograd node it is

    def _note_node(self, on_device: bool) -> None:
        """Remember which autograd nodes belong to work on the host: autograd itself sees host tensors alone."""
        newest = torch._C._autograd._get_sequence_nr()
        if newest > self._newest_node and not on_device:
            self._host_nodes.add(newest - 1)
        self._newest_node = newest

    def _autograd_means_device(self) -> bool:
        """Whether autograd's own code asks for a host tensor, in the backward of work on the device."""
        node: Any = torch._C._current_autograd_node()
        if node is None or not _called_by_autograd():
            return False
        if hasattr(node, "variable"):
            return self.is_on_device(node.variable)
        return node._sequence_nr() not in self._host_nodes

    # Tensors of both sides

    def is_device(self, device: Any) -> bool:
        """Whether a device argument means the simulated device."""
        if device is None:
            return False
        if isinstance(device, int):
            return True
        return torch.device(device).type == self.simulator.device_type

    def inner(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor over the simulator's own memory that stands for a program's tensor."""
        block = self.memory.block_of(tensor)
        if block is None:
            return tensor.clone()
        return _over(block, tensor)

    def new(self, layout: Layout, space: str = DEVICE) -> torch.Tensor:
        """A fresh program tensor."""
        size, stride, dtype = layout
        elements = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        block = self.memory.allocate(elements * dtype.itemsize, space)
        return self.memory.program_tensor(block, dtype, size, stride)

    # Factories

    def _factory(self, operator: Operator, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
        device = kwargs.get("device")
        pinned = kwargs.get("pin_memory")
        to_device = self.is_device(device) or (device is None and on_device) or self._autograd_means_device()
        if not to_device and not pinned:
            if on_device:
                args = tuple(map_tensors(a, _stand_in) for a in args)
            return operator.function(*args, **kwargs)
        space = DEVICE if to_device else PINNED
        like = tuple(map_tensors(a, _stand_in) for a in args)
        plain = {**kwargs, "device": HOST_DEVICE, "pin_memory": False}
        if "pin_memory" not in operator.names:
            del plain["pin_memory"]
        value = self._drawn(operator, like, plain) if operator.is_random else operator.function(*like, **plain)
        result = self.new((value.size(), value.stride(), value.dtype), space)
        if operator.function in METADATA_ONLY:
            return result
        target = self.inner(result)
        if space is PINNED:
            target.copy_(value)
        else:
            self.simulator.launch(lambda: target.copy_(value), operator.name, (), (result,))
        return result

    # Copies

    def copy_to(
        self,
        source: torch.Tensor,
        device: bool,
        dtype: torch.dtype | None,
        non_blocking: bool,
        memory_format: Any,
        pinned: bool = False,
    ) -> torch.Tensor:
        """A copy of ``source`` on the device or on the host."""
        block = self.memory.block_of(source)
        layout = aten._to_copy.default(_stand_in(source), dtype=dtype, memory_format=memory_format)
        kind = (layout.size(), layout.stride(), layout.dtype)
        if device:
            target = self.new(kind)
        elif pinned:
            target = self.new(kind, PINNED)
        else:
            target = torch.empty_strided(kind[0], kind[1], dtype=kind[2], device="cpu")
        if not device and (block is None or block.space is not DEVICE):
            self.simulator.host_access("_to_copy", (source,), (target,))
            with _disable_current_modes():
                target.detach().copy_(source.detach())
            return target
        self.copy(target, source, non_blocking)
        return target

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Copy between two tensors of which at least one is on the device."""
        to, frm = self.memory.block_of(target), self.memory.block_of(source)
        to_device = to is not None and to.space is DEVICE
        from_device = frm is not None and frm.space is DEVICE
        host_block = to if from_device and not to_device else frm
        with _disable_current_modes():
            inner_source = self.inner(source)
            inner_target = target.detach() if to is None else _over(to, target)
        blocks_host = to_device != from_device and not (non_blocking and host_block is not None)
        if to_device and frm is None:
            blocks_host = False
        direction = ("h2d", "d2d")[from_device] if to_device else "d2h"
        self.simulator.copies.count(direction, target.numel() * target.element_size())
        name = f"copy_ ({direction}{', blocking' if blocks_host else ''})"
        landing = Landing(weakref.ref(frm)) if frm is not None and to is not None and direction == "d2h" else None
        self.simulator.launch(lambda: inner_target.copy_(inner_source), name, (source,), (target,), landing)
        if blocks_host:
            self.simulator.machine.current.synchronize()

    def _copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        blocks = (self.memory.block_of(target), self.memory.block_of(source))
        if any(b is not None and b.space is DEVICE for b in blocks):
            self.copy(target, source, non_blocking)
        else:
            self.simulator.host_access("copy_", (source,), (target,))
            aten.copy_.default(target, source, non_blocking)
        return target

    def _to_copy(
        self,
        source: torch.Tensor,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        non_blocking: bool = False,
        memory_format: Any = None,
    ) -> torch.Tensor:
        on_device = self.is_on_device(source)
        if layout not in (None, torch.strided) or (not on_device and not self.is_device(device)):
            self.simulator.host_access("_to_copy", (source,), ())
            copied: torch.Tensor = aten._to_copy.default(
                source,
                dtype=dtype,
                layout=layout,
                device=device,
                pin_memory=pin_memory,
                non_blocking=non_blocking,
                memory_format=memory_format,
            )
            return copied
        return self.copy_to(source, True, dtype, non_blocking, memory_format)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the simulated device."""
        if tensor.layout is not torch.strided:
            return False
        block = self.memory.block_of(tensor)
        return block is not None and block.space is DEVICE

    def is_pinned(self, tensor: torch.Tensor, _device: Any = None) -> bool:
        """Whether the tensor is in pinned host memory."""
        if tensor.layout is not torch.strided:
            return False
        block = self.memory.block_of(tensor)
        return block is not None and block.space is PINNED

    def pin(self, tensor: torch.Tensor, _device: Any = None) -> torch.Tensor:
        """A copy of a host tensor in pinned memory (the tensor itself if it is pinned)."""
        if self.is_pinned(tensor):
            return tensor
        if self.is_on_device(tensor):
            raise RuntimeError("cannot pin a device tensor: only dense CPU tensors can be pinned")
        return self.copy_to(tensor, False, None, False, torch.preserve_format, pinned=True)

    def _item(self, tensor: torch.Tensor) -> Any:
        if not self.is_on_device(tensor):
            self.simulator.host_access("item", (tensor,), ())
            return aten._local_scalar_dense.default(tensor)
        inner, box = self.inner(tensor), []
        self.simulator.launch(lambda: box.append(aten._local_scalar_dense.default(inner)), "item", (tensor,), ())
        self.simulator.machine.current.synchronize()
        return box[0]

    # Kernels

    def _host_access(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        reads, writes = self._reads_writes(operator, args, kwargs)
        self.simulator.host_access(operator.name, reads, writes)

    def _reads_writes(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for value, written in zip(args, operator.writes, strict=False):
            (writes if written else reads).extend(tensors_in((value,)))
        for name, value in kwargs.items():
            (writes if name in operator.written_names else reads).extend(tensors_in((value,)))
        return reads, writes

    def _check_devices(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> None:
        names = dict(zip(operator.names, args, strict=False)) | kwargs
        for name, value in names.items():
            if name == "indices" and operator.function in INDEXING:
                continue
            for tensor in tensors_in((value,)):
                if self.is_on_device(tensor):
                    continue
                if tensor.dim() == 0 and name not in operator.written_names:
                    continue
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{self.simulator.device} and {tensor.device}! (argument {name} of {operator.name})"
                )

    def _kernel(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        function, simulator = operator.function, self.simulator
        reads, writes = self._reads_writes(operator, args, kwargs)
        inner_args = tuple(map_tensors(a, self.inner) for a in args)
        inner_kwargs = {k: map_tensors(v, self.inner) for k, v in kwargs.items()}

        grad_mode = torch.is_grad_enabled()

        def call() -> Any:
            """Run the CPU kernel; a few return something else where gradients are off."""
            with torch.set_grad_enabled(grad_mode):
                return function(*inner_args, **inner_kwargs)

        if operator.is_random:
            call = self._replayed(call, function, inner_args, inner_kwargs)
        if operator.shape_depends_on_data and not _is_integer_indexing(operator, args):
            box: list[Any] = []
            simulator.launch(lambda: box.append(call()), operator.name, reads, writes)
            simulator.machine.current.synchronize()
            return self._lift_results(box[0], operator)
        if operator.written_names:
            simulator.launch(call, operator.name, reads, writes)
            return _written_results(operator, args, kwargs)
        layouts = self._result_layouts(operator, args, kwargs)
        results = _map_layouts(layouts, self.new)
        targets = [self.inner(t) for t in tensors_in((results,) if isinstance(results, torch.Tensor) else results)]

        def run() -> None:
            value = call()
            values = tensors_in((value,) if isinstance(value, torch.Tensor) else value)
            for target, result in zip(targets, values, strict=True):
                target.copy_(result)

        fresh = tensors_in((results,) if isinstance(results, torch.Tensor) else results)
        simulator.launch(run, operator.name, reads, fresh)
        return results

    def _lift_results(self, value: Any, operator: Operator) -> Any:
        def lift(tensor: torch.Tensor) -> torch.Tensor:
            result = self.new((tensor.size(), tensor.stride(), tensor.dtype))
            target = self.inner(result)
            self.simulator.launch(lambda: target.copy_(tensor), operator.name, (), (result,))
            return result

        return map_tensors(value, lift)

    def _drawn(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a random factory makes, drawn from the device's generator unless it is given another one."""
        if kwargs.get("generator") is not None:
            return operator.function(*args, **kwargs)
        rng = self.simulator.rng
        with rng.borrowed(rng.get_state()) as after:
            value = operator.function(*args, **kwargs)
            rng.set_state(after())
        return value

    def _replayed(self, call: Any, function: Any, args: Any, kwargs: Any) -> Any:
        """Draw in program order, compute at execution: the same numbers whenever the work runs."""
        rng = self.simulator.rng
        state = rng.get_state()
        with rng.borrowed(state) as after:
            function(
                *(map_tensors(a, torch.clone) for a in args),
                **{k: map_tensors(v, torch.clone) for k, v in kwargs.items()},
            )
            rng.set_state(after())

        def replay() -> Any:
            with rng.borrowed(state):
                return call()

        return replay

    def _result_layouts(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Layouts of the results, from the CPU kernel itself run once on zeros (meta kernels differ in dtypes)."""
        key: Any = (operator.function, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items())))
        try:
            known = self._layouts.get(key)
        except TypeError:
            key = known = None
        if known is None:
            value = operator.function(
                *(map_tensors(a, _stand_in) for a in args), **{k: map_tensors(v, _stand_in) for k, v in kwargs.items()}
            )
            known = _layouts_of(value)
            if len(self._layouts) > _CACHE_LIMIT:
                self._layouts.clear()
            if key is not None:
                self._layouts[key] = known
        return known


_SPECIAL: dict[Any, Any] = {
    aten.copy_.default: DispatchMode._copy_,
    aten._to_copy.default: DispatchMode._to_copy,
    aten.is_pinned.default: DispatchMode.is_pinned,
    aten._pin_memory.default: DispatchMode.pin,
    aten.pin_memory.default: DispatchMode.pin,
    aten._local_scalar_dense.default: DispatchMode._item,
}
"""Operators with a handler of their own."""


def _called_by_autograd() -> bool:
    """Whether no Python code stands between the engine's backward and the operator."""
    frame = sys._getframe(4)
    while frame.f_back is not None and "/torch/_" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def _over(block: Block, tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # the work may run when the program has left its inference mode
        typed = block.flat.view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros with the same size, stride and dtype."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    zeros: torch.Tensor = aten.zero_.default(empty)
    return zeros


def _is_integer_indexing(operator: Operator, args: Any) -> bool:
    if operator.function is not aten.index.Tensor:
        return False
    return not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _written_results(operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
    if operator.return_count == 0:
        return None
    given = dict(zip(operator.names, args, strict=False)) | kwargs
    written = [given[n] for n in operator.names if n in operator.written_names]
    return written[0] if operator.return_count == 1 else tuple(written[: operator.return_count])


def _layouts_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", (value.size(), value.stride(), value.dtype))
    if isinstance(value, (list, tuple)):
        return ("sequence", type(value), [_layouts_of(v) for v in value])
    return ("value", value)


def _map_layouts(layouts: Any, new: Any) -> Any:
    if layouts[0] == "tensor":
        return new(layouts[1])
    if layouts[0] == "sequence":
        return layouts[1]([_map_layouts(v, new) for v in layouts[2]])
    return layouts[1]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    return (type(value), value)

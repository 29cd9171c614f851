"""The torch names that mean the simulated device while a simulator is active; every one is restored after."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from offload_ref.simulator.core import Event, Stream, current_stream_is
from offload_ref.simulator.memory import DEVICE

if TYPE_CHECKING:
    from offload_ref.simulator.simulator import Simulator

_ABSENT = object()


class Patcher:
    """Replaces attributes and puts them back in reverse order."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace one attribute."""
        self._saved.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put everything back."""
        for owner, name, value in reversed(self._saved):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def patched_names(simulator: Simulator) -> Iterator[None]:
    """Patch torch for the duration of the block."""
    _device_constructors()  # torch caches the functions that a default device applies to: let it see the originals
    patcher = Patcher()
    try:
        _patch_tensor(patcher, simulator)
        _patch_storage(patcher, simulator)
        _patch_accelerator(patcher, simulator)
        _patch_factories(patcher, simulator)
        if simulator.device_type == "cuda":
            _patch_cuda(patcher, simulator)
        yield
    finally:
        patcher.restore()


class _SimulatedType(type):
    """A class whose instances are made by the simulator."""

    make: Callable[..., Any]
    instance_type: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.instance_type)


def _simulated_type(name: str, instance_type: type, make: Callable[..., Any]) -> type:
    return _SimulatedType(name, (), {"make": staticmethod(make), "instance_type": instance_type})


def _patch_accelerator(patcher: Patcher, simulator: Simulator) -> None:
    machine, accelerator = simulator.machine, torch.accelerator
    stream_type = _simulated_type("Stream", Stream, lambda *_a, **_k: machine.new_stream())
    event_type = _simulated_type("Event", Event, lambda *_a, **_k: Event(machine))
    patcher.put(torch, "Stream", stream_type)
    patcher.put(torch, "Event", event_type)
    common: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: machine.current,
        "set_stream": lambda stream: machine.stack.__setitem__(-1, stream),
        "synchronize": lambda device=None: machine.synchronize(),
        "memory_allocated": lambda device=None: simulator.memory_allocated(),
        "max_memory_allocated": lambda device=None: simulator.max_memory_allocated(),
        "memory_reserved": lambda device=None: simulator.memory_allocated(),
        "max_memory_reserved": lambda device=None: simulator.max_memory_allocated(),
        "reset_peak_memory_stats": lambda device=None: simulator.reset_peak_memory_stats(),
        "memory_stats": lambda device=None: _memory_stats(simulator),
        "empty_cache": lambda: None,
    }
    for name, value in common.items():
        patcher.put(accelerator, name, value)
    patcher.put(accelerator, "current_accelerator", lambda check_available=False: torch.device(simulator.device_type))
    patcher.put(accelerator, "current_device_index", lambda: 0)
    patcher.put(accelerator, "set_device_index", lambda device: None)
    module = getattr(torch, simulator.device_type, None)
    if module is None:
        return
    for name, value in common.items():
        if hasattr(module, name):
            patcher.put(module, name, value)
    patcher.put(module, "_lazy_init", lambda: None)
    patcher.put(module, "is_initialized", lambda: True)
    patcher.put(module, "Stream", stream_type)
    patcher.put(module, "Event", event_type)
    patcher.put(module, "current_device", lambda: 0)
    patcher.put(module, "set_device", lambda device: None)
    patcher.put(module, "stream", lambda stream: current_stream_is(machine, stream))
    patcher.put(module, "default_stream", lambda device=None: machine.default)


def _memory_stats(simulator: Simulator) -> dict[str, int]:
    live, peak = simulator.memory_allocated(), simulator.max_memory_allocated()
    return {
        "allocated_bytes.all.current": live,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": live,
        "reserved_bytes.all.peak": peak,
        "active_bytes.all.current": live,
        "active_bytes.all.peak": peak,
    }


def _patch_cuda(patcher: Patcher, simulator: Simulator) -> None:
    cuda, rng = torch.cuda, simulator.rng
    total = simulator.memory.capacity_bytes
    properties = types.SimpleNamespace(
        name="simulated", major=9, minor=0, total_memory=total, multi_processor_count=1, warp_size=32
    )
    table: dict[str, Any] = {
        "init": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (total - simulator.memory_allocated(), total),
        "get_rng_state": lambda device="cuda": rng.get_state(),
        "set_rng_state": lambda state, device="cuda": rng.set_state(state),
        "manual_seed": rng.seed,
        "manual_seed_all": rng.seed,
        "initial_seed": lambda: rng.generator.initial_seed(),
        "reset_max_memory_allocated": lambda device=None: simulator.reset_peak_memory_stats(),
    }
    for name, value in table.items():
        patcher.put(cuda, name, value)
    patcher.put(cuda.nvtx, "range_push", lambda msg: 0)
    patcher.put(cuda.nvtx, "range_pop", lambda: 0)
    autocast = torch.autocast

    class Autocast(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str = "cuda", dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda":
                dtype = dtype or torch.get_autocast_dtype("cuda")
                device_type = "cpu"
            super().__init__(device_type, dtype, *args, **kwargs)

    patcher.put(torch, "autocast", Autocast)
    patcher.put(torch.amp, "autocast", Autocast)


def _patch_factories(patcher: Patcher, simulator: Simulator) -> None:
    mode = simulator.mode

    def from_data(original: Any) -> Any:
        def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, pin_memory: bool = False,
                 **kwargs: Any) -> Any:
            if isinstance(data, torch.Tensor) and mode.is_on_device(data):
                if original is not tensor:
                    return data.to(device=device or data.device, dtype=kwargs.get("dtype"))
                device = device or data.device
                data = data.detach().cpu()
            if device is None:
                device = _default_device()
            on_device = mode.is_device(device)
            made = original(data, *args, device="cpu" if on_device else device, **kwargs)
            made = mode.pin(made) if pin_memory else made.to(device) if on_device else made
            return made.requires_grad_(requires_grad) if requires_grad else made

        return make

    tensor = torch.tensor
    for name in ("tensor", "as_tensor", "asarray"):
        patcher.put(torch, name, from_data(getattr(torch, name)))
    manual_seed = torch.manual_seed

    def seed_both(seed: int) -> torch.Generator:
        simulator.rng.seed(int(seed))
        return manual_seed(seed)

    patcher.put(torch, "manual_seed", seed_both)


def _default_device() -> Any:
    for function_mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(function_mode, torch.utils._device.DeviceContext):
            return function_mode.device
    return None


def _patch_tensor(patcher: Patcher, simulator: Simulator) -> None:
    tensor_type, mode, memory = torch.Tensor, simulator.mode, simulator.memory
    device_of = torch._C.TensorBase.device.__get__
    device, host = simulator.device, torch.device("cpu")

    class ToCopy(torch.autograd.Function):
        """A copy between host and device; autograd's own would go by the label, which is the host's."""

        @staticmethod
        def forward(ctx: Any, source: torch.Tensor, to_device: bool, dtype: Any, non_blocking: bool, fmt: Any) -> Any:
            ctx.source = (source.dtype, mode.is_on_device(source))
            return mode.copy_to(source, to_device, dtype, non_blocking, fmt)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            dtype, on_device = ctx.source
            return gradient.to(device=device if on_device else host, dtype=dtype), None, None, None, None

    original_to = tensor_type.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        target, dtype, non_blocking, fmt = torch._C._nn._parse_to(*args, **_parsable(kwargs))
        copy = bool(kwargs.get("copy", False)) or (len(args) > 3 and bool(args[3]))
        on_device = mode.is_on_device(self)
        to_device = on_device if target is None else mode.is_device(target)
        if on_device == to_device:
            kwargs = {"dtype": dtype or self.dtype, "copy": copy}
            if fmt is not None:
                kwargs["memory_format"] = fmt
            if on_device or target is None or target.type == "cpu":
                return original_to(self, **kwargs)
            return original_to(self, target, **kwargs)
        return ToCopy.apply(self, to_device, dtype, non_blocking, fmt)  # type: ignore[no-any-return]

    def is_cuda(self: torch.Tensor) -> bool:
        return mode.is_on_device(self)

    def read_on_host(name: str) -> Any:
        original = getattr(tensor_type, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.layout is torch.strided and (block := memory.block_of(self)) is not None:
                if block.space is DEVICE:
                    if name == "numpy" and not kwargs.get("force"):
                        raise TypeError(
                            f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                            "tensor to host memory first."
                        )
                    return getattr(self.detach().cpu(), name)(*args, **kwargs)
                simulator.host_access(name, (self,), ())
            return original(self, *args, **kwargs)

        return read

    def record_stream(self: torch.Tensor, stream: Stream) -> None:
        block = memory.block_of(self)
        if block is not None:
            block.recorded.add(stream.actor)

    original_repr = tensor_type.__repr__

    def represent(self: torch.Tensor, **kwargs: Any) -> str:
        if not mode.is_on_device(self):
            if mode.is_pinned(self):
                simulator.host_access("repr", (self,), ())
            return original_repr(self, **kwargs)
        copied = original_repr(self.detach().cpu(), **kwargs)
        suffix = f", device='{device}'"
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        grad = ", requires_grad=True" if self.requires_grad and not grad else grad
        return copied[:-1] + suffix + grad + ")"

    patcher.put(tensor_type, f"is_{simulator.device_type}", property(is_cuda))
    patcher.put(tensor_type, "device", property(lambda t: device if mode.is_on_device(t) else device_of(t)))
    patcher.put(tensor_type, "is_cpu", property(lambda t: not mode.is_on_device(t) and device_of(t).type == "cpu"))
    patcher.put(tensor_type, "to", to)
    patcher.put(tensor_type, "cpu", lambda t, memory_format=None: to(t, "cpu", **_given(memory_format)))
    patcher.put(
        tensor_type, simulator.device_type,
        lambda t, device=None, non_blocking=False, memory_format=None: to(
            t, simulator.device, non_blocking=non_blocking, **_given(memory_format)
        ),
    )
    patcher.put(tensor_type, "get_device", lambda t: 0 if mode.is_on_device(t) else -1)
    patcher.put(tensor_type, "pin_memory", mode_method(mode.pin))
    patcher.put(tensor_type, "is_pinned", mode_method(mode.is_pinned))
    patcher.put(tensor_type, "record_stream", record_stream)
    patcher.put(tensor_type, "__repr__", represent)
    for name in ("numpy", "tolist"):
        patcher.put(tensor_type, name, read_on_host(name))

    original_type = tensor_type.type

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        prefix = f"torch.{simulator.device_type}."
        if dtype is None:
            name = original_type(self)
            return name.replace("torch.", prefix) if mode.is_on_device(self) else name
        if isinstance(dtype, torch.dtype):
            return to(self, dtype=dtype, non_blocking=non_blocking)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        on_device = name.startswith(prefix)
        wanted = getattr(torch, name.rsplit(".", 1)[-1]).dtype
        return to(self, device if on_device else host, wanted, non_blocking)

    patcher.put(tensor_type, "type", type_)
    new_tensor = tensor_type.new_tensor

    def new_tensor_(self: torch.Tensor, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        on_device = mode.is_on_device(self) if device is None else mode.is_device(device)
        requires_grad = kwargs.pop("requires_grad", False)
        if isinstance(data, torch.Tensor):
            data = data.detach().cpu()
        made = new_tensor(self, data, device="cpu", **kwargs)
        made = made.to(simulator.device) if on_device else made
        return made.requires_grad_(requires_grad)

    patcher.put(tensor_type, "new_tensor", new_tensor_)

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not mode.is_on_device(self) or type(self) not in (torch.Tensor, torch.nn.Parameter):
            return original_deepcopy(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        copied = self.detach().clone(memory_format=torch.preserve_format)
        if type(self) is torch.nn.Parameter:
            copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    original_deepcopy = tensor_type.__deepcopy__
    patcher.put(tensor_type, "__deepcopy__", deepcopy)
    parameter_deepcopy = torch.nn.Parameter.__deepcopy__
    patcher.put(
        torch.nn.Parameter, "__deepcopy__",
        lambda p, memo: deepcopy(p, memo) if mode.is_on_device(p) else parameter_deepcopy(p, memo),
    )


def mode_method(function: Callable[..., Any]) -> Any:
    """The mode's method as a method of Tensor."""
    return lambda tensor, device=None: function(tensor)


def _given(memory_format: Any) -> dict[str, Any]:
    return {} if memory_format is None else {"memory_format": memory_format}


def _parsable(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if v is not None and k != "copy"}


def _patch_storage(patcher: Patcher, simulator: Simulator) -> None:
    storage_type, memory = torch.UntypedStorage, simulator.memory
    device_of = torch._C.StorageBase.device.__get__

    def block_of(storage: torch.UntypedStorage) -> Any:
        return memory.blocks.get(storage._cdata)

    def on_device(storage: torch.UntypedStorage) -> bool:
        block = block_of(storage)
        return block is not None and block.space is DEVICE

    def flat(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload, no-any-return]

    def cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return flat(storage).cpu().untyped_storage() if on_device(storage) else storage

    def to(storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if simulator.mode.is_device(device):
            return flat(storage).to(device, non_blocking=non_blocking).untyped_storage()
        return cpu(storage)

    def copy_(storage: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False) -> Any:
        if not on_device(storage) and not on_device(source):
            return torch._C.StorageBase.copy_(storage, source, non_blocking)  # type: ignore[attr-defined]
        flat(storage).copy_(flat(source), non_blocking)
        return storage

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return flat(storage).clone().untyped_storage()

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        block = block_of(storage)
        if block is None:
            return torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        if size == block.nbytes:
            return storage
        if size != 0:
            from offload_ref.simulator.errors import NotSimulatedError
            raise NotSimulatedError("UntypedStorage.resize_")
        memory.reap()
        memory.blocks.pop(storage._cdata)
        memory.free(block)
        return storage

    patcher.put(storage_type, "device", property(lambda s: simulator.device if on_device(s) else device_of(s)))
    patcher.put(storage_type, "is_cuda", property(on_device))
    patcher.put(storage_type, "cpu", cpu)
    patcher.put(storage_type, "to", to)
    patcher.put(storage_type, "copy_", copy_)
    patcher.put(storage_type, "clone", clone)
    patcher.put(storage_type, "resize_", resize_)

"""Methods and attributes of torch.Tensor and of its storage that know where a tensor is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from offload_ref.simulator.core import Stream
from offload_ref.simulator.errors import NotSimulatedError
from offload_ref.simulator.memory import DEVICE
from offload_ref.simulator.patching import Patcher, as_method
from offload_ref.simulator.races import RacyAccess
from offload_ref.simulator.sites import call_site

if TYPE_CHECKING:
    from offload_ref.simulator.simulator import Simulator

HOST = torch.device("cpu")
"""Where tensors are that no block of the device holds."""

_READ_DIRECTLY = ("numpy", "tolist", "__repr__", "__reduce_ex__", "__dlpack__")
"""Methods of torch.Tensor that read or lend its bytes, and that no operator shows."""


def patch_tensors(patcher: Patcher, simulator: Simulator) -> None:
    """Patch torch.Tensor, torch.nn.Parameter and torch.UntypedStorage."""
    tensors, storages = _TensorMethods(simulator), _StorageMethods(simulator)
    device_type = simulator.device_type
    patcher.put(torch.Tensor, "device", property(tensors.device_of))
    patcher.put(torch.Tensor, "is_cpu", property(tensors.is_on_host))
    patcher.put(torch.Tensor, f"is_{device_type}", property(simulator.mode.is_on_device))
    tensors.read_directly = {name: getattr(torch.Tensor, name) for name in _READ_DIRECTLY}
    patcher.put_methods(torch.Tensor, tensors, _TensorMethods.PATCHED)
    patcher.put(torch.Tensor, device_type, as_method(tensors.to_accelerator))
    for cls in (torch.Tensor, torch.nn.Parameter):
        patcher.put(cls, "__deepcopy__", as_method(tensors.deepcopy))
    patcher.put(torch.UntypedStorage, "device", property(storages.device_of))
    patcher.put(torch.UntypedStorage, f"is_{device_type}", property(storages.is_on_device))
    patcher.put_methods(torch.UntypedStorage, storages, _StorageMethods.PATCHED)


class _Copy(torch.autograd.Function):
    """A differentiable copy between host and device; autograd's own goes by the label, which is the host's."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, mode: Any, to_device: bool, dtype: Any, non_blocking: bool, layout: Any
    ) -> torch.Tensor:
        ctx.mode, ctx.source = mode, (source.dtype, mode.is_on_device(source))
        copied: torch.Tensor = mode.copy_to(source, to_device, dtype, non_blocking, layout)
        return copied

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dtype, on_device = ctx.source
        device = ctx.mode.simulator.device if on_device else HOST
        return gradient.to(device=device, dtype=dtype), None, None, None, None, None


class _TensorMethods:
    """What takes the place of methods of torch.Tensor; the tensor is the first argument."""

    PATCHED = (
        "to", "cpu", "get_device", "pin_memory", "is_pinned", "record_stream", "type", "new_tensor", *_READ_DIRECTLY,
    )  # fmt: skip

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.mode, self.memory = simulator, simulator.mode, simulator.memory
        self.read_directly: dict[str, Callable[..., Any]] = {}
        self._device_label = torch._C.TensorBase.device.__get__
        self._to: Callable[..., torch.Tensor] = torch.Tensor.to
        self._type, self._new_tensor = torch.Tensor.type, torch.Tensor.new_tensor
        self._deepcopy = {cls: cls.__deepcopy__ for cls in (torch.Tensor, torch.nn.Parameter)}

    # Where it is

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        label: torch.device = self._device_label(tensor)
        return self.simulator.device if self.mode.is_on_device(tensor) else label

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return not self.mode.is_on_device(tensor) and self._device_label(tensor).type == "cpu"

    def get_device(self, tensor: torch.Tensor) -> int:
        return 0 if self.mode.is_on_device(tensor) else -1

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        return self.mode.is_pinned(tensor, device)

    # Copies

    def to(self, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = copy or [a for a in args if isinstance(a, bool)][1:] == [True]
        given = {name: value for name, value in kwargs.items() if value is not None}
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **given)
        target, dtype, non_blocking, layout = parsed
        on_device = self.mode.is_on_device(tensor)
        to_device = on_device if target is None else self.mode.is_device(target)
        if to_device != on_device:
            moved = _Copy.apply(tensor, self.mode, to_device, dtype, non_blocking, layout)  # type: ignore[no-untyped-call]
            return cast("torch.Tensor", moved)
        keywords = {"memory_format": layout, "device": None if to_device else target}
        keywords = {name: value for name, value in keywords.items() if value is not None}
        return self._to(tensor, dtype=tensor.dtype if dtype is None else dtype, copy=copy, **keywords)

    def cpu(self, tensor: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
        return self.to(tensor, "cpu", memory_format=memory_format)

    def to_accelerator(
        self, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None
    ) -> torch.Tensor:
        """The method that is called like the device: ``cuda``."""
        target = self.simulator.device if device is None else device
        return self.to(tensor, target, non_blocking=non_blocking, memory_format=memory_format)

    def pin_memory(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self.mode.pin(tensor, device)

    def type(self, tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        prefix = f"torch.{self.simulator.device_type}."
        if dtype is None:
            name = str(self._type(tensor))
            return name.replace("torch.", prefix) if self.mode.is_on_device(tensor) else name
        if isinstance(dtype, torch.dtype):
            return self.to(tensor, dtype=dtype, non_blocking=non_blocking)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        target = self.simulator.device if name.startswith(prefix) else HOST
        return self.to(tensor, target, getattr(torch, name.rsplit(".", 1)[-1]).dtype, non_blocking)

    def new_tensor(self, tensor: torch.Tensor, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        requires_grad = kwargs.pop("requires_grad", False)
        values = data.detach().cpu() if isinstance(data, torch.Tensor) else data
        made = self._new_tensor(tensor, values, device="cpu", **kwargs)
        on_device = self.mode.is_on_device(tensor) if device is None else self.mode.is_device(device)
        return (made.to(self.simulator.device) if on_device else made).requires_grad_(requires_grad)

    def deepcopy(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not self.mode.is_on_device(tensor) or type(tensor) not in self._deepcopy:
            original: Any = self._deepcopy.get(type(tensor), self._deepcopy[torch.Tensor])
            return cast("torch.Tensor", original(tensor, memo))
        if id(tensor) not in memo:
            copied = tensor.detach().clone(memory_format=torch.preserve_format)
            if isinstance(tensor, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied)
            memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        return cast("torch.Tensor", memo[id(tensor)])

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        block = self.memory.block_of(tensor)
        if block is not None:
            block.recorded.add(stream.actor)

    # Reads by the host that no operator sees

    def numpy(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        if self.mode.is_on_device(tensor) and not force:
            raise TypeError(
                f"can't convert {self.simulator.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.read_directly["numpy"](self._lent(self._readable(tensor, "numpy"), "numpy"), force=force)

    def __dlpack__(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        if self.mode.is_pinned(tensor):
            self._lent(self._readable(tensor, "dlpack"), "dlpack")
        return self.read_directly["__dlpack__"](tensor, **kwargs)

    def __reduce_ex__(self, tensor: torch.Tensor, protocol: Any) -> Any:  # type: ignore[override]  # noqa: PLE0302
        """What torch.save and pickle ask; they write the whole storage."""
        if self.mode.is_pinned(tensor):
            self.simulator.host_access("pickle", (_as_bytes(tensor.untyped_storage()),), ())
        return self.read_directly["__reduce_ex__"](tensor, protocol)

    def _lent(self, tensor: torch.Tensor, borrower: str) -> torch.Tensor:
        """The tensor, whose bytes another library may read from now on without a sign."""
        block = self.memory.block_of(tensor)
        if block is not None:
            block.alias = RacyAccess("host", "may read at any time", borrower, str(call_site()))
        return tensor

    def tolist(self, tensor: torch.Tensor) -> Any:
        return self.read_directly["tolist"](self._readable(tensor, "tolist"))

    def __repr__(self, tensor: torch.Tensor, **kwargs: Any) -> str:  # type: ignore[override]
        text = str(self.read_directly["__repr__"](self._readable(tensor, "repr"), **kwargs))
        if not self.mode.is_on_device(tensor):
            return text
        gradient = ", requires_grad=True" if tensor.requires_grad else ""
        if tensor.grad_fn is not None:
            gradient = f", grad_fn=<{type(tensor.grad_fn).__name__}>"
        return f"{text[:-1]}, device='{self.simulator.device}'{gradient})"

    def _readable(self, tensor: torch.Tensor, reader: str) -> torch.Tensor:
        """The tensor, once the host's read of it has been noted; a copy if it is on the device."""
        if self.mode.is_on_device(tensor):
            return tensor.detach().cpu()
        if self.mode.is_pinned(tensor):
            self.simulator.host_access(reader, (tensor,), ())
        return tensor


class _StorageMethods:
    """What takes the place of methods of torch.UntypedStorage; the storage is the first argument."""

    PATCHED = ("cpu", "to", "copy_", "clone", "resize_")

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.memory = simulator, simulator.memory
        self._originals = torch._C.StorageBase
        self._device_label = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]

    def is_on_device(self, storage: torch.UntypedStorage) -> bool:
        block = self.memory.blocks.get(storage._cdata)
        return block is not None and block.space is DEVICE

    def device_of(self, storage: torch.UntypedStorage) -> torch.device:
        label: torch.device = self._device_label(storage)
        return self.simulator.device if self.is_on_device(storage) else label

    def cpu(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return _as_bytes(storage).cpu().untyped_storage() if self.is_on_device(storage) else storage

    def to(self, storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if self.simulator.mode.is_device(device):
            return _as_bytes(storage).to(device, non_blocking=non_blocking).untyped_storage()
        return self.cpu(storage)

    def copy_(self, storage: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False) -> Any:
        if not self.is_on_device(storage) and not self.is_on_device(source):
            return self._originals.copy_(storage, source, non_blocking)  # type: ignore[attr-defined]
        _as_bytes(storage).copy_(_as_bytes(source), non_blocking)
        return storage

    def clone(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return _as_bytes(storage).clone().untyped_storage()

    def resize_(self, storage: torch.UntypedStorage, size: int) -> Any:
        block = self.memory.blocks.get(storage._cdata)
        if block is None:
            return self._originals.resize_(storage, size)  # type: ignore[attr-defined]
        if size not in (0, block.nbytes):
            raise NotSimulatedError("UntypedStorage.resize_", "to a size other than 0 or its own")
        if size == 0:
            self.memory.release(storage)
        return storage


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)

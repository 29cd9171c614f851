"""The torch names that mean the simulated device while a simulator is active; every one is restored after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from offload_ref.simulator.device_names import patch_device_names
from offload_ref.simulator.patching import Patcher, simulated_type
from offload_ref.simulator.tensor_names import patch_tensors

if TYPE_CHECKING:
    from offload_ref.simulator.device import DispatchMode
    from offload_ref.simulator.simulator import Simulator


@contextmanager
def patched_names(simulator: Simulator) -> Iterator[None]:
    """Patch torch for the duration of the block."""
    _device_constructors()  # torch caches the factories that a default device applies to: it has to see its own
    _initialise_real_device(simulator.device_type)
    patcher = Patcher()
    try:
        patch_tensors(patcher, simulator)
        patch_device_names(patcher, simulator)
        _patch_factories(patcher, simulator)
        yield
    finally:
        patcher.restore()


def _initialise_real_device(device_type: str) -> None:
    """Have torch initialise a real device of that type now: it asks once, and must not hear the simulator's answer."""
    real = torch.accelerator.current_accelerator(check_available=True)
    if real is not None and real.type == device_type:
        torch.get_device_module(device_type).init()


def _patch_factories(patcher: Patcher, simulator: Simulator) -> None:
    """Patch the factories that C++ fills before any operator is dispatched, and the seed of all generators."""
    for name in ("tensor", "as_tensor", "asarray"):
        patcher.put(torch, name, _from_data(name, getattr(torch, name), simulator.mode))
    host_generator = torch.Generator
    generator = simulated_type(
        "Generator", host_generator, lambda device="cpu": host_generator(_label(device, simulator))
    )
    patcher.put(torch, "Generator", generator)
    seed_the_host = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        simulator.rng.seed(int(seed))
        return seed_the_host(seed)

    patcher.put(torch, "manual_seed", manual_seed)


def _label(device: Any, simulator: Simulator) -> Any:
    """The device as C++ knows it: the simulated one is the host to it."""
    return "cpu" if simulator.mode.is_device(device) else device


def _from_data(name: str, original: Callable[..., torch.Tensor], mode: DispatchMode) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` or one of its like: made on the host, then moved to where it belongs."""

    def make(
        data: Any, *args: Any, device: Any = None, requires_grad: bool = False, pin_memory: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        if isinstance(data, torch.Tensor) and mode.is_on_device(data):
            target = data.device if device is None else device
            if name != "tensor":
                return data.to(device=target, dtype=kwargs.get("dtype"))
            data, device = data.detach().cpu(), target
        target = _default_device() if device is None else device
        on_device = mode.is_device(target)
        made = original(data, *args, device="cpu" if on_device else target, **kwargs)
        made = mode.pin(made) if pin_memory else made
        made = made.to(target) if on_device else made
        return made.requires_grad_() if requires_grad else made

    return make


def _default_device() -> torch.device | None:
    """The device of the innermost ``with torch.device(...)`` or of ``torch.set_default_device``."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            device: torch.device = mode.device
            return device
    return None

"""torch.Stream, torch.Event, torch.accelerator and the device's own module (torch.cuda), simulated or refused."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from offload_ref.simulator.core import Event, Machine, Stream, current_stream_is
from offload_ref.simulator.patching import (
    Patcher,
    constant,
    ignoring_arguments,
    refusing,
    refusing_type,
    simulated_type,
)

if TYPE_CHECKING:
    from offload_ref.simulator.simulator import Simulator

HARMLESS = frozenset({"cast", "classproperty", "get_arch_list", "get_gencode_flags", "lru_cache"})
"""Names of torch.cuda that ask no device."""


def patch_device_names(patcher: Patcher, simulator: Simulator) -> None:
    """Patch what every accelerator has, then the device's own module; refuse the rest of both by name."""
    machine = simulator.machine
    streams = {
        "Stream": simulated_type("Stream", Stream, ignoring_arguments(machine.new_stream)),
        "Event": simulated_type("Event", Event, ignoring_arguments(lambda: Event(machine))),
    }
    patcher.put_all(torch, streams)
    common = {**_streams_and_waits(machine), **_memory(simulator)}
    _patch_module(patcher, torch.accelerator, {**common, **_of_the_accelerator(simulator)})
    module = getattr(torch, simulator.device_type, None)
    if module is not None:
        own = _of_cuda(simulator) if simulator.device_type == "cuda" else {}
        _patch_module(patcher, module, {**common, **streams, **_of_a_device_module(machine), **own})
    if simulator.device_type == "cuda":
        patcher.put_all(torch.cuda.nvtx, {"range_push": constant(0), "range_pop": constant(0)})
        patcher.put(torch.backends.cudnn, "is_acceptable", constant(False))
    _patch_autocast(patcher, simulator.device_type)


def _patch_module(patcher: Patcher, module: Any, table: dict[str, Any]) -> None:
    """Patch those names of the table that the module has, and refuse its other public functions and classes."""
    for name in [name for name in vars(module) if name in table]:
        patcher.put(module, name, table[name])
    for name, value in list(vars(module).items()):
        if name.startswith("_") or name in table or name in HARMLESS or not _is_own(value):
            continue
        full_name = f"{module.__name__}.{name}"
        patcher.put(module, name, refusing_type(full_name) if isinstance(value, type) else refusing(full_name))


def _is_own(value: Any) -> bool:
    """Whether a module's attribute is a function or class of torch that may reach for a device."""
    if isinstance(value, type):
        return value.__module__.startswith("torch") and not issubclass(value, BaseException)
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType)


def _streams_and_waits(machine: Machine) -> dict[str, Any]:
    return {
        "is_available": constant(True),
        "device_count": constant(1),
        "current_stream": ignoring_arguments(lambda: machine.current),
        "set_stream": machine.set_stream,
        "synchronize": ignoring_arguments(machine.synchronize),
    }


def _memory(simulator: Simulator) -> dict[str, Any]:
    total = simulator.memory.capacity_bytes
    live, peak = ignoring_arguments(simulator.memory_allocated), ignoring_arguments(simulator.max_memory_allocated)
    free = ignoring_arguments(lambda: (total - simulator.memory_allocated(), total))
    reset = ignoring_arguments(simulator.reset_peak_memory_stats)
    return {
        "memory_allocated": live,
        "memory_reserved": live,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "memory_stats": ignoring_arguments(lambda: _memory_stats(simulator)),
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "mem_get_info": free,
        "get_memory_info": free,
        "empty_cache": constant(None),
        "empty_host_cache": constant(None),
    }


def _memory_stats(simulator: Simulator) -> dict[str, int]:
    figures = {"current": simulator.memory_allocated(), "peak": simulator.max_memory_allocated()}
    kinds = ("allocated", "reserved", "active")
    return {f"{kind}_bytes.all.{when}": nbytes for kind in kinds for when, nbytes in figures.items()}


def _of_the_accelerator(simulator: Simulator) -> dict[str, Any]:
    return {
        "current_accelerator": constant(torch.device(simulator.device_type)),
        "current_device_index": constant(0),
        "current_device_idx": constant(0),
        "set_device_index": constant(None),
        "set_device_idx": constant(None),
        "device_index": ignoring_arguments(nullcontext),
    }


def _of_a_device_module(machine: Machine) -> dict[str, Any]:
    return {
        "_lazy_init": constant(None),
        "init": constant(None),
        "is_initialized": constant(True),
        "current_device": constant(0),
        "set_device": constant(None),
        "device": simulated_type("device", nullcontext, ignoring_arguments(nullcontext)),
        "device_of": simulated_type("device_of", nullcontext, ignoring_arguments(nullcontext)),
        "stream": current_stream_is,
        "default_stream": ignoring_arguments(lambda: machine.default),
        "is_current_stream_capturing": constant(False),
        "get_sync_debug_mode": constant(0),
    }


def _of_cuda(simulator: Simulator) -> dict[str, Any]:
    rng, total = simulator.rng, simulator.memory.capacity_bytes
    properties = types.SimpleNamespace(
        name="simulated", major=9, minor=0, total_memory=total, multi_processor_count=1, warp_size=32
    )

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:  # noqa: ARG001 - torch's signature
        rng.set_state(new_state)

    def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
        rng.set_state(new_states[0])

    return {
        "is_bf16_supported": constant(True),
        "is_tf32_supported": constant(False),
        "get_device_name": constant("simulated"),
        "get_device_capability": constant((9, 0)),
        "get_device_properties": constant(properties),
        "get_allocator_backend": constant("native"),
        "get_rng_state": ignoring_arguments(rng.get_state),
        "get_rng_state_all": ignoring_arguments(lambda: [rng.get_state()]),
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": rng.seed,
        "manual_seed_all": rng.seed,
        "initial_seed": ignoring_arguments(rng.generator.initial_seed),
    }


def _patch_autocast(patcher: Patcher, device_type: str) -> None:
    """Autocast goes by the label that C++ sees, which is the host's."""
    original = torch.autocast

    class Autocast(original):  # type: ignore[misc, valid-type]
        def __init__(self, device_type_: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if device_type_ == device_type:
                device_type_, dtype = "cpu", dtype or torch.get_autocast_dtype(device_type)
            super().__init__(device_type_, dtype, *args, **kwargs)

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return Autocast(device_type, *args, **kwargs)

    patcher.put(torch, "autocast", simulated_type("autocast", original, autocast))
    patcher.put(torch.amp, "autocast", simulated_type("autocast", original, autocast))

"""What a plan costs, from first principles: bytes of weights, gradients, masters and optimizer states.

Figures are those of a training that has made its first step, between two steps, in bytes that the program
asks its allocators for. Nothing here needs torch or a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from offload_ref.errors import DtypeError, SizeError, require, whole_number
from offload_ref.partition import Share, into_runs
from offload_ref.partition import partition as divide

__all__ = ["OptimizerMemory", "Parameter", "describe", "itemsize", "pinned_rounding", "predict"]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by the name of its dtype."""

MASTER_BYTES = 4
"""Bytes of one element of a master: masters are fp32."""

MASTERED_BYTES = 2
"""Bytes of one element of a weight that has a master: bfloat16 and float16."""

ADAM_STATE_TENSORS = 2
"""Tensors of a parameter's size that Adam keeps: its two moments."""


def _check_size(what: str, value: object, rule: str, least: int = 0) -> None:
    number = whole_number(value)
    fits = number is not None and number >= least
    require(fits, SizeError, what, value, f"a whole number, at least {least}", rule)


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the planner has to know of one parameter.

    Attributes:
        numel: number of elements.
        dtype: dtype of the weight, by name, as a torch dtype, or as bytes per element.
        gradient_dtype: dtype of the gradient; that of the weight if None.
        trainable: whether it requires a gradient; a frozen parameter costs its weight alone.
        on_host: whether the weight itself is on the host; it is stepped there, outside the fraction.
        dense: whether its elements fill a range of memory; one that does not is never split.

    Raises:
        SizeError: the number of elements is negative.
    """

    numel: int
    dtype: object = "float32"
    gradient_dtype: object = None
    trainable: bool = True
    on_host: bool = False
    dense: bool = True

    def __post_init__(self) -> None:
        _check_size("elements of a parameter", self.numel, "MEM-20")

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element of the weight."""
        return itemsize(self.dtype)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one element of the gradient."""
        return itemsize(self.dtype if self.gradient_dtype is None else self.gradient_dtype)


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Bytes of everything that the optimizer owns or updates, on both sides.

    Attributes:
        device_weights: weights on the device; those of the host share stay there too.
        device_gradients: gradients on the device.
        device_masters: fp32 masters of 16-bit weights of the device share.
        device_states: optimizer states of the device share.
        host_weights: weights of parameters that are on the host themselves.
        host_working: what the host steps: masters of 16-bit weights, copies of the others.
        host_states: optimizer states of the host share.
        host_gradients: where gradients of the host share arrive, in their own dtype.
        host_staging: where weights of the host share leave from, if the working copy has another dtype.
        pinned: how much of the host bytes is pinned.
        pinned_taken: what torch's pinned allocator takes for these; see `pinned_rounding`.
        saved: device bytes less than with nothing on the host.
    """

    device_weights: int = 0
    device_gradients: int = 0
    device_masters: int = 0
    device_states: int = 0
    host_weights: int = 0
    host_working: int = 0
    host_states: int = 0
    host_gradients: int = 0
    host_staging: int = 0
    pinned: int = 0
    pinned_taken: int = 0
    saved: int = 0

    def __add__(self, other: OptimizerMemory) -> OptimizerMemory:
        return OptimizerMemory(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(OptimizerMemory)))

    @property
    def device(self) -> int:
        """All device bytes."""
        return self.device_weights + self.device_gradients + self.device_masters + self.device_states

    @property
    def host(self) -> int:
        """All host bytes, pinned or not."""
        copies = self.host_working + self.host_gradients + self.host_staging
        return self.host_weights + self.host_states + copies


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The settings of the optimizer that change what it allocates; names are the optimizer's own.

    Attributes:
        param_update_in_fp32: whether 16-bit weights have fp32 masters.
        state_tensors: states of a parameter's size per parameter: 2 for Adam, 1 for SGD with momentum.
        device_step_bytes: bytes of the step count of each parameter with a device share: 4 if the device's
            class is fused or capturable and so keeps it there, else 0.
        pin_cpu_grads: whether gradients arrive in pinned memory.
        pin_cpu_params: whether weights leave from pinned memory.
        bucket_bytes: most bytes of working copies in one bucket; each bucket is one pinned request per
            direction.

    Raises:
        SizeError: a size is no whole number, or too small.
    """

    param_update_in_fp32: bool = False
    state_tensors: int = ADAM_STATE_TENSORS
    device_step_bytes: int = 0
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    bucket_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        for name, least in (("state_tensors", 0), ("device_step_bytes", 0), ("bucket_bytes", 1)):
            _check_size(name, getattr(self, name), "MEM-20", least)

    def has_master(self, parameter: Parameter) -> bool:
        """Return whether the parameter is stepped through an fp32 copy of its 16-bit weight."""
        return self.param_update_in_fp32 and parameter.weight_bytes == MASTERED_BYTES

    def working_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of one element of what is stepped, and of each of its states."""
        return MASTER_BYTES if self.has_master(parameter) else parameter.weight_bytes


DEFAULT_SETTINGS = OptimizerSettings()
"""The optimizer's own defaults."""


def predict(
    parameters: Iterable[Parameter],
    fraction: object,
    *,
    partition: str = "greedy",
    settings: OptimizerSettings = DEFAULT_SETTINGS,
) -> OptimizerMemory:
    """Return the bytes of a training whose optimizer keeps a fraction of its states on the host.

    Args:
        parameters: every parameter, in the order of the optimizer's groups.
        fraction: part of the trainable device elements, in [0, 1].
        partition: ``"greedy"`` or ``"exact"``.
        settings: what else changes the allocations.

    Raises:
        FractionError: the fraction is no number in [0, 1] (OPT-3).
        PartitionModeError: there is no such partition (CFG-5).
        DtypeError: a dtype has no size known here.
    """
    listed = list(parameters)
    on_device = [one for one in listed if not one.on_host]
    sizes, counted = [one.numel for one in on_device], [one.trainable for one in on_device]
    shares = [
        Share(one.numel, one.numel) if share.split and not one.dense else share
        for one, share in zip(on_device, divide(sizes, fraction, partition, counted), strict=True)
    ]
    parts = [_of_device_parameter(*pair, settings) for pair in zip(on_device, shares, strict=True)]
    parts += [_of_host_parameter(one, settings) for one in listed if one.on_host]
    requests = _pinned_requests(on_device, shares, settings)
    taken = sum(map(pinned_rounding, requests))
    return replace(sum(parts, OptimizerMemory()), pinned=sum(requests), pinned_taken=taken)


def describe(tensors: Iterable[Any], *, all_on_device: bool = False) -> list[Parameter]:
    """Return what the planner has to know of tensors, in order: `Parameter` for each.

    Args:
        tensors: torch parameters.
        all_on_device: plan as if every tensor were on the device, for a model that is still on the host.
    """
    from offload_ref.buckets import is_dense  # noqa: PLC0415 - whoever has tensors has torch

    return [
        Parameter(
            numel=tensor.numel(),
            dtype=tensor.dtype,
            gradient_dtype=None if tensor.grad is None else tensor.grad.dtype,
            trainable=tensor.requires_grad,
            on_host=tensor.device.type == "cpu" and not all_on_device,
            dense=is_dense(tensor),
        )
        for tensor in tensors
    ]


def itemsize(dtype: object) -> int:
    """Return the bytes of one element of a dtype given by name, as a torch dtype, or as that number itself.

    Raises:
        DtypeError: the dtype is none of these.
    """
    size = DTYPE_BYTES.get(str(dtype).removeprefix("torch."), getattr(dtype, "itemsize", dtype))
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DtypeError("dtype", seen=dtype, required=f"one of {', '.join(DTYPE_BYTES)}", rule="MEM-20")
    return size


def pinned_rounding(nbytes: int) -> int:
    """Return what torch's pinned allocator takes for a request: the next power of two, in bytes.

    That is its rounding mode, which is on by default; without it a request takes what it asks for.

    Raises:
        SizeError: the request is negative.
    """
    _check_size("pinned bytes", nbytes, "MEM-21")
    return 1 << (int(nbytes) - 1).bit_length() if nbytes else 0


def _of_device_parameter(parameter: Parameter, share: Share, settings: OptimizerSettings) -> OptimizerMemory:
    """Return the bytes of one parameter that is on the device."""
    weights = parameter.numel * parameter.weight_bytes
    if not parameter.trainable:
        return OptimizerMemory(device_weights=weights)
    working, state = settings.working_bytes(parameter), settings.state_tensors
    master = MASTER_BYTES if settings.has_master(parameter) else 0
    host, device = share.host_elements, share.device_elements
    staging = host * parameter.weight_bytes if master else 0
    return OptimizerMemory(
        device_weights=weights,
        device_gradients=parameter.numel * parameter.gradient_bytes,
        device_masters=device * master,
        device_states=device * working * state + (0 if share.whole_host else settings.device_step_bytes),
        host_working=host * working,
        host_states=host * working * state,
        host_gradients=host * parameter.gradient_bytes,
        host_staging=staging,
        saved=host * (working * state + master) + share.whole_host * settings.device_step_bytes,
    )


def _pinned_requests(
    parameters: Sequence[Parameter], shares: Sequence[Share], settings: OptimizerSettings
) -> list[int]:
    """Return the bytes of each pinned allocation: per bucket one for gradients and one for weights."""
    crossing = [
        (parameter, share.host_elements)
        for parameter, share in zip(parameters, shares, strict=True)
        if parameter.trainable and share.host_elements
    ]
    working = [elements * settings.working_bytes(parameter) for parameter, elements in crossing]
    requests = []
    for run in into_runs(working, settings.bucket_bytes):
        if settings.pin_cpu_grads:
            requests.append(sum(elements * parameter.gradient_bytes for parameter, elements in crossing[run]))
        if settings.pin_cpu_params:
            requests.append(sum(elements * parameter.weight_bytes for parameter, elements in crossing[run]))
    return requests


def _of_host_parameter(parameter: Parameter, settings: OptimizerSettings) -> OptimizerMemory:
    """Return the bytes of one parameter that is on the host itself: nothing of it crosses or is pinned."""
    weights = parameter.numel * parameter.weight_bytes
    if not parameter.trainable:
        return OptimizerMemory(host_weights=weights)
    working = parameter.numel * settings.working_bytes(parameter)
    return OptimizerMemory(
        host_weights=weights,
        host_working=working if settings.has_master(parameter) else 0,
        host_states=working * settings.state_tensors,
        host_gradients=parameter.numel * parameter.gradient_bytes,
    )

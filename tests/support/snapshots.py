"""What a refusal must leave as it was, bit for bit: optimizers with their parameters, layers, plain arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from offload_ref import HybridDeviceOptimizer

HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs"),
    *("_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)
"""Attributes of a module that hold hooks."""


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    """The kind of a tensor and its bytes; two are equal only if every bit is."""
    values = tensor.detach()
    kind = (type(tensor), str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.layout)
    if tensor.is_meta:
        return kind
    if tensor.layout is not torch.strided:
        return (*kind, bits(values.to_dense()))
    return (*kind, tensor.stride(), values.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


def frozen(value: object) -> object:
    """A value that compares by contents: containers entry by entry and in order, tensors by their bits."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, Mapping):
        return type(value), tuple((key, frozen(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(frozen, value))
    return type(value), repr(value) if isinstance(value, float) else value


def of_parameters(parameters: Iterable[torch.Tensor]) -> list[tuple[object, ...]]:
    """Values, edits and gradients of parameters, and the objects that hold them."""
    return [
        (
            *(id(p), p.data_ptr(), p._version, p.requires_grad, bits(p)),
            *((id(gradient), frozen(gradient)) for gradient in (p.grad, getattr(p, "decoupled_grad", None))),
        )
        for p in parameters
    ]


def of_groups(groups: Iterable[Any]) -> list[object]:
    """Param groups: the very dicts, their keys in order, their members, and the value of each hyperparameter."""
    return [(id(group), [(key, _of_entry(key, value)) for key, value in group.items()]) for group in groups]


def _of_entry(key: object, value: object) -> object:
    if key == "params":
        members = value if isinstance(value, list | tuple) else [value]
        return id(value), type(value), [id(member) for member in members]
    return frozen(value)


def of_optimizer(optimizer: HybridDeviceOptimizer, parameters: Iterable[torch.Tensor]) -> dict[str, object]:
    """Parameters, groups, defaults, states with masters and step counts, and how the work is divided."""
    return {
        "parameters": of_parameters(parameters),
        "groups": of_groups(optimizer.param_groups),
        "list of groups": id(optimizer.param_groups),
        "defaults": frozen(optimizer.defaults),
        "state": frozen(optimizer.state_dict(copy=True)),
        "live state": [(id(p), frozen(state)) for p, state in optimizer.state.items()],
        "units": [(id(unit), id(unit.parameter), unit.group) for unit in optimizer.units],
        "buckets": [(id(bucket), len(bucket.units)) for bucket in optimizer.buckets],
    }


def of_layers(layers: Iterable[nn.Module]) -> dict[str, object]:
    """Parameters, gradients and hooks of modules, and whichever saved-tensor hooks are on top."""
    modules = [module for layer in layers for module in layer.modules()]
    return {
        "parameters": of_parameters(p for module in modules for p in module.parameters(recurse=False)),
        "hooks": [[list(getattr(module, name)) for name in HOOKS] for module in modules],
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),  # no public name tells
    }

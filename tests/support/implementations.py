"""The two implementations in this package, with one face: the core, and the first lesson."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload_ref import HybridDeviceOptimizer, minimal, offload_layers


@dataclass(frozen=True)
class Implementation:
    """What a test of both asks for.

    Attributes:
        offload: a context for layers, of which the first so many are offloaded, however small their tensors are.
        optimizer_of: builds the optimizer from parameters, a fraction, a class for both sides and its keywords.
    """

    offload: Callable[[nn.ModuleList, int], AbstractContextManager[object]]
    optimizer_of: Callable[..., Optimizer]

    def optimizer(self, parameters: Any, fraction: float, cls: Any = torch.optim.SGD, **keywords: Any) -> Optimizer:
        """The optimizer with the same class on both sides."""
        return self.optimizer_of(parameters, fraction, cls, **keywords)


def _same_class_twice(parameters: Any, fraction: float, cls: Any, **keywords: Any) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(parameters, fraction, cls, cls, **keywords)


IMPLEMENTATIONS = {
    "core": Implementation(partial(offload_layers, min_offload_bytes=0), _same_class_twice),
    "first lesson": Implementation(minimal.offload_layers, minimal.HybridDeviceOptimizer),
}
"""Name -> what is judged."""

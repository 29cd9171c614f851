"""What host steps are tried with: classes, precisions, implementations, and drawn weights and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.001, "amsgrad": True},
    "AdamW": {"lr": 0.001, "weight_decay": 0.1},
    "NAdam": {"lr": 0.002, "weight_decay": 0.01},
    "RAdam": {"lr": 0.001, "weight_decay": 0.01},
    "Adamax": {"lr": 0.002},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "ASGD": {"lr": 0.01, "t0": 5.0},
    "Rprop": {"lr": 0.01},
}
"""The element-wise classes of torch.optim, with hyperparameters that use every state."""

FLOAT16_EPS = 1e-4
"""What the classes add to a denominator of 16 bits: their own 1e-8 is zero in float16."""

PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "float64": (torch.float64, False),
    "bfloat16 with masters": (torch.bfloat16, True),
    "bfloat16": (torch.bfloat16, False),
    "float16 with masters": (torch.float16, True),
    "float16": (torch.float16, False),
}
"""The dtype of weights and gradients, and whether fp32 masters are stepped in their place."""

COLUMNS = ("float32", "float64", "bfloat16", "float16")
"""The dtypes that are stepped, by which bounds are stated: with masters it is float32."""

KERNELS: dict[str, dict[str, bool]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""torch's implementations by the keywords that choose them; by default the device has foreach, the host the loop."""

SHAPES = ((48, 64), (1021,), (7,), ())
"""A few thousand elements; sizes that vector registers do not divide."""


@dataclass(frozen=True)
class Trial:
    """What is stepped: a class, a precision, an implementation, and drawn weights and gradients."""

    optimizer: str
    precision: str
    kernel: str = "default"
    seed: int = 0
    shapes: Sequence[tuple[int, ...]] = SHAPES

    @property
    def row(self) -> str:
        """The name of the class with its fused kernel apart, as the rows of OPT-18 have it."""
        return f"{self.optimizer}, fused" if self.kernel == "fused" else self.optimizer

    @property
    def cls(self) -> type[Optimizer]:
        """The class of torch.optim."""
        found: type[Optimizer] = getattr(torch.optim, self.optimizer)
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and gradients."""
        return PRECISIONS[self.precision][0]

    @property
    def masters(self) -> bool:
        """Whether fp32 masters are stepped."""
        return PRECISIONS[self.precision][1]

    @property
    def column(self) -> str:
        """The dtype that is stepped and judged, as the specification's tables head it."""
        return "float32" if self.masters else self.precision

    @property
    def keywords(self) -> dict[str, Any]:
        """What the class is constructed with."""
        keywords = {**HYPERPARAMETERS[self.optimizer], **KERNELS[self.kernel]}
        if self.column == "float16" and "eps" in inspect.signature(self.cls).parameters:
            keywords["eps"] = FLOAT16_EPS
        return keywords

    def drawn(self, number: int, smallest: float, draw: int) -> torch.Tensor:
        """Numbers of either sign and all magnitudes from ``smallest`` to 1, one in twenty of them zero."""
        generator = torch.Generator().manual_seed(10_000 * self.seed + 100 * draw + number)
        shape = self.shapes[number]
        exponent, sign, kept = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(3))
        return (smallest**exponent * (sign - 0.5).sign() * (kept > 0.05)).to(self.dtype)

    def weights(self, device: str) -> list[torch.nn.Parameter]:
        """The parameters at their first values; small ones among them, of which an update is a large part."""
        return [torch.nn.Parameter(self.drawn(n, 1e-4, 0).to(device)) for n in range(len(self.shapes))]

    def gradient(self, step: int, number: int) -> torch.Tensor | None:
        """The gradient of a parameter in a step, on the host; None for each in one of five steps."""
        return None if (step + number) % 5 == 4 else self.drawn(number, 1e-6, 1 + step)

    def give_gradients(self, weights: Sequence[torch.Tensor], step: int) -> None:
        """Set the gradients of a step."""
        for number, weight in enumerate(weights):
            gradient = self.gradient(step, number)
            weight.grad = None if gradient is None else gradient.to(weight.device)

    def groups(self, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Two groups that differ in their learning rates."""
        lr = HYPERPARAMETERS[self.optimizer]["lr"]
        return [{"params": list(parameters[:1]), "lr": lr}, {"params": list(parameters[1:]), "lr": lr / 2}]

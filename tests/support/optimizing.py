"""Trainings of a few parameters with drawn gradients, with the offloading optimizer and with a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from offload_ref import HybridDeviceOptimizer
from offload_ref.simulator import Simulator
from offload_ref.simulator.schedules import Schedule

CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}
"""Element-wise classes with hyperparameters that use every state."""


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        shapes: one parameter each.
        dtype: of the parameters and gradients.
        group_of: the number of each parameter's group; groups differ in lr and weight decay.
        steps: per step, which parameters have a gradient.
        optimizer: a key of CLASSES.
        foreach: the implementation, on both sides.
    """

    shapes: Sequence[tuple[int, ...]]
    steps: Sequence[Sequence[bool]]
    dtype: torch.dtype = torch.float32
    group_of: Sequence[int] = ()
    optimizer: str = "AdamW"
    foreach: bool = False
    masters: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def parameters(self, device: str) -> list[torch.nn.Parameter]:
        """The parameters at their first values."""
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]
        return [torch.nn.Parameter(value.to(device)) for value in values]

    def gradient(self, step: int, number: int) -> torch.Tensor:
        """The gradient of a parameter in a step, on the host."""
        generator = torch.Generator().manual_seed(1000 * step + number)
        return torch.randn(self.shapes[number], generator=generator).to(self.dtype)

    def groups(self, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Two groups at most, the second with hyperparameters of its own; a group may be empty."""
        lr = CLASSES[self.optimizer][1]["lr"]
        numbers = list(self.group_of) or [0] * len(parameters)
        members = [[p for p, n in zip(parameters, numbers, strict=True) if n == group] for group in range(2)]
        return [{"params": members[0], "name": "first"}, {"params": members[1], "lr": lr / 2, "weight_decay": 0.0}]

    def set_gradients(self, parameters: Sequence[torch.Tensor], step: int, device: str) -> None:
        """Give each active parameter a new gradient, computed on the device, and the others None."""
        for number, (parameter, active) in enumerate(zip(parameters, self.steps[step], strict=True)):
            parameter.grad = self.gradient(step, number).to(device) * 1 if active else None

    def schedule(self, groups: Sequence[dict[str, Any]], step: int) -> None:
        """Move the learning rates, as a scheduler does."""
        for group in groups:
            group["lr"] *= 0.5 if step % 2 else 1.5


def plain(training: Training) -> list[torch.Tensor]:
    """The plain loop on host tensors: the class itself, on fp32 masters where asked."""
    parameters = training.parameters("cpu")
    stepped = list(parameters)
    if training.masters:
        stepped = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    cls, keywords = CLASSES[training.optimizer]
    optimizer = cls(training.groups(stepped), **{**keywords, "foreach": training.foreach})
    for step in range(len(training.steps)):
        training.set_gradients(parameters, step, "cpu")
        for parameter, working in zip(parameters, stepped, strict=True):
            working.grad = None if parameter.grad is None else parameter.grad.to(working.dtype)
        optimizer.step()
        if training.masters:
            for parameter, working, active in zip(parameters, stepped, training.steps[step], strict=True):
                if active:
                    parameter.data.copy_(working.data)
        training.schedule(optimizer.param_groups, step)
    return [p.detach() for p in parameters]


def offloading(
    training: Training, parameters: Sequence[torch.Tensor], fraction: float, **options: Any
) -> HybridDeviceOptimizer:
    """The offloading optimizer for a training."""
    cls, keywords = CLASSES[training.optimizer]
    return HybridDeviceOptimizer(
        training.groups(parameters),
        offload_fraction=fraction,
        cpu_optimizer_cls=cls,
        gpu_optimizer_cls=cls,
        param_update_in_fp32=training.masters,
        foreach=training.foreach,
        **{**keywords, **options},
    )


def offloaded_run(
    training: Training,
    fraction: float,
    schedule: Schedule | None = None,
    between: Callable[[HybridDeviceOptimizer, int], HybridDeviceOptimizer] = lambda optimizer, _step: optimizer,
    **options: Any,
) -> list[torch.Tensor]:
    """The same training with offloading on the simulated accelerator; nothing is read before its end.

    ``between`` may act on the optimizer after each step, and returns the one to go on with.
    """
    with Simulator(schedule=schedule, device_type="cuda") as simulator:
        parameters = training.parameters("cuda")
        optimizer = offloading(training, parameters, fraction, **options)
        for step in range(len(training.steps)):
            training.set_gradients(parameters, step, "cuda")
            optimizer.step()
            training.schedule(optimizer.param_groups, step)
            optimizer = between(optimizer, step)
        results = [p.detach().cpu() for p in parameters]
    simulator.assert_race_free()
    return results

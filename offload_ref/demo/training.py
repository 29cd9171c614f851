"""The training loop that all three runs share: accumulation, clipping, AdamW's groups, the schedule."""

from __future__ import annotations

from functools import partial
from math import cos, pi
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offload_ref.demo.model import GPT
    from offload_ref.demo.settings import DemoSettings
    from offload_ref.demo.text import MicroBatch

WEIGHT_DECAY = 0.1
"""Decoupled decay of matrices; norms and biases have none."""

BETAS = (0.9, 0.95)
"""AdamW's decay rates of the two moments."""

WARM_UP_FRACTION = 0.1
"""Part of the steps in which the learning rate rises to its peak."""

FINAL_RATE = 0.1
"""Learning rate at the end over the peak."""

STEP = "optimizer step"
"""The point of the program before the optimizer step."""

GRADIENT_NORM_MAX = 1.0
"""Gradients of a larger norm are scaled down to it."""

Groups = list[dict[str, Any]]
"""Parameter groups as torch.optim takes them."""


class Stepper(Protocol):
    """What the loop needs of an optimizer."""

    def step(self) -> None:
        """Update the weights from ``parameter.grad``, then advance the learning rate."""


class OptimizerStepper:
    """Any torch optimizer, with the demo's learning-rate schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer = optimizer
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(relative_rate, steps=steps))

    def step(self) -> None:
        """Step the optimizer, then the schedule."""
        self.optimizer.step()
        self.schedule.step()


def relative_rate(step: int, steps: int) -> float:
    """Return the learning rate of ``step`` (from 0) over its peak: a linear warm-up, then a cosine."""
    warm_up = max(1, round(WARM_UP_FRACTION * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up + 1) / max(1, steps - warm_up))
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + cos(pi * progress)) / 2


def weight_decay_groups(model: torch.nn.Module) -> Groups:
    """Return two groups: matrices with decay, norms and biases without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def hyperparameters(settings: DemoSettings) -> dict[str, Any]:
    """Return AdamW's keywords, equal in every run."""
    return {"lr": settings.learning_rate, "betas": BETAS, "foreach": settings.foreach}


class Observer(Protocol):
    """What the loop tells of its progress."""

    def phase(self, name: str) -> None:
        """Mark a point of the program between two layers' work."""

    def step_done(self) -> None:
        """Mark the end of a training step."""


def train(
    model: GPT, stepper: Stepper, batches: Sequence[Sequence[MicroBatch]], settings: DemoSettings, observer: Observer
) -> torch.Tensor:
    """Train on every batch in order and return the loss of each step, shape (steps,), fp32 on the host.

    The losses stay on the device until the end: reading one would order the host after all device work and
    hide what a missing wait does.
    """
    losses = []
    for micro_batches in batches:
        losses.append(accumulate(model, micro_batches, observer))
        parameters = list(model.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM_MAX, foreach=settings.foreach)
        observer.phase(STEP)
        stepper.step()
        observer.phase("end of the optimizer step")
        model.zero_grad(set_to_none=True)
        observer.step_done()
    return torch.stack(losses).cpu()


def accumulate(model: GPT, micro_batches: Sequence[MicroBatch], observer: Observer) -> torch.Tensor:
    """Add up the gradients of the mean loss over the micro-batches and return that loss."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for inputs, targets in micro_batches:
        observer.phase("forward")
        loss = model.loss(inputs.to(device), targets.to(device)) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    return total

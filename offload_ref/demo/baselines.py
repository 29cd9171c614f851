"""The two yardsticks, written out plainly: they share no code with the offloading that they judge.

``plain`` is torch's AdamW on the device. ``same-kernel`` steps the share that offloading would move with the
host's kernels, one parameter after the other, with nothing but blocking copies. From the reference it takes
the arithmetic of the partition alone, so that a fault of offloading cannot hide in its own yardstick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offload_ref.demo.training import Groups, OptimizerStepper, Stepper, hyperparameters
from offload_ref.partition import partition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offload_ref.demo.settings import DemoSettings
    from offload_ref.partition import Share

HOST = torch.device("cpu")
"""Where ``same-kernel`` steps the host share."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of a parameter in flat order, and the fp32 copy of them that is stepped."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    copy: torch.Tensor

    def load_gradient(self) -> None:
        """Give the copy the parameter's gradient, which crosses in its own dtype and is cast on arrival."""
        gradient = self.parameter.grad
        if gradient is None:
            self.copy.grad = None
        else:
            arrived = gradient.detach().view(-1)[self.start : self.stop].to(self.copy.device)
            self.copy.grad = arrived.to(self.copy.dtype)

    def store_weight(self) -> None:
        """Round the copy to the weight's dtype, then write it back."""
        rounded = self.copy.detach().to(self.parameter.dtype)
        self.parameter.detach().view(-1)[self.start : self.stop].copy_(rounded)


class CopyStepper:
    """AdamW over the fp32 copies of slices that lie in one place."""

    def __init__(self, groups: Groups, settings: DemoSettings, **kernel: bool) -> None:
        self.slices: list[Slice] = [piece for group in groups for piece in group["slices"]]
        filled = [
            {"params": [piece.copy for piece in group["slices"]], "weight_decay": group["weight_decay"]}
            for group in groups
            if group["slices"]
        ]
        optimizer = torch.optim.AdamW(filled, **{**hyperparameters(settings), **kernel})
        self.stepper = OptimizerStepper(optimizer, settings.steps)

    def step(self) -> None:
        """Bring the gradients, step the copies, write the weights back."""
        for piece in self.slices:
            piece.load_gradient()
        self.stepper.step()
        for piece in self.slices:
            piece.copy.grad = None
            piece.store_weight()


class SameKernelStepper:
    """The host share stepped by the host's kernels, then the rest on the device."""

    def __init__(self, groups: Groups, settings: DemoSettings) -> None:
        sides = [slice_groups(groups, settings, on_host=on_host) for on_host in (True, False)]
        self.parts = [CopyStepper(side, settings) for side in sides if any(g["slices"] for g in side)]

    def step(self) -> None:
        """Step both shares."""
        for part in self.parts:
            part.step()


def plain(groups: Groups, settings: DemoSettings) -> Stepper:
    """Return torch's AdamW on the device; for bf16 weights it steps fp32 masters on the device."""
    if settings.bf16:
        return CopyStepper(whole_groups(groups), settings)
    return OptimizerStepper(torch.optim.AdamW(groups, **hyperparameters(settings)), settings.steps)


def other_kernel(groups: Groups, settings: DemoSettings) -> Stepper:
    """Return ``plain`` with AdamW's fused kernel: how far apart do two kernels of one device come?"""
    return CopyStepper(whole_groups(groups), settings, foreach=False, fused=True)


def same_kernel(groups: Groups, settings: DemoSettings) -> Stepper:
    """Return the baseline that differs from offloading in nothing but when and where the work is done."""
    return SameKernelStepper(groups, settings)


def copy_slice(parameter: torch.nn.Parameter, start: int, stop: int, place: torch.device) -> Slice:
    """Copy elements [start, stop) of a parameter in fp32 to ``place``."""
    arrived = parameter.detach().view(-1)[start:stop].to(place)
    return Slice(parameter, start, stop, arrived.to(torch.float32, copy=True).requires_grad_())


def whole_groups(groups: Groups) -> Groups:
    """Return the groups with one slice per parameter, on the parameter's own device."""
    return [{**group, "slices": [copy_slice(p, 0, p.numel(), p.device) for p in group["params"]]} for group in groups]


def slice_groups(groups: Groups, settings: DemoSettings, *, on_host: bool) -> Groups:
    """Return the groups with the slices that the partition gives to one side."""
    parameters = [p for group in groups for p in group["params"]]
    shares = partition([p.numel() for p in parameters], settings.host_fraction, settings.partition)
    share_of = dict(zip(parameters, shares, strict=True))
    return [{**group, "slices": list(one_side(group["params"], share_of, on_host=on_host))} for group in groups]


def one_side(
    parameters: list[torch.nn.Parameter], share_of: dict[torch.nn.Parameter, Share], *, on_host: bool
) -> Iterator[Slice]:
    """Yield one side's slices and leave out what has no element there."""
    for parameter in parameters:
        border, end = share_of[parameter].host_elements, share_of[parameter].numel
        start, stop = (0, border) if on_host else (border, end)
        if start < stop:
            yield copy_slice(parameter, start, stop, HOST if on_host else parameter.device)

"""The same steps of one optimizer class in the plain loop on the device and with the step on the host."""

from __future__ import annotations

import inspect
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from distances import farthest
from trials import KERNELS, Trial

from offload_ref import HybridDeviceOptimizer

WARM_UP_STEPS = 10
"""Steps before the one that is judged, so that no state is at its first value."""

MANY_STEPS = 20
"""Steps from the first values, over which rounding adds up."""


@dataclass(frozen=True)
class Snapshot:
    """Weights, what is stepped of them, and torch's state dict."""

    weights: list[torch.Tensor]
    stepped: list[torch.Tensor]
    state: dict[str, Any]


class PlainRun:
    """Everything on the device: the class itself, on fp32 masters where the trial has them."""

    def __init__(self, trial: Trial, device: str) -> None:
        self.trial = trial
        self.weights = trial.weights(device)
        self.stepped = [torch.nn.Parameter(w.detach().float()) for w in self.weights] if trial.masters else self.weights
        self.optimizer = trial.cls(trial.groups(self.stepped), **trial.keywords)

    def step(self, step: int) -> None:
        """Step with the gradients of that number."""
        self.trial.give_gradients(self.weights, step)
        for weight, stepped in zip(self.weights, self.stepped, strict=True):
            stepped.grad = None if weight.grad is None else weight.grad.to(stepped.dtype)
        self.optimizer.step()
        for weight, stepped in zip(self.weights, self.stepped, strict=True):
            weight.data.copy_(stepped.data)

    def snapshot(self) -> Snapshot:
        """Copies of everything that the next step depends on."""
        weights = [weight.detach().clone() for weight in self.weights]
        stepped = [tensor.detach().clone() for tensor in self.stepped]
        return Snapshot(weights, stepped, deepcopy(self.optimizer.state_dict()))

    def load(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot."""
        for own, loaded in zip((*self.weights, *self.stepped), (*snapshot.weights, *snapshot.stepped), strict=True):
            own.data.copy_(loaded)
        self.optimizer.load_state_dict(snapshot.state)

    def results(self) -> list[torch.Tensor]:
        """What has been stepped, on the host: masters where there are some, else weights."""
        return [tensor.detach().cpu() for tensor in self.stepped]


@dataclass
class HostRun:
    """The same with the offloading optimizer, which by default steps everything on the host."""

    trial: Trial
    device: str
    fraction: float = 1.0
    partition: str = "greedy"
    weights: list[torch.nn.Parameter] = field(init=False)
    optimizer: HybridDeviceOptimizer = field(init=False)

    def __post_init__(self) -> None:
        self.weights = self.trial.weights(self.device)
        self.optimizer = HybridDeviceOptimizer(
            self.trial.groups(self.weights),
            offload_fraction=self.fraction,
            partition=self.partition,
            cpu_optimizer_cls=self.trial.cls,
            gpu_optimizer_cls=self.trial.cls,
            param_update_in_fp32=self.trial.masters,
            bucket_bytes=4096,
            **self.trial.keywords,
        )

    def step(self, step: int) -> None:
        """Step with the gradients of that number."""
        self.trial.give_gradients(self.weights, step)
        self.optimizer.step()

    def load(self, snapshot: Snapshot) -> None:
        """Go on from a plain run's snapshot."""
        state = deepcopy(snapshot.state)
        if self.trial.masters:
            for number, master in enumerate(snapshot.stepped):
                state["state"].setdefault(number, {})["master_param"] = master
        for weight, loaded in zip(self.weights, snapshot.weights, strict=True):
            weight.data.copy_(loaded)
        self.optimizer.load_state_dict(state)

    def results(self) -> list[torch.Tensor]:
        """What has been stepped, on the host: masters where there are some, else weights."""
        if not self.trial.masters:
            return [weight.detach().cpu() for weight in self.weights]
        states = self.optimizer.state_dict()["state"]
        return [states[number]["master_param"].detach().cpu() for number in range(len(self.weights))]


def kernels_of(optimizer: str, precision: str, device: str) -> list[str]:
    """The implementations that a class has for a precision, both on the device and on the host."""
    fused = Trial(optimizer, precision, "fused", shapes=((128,),))
    has_fused = all(steps_every_element(fused, side) for side in (device, "cpu"))
    return [kernel for kernel in KERNELS if kernel != "fused" or has_fused]


def steps_every_element(trial: Trial, device: str) -> bool:
    """Whether the class has the trial's implementation on a device, and it moves all weights that have a gradient.

    torch's fused SGD has no such kernel on the host for 16 bits, as of torch 2.13: it leaves every whole vector
    register of weights as it was.
    """
    if not set(KERNELS[trial.kernel]) <= set(inspect.signature(trial.cls).parameters):
        return False
    run = PlainRun(trial, device)
    for tensor in (*run.weights, *run.stepped):
        tensor.data.zero_()
        tensor.grad = torch.ones_like(tensor)
    try:
        run.optimizer.step()
    except RuntimeError:
        return False
    return all(bool((tensor != 0).all()) for tensor in run.results())


def warmed_up(trial: Trial, device: str) -> Snapshot:
    """Where a plain run stands before the step that is judged."""
    plain = PlainRun(trial, device)
    for step in range(WARM_UP_STEPS):
        plain.step(step)
    return plain.snapshot()


def after_one_step(run: PlainRun | HostRun, start: Snapshot, step: int = WARM_UP_STEPS) -> list[torch.Tensor]:
    """What one step from a snapshot gives."""
    run.load(start)
    run.step(step)
    return run.results()


def one_step(trial: Trial, device: str) -> float:
    """How far one host step comes from the device's, from the same state with the same gradients; in ulps."""
    start = warmed_up(trial, device)
    seen = after_one_step(HostRun(trial, device), start)
    expected = after_one_step(PlainRun(trial, device), start)
    return farthest(seen, expected, (tensor.cpu() for tensor in start.stepped))


def one_split_step(trial: Trial, device: str, fraction: float) -> float:
    """How far one host step comes from itself if a parameter is split and both parts are stepped; in ulps."""
    start = warmed_up(trial, device)
    seen = after_one_step(HostRun(trial, device, fraction, "exact"), start)
    expected = after_one_step(HostRun(trial, device), start)
    return farthest(seen, expected, (tensor.cpu() for tensor in start.stepped))


def many_steps(trial: Trial, device: str, steps: int) -> dict[str, float]:
    """How far the device's other kernels, and "host", come from the device's foreach kernel, by name; in ulps.

    The unit is the spacing at the largest magnitude that a weight has on the way.
    """
    foreach = PlainRun(replace(trial, kernel="foreach"), device)
    others = [replace(trial, kernel=kernel) for kernel in ("for-loop", "fused")]
    runs: dict[str, PlainRun | HostRun] = {
        other.kernel: PlainRun(other, device) for other in others if steps_every_element(other, device)
    }
    runs["host"] = HostRun(trial, device)
    largest = [tensor.abs() for tensor in foreach.results()]
    for step in range(steps):
        for run in (foreach, *runs.values()):
            run.step(step)
        largest = [torch.maximum(*both) for both in zip(largest, map(torch.abs, foreach.results()), strict=True)]
    expected = foreach.results()
    return {name: farthest(run.results(), expected, largest) for name, run in runs.items()}

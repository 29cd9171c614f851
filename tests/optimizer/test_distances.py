"""A host step has the bits of the host's kernel, and comes no farther from the device's than the bounds allow."""

from __future__ import annotations

import pytest
import torch
from distances import farthest, many_steps_bound, stated_bounds
from host_steps import (
    MANY_STEPS,
    WARM_UP_STEPS,
    HostRun,
    PlainRun,
    after_one_step,
    kernels_of,
    many_steps,
    one_split_step,
    one_step,
    warmed_up,
)
from machines import Machine
from same_kernel import SameKernel
from trials import COLUMNS, HYPERPARAMETERS, PRECISIONS, Trial

CLASSES = sorted(HYPERPARAMETERS)

each_class = pytest.mark.parametrize("optimizer", CLASSES)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def by_same_kernel(trial: Trial, device: str, fraction: float, partition: str, steps: int) -> list[torch.Tensor]:
    """Weights, then what is stepped, after a training by the same-kernel baseline whose learning rates fall."""
    weights = trial.weights(device)
    baseline = SameKernel(
        trial.groups(weights), fraction, partition, trial.cls, masters=trial.masters, **trial.keywords
    )
    for step in range(steps):
        trial.give_gradients(weights, step)
        baseline.step()
        for group in baseline.param_groups:
            group["lr"] *= 0.9
    return [*(weight.detach().cpu() for weight in weights), *baseline.masters()]


def by_offloading(trial: Trial, device: str, fraction: float, partition: str, steps: int) -> list[torch.Tensor]:
    """The same by the offloading optimizer."""
    run = HostRun(trial, device, fraction, partition)
    for step in range(steps):
        run.step(step)
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.9
    return [*(weight.detach().cpu() for weight in run.weights), *run.results()]


@pytest.mark.requirement("OPT-6", "OPT-10", "OPT-11", "OPT-20")
@pytest.mark.parametrize("partition", ["greedy", "exact"])
@each_precision
@each_class
def test_a_host_step_has_the_bits_of_the_same_kernel(
    machine: Machine, optimizer: str, precision: str, partition: str
) -> None:
    """Four steps equal those of copies stepped on each side, in every implementation, with gradients that are None."""
    with machine.run():
        for kernel in kernels_of(optimizer, precision, machine.device):
            case = (Trial(optimizer, precision, kernel), machine.device, 0.5, partition, 4)
            both = zip(by_offloading(*case), by_same_kernel(*case), strict=True)
            assert all(torch.equal(seen, expected) for seen, expected in both), kernel


@pytest.mark.requirement("OPT-18")
@each_precision
@each_class
def test_one_host_step_is_within_the_bound(machine: Machine, optimizer: str, precision: str) -> None:
    """From the same state a step is as near as stated; on the simulator the same implementation gives the same bits.

    There the device's kernels are the host's. By default torch takes foreach on the device and the loop on the host.
    """
    with machine.run():
        for kernel in kernels_of(optimizer, precision, machine.device):
            trial = Trial(optimizer, precision, kernel)
            same = machine.simulated and kernel != "default"
            bound = 0.0 if same else stated_bounds("OPT-18")[trial.row, trial.column]
            assert one_step(trial, machine.device) <= bound, kernel


@pytest.mark.requirement("OPT-18")
@each_precision
@each_class
def test_a_step_with_other_gradients_is_beyond_the_bound(machine: Machine, optimizer: str, precision: str) -> None:
    """The bound tells a step from one with the gradients of another step."""
    trial = Trial(optimizer, precision)
    with machine.run():
        start = warmed_up(trial, machine.device)
        expected = after_one_step(PlainRun(trial, machine.device), start)
        seen = after_one_step(HostRun(trial, machine.device), start, WARM_UP_STEPS + 5)
        before = [tensor.cpu() for tensor in start.stepped]
    assert farthest(seen, expected, before) > stated_bounds("OPT-18")[optimizer, trial.column]


@pytest.mark.accelerator
@pytest.mark.requirement("OPT-19")
@pytest.mark.parametrize("machine", ["real"], indirect=True)
@each_precision
@each_class
def test_many_host_steps_stay_as_near_as_other_kernels(machine: Machine, optimizer: str, precision: str) -> None:
    """After 20 steps the host is at most twice as far from the device's foreach kernel as its other kernels are."""
    trial = Trial(optimizer, precision)
    with machine.run():
        distances = many_steps(trial, machine.device, MANY_STEPS)
    assert distances["host"] <= many_steps_bound(distances, stated_bounds("OPT-18")[optimizer, trial.column])


@pytest.mark.requirement("OPT-19")
@pytest.mark.parametrize("optimizer", ["NAdam", "RAdam", "ASGD"])
def test_many_steps_are_measured_from_the_same_kernel(optimizer: str) -> None:
    """On the simulator the host's loop and the device's are one kernel, so both are equally far from foreach."""
    machine = Machine("cuda", simulated=True)
    with machine.run():
        distances = many_steps(Trial(optimizer, "float32"), machine.device, MANY_STEPS)
    assert distances["host"] == distances["for-loop"] > 0


@pytest.mark.requirement("OPT-48")
@pytest.mark.parametrize("fraction", [0.3, 0.9])
@pytest.mark.parametrize(("optimizer", "column"), stated_bounds("OPT-48"))
def test_a_split_step_of_a_fused_host_kernel_is_within_the_bound(optimizer: str, column: str, fraction: float) -> None:
    """On the simulator, where both parts are stepped by the host's kernel, the split moves weights by ulps alone."""
    bound = stated_bounds("OPT-48")[optimizer, column]
    machine = Machine("cuda", simulated=True)
    with machine.run():
        if "fused" not in kernels_of(optimizer, column, machine.device):
            pytest.skip(f"this torch has no fused kernel of {optimizer} for the device")
        distances = [
            one_split_step(Trial(optimizer, precision, "fused", seed), machine.device, fraction)
            for precision in PRECISIONS
            for seed in range(4)
            if Trial(optimizer, precision).column == column
        ]
    assert max(distances) <= bound


@pytest.mark.requirement("OPT-18", "OPT-48")
def test_every_class_and_dtype_has_a_bound() -> None:
    """The tables have a cell for each of the eleven classes, and for each fused host kernel that steps all elements."""
    fused = {(name, column) for name in CLASSES for column in COLUMNS if "fused" in kernels_of(name, column, "cpu")}
    stated = set(stated_bounds("OPT-18"))
    assert {one for one in stated if "fused" not in one[0]} == {
        (name, column) for name in CLASSES for column in COLUMNS
    }
    assert {one for one in stated if "fused" in one[0]} >= {(f"{name}, fused", column) for name, column in fused}
    assert set(stated_bounds("OPT-48")) >= {one for one in fused if one[0] != "SGD"}


@pytest.mark.requirement("OPT-18")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_host_kernel_that_leaves_weights_out_counts_as_none(optimizer: str) -> None:
    """Those that count are far less than an update away, which is at least 128 ulps of a weight that was zero."""
    assert many_steps(Trial(optimizer, "bfloat16"), "cpu", 1).get("fused", 0.0) < 64

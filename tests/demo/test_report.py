"""How two runs are compared, and what counts as a failure."""

import math

import pytest
import torch

from offload_ref.demo.report import Comparison, compare, describe_failure, largest_difference
from offload_ref.demo.runs import RunRecord


def record(losses: list[float], weights: dict[str, list[float]]) -> RunRecord:
    """Return a run that left these losses and weights."""
    return RunRecord(
        name="run",
        device="none",
        losses=torch.tensor(losses),
        weights={name: torch.tensor(values) for name, values in weights.items()},
        segments=(),
        pinned_bytes=None,
        traffic=None,
        races=None,
        seconds=0.0,
    )


def test_equal_runs_have_no_difference() -> None:
    """Numbers that are no numbers are equal to themselves bit by bit."""
    same = record([1.0, math.nan], {"w": [1.0, -0.0]})
    assert compare(same, same, 0.0) == Comparison("run", 0.0, 0.0, bit_equal=True, loss_bound=0.0)
    assert compare(same, same, 0.0).passed


def test_the_largest_difference_is_found_anywhere() -> None:
    """It may stand in any step and in any weight."""
    left = record([1.0, 2.0, 3.0], {"a": [0.0, 0.0], "b": [5.0]})
    right = record([1.0, 2.5, 3.25], {"a": [0.0, 1.0], "b": [7.0]})
    comparison = compare(left, right, 0.001)
    assert (comparison.loss_difference, comparison.weight_difference) == (0.5, 2.0)
    assert not comparison.passed


def test_signs_of_zero_are_different_bits() -> None:
    """The same bits are asked for, not equal numbers."""
    comparison = compare(record([0.0], {"w": [0.0]}), record([0.0], {"w": [-0.0]}), 0.0)
    assert comparison.loss_difference == comparison.weight_difference == 0.0
    assert not comparison.passed


@pytest.mark.parametrize("bound", [0.0, 0.001])
def test_what_is_no_number_keeps_no_bound(bound: float) -> None:
    """A loss of NaN on one side alone is infinitely far away."""
    comparison = compare(record([math.nan], {"w": [1.0]}), record([1.0], {"w": [1.0]}), bound)
    assert comparison.loss_difference == math.inf
    assert not comparison.passed


def test_a_bound_is_not_reached() -> None:
    """The difference has to stay below it."""
    assert Comparison("plain", 0.000999, 5.0, bit_equal=False, loss_bound=0.001).passed
    assert not Comparison("plain", 0.001, 0.0, bit_equal=False, loss_bound=0.001).passed


def test_a_failure_names_bound_and_differences() -> None:
    """Its one line says what was compared, what was required and what was seen."""
    line = describe_failure(Comparison("same-kernel", 0.25, 0.5, bit_equal=False, loss_bound=0.0))
    assert all(part in line for part in ("same-kernel", "the same bits", "0.25", "0.5"))


def test_bf16_weights_are_compared_as_they_are() -> None:
    """One unit in the last place is a difference."""
    left = torch.tensor([1.0], dtype=torch.bfloat16)
    right = torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert largest_difference(left, right) == 0.0078125

"""What the three runs say together: differences, memory, and whether the demo passed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from offload_ref.demo.memory import MemoryReport
    from offload_ref.demo.runs import RunRecord
    from offload_ref.demo.settings import DemoSettings

FORMAT = 1
"""Version of the JSON file; it grows when a key changes its meaning or goes."""

LOSS_BOUND = 0.001
"""Largest difference in loss, in nats, that another kernel on the host may make with fp32 weights."""

BASELINES = ("plain", "same-kernel")
"""The runs that the offloaded one is compared with."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The offloaded run against one baseline.

    Attributes:
        baseline: name of the run compared with.
        loss_difference: largest over the steps, in nats.
        weight_difference: largest over all final weights.
        bit_equal: whether losses and weights have the same bits.
        loss_bound: what ``loss_difference`` has to stay below; 0.0 asks for the same bits.
    """

    baseline: str
    loss_difference: float
    weight_difference: float
    bit_equal: bool
    loss_bound: float

    @property
    def passed(self) -> bool:
        """Whether the bound is kept; a loss that is no number keeps none."""
        return self.bit_equal if self.loss_bound == 0 else self.loss_difference < self.loss_bound


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything that the tables and the JSON file show."""

    settings: DemoSettings
    device: str
    simulated: bool
    runs: dict[str, RunRecord]
    comparisons: dict[str, Comparison]
    memory: MemoryReport

    @property
    def races(self) -> list[str]:
        """The races of all runs, the baselines' included."""
        return [f"{name}: {race}" for name, run in self.runs.items() for race in run.races or ()]

    @property
    def diverged(self) -> list[str]:
        """The runs with a loss that is no finite number."""
        return [name for name, run in self.runs.items() if not torch.isfinite(run.losses).all()]

    @property
    def offloads(self) -> bool:
        """Whether the settings offload anything."""
        return self.settings.offloaded_layers > 0 or self.settings.host_fraction > 0

    @property
    def failures(self) -> list[str]:
        """Why the demo failed, one line each; empty if it passed."""
        wrong = [describe_failure(each) for each in self.comparisons.values() if not each.passed]
        wrong += [f"{name}: a loss is no finite number, which proves nothing" for name in self.diverged]
        return wrong + ([f"{len(self.races)} race(s) found"] if self.races else [])

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values; sizes in bytes, times in seconds, losses in nats."""
        return {
            "format": FORMAT,
            "device": {"name": self.device, "simulated": self.simulated},
            "settings": asdict(self.settings),
            "runs": {name: run.as_json() for name, run in self.runs.items()},
            "comparisons": {name: {**asdict(c), "passed": c.passed} for name, c in self.comparisons.items()},
            "memory": self.memory.as_json(),
            "races": self.races,
            "failures": self.failures,
            "passed": not self.failures,
        }


def describe_failure(comparison: Comparison) -> str:
    """Return one line that says which bound was missed and by what."""
    bound = "the same bits" if comparison.loss_bound == 0 else f"a loss difference below {comparison.loss_bound:.3g}"
    return (
        f"offloaded against {comparison.baseline}: {bound} required, largest difference in loss "
        f"{comparison.loss_difference:.3g}, in weights {comparison.weight_difference:.3g}"
    )


def compare(offloaded: RunRecord, baseline: RunRecord, loss_bound: float) -> Comparison:
    """Compare losses and final weights."""
    pairs = [(offloaded.weights[name], weight) for name, weight in baseline.weights.items()]
    losses = (offloaded.losses, baseline.losses)
    return Comparison(
        baseline=baseline.name,
        loss_difference=largest_difference(*losses),
        weight_difference=max(largest_difference(*pair) for pair in pairs),
        bit_equal=all(same_bits(*pair) for pair in [*pairs, losses]),
        loss_bound=loss_bound,
    )


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return max |left - right|; infinity where one side is no number and the other side's bits differ."""
    if same_bits(left, right):
        return 0.0
    difference = (left.double() - right.double()).abs().nan_to_num(nan=float("inf"))
    return float(difference.max())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))

"""Peak device bytes, predicted from the run without offloading and held against the measured ones.

Between two points of the program the prediction takes the baseline's ledger, leaves out the masters and states
that the plan puts on the host and the activations that the offloading's records say are away, less those that
are there again. Only the optimizer step is different: it works on the device share alone, so its temporaries
are those of a rehearsal with that share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offload_ref.demo.probe import Segment
from offload_ref.demo.settings import DemoSettings
from offload_ref.demo.training import STEP
from offload_ref.planner import OptimizerSettings, Parameter, predict


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """Device bytes that the optimizer takes less than the baseline's, and what a step takes for a while.

    Attributes:
        absent_before: masters that the baseline makes at once and the offloaded run at its first step.
        saved_after: masters and states on the host, from the first step on.
        first_step: most bytes of the first step over those before it; masters and states are made in it.
        later_step: most bytes of any later step over those before it.
    """

    absent_before: int
    saved_after: int
    first_step: int
    later_step: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Peak device bytes of the whole training.

    Attributes:
        baseline: measured without offloading.
        offloaded: measured with it.
        predicted: predicted for it.
        states_moved: masters and states that live on the host, according to the plan.
        activations_moved: activations that are away when the predicted peak is reached.
        predicted_at: the point of the program where it is reached.
    """

    baseline: int
    offloaded: int
    predicted: int
    states_moved: int
    activations_moved: int
    predicted_at: str

    @property
    def saved(self) -> int:
        """Measured saving."""
        return self.baseline - self.offloaded

    @property
    def predicted_saving(self) -> int:
        """Predicted saving."""
        return self.baseline - self.predicted

    def as_json(self) -> dict[str, Any]:
        """Return all figures in bytes."""
        return {**asdict(self), "saved": self.saved, "predicted_saving": self.predicted_saving}


def plan_optimizer(settings: DemoSettings, sizes: Sequence[int], rehearsed: tuple[int, int]) -> OptimizerPlan:
    """Ask the planner what the fraction saves.

    Args:
        settings: fraction, partition and dtypes.
        sizes: elements of each parameter, in the order of the optimizer's groups.
        rehearsed: bytes that the first and a later step of the device share took, masters made before.
    """
    if not settings.config.optimizer.optimizer_cpu_offload:
        return OptimizerPlan(0, 0, *rehearsed)
    parameters = [Parameter(size, "bfloat16" if settings.bf16 else "float32") for size in sizes]
    optimizer = OptimizerSettings(param_update_in_fp32=settings.bf16)
    without, plan = (
        predict(parameters, fraction, partition=settings.partition, settings=optimizer)
        for fraction in (0, settings.host_fraction)
    )
    first, later = rehearsed
    return OptimizerPlan(without.device_masters, plan.saved, plan.device_masters + first, later)


def predict_segments(baseline: Sequence[Segment], offloaded: Sequence[Segment], plan: OptimizerPlan) -> list[int]:
    """Return the predicted peak of each segment of the offloaded run, in bytes.

    Of the offloaded run only the records of what is away are used, never a measured byte.
    """
    predicted, saved, step = [], plan.absent_before, plan.first_step
    for without, records in zip(baseline, offloaded, strict=True):
        if without.point == STEP:
            predicted.append(without.start_bytes - saved + step)
            saved, step = plan.saved_after, plan.later_step
        else:
            at_start = without.start_bytes - records.away_bytes
            later = without.peak_bytes - records.next_away_bytes
            predicted.append(max(at_start, later) - saved)
    return predicted


def report_memory(baseline: Sequence[Segment], offloaded: Sequence[Segment], plan: OptimizerPlan) -> MemoryReport:
    """Compare the largest predicted peak with the measured ones."""
    predicted = predict_segments(baseline, offloaded, plan)
    highest = max(range(len(predicted)), key=predicted.__getitem__)
    return MemoryReport(
        baseline=max(segment.peak_bytes for segment in baseline),
        offloaded=max(segment.peak_bytes for segment in offloaded),
        predicted=predicted[highest],
        states_moved=plan.saved_after,
        activations_moved=offloaded[highest].next_away_bytes,
        predicted_at=offloaded[highest].point,
    )

"""The report as tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from offload_ref.demo.report import Comparison, DemoReport
    from offload_ref.demo.runs import RunRecord

LOSS_ROWS = 5
"""Steps whose losses are shown: the first, the last, and some between them."""

WHY_PLAIN_DIFFERS = (
    "plain is not 0 on a real accelerator: the host's kernel steps the host share and rounds differently; "
    "same-kernel has the same kernel do it."
)
"""Shown where the host's kernels replace the device's."""


def show(report: DemoReport, console: Console) -> None:
    """Print the losses, the differences, the memory and the verdict."""
    for table in (losses(report), differences(report), memory(report), work(report)):
        console.print(table)
    for note in notes(report):
        console.print(note)


def losses(report: DemoReport) -> Table:
    """Return the losses of some steps, one column per run."""
    table = Table(title=f"Loss in nats per byte, on {report.device}")
    table.add_column("step", justify="right")
    for name in report.runs:
        table.add_column(name, justify="right")
    last = report.settings.steps - 1
    for step in sorted({round(last * row / (LOSS_ROWS - 1)) for row in range(LOSS_ROWS)}):
        table.add_row(str(step + 1), *(f"{float(run.losses[step]):.6f}" for run in report.runs.values()))
    return table


def differences(report: DemoReport) -> Table:
    """Return the largest differences from each baseline, with their bounds."""
    table = Table(title="Largest difference of the offloaded run")
    table.add_column("against")
    for heading in ("in loss", "in weights", "required", "verdict"):
        table.add_column(heading, justify="right")
    for comparison in report.comparisons.values():
        table.add_row(
            comparison.baseline,
            f"{comparison.loss_difference:.3g}",
            f"{comparison.weight_difference:.3g}",
            requirement(comparison),
            "passed" if comparison.passed else "FAILED",
        )
    return table


def requirement(comparison: Comparison) -> str:
    """Return the bound in words."""
    return "the same bits" if comparison.loss_bound == 0 else f"loss below {comparison.loss_bound:.3g}"


def memory(report: DemoReport) -> Table:
    """Return the peaks of device memory, measured and predicted."""
    table = Table(title="Peak device memory in bytes")
    for heading in ("baseline", "offloaded", "predicted", "saved", "saving predicted"):
        table.add_column(heading, justify="right")
    peaks = report.memory
    figures = (peaks.baseline, peaks.offloaded, peaks.predicted, peaks.saved, peaks.predicted_saving)
    table.add_row(*(f"{figure:,}" for figure in figures))
    return table


def work(report: DemoReport) -> Table:
    """Return what each run took: memory, copies, races, seconds."""
    table = Table(title="Each run")
    table.add_column("")
    for name in report.runs:
        table.add_column(name, justify="right")
    for heading, figure in FIGURES.items():
        table.add_row(heading, *(figure(run, report.settings.steps) for run in report.runs.values()))
    return table


def counted(figure: float | None) -> str:
    """Return a figure with separators, or say that nobody counts it."""
    return "not counted" if figure is None else f"{figure:,.0f}"


def per_step(run: RunRecord, field: str, steps: int) -> str:
    """Return one figure of the traffic, divided by the steps."""
    return counted(None if run.traffic is None else getattr(run.traffic, field) / steps)


FIGURES: dict[str, Callable[[RunRecord, int], str]] = {
    "peak device bytes": lambda run, _: counted(run.peak_bytes),
    "peak pinned host bytes": lambda run, _: counted(run.pinned_bytes),
    "copies to the host per step": lambda run, steps: per_step(run, "d2h_copies", steps),
    "bytes to the host per step": lambda run, steps: per_step(run, "d2h_bytes", steps),
    "copies to the device per step": lambda run, steps: per_step(run, "h2d_copies", steps),
    "bytes to the device per step": lambda run, steps: per_step(run, "h2d_bytes", steps),
    "races found": lambda run, _: counted(None if run.races is None else len(run.races)),
    "seconds": lambda run, _: f"{run.seconds:.1f}",
}
"""Row of the table -> how a run fills it, given the number of steps."""


def notes(report: DemoReport) -> Iterator[str]:
    """Yield what the tables cannot say: where the peak lies, why a difference is there, what failed."""
    peaks = report.memory
    yield "The baseline of the memory table is plain; copies include batches, losses and first-step set-up."
    yield (
        f"Predicted peak: at the {peaks.predicted_at}, with {peaks.states_moved:,} bytes of states "
        f"on the host and {peaks.activations_moved:,} bytes of activations away."
    )
    if not report.simulated and report.settings.host_fraction > 0:
        yield WHY_PLAIN_DIFFERS
    yield from (f"Note: {note}" for note in report.settings.notes)
    yield from report.races
    yield from (f"FAILED: {failure}" for failure in report.failures)
    if not report.failures:
        yield "Passed: offloading changed nothing." if report.offloads else "Passed, but nothing was offloaded."

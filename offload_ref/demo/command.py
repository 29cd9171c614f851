"""The command ``offload-ref demo``: its options and exit codes. Torch is loaded once the options are read."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path  # typer reads the annotations
from typing import Annotated, Any

import typer

from offload_ref.demo.settings import RULE, DemoSettings, resolve
from offload_ref.errors import DemoSettingError, NoAcceleratorError, OffloadError, OffloadValueError, UnsupportedError

BAD_INPUT = (OffloadValueError, NoAcceleratorError, UnsupportedError)
"""Errors of a run that say what it was wrongly asked for; every other one is a defect."""

EXIT_FAILED = 1
"""A difference above its bound, or a race."""

EXIT_BAD_INPUT = 2
"""The demo was asked for what it cannot do."""

WORKSPACE_CONFIG = ":4096:8"
"""The workspaces with which cuBLAS is deterministic; it has to be set before CUDA starts."""


DEFAULT: dict[str, Any] = {field.name: field.default for field in fields(DemoSettings)}
"""The demo's own defaults, by the name of the option."""


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FIELD=VALUE]...", help="Fields of Megatron's configuration, such as optimizer.pin_cpu_grads=false."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Transformer layers, L.", show_default="4")]
OffloadLayers = Annotated[
    int | None, typer.Option(help="K, 0 <= K < L: the first K layers' activations move.", show_default="half of L")
]
Fraction = Annotated[
    float | None, typer.Option(help="Part of the optimizer's states on the host, 0 to 1.", show_default="0.5")
]
Partition = Annotated[str, typer.Option(help="greedy: whole parameters, as Megatron; exact: one is split.")]
Device = Annotated[str, typer.Option(help="auto (an accelerator if there is one), simulated, or a device type.")]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="How late simulated streams run: eager (at once), lazy (last), starve:NAME (default, stream1, ...).",
        show_default="lazy",
    ),
]
Steps = Annotated[int, typer.Option(help="Training steps.")]
Hidden = Annotated[int, typer.Option(help="Width of the model.")]
Heads = Annotated[int, typer.Option(help="Attention heads, a divisor of the width.")]
Sequence = Annotated[int, typer.Option(help="Bytes of text per sample.")]
Batch = Annotated[int, typer.Option(help="Samples per micro-batch.")]
Accumulation = Annotated[int, typer.Option(help="Micro-batches per step.")]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
MinOffloadBytes = Annotated[int, typer.Option(help="Activations of fewer bytes stay on the device.")]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights.")]
DataSeed = Annotated[int, typer.Option(help="Seed of the batches.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="bf16 weights with fp32 masters.")]
Foreach = Annotated[bool, typer.Option("--foreach", help="AdamW's foreach kernels.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures there.")]


def demo(
    overrides: Overrides = None,
    *,
    layers: Layers = None,
    offload_layers: OffloadLayers = None,
    fraction: Fraction = None,
    partition: Partition = DEFAULT["partition"],
    device: Device = DEFAULT["device"],
    schedule: Schedule = None,
    steps: Steps = DEFAULT["steps"],
    hidden: Hidden = DEFAULT["hidden"],
    heads: Heads = DEFAULT["heads"],
    sequence: Sequence = DEFAULT["sequence"],
    batch: Batch = DEFAULT["batch"],
    accumulation: Accumulation = DEFAULT["accumulation"],
    learning_rate: LearningRate = DEFAULT["learning_rate"],
    min_offload_bytes: MinOffloadBytes = DEFAULT["min_offload_bytes"],
    seed: Seed = DEFAULT["seed"],
    data_seed: DataSeed = DEFAULT["data_seed"],
    bf16: Bf16 = False,
    foreach: Foreach = False,
    json_file: JsonFile = None,
) -> None:
    """Train a byte-level GPT three times and prove that offloading changes no bit.

    The text is the Python standard library's own source. The runs are plain (no offloading), same-kernel (no
    offloading, but the host's kernels step what offloading would move there) and offloaded. Exit code 1: a
    difference above its bound, or a race; 2: bad input.
    """
    options = {name: value for name, value in locals().items() if name != "json_file"}
    options["overrides"] = overrides or []
    try:
        check_writable(json_file)
        settings = resolve(**options)
    except OffloadError as error:
        raise refused(error) from None
    try:
        failed = execute(settings, json_file)
    except BAD_INPUT as error:
        raise refused(error) from None
    raise typer.Exit(EXIT_FAILED if failed else 0)


def execute(settings: DemoSettings, path: Path | None) -> bool:
    """Run the demo, show it, write the file if one is wanted, and return whether anything failed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE_CONFIG)
    from rich.console import Console  # noqa: PLC0415  # comes with an extra
    from rich.progress import Progress  # noqa: PLC0415  # as above

    from offload_ref.demo.runs import STEPPERS, prepare, run_demo  # noqa: PLC0415  # imports torch
    from offload_ref.demo.tables import show  # noqa: PLC0415  # imports torch

    experiment = prepare(settings)
    console = Console()
    with Progress(console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=settings.steps) for name in STEPPERS}
        report = run_demo(experiment, lambda name: progress.advance(tasks[name]))
    show(report, console)
    if path is not None:
        path.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return bool(report.failures)


def check_writable(path: Path | None) -> None:
    """Refuse a file that could not be written, before minutes are spent on its content."""
    if path is None:
        return
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise DemoSettingError("--json", seen=str(path), required="a file in a writable folder", rule=RULE)


def refused(error: Exception) -> typer.Exit:
    """Print an error's text and its notes on one line, and return what ends the command."""
    line = " ".join("; ".join([str(error), *getattr(error, "__notes__", ())]).split())
    typer.echo(f"offload-ref demo: {line}", err=True)
    return typer.Exit(EXIT_BAD_INPUT)

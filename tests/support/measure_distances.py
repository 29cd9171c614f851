"""Measure what the tables of the specification bound, and print rows that fit them.

``python measure_distances.py`` takes the current accelerator: the largest distance of one host step (OPT-18), the bound
that the margin rule makes of it, and how far N host steps come beside the device's other kernels (OPT-19).
``python measure_distances.py split`` takes the simulator: the largest distance of a split step (OPT-48).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch  # noqa: E402 - the paths above come first, for the project may not be installed
from distances import bound_of, many_steps_bound, stated_bounds  # noqa: E402
from host_steps import MANY_STEPS, kernels_of, many_steps, one_split_step, one_step  # noqa: E402
from trials import COLUMNS, HYPERPARAMETERS, PRECISIONS, SHAPES, Trial  # noqa: E402

from offload_ref.simulator import Simulator  # noqa: E402

SEEDS = 20
"""Draws of weights and gradients for one step."""

SEEDS_OF_SPLIT_STEPS = 100
"""The same for one split step; each has a fraction of its own."""

SEEDS_OF_MANY_STEPS = 4
"""The same for many steps, which take longer."""

SIZES = (SHAPES, ((129, 65), (2, 3, 5), (16,), (1,)))
"""Shapes of parameters, in turn."""


def say(line: str) -> None:
    """Print at once, so that a run that is cut short has told what it knew."""
    print(line, flush=True)  # noqa: T201 - it is a script


def trials(optimizer: str, precision: str, kernel: str, seeds: int) -> Iterator[Trial]:
    """One trial per seed."""
    for seed in range(seeds):
        yield Trial(optimizer, precision, kernel, seed, SIZES[seed % len(SIZES)])


def farthest_one_step(optimizer: str, device: str, seeds: int) -> dict[str, dict[str, tuple[float, str]]]:
    """Row -> dtype stepped -> the largest distance of one host step over all draws, and in which implementation."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for precision in PRECISIONS:
        for kernel in kernels_of(optimizer, precision, device):
            for trial in trials(optimizer, precision, kernel, seeds):
                of_row = found.setdefault(trial.row, {})
                of_row[trial.column] = max(of_row.get(trial.column, (0.0, "all")), (one_step(trial, device), kernel))
    return found


def row(name: str, cells: Iterable[str]) -> str:
    """A row of a markdown table."""
    return "| " + " | ".join([name, *cells]) + " |"


def measure_one_step(device: str, seeds: int) -> None:
    """Print the distances of one host step, then the bounds that the rule makes of them."""
    say("\nOne host step, largest distance in ulps and its implementation, and the stated bound where it is exceeded")
    say(row("class", COLUMNS))
    stated, found = stated_bounds("OPT-18"), {}
    for optimizer in HYPERPARAMETERS:
        for name, pairs in farthest_one_step(optimizer, device, seeds).items():
            found[name] = pairs
            cells = ((*pairs.get(column, (0.0, "none")), stated.get((name, column), 0.0)) for column in COLUMNS)
            say(row(name, (f"{d:g} {kernel}{f' > {bound:g}' if d > bound else ''}" for d, kernel, bound in cells)))
    say("\nBounds by the margin rule, for the table of OPT-18")
    say(row("class", COLUMNS))
    for name, pairs in found.items():
        say(row(name, (f"{bound_of(pairs[column][0]):g}" if column in pairs else "-" for column in COLUMNS)))


def ratio(distances: dict[str, float]) -> float:
    """The host's distance to that of the device's farthest other kernel."""
    host, other = distances["host"], max(distance for name, distance in distances.items() if name != "host")
    return host / other if other else math.inf if host else 0.0


def of_many_steps(optimizer: str, precision: str, device: str, seeds: int) -> str:
    """The draw in which the host goes farthest beside the device's other kernels; marked if OPT-19 forbids it."""
    drawn = list(trials(optimizer, precision, "default", seeds))
    bound = stated_bounds("OPT-18")[optimizer, drawn[0].column]
    worst = max((many_steps(trial, device, MANY_STEPS) for trial in drawn), key=ratio)
    told = ", ".join(f"{name} {distance:.3g}" for name, distance in worst.items())
    return f"{told}: {ratio(worst):.2g}{' too far' if worst['host'] > many_steps_bound(worst, bound) else ''}"


def measure_many_steps(device: str, seeds: int) -> None:
    """Print how far the host and the device's other kernels come from the device's foreach kernel."""
    say(f"\n{MANY_STEPS} steps, distances from the device's foreach kernel in ulps: the host's to the farthest other")
    say(row("class", PRECISIONS))
    for optimizer in HYPERPARAMETERS:
        cells = (of_many_steps(optimizer, precision, device, seeds) for precision in PRECISIONS)
        say(row(optimizer, cells))


def farthest_split_step(optimizer: str, device: str, seeds: int) -> dict[str, float]:
    """The largest distance of one split step of a fused kernel, by the dtype stepped; no fused kernel, no entry."""
    found: dict[str, float] = {}
    for precision in PRECISIONS:
        if "fused" in kernels_of(optimizer, precision, device):
            for trial in trials(optimizer, precision, "fused", seeds):
                distance = one_split_step(trial, device, (trial.seed + 0.5) / seeds)
                found[trial.column] = max(found.get(trial.column, 0.0), distance)
    return found


def measure_split_step(device: str, seeds: int) -> None:
    """Print the distances of one split step and the bounds that the rule makes of them."""
    say("One split step of a fused host kernel, largest distance in ulps -> bound")
    say(row("class", COLUMNS))
    for optimizer in HYPERPARAMETERS:
        if found := farthest_split_step(optimizer, device, seeds):
            pairs = [(found[column], bound_of(found[column])) if column in found else None for column in COLUMNS]
            say(row(optimizer, ("-" if pair is None else "{:g} -> {:g}".format(*pair) for pair in pairs)))


def measure_on_accelerator() -> None:
    """Measure what needs a real device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        sys.exit("this machine has no accelerator: there is nothing to measure")
    started = time.perf_counter()
    name = getattr(torch.get_device_module(accelerator), "get_device_name", lambda: accelerator.type)()
    say(f"torch {torch.__version__}, {name}")
    measure_one_step(accelerator.type, SEEDS)
    measure_many_steps(accelerator.type, SEEDS_OF_MANY_STEPS)
    say(f"\n{time.perf_counter() - started:.0f} s")


def main(arguments: list[str]) -> None:
    """Measure as the command line says, on one host thread."""
    torch.set_num_threads(1)
    if arguments == ["split"]:
        with Simulator(device_type="cuda"):
            measure_split_step("cuda", SEEDS_OF_SPLIT_STEPS)
    else:
        measure_on_accelerator()


if __name__ == "__main__":
    main(sys.argv[1:])

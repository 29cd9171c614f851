"""Measure on the current accelerator what the tables of OPT-18 and OPT-19 bound: ``python measure_distances.py``.

It prints, in rows that fit the specification, the largest distance of one host step, the bound that the margin rule
makes of it, and how far N host steps come beside another kernel of the device.
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
from host_steps import (  # noqa: E402
    HYPERPARAMETERS,
    MANY_STEPS,
    PRECISIONS,
    SHAPES,
    Trial,
    kernels_of,
    many_steps,
    one_step,
)

COLUMNS = ("float32", "float64", "bfloat16", "float16")
"""The dtypes that are stepped: with masters it is float32."""

SEEDS = 20
"""Draws of weights and gradients for one step."""

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


def farthest_one_step(optimizer: str, device: str, seeds: int) -> dict[str, tuple[float, str]]:
    """The largest distance of one host step over all draws, and in which implementation, by the dtype stepped."""
    found = dict.fromkeys(COLUMNS, (0.0, "all"))
    for precision in PRECISIONS:
        for kernel in kernels_of(optimizer, precision, device):
            for trial in trials(optimizer, precision, kernel, seeds):
                distance = one_step(trial, device)
                if distance > found[trial.column][0]:
                    found[trial.column] = (distance, kernel)
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
        found[optimizer] = farthest_one_step(optimizer, device, seeds)
        cells = ((*pair, stated[optimizer, column]) for column, pair in found[optimizer].items())
        say(row(optimizer, (f"{d:g} {kernel}{f' > {bound:g}' if d > bound else ''}" for d, kernel, bound in cells)))
    say("\nBounds by the margin rule, for the table of OPT-18")
    say(row("class", COLUMNS))
    for optimizer, pairs in found.items():
        say(row(optimizer, (f"{bound_of(distance):g}" for distance, _kernel in pairs.values())))


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


def main() -> None:
    """Measure on the current accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        sys.exit("this machine has no accelerator: there is nothing to measure")
    torch.set_num_threads(1)
    started = time.perf_counter()
    name = getattr(torch.get_device_module(accelerator), "get_device_name", lambda: accelerator.type)()
    say(f"torch {torch.__version__}, {name}")
    measure_one_step(accelerator.type, SEEDS)
    measure_many_steps(accelerator.type, SEEDS_OF_MANY_STEPS)
    say(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()

"""How far two results of one step are apart, in units in the last place, and the bounds that the spec states."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch

CHAPTER = Path(__file__).parents[2] / "spec" / "30-optimizer.md"
"""Where the bounds stand, and nowhere else."""


def spacing(magnitude: torch.Tensor) -> torch.Tensor:
    """The distance from each magnitude to the next larger number of its dtype, as float64.

    Below the smallest normal number all numbers are equally far apart.
    """
    facts = torch.finfo(magnitude.dtype)
    normal = magnitude.abs().double().clamp_min(facts.smallest_normal)
    _fraction, exponent = torch.frexp(normal)  # normal == fraction * 2 ** exponent, and fraction is in [0.5, 1)
    return torch.ldexp(torch.full_like(normal, facts.eps), exponent - 1)


def ulps(seen: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The distance of each element, as float64, in spacings of the dtype at the larger of the two expected magnitudes.

    A step adds an update to ``before``. Where the sum is nearly zero, the rounding of its two terms is large beside
    the result: there the spacing at the result alone would call the best of kernels millions of units wrong. The
    spacing at the larger of the weights before and after is what one rounding of that sum can cost. What is no
    number, or infinite on one side alone, is infinitely far away.
    """
    magnitude = torch.maximum(before.abs(), expected.abs())
    distance = (seen.double() - expected.double()).abs() / spacing(magnitude)
    return torch.where(seen == expected, 0.0, distance.nan_to_num(nan=torch.inf, posinf=torch.inf))


def farthest(seen: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], before: Iterable[torch.Tensor]) -> float:
    """The largest distance of any element of any tensor, in ulps; 0.0 if and only if all are equal."""
    triples = zip(seen, expected, before, strict=True)
    return max((float(ulps(*triple).max()) for triple in triples if triple[0].numel()), default=0.0)


def bound_of(distance: float) -> float:
    """The margin rule: the smallest power of two that is at least 1 and not below twice the largest distance seen."""
    if not math.isfinite(distance):
        return distance
    return 2.0 ** max(0, math.ceil(math.log2(2 * distance))) if distance else 1.0


def many_steps_bound(distances: dict[str, float], one_step_bound: float) -> float:
    """What OPT-19 allows "host", beside the distances of the device's other kernels and the bound of one step."""
    return 2 * max(one_step_bound, *(distance for name, distance in distances.items() if name != "host"))


def stated_bounds(requirement: str) -> dict[tuple[str, str], float]:
    """The table under a requirement's heading: (class, dtype) -> bound in ulps; a dash states none."""
    text = CHAPTER.read_text(encoding="utf-8")
    section = text.split(f"### {requirement}: ", 1)[1].split("\n### ", 1)[0]
    lines = [line.strip("| ").split("|") for line in re.findall(r"^\|.*\|$", section, flags=re.MULTILINE)]
    (_class, *dtypes), _rule, *rows = ([cell.strip() for cell in line] for line in lines)
    return {
        (name, dtype): float(cell)
        for name, *cells in rows
        for dtype, cell in zip(dtypes, cells, strict=True)
        if cell != "-"
    }

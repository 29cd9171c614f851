"""The ruler that host steps are measured with, the margin rule, and the script that measures."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import measure_distances
import pytest
import torch
from distances import bound_of, farthest, many_steps_bound, spacing, ulps
from machines import Machine
from trials import COLUMNS

pytestmark = pytest.mark.requirement("OPT-18")

KNOWN_SPACINGS = [
    (torch.float32, 1.0, 2.0**-23),
    (torch.float32, 3.0, 2.0**-22),
    (torch.float32, -0.75, 2.0**-24),
    (torch.float32, 0.0, 2.0**-149),
    (torch.float32, 2.0**-126, 2.0**-149),
    (torch.float64, 1.0, 2.0**-52),
    (torch.float64, 0.0, 2.0**-1074),
    (torch.bfloat16, 1.0, 2.0**-7),
    (torch.float16, 1.0, 2.0**-10),
    (torch.float16, 1e-6, 2.0**-24),
]


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "magnitude", "expected"), KNOWN_SPACINGS)
def test_spacing_at_known_numbers(dtype: torch.dtype, magnitude: float, expected: float) -> None:
    """The spacing doubles at each power of two and is constant below the smallest normal number."""
    assert spacing(torch.tensor(magnitude, dtype=dtype)).item() == expected


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spacing_is_the_step_to_the_next_number(dtype: torch.dtype) -> None:
    """From any number upwards, the next one is a spacing away."""
    numbers = 10 ** torch.linspace(-44, 38, 1001, dtype=dtype)
    following = torch.nextafter(numbers, torch.full_like(numbers, math.inf))
    assert torch.equal(spacing(numbers), following.double() - numbers.double())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "expected", "seen", "distance"),
    [
        (1.0, 1.0, 1.0, 0.0),
        (1.0, 1.0, 1.0 + 2**-23, 1.0),
        (1.0, 1.0, 1.0 - 2**-24, 0.5),
        (0.0, 1.0, 1.0 - 3 * 2**-23, 3.0),
        (1.0, 2**-23, 0.0, 1.0),
        (0.0, 2**-23, 0.0, 2.0**23),
        (4.0, 1.0, 1.0 + 2**-21, 1.0),
        (0.0, 0.0, 2**-149, 1.0),
        (0.0, math.inf, math.inf, 0.0),
        (0.0, 1.0, math.inf, math.inf),
        (0.0, math.inf, 1.0, math.inf),
        (0.0, math.nan, 1.0, math.inf),
        (0.0, math.nan, math.nan, math.inf),
    ],
)
def test_known_distances(before: float, expected: float, seen: float, distance: float) -> None:
    """The unit is the spacing at the larger magnitude before and after; what is no number is infinitely far."""
    assert ulps(*(torch.tensor([number]) for number in (seen, expected, before))).item() == distance


@pytest.mark.quick
def test_the_farthest_element_of_all_tensors_counts() -> None:
    """Tensors without elements are no farther than others."""
    expected = [torch.ones(2), torch.ones(0), torch.ones(())]
    seen = [torch.ones(2), torch.ones(0), torch.tensor(1 + 2**-22)]
    assert farthest(seen, expected, expected) == 2
    assert farthest(expected, expected, expected) == 0


@pytest.mark.quick
@pytest.mark.parametrize(("distance", "bound"), [(0, 1), (0.3, 1), (0.5, 1), (1, 2), (1.5, 4), (2, 4), (math.inf,) * 2])
def test_the_margin_rule(distance: float, bound: float) -> None:
    """Twice the distance, up to the next power of two, and at least 1."""
    assert bound_of(distance) == bound


@pytest.mark.quick
@pytest.mark.requirement("OPT-19")
def test_many_steps_may_go_twice_as_far_as_the_other_kernels_or_the_bound() -> None:
    """Whichever is farther; how far the host goes makes no difference."""
    assert many_steps_bound({"for-loop": 3, "fused": 5, "host": 100}, 4) == 10
    assert many_steps_bound({"for-loop": 0, "host": 100}, 4) == 8


@pytest.mark.requirement("OPT-19")
def test_the_script_measures() -> None:
    """On the simulator Rprop, which rounds once, is nowhere different; in NAdam the loop differs from foreach."""
    machine = Machine("cuda", simulated=True)
    with machine.run():
        (nowhere,) = measure_distances.farthest_one_step("Rprop", machine.device, 2).values()
        assert [nowhere[column][0] for column in COLUMNS] == [0.0] * len(COLUMNS)
        assert measure_distances.farthest_one_step("NAdam", machine.device, 1)["NAdam"]["float32"][1] == "default"
        assert measure_distances.of_many_steps("Rprop", "float32", machine.device, 1) == "for-loop 0, host 0: 0"
        assert measure_distances.of_many_steps("NAdam", "float32", machine.device, 2).endswith(": 1")


def test_the_script_says_in_one_line_that_there_is_no_accelerator(tmp_path: Path) -> None:
    """It runs from any directory, in an environment that knows nothing of the project."""
    script = Path(measure_distances.__file__)
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == ["this machine has no accelerator: there is nothing to measure"]

"""Bad arguments of partition, schedule and planner: refused by class, with arguments and results as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from refusing import Case, Plain, assert_arguments_kept, case

from offload_ref import partition, planner, schedule, timeline
from offload_ref.errors import DtypeError, FractionError, LayerCountError, PartitionModeError, SizeError

P: Any = planner
"""The planner without its types, for arguments of wrong ones."""

RULES: dict[str, Any] = {"greedy": partition.greedy, "exact": partition.exact, "partition": partition.partition}
"""Name -> what divides sizes by a fraction."""

COUNTERS: dict[str, Any] = {
    "Schedule": schedule.Schedule,
    "check": schedule.check_num_layers,
    "events": timeline.events,
}
"""Name -> what takes K and L."""


def good() -> object:
    """Results of good calls of the functions that are refused below."""
    return [
        partition.greedy([5, 3], 0.5, [True, False]),
        partition.exact([5, 3], 0.5, [True, False]),
        timeline.events(1, 3),
        planner.predict([planner.Parameter(10)], 0.5),
    ]


def plan(numel: Any = 10, dtype: Any = "float32", fraction: Any = 0.5, **keywords: Any) -> object:
    """A plan for one parameter."""
    return P.predict([P.Parameter(numel, dtype)], fraction, **keywords)


def plan_gradients(dtype: Any) -> object:
    """A plan for a parameter whose gradients have a dtype of their own."""
    return P.predict([P.Parameter(3, "float32", dtype)], 1)


def plan_with(**settings: Any) -> object:
    """A plan for three parameters with other settings."""
    return P.predict([P.Parameter(10)] * 3, 0.9, settings=P.OptimizerSettings(**settings))


SIZES = [
    case(f"{name} of {what}", Plain(rule, sizes, 0.5), SizeError, "OPT-1", seen)
    for name, rule in RULES.items()
    for what, sizes, seen in (
        ("a negative size", [-1], -1),
        ("a negative size among others", [5, -3, 2], -3),
        ("None", None, None),
        ("a number", 3, 3),
        ("texts", ["5"], "5"),
        ("None among sizes", [5, None], None),
        ("half an element", [1.5], 1.5),
        ("nan", [float("nan")], float("nan")),
        ("a switch", [True], True),
    )
]

COUNTED = [
    case(f"{name} with {what} counted", Plain(rule, [5, 3], 0.5, counted=counted), SizeError, "OPT-4", seen)
    for name, rule in RULES.items()
    for what, counted, seen in (
        ("fewer", [True], 1),
        ("more", [True] * 3, 3),
        ("none", [], 0),
        ("a number", 2, 2),
        ("texts", ["False", "False"], "False"),
    )
]

BY_FRACTION: dict[str, Callable[[Any], Plain]] = {
    "predict": lambda value: Plain(plan, fraction=value),
    "partition": lambda value: Plain(partition.partition, [5, 3], value),
    "check": lambda value: Plain(partition.check_fraction, value),
    "no sizes": lambda value: Plain(partition.greedy, [], value),
}
"""Name -> a call with this fraction."""

FRACTIONS = [
    case(f"{name} at {what}", call(value), FractionError, "OPT-3", value)
    for name, call in BY_FRACTION.items()
    for what, value in {
        "below": -0.1,
        "above": 1.1,
        "nan": float("nan"),
        "text": "0.5",
        "None": None,
        "switch": True,
    }.items()
]

BY_MODE: dict[str, Callable[[Any], Plain]] = {
    "partition": lambda value: Plain(partition.partition, [1], 0.5, value),
    "plan": lambda value: Plain(plan, partition=value),
}
"""Name -> a call with this partition."""

NO_MODES: tuple[Any, ...] = ("half", "", "Greedy", None, 3, True, [], ["greedy"], {}, b"greedy")
"""What names no partition."""

MODES = [
    case(f"{name} {value!r}", call(value), PartitionModeError, "CFG-5", value)
    for name, call in BY_MODE.items()
    for value in NO_MODES
]

COUNTS = [
    case(f"{name} of {what}", Plain(counter, num_layers, model_layers), LayerCountError, "ACT-5", seen)
    for name, counter in COUNTERS.items()
    for what, num_layers, model_layers, seen in (
        ("K below", -1, 3, -1),
        ("K of all", 3, 3, 3),
        ("K above", 4, 3, 4),
        ("K as a list", [], 3, []),
        ("K nan", float("nan"), 3, float("nan")),
        ("K a switch", True, 3, True),
        ("L zero", 0, 0, 0),
        ("L below", 0, -1, -1),
        ("L a switch", 0, True, True),
        ("L a float", 1, 4.0, 4.0),
        ("L a text", 1, "4", "4"),
        ("L infinite", 1, float("inf"), float("inf")),
        ("neither", None, None, None),
    )
]

BY_DTYPE: dict[str, Callable[[Any], Plain]] = {
    "dtype": lambda value: Plain(plan, dtype=value),
    "itemsize": lambda value: Plain(P.itemsize, value),
    "gradients of": lambda value: Plain(plan_gradients, value),
}
"""Name -> a call with this dtype."""

NO_DTYPES: tuple[Any, ...] = ("float31", "", "torch.float31", True, 0, -4, 2.0, (), b"float32")
"""What has no known size."""

PLANS = [
    case("negative parameter", Plain(plan, -1), SizeError, "MEM-20", -1),
    case("negative host parameter", Plain(P.Parameter, -1, on_host=True), SizeError, "MEM-20", -1),
    *(
        case(f"parameter of {value!r}", Plain(plan, value), SizeError, "MEM-20", value)
        for value in ("10", None, 1.5, float("nan"), True)
    ),
    *(
        case(f"{name} {value!r}", call(value), DtypeError, "MEM-20", value)
        for name, call in BY_DTYPE.items()
        for value in NO_DTYPES
    ),
    *(
        case(f"{name}={value!r}", Plain(plan_with, **{name: value}), SizeError, "MEM-20", value)
        for name in ("bucket_bytes", "state_tensors", "device_step_bytes")
        for value in (-1, 1.5, float("nan"), None, "x")
    ),
    case("negative request", Plain(P.pinned_rounding, -1), SizeError, "MEM-21", -1),
    *(
        case(f"request of {value!r}", Plain(P.pinned_rounding, value), SizeError, "MEM-21", value)
        for value in (1.5, None, "3", True)
    ),
    case("numpy's whole numbers, negative", Plain(plan, np.int64(-3)), SizeError, "MEM-20", np.int64(-3)),
]


@pytest.mark.quick
@pytest.mark.parametrize("refused", [*SIZES, *COUNTED, *FRACTIONS, *MODES, *COUNTS, *PLANS])
def test_bad_arithmetic_changes_nothing(refused: Case) -> None:
    """It is refused; its arguments are as before, and good calls return what they returned."""
    assert_arguments_kept(refused, good)

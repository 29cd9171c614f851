"""State dicts that do not fit: refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_subject import Stepped, assert_nothing_changed
from refusing import Case, case

from offload_ref.errors import StateDictError

SHAPES = [(4,), (2, 3), (5,), (3,)]
"""Of the parameters."""


NO_DICTS: dict[str, Any] = {"None": None, "a number": 3, "a text": "x", "a list": [{}], "pairs": [("step", 1)]}
"""What is no dict."""


def loading(spoil: Callable[[dict[str, Any]], Any]) -> Callable[[Stepped], None]:
    """Load the subject's own state dict, with other learning rates, after it has been spoilt."""

    def load(subject: Stepped) -> None:
        saved = subject.optimizer.state_dict(copy=True)
        for group in saved["param_groups"]:
            group["lr"] = 77.0
        spoil(saved)
        subject.optimizer.load_state_dict(saved)

    return load


def loading_value(value: Any) -> Callable[[Stepped], None]:
    """Load something else."""
    return lambda subject: subject.optimizer.load_state_dict(value)


def refused(name: str, spoil: Callable[[dict[str, Any]], Any], seen: object) -> Any:
    """A row: what is done to a good state dict, and what the refusal shows."""
    return case(name, loading(spoil), StateDictError, "OPT-32", seen)


def in_state(number: int, name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Put a value into the state of a parameter."""
    return lambda saved: saved["state"][number].update({name: value})


def in_group(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Put a value into the first group."""
    return lambda saved: saved["param_groups"][0].update({name: value})


def at(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Put a value in place of the groups or states."""
    return lambda saved: saved.update({key: value})


def _move_a_parameter(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"].append(saved["param_groups"][1]["params"].pop(0))


def _renumber(number: object) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["state"].update({number: saved["state"].pop(0)})


def _replace(number: int, state: Any) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved["state"].update({number: state})


WHOLES = [
    case(f"load {name}", loading_value(value), StateDictError, "OPT-32", seen)
    for name, value, seen in (
        ("None", None, None),
        ("a number", 3, 3),
        ("pairs", [("state", {}), ("param_groups", [])], [("state", {}), ("param_groups", [])]),
        ("an empty dict", {}, []),
        ("an empty list", [], []),
        ("a text", "x", "x"),
        ("keys of two kinds", {1: {}, "state": {}}, ["1", "state"]),
    )
]

KEYS = [
    refused("no states", lambda saved: saved.pop("state"), ["param_groups"]),
    refused("no groups", lambda saved: saved.pop("param_groups"), ["state"]),
    *(
        refused(f"groups are {name}", at("param_groups", value), seen)
        for name, value, seen in (
            ("None", None, None),
            ("a number", 3, 3),
            ("a text", "x", "x"),
            ("an empty list", [], []),
            ("numbers", [1, 2], 1),
            ("without params", [{}, {}], {}),
        )
    ),
    *(refused(f"states are {name}", at("state", value), value) for name, value in NO_DICTS.items()),
]

GROUPS = [
    refused("fewer groups", lambda saved: saved["param_groups"].pop(), [2]),
    refused("more groups", lambda saved: saved["param_groups"].append({"params": []}), [2, 2, 0]),
    refused("fewer parameters", lambda saved: saved["param_groups"][0]["params"].pop(), [1, 2]),
    refused("more parameters", lambda saved: saved["param_groups"][1]["params"].append(9), [2, 3]),
    refused("a parameter in another group", _move_a_parameter, [3, 1]),
    refused("groups in another order", lambda saved: saved["param_groups"].insert(0, {"params": [7]}), [1, 2, 2]),
    refused("a group that is no dict", lambda saved: saved["param_groups"].insert(0, 3), 3),
    refused("None for params", in_group("params", None), None),
    refused("numbers that are lists", in_group("params", [[0], [1]]), [0]),
    refused("a number twice", in_group("params", [1, 1]), [1, 1]),
    *(
        refused(f"a state for {name}", _renumber(number), number)
        for name, number in {
            "an unknown number": 9,
            "a negative number": -1,
            "a text": "0",
            "None": None,
            "a fraction": 0.5,
        }.items()
    ),
]

SHAPE_CASES = [
    refused(f"{name} of parameter {number} is {shape}", in_state(number, name, torch.zeros(shape)), shape)
    for name in ("exp_avg", "exp_avg_sq", "master_param")
    for number, own in enumerate(SHAPES)
    for shape in ((7, 7), own[::-1] if len(own) > 1 else (*own, own[0]))
]

STATES = [
    *(
        refused(f"the state of parameter {number} is {name}", _replace(number, value), value)
        for number in (0, 3)
        for name, value in NO_DICTS.items()
    ),
    *(
        refused(f"{state} of parameter {number} is {name}", in_state(number, state, value), seen)
        for number in (0, 3)
        for state in ("exp_avg", "master_param")
        for name, value, seen in (
            ("None", None, None),
            ("a number", 0.5, 0.5),
            ("a text", "x", "x"),
            ("an array", np.float32(1), np.float32(1)),
            ("one element", torch.zeros(1), (1,)),
            ("without dimensions", torch.zeros(()), ()),
            ("complex", torch.zeros(SHAPES[number], dtype=torch.complex64), torch.complex64),
            ("sparse", torch.zeros(SHAPES[number]).to_sparse(), torch.sparse_coo),
            ("on the meta device", torch.zeros(SHAPES[number], device="meta"), "meta"),
        )
    ),
    *(
        refused(f"the step of parameter {number} is {name}", in_state(number, "step", value), seen)
        for number in (0, 3)
        for name, value, seen in (
            ("negative", torch.tensor(-1.0), -1.0),
            ("a negative number", -1, -1),
            ("a text", "3", "3"),
            ("None", None, None),
            ("a list", [1], [1]),
            ("two numbers", torch.tensor([1.0, 2.0]), (2,)),
            ("of the parameter's shape", torch.ones(SHAPES[number]), SHAPES[number]),
        )
    ),
]


@pytest.mark.parametrize("refused", [*WHOLES, *KEYS, *GROUPS, *SHAPE_CASES, *STATES])
def test_a_misfit_changes_nothing(refused: Case) -> None:
    """It is refused; every bit is as before, and the next step is that of an optimizer that never saw it."""
    assert_nothing_changed(refused, Stepped.new)

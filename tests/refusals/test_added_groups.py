"""Bad groups for ``add_param_group``: refused, with groups, units, states and the next step as if never tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_subject import Stepped, assert_nothing_changed, fresh
from refusing import Case, case
from torch import nn

from offload_ref.errors import OptimizerInputError

DUPLICATE = "a parameter twice"
NO_LEAF = "a non-leaf tensor"


def adding(group: Callable[[Stepped], Any]) -> Callable[[Stepped], object]:
    """Add what is made for the subject."""
    return lambda subject: subject.optimizer.add_param_group(group(subject))


def _fresh_twice(_subject: Stepped) -> dict[str, Any]:
    return {"params": [fresh()] * 2}


CASES = [
    case(name, adding(group), OptimizerInputError, "OPT-40", seen)
    for name, group, seen in (
        ("None", lambda _: None, None),
        ("a list", lambda _: [], []),
        ("a text", lambda _: "group", "group"),
        ("no params", lambda _: {"lr": 1.0}, {"lr": 1.0}),
        ("an empty dict", lambda _: {}, {}),
        ("None for params", lambda _: {"params": None}, None),
        ("a number for params", lambda _: {"params": 3}, 3),
        ("a text for params", lambda _: {"params": "w"}, "w"),
        ("a set for params", lambda _: {"params": set()}, set()),
        ("None among params", lambda _: {"params": [fresh(), None]}, None),
        ("a number among params", lambda _: {"params": [fresh(), 3]}, 3),
        ("a non-leaf", lambda _: {"params": fresh() * 2}, NO_LEAF),
        ("a non-leaf among params", lambda _: {"params": [fresh(), fresh() * 2]}, NO_LEAF),
        ("a parameter that is there", lambda it: {"params": it.parameters[:1]}, DUPLICATE),
        ("one that is there among others", lambda it: {"params": [fresh(), it.parameters[3]]}, DUPLICATE),
        ("a group that is there", lambda it: it.optimizer.param_groups[1], DUPLICATE),
        ("a parameter twice", _fresh_twice, DUPLICATE),
        ("a name without others' names", lambda _: {"params": [("w", fresh())]}, "w"),
        ("the meta device", lambda _: {"params": [nn.Parameter(torch.ones(2, device="meta"))]}, "meta"),
        ("sparse", lambda _: {"params": [nn.Parameter(torch.ones(2).to_sparse())]}, torch.sparse_coo),
    )
]


@pytest.mark.requirement("OPT-16")
@pytest.mark.parametrize("refused", CASES)
def test_a_bad_group_is_not_added(refused: Case) -> None:
    """It is refused; every bit is as before, and the next step is that of an optimizer that never saw it."""
    assert_nothing_changed(refused, Stepped.new)

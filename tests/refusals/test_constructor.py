"""Bad arguments of the optimizer's constructor: refused, and neither parameters nor groups have changed."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_subject import KEYWORDS, Given, assert_nothing_changed, fresh, make
from refusing import Case, case
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, SparseAdam

from offload_ref.errors import (
    FractionError,
    HostStepError,
    OffloadTypeError,
    OptimizerInputError,
    PartitionModeError,
    UnsupportedError,
)

Call = Callable[[Given], object]

NO_LEAF = "a non-leaf tensor"
"""What an error shows of a tensor that is no leaf."""


class DeviceOnly(SGD):
    """A class that steps device tensors alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("device tensors only")


def _build(given: Given, **keywords: Any) -> object:
    return make(given.groups, **{**KEYWORDS, **keywords})


def with_groups(**keywords: Any) -> Call:
    """A construction with good groups and these keywords."""
    return partial(_build, **keywords)


def with_list(*classes: Any, **keywords: Any) -> Call:
    """A construction with a list of good parameters, of these classes and keywords."""
    return lambda given: make(given.parameters, 0.5, *classes, **keywords)


def of(params: Callable[[Given], Any]) -> Call:
    """A construction of what is made of the parameters and groups given."""
    return lambda given: make(params(given))


FRACTIONS = [
    case(f"fraction {name}", with_groups(offload_fraction=value), FractionError, "OPT-3", value)
    for name, value in {
        "below": -0.1,
        "just above": 1.0000000000000002,
        "a percentage": 50,
        "nan": float("nan"),
        "infinite": float("inf"),
        "minus infinity": -float("inf"),
        "a switch": True,
        "a text": "0.5",
        "None": None,
        "a list": [0.5],
        "a dict": {},
        "complex": 0.5j,
        "float32 above": np.float32(2),
        "decimal nan": Decimal("NaN"),
        "a signalling nan": Decimal("sNaN"),
        "a tensor": torch.tensor(0.5),
    }.items()
]

PARAMETERS = [
    case(f"params {name}", of(params), OptimizerInputError, "OPT-40", seen)
    for name, params, seen in (
        ("None", lambda _: None, None),
        ("a number", lambda _: 3, 3),
        ("a text", lambda _: "abc", "a"),
        ("an empty text", lambda _: "", []),
        ("bytes", lambda _: b"abc", 97),
        ("an empty list", lambda _: [], []),
        ("an empty tuple", lambda _: (), []),
        ("an exhausted iterator", lambda _: iter(()), []),
        ("an empty dict", lambda _: {}, []),
        ("a bare group", lambda given: given.groups[0], "params"),
        ("a bare parameter", lambda given: given.parameters[0], nn.Parameter),
        ("with None", lambda given: [*given.parameters, None], None),
        ("with None first", lambda given: [None, *given.parameters], None),
        ("with a number", lambda given: [*given.parameters, 3], 3),
        ("with a text", lambda given: [*given.parameters, "weight"], "weight"),
        ("with an array", lambda given: [*given.parameters, np.float32(1)], np.float32(1)),
        ("with a class", lambda given: [*given.parameters, nn.Parameter], nn.Parameter),
        ("with an empty list", lambda given: [*given.parameters, []], []),
        ("with a non-leaf", lambda given: [*given.parameters, given.parameters[0] * 2], NO_LEAF),
        ("with a view", lambda given: [given.parameters[0][:2]], NO_LEAF),
        ("named with None", lambda _: [("weight", None)], None),
        ("named with a number", lambda _: [("weight", 1)], 1),
        ("named with a non-leaf", lambda given: [("weight", given.parameters[0] * 2)], NO_LEAF),
        ("a name alone", lambda _: [("weight",)], ("weight",)),
        ("an empty pair", lambda _: [()], ()),
        ("a parameter twice", lambda given: [given.parameters[0]] * 2, "a parameter twice"),
        ("on the meta device", lambda _: [nn.Parameter(torch.ones(2, device="meta"))], "meta"),
        ("sparse", lambda _: [nn.Parameter(torch.ones(2).to_sparse())], torch.sparse_coo),
    )
]

IN_GROUPS = [
    case(f"group {name}", of(params), OptimizerInputError, "OPT-40", seen)
    for name, params, seen in (
        ("with a bare non-leaf", lambda given: [{"params": given.parameters[0] * 2}], NO_LEAF),
        ("with None alone", lambda _: [{"params": [None]}], None),
        ("after a parameter", lambda _: [torch.ones(1), {}], {}),
        ("and a non-leaf", lambda given: [*given.groups, {"params": [fresh() * 2]}], NO_LEAF),
        ("and None in a group", lambda given: [*given.groups, {"params": [None]}], None),
        ("and no list of params", lambda given: [*given.groups, {"params": None}], None),
        ("and a number for params", lambda given: [*given.groups, {"params": 3}], 3),
        ("without params", lambda given: [*given.groups, {"lr": 1.0}], {"lr": 1.0}),
        ("and an empty dict", lambda given: [*given.groups, {}], {}),
        ("and None", lambda given: [*given.groups, None], None),
        ("and a text", lambda given: [*given.groups, "group"], "group"),
        ("twice", lambda given: [given.groups[0]] * 2, "a parameter twice"),
        (
            "with another's parameter",
            lambda given: [*given.groups, {"params": given.parameters[:1]}],
            "a parameter twice",
        ),
        ("with a parameter twice", lambda given: [{"params": given.parameters[:1] * 2}], "a parameter twice"),
    )
]

KEYWORD_CASES = [
    case(f"keyword {name}", call, OffloadTypeError, "OPT-15", seen)
    for name, call, seen in (
        ("unknown", with_list(fraction=0.5), "fraction=0.5"),
        ("of another class", with_list(momentum=0.9), "momentum=0.9"),
        ("that contradicts", with_list(bias_correction=False), "bias_correction=False"),
        ("decay that contradicts", with_list(decoupled_weight_decay=False), "decoupled_weight_decay=False"),
        ("names", with_list(param_names=["weight"]), "param_names=['weight']"),
        ("after good ones", with_list(lr=0.1, eps=1e-8, epsilon=1e-8), "epsilon=1e-08"),
        ("a tensor", with_list(bias_correction=torch.ones(2)), "bias_correction=tensor([1., 1.])"),
        ("with groups", with_groups(momentum=0.9), "momentum=0.9"),
    )
]

CLASSES = [
    case(f"class {name}", call, HostStepError, "OPT-41", seen)
    for name, call, seen in (
        ("of the device", with_list(DeviceOnly, DeviceOnly, lr=1.0), DeviceOnly),
        ("of the device for the host alone", with_list(DeviceOnly, SGD, lr=1.0), DeviceOnly),
        ("that needs a closure", with_list(LBFGS, LBFGS), LBFGS),
        ("that needs sparse gradients", with_list(SparseAdam, SparseAdam), SparseAdam),
        ("of the device with groups", with_groups(cpu_optimizer_cls=DeviceOnly, gpu_optimizer_cls=SGD), DeviceOnly),
    )
]

NO_CLASSES = [
    case(f"class {name}", with_list(cls), OffloadTypeError, "OPT-41", cls)
    for name, cls in {"None": None, "a text": "AdamW", "a number": 3, "a dict": dict, "a module": nn.Linear}.items()
]

MODES = [
    *(
        case(f"partition {name}", with_groups(partition=value), PartitionModeError, "OPT-42", value)
        for name, value in {"unknown": "balanced", "None": None, "a switch": True, "capital": "Greedy"}.items()
    ),
    *(
        case(f"partition {name}", with_groups(partition=value), PartitionModeError, "OPT-42", value)
        for name, value in {"a list": ["greedy"], "a dict": {}}.items()
    ),
    *(
        case(f"exact {name}", with_groups(partition="exact", **keywords), PartitionModeError, "OPT-42", seen)
        for name, keywords, seen in (
            ("of a shape-aware class", {"cpu_optimizer_cls": Adafactor, "gpu_optimizer_cls": Adafactor}, Adafactor),
            ("of one shape-aware class", {"gpu_optimizer_cls": Adafactor}, Adafactor),
            ("of a class of one's own", {"cpu_optimizer_cls": DeviceOnly}, DeviceOnly),
            ("not vouched for", {"elementwise": False}, AdamW),
        )
    ),
    *(
        case(f"step on {name}", with_groups(step_on=value), UnsupportedError, "OPT-43", value)
        for name, value in {"the device": "device", "gpu": "gpu", "None": None, "a switch": True}.items()
    ),
    *(
        case(f"bucket of {name}", with_groups(bucket_bytes=value), OptimizerInputError, "OPT-40", value)
        for name, value in {
            "no bytes": 0,
            "fewer than none": -1,
            "half a byte": 0.5,
            "a switch": True,
            "None": None,
            "a text": "1",
            "infinity": float("inf"),
            "a tensor": torch.tensor(4),
        }.items()
    ),
]

SWITCHES = [
    case(f"{option} is no switch", with_groups(**{option: "false"}), OffloadTypeError, "OPT-43", "false")
    for option in (
        *("param_update_in_fp32", "pin_cpu_grads", "pin_cpu_params"),
        *("overlap_cpu_optimizer_d2h_h2d", "elementwise"),
    )
]


@pytest.mark.parametrize(
    "refused", [*FRACTIONS, *PARAMETERS, *IN_GROUPS, *KEYWORD_CASES, *CLASSES, *NO_CLASSES, *MODES, *SWITCHES]
)
def test_a_bad_construction_changes_nothing(refused: Case) -> None:
    """It is refused; parameters and groups keep every bit, and a good construction then steps as if it came first."""
    assert_nothing_changed(refused, Given.new)

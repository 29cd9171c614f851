"""Bad gradients, closures and copies of a stepped optimizer: refused before anything moves."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_subject import Stepped, assert_nothing_changed
from refusing import Case, case
from snapshots import of_optimizer
from torch import nn

from offload_ref import HybridDeviceOptimizer
from offload_ref.errors import OptimizerInputError, SparseGradientError, UnsupportedError
from offload_ref.simulator import Simulator


def step(subject: Stepped) -> object:
    """Step as always."""
    return subject.optimizer.step()


def decoupled(number: int, gradient: Callable[[torch.Tensor], Any]) -> Callable[[Stepped], None]:
    """Give a parameter a ``decoupled_grad`` made for it."""

    def prepare(subject: Stepped) -> None:
        parameter: Any = subject.parameters[number]
        parameter.decoupled_grad = gradient(parameter)

    return prepare


def _zeros(*shape: int, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: torch.zeros(shape, **{"device": "cuda", "dtype": parameter.dtype, **options})


def _alike(**options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda parameter: torch.zeros(parameter.shape, **{"device": "cuda", "dtype": parameter.dtype, **options})


def _always(value: object) -> Callable[[torch.Tensor], object]:
    return lambda _parameter: value


GRADIENTS = [
    case(
        f"decoupled_grad {name} of {side}",
        step,
        OptimizerInputError,
        "OPT-49",
        seen,
        prepare=decoupled(number, gradient),
    )
    for number, side in ((0, "the host's share"), (3, "the device's share"))
    for name, gradient, seen in (
        ("of another shape", _zeros(7), (7,)),
        ("of more dimensions", _zeros(3, 1), (3, 1)),
        ("of one element", _zeros(1), (1,)),
        ("without dimensions", _zeros(), ()),
        ("on the host", _alike(device="cpu"), "cpu"),
        ("on the meta device", _alike(device="meta"), "meta"),
        ("of whole numbers", _alike(dtype=torch.int64), torch.int64),
        ("of complex numbers", _alike(dtype=torch.complex64), torch.complex64),
        ("as a text", _always("gradient"), "gradient"),
        ("as a number", _always(1.0), 1.0),
        ("as a list", _always([1.0]), [1.0]),
        ("as a switch", _always(value=False), False),
        ("as an array", _always(np.float32(1)), np.float32(1)),
    )
]


def _step_with(closure: Any, subject: Stepped) -> object:
    return subject.optimizer.step(closure)


CLOSURES = [
    case(f"closure {name}", partial(_step_with, value), OptimizerInputError, "OPT-9", value)
    for name, value in {"a number": 3, "a text": "loss", "a switch": False, "a list": []}.items()
]


def _copy_by(copied: Callable[[object], object], subject: Stepped) -> object:
    return copied(subject.optimizer)


COPIERS: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "deep copy": copy.deepcopy,
    "shallow copy": copy.copy,
    "saved whole": lambda optimizer: torch.save(optimizer, io.BytesIO()),
    "saved inside a checkpoint": lambda optimizer: torch.save({"optimizer": optimizer}, io.BytesIO()),
    "copied inside a list": lambda optimizer: copy.deepcopy([optimizer]),
}
"""Name -> what copies the optimizer itself."""

COPIES = [
    case(name, partial(_copy_by, copied), UnsupportedError, "OPT-46", HybridDeviceOptimizer)
    for name, copied in COPIERS.items()
]


@pytest.mark.parametrize("refused", [*GRADIENTS, *CLOSURES, *COPIES])
def test_a_bad_step_moves_nothing(refused: Case) -> None:
    """It is refused; every bit is as before, and the next step is that of an optimizer that never saw it."""
    assert_nothing_changed(refused, Stepped.new)


def _raise(_subject: Stepped) -> float:
    return 1 / 0


def _spoil_gradients(subject: Stepped) -> None:
    subject.parameters[0].grad = None
    raise ZeroDivisionError


@pytest.mark.requirement("OPT-9", "OPT-47")
@pytest.mark.parametrize("closure", [_raise, _spoil_gradients])
def test_a_closure_that_raises_moves_nothing(closure: Callable[[Stepped], Any]) -> None:
    """Its own error comes through; weights, states and groups keep every bit, and so does the step after it."""
    with Simulator(device_type="cuda") as simulator:
        subject, untouched = Stepped.new(), Stepped.new()
        before = subject.snapshot()
        with pytest.raises(ZeroDivisionError):
            subject.optimizer.step(lambda: closure(subject))
        after = subject.snapshot()
        kept = set(before) - ({"parameters"} if closure is _spoil_gradients else set())
        assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
        assert subject.after_a_good_step() == untouched.after_a_good_step()
    simulator.assert_race_free()


@pytest.mark.requirement("OPT-45")
@pytest.mark.parametrize("number", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("attribute", ["grad", "decoupled_grad"])
def test_a_sparse_gradient_moves_nothing(number: int, attribute: str) -> None:
    """It is refused with its layout; no parameter has moved, on the device or on the host."""
    with Simulator(device_type="cuda"):
        parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
        parameters.insert(1, nn.Parameter(torch.ones(2, 2).to("cuda")))
        optimizer = HybridDeviceOptimizer(parameters, 1.0, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        setattr(parameters[number], attribute, torch.eye(2).to_sparse())
        before = of_optimizer(optimizer, parameters)
        with pytest.raises(SparseGradientError, match="OPT-45") as refusal:
            optimizer.step()
        assert refusal.value.seen is torch.sparse_coo
        assert of_optimizer(optimizer, parameters) == before

"""The snapshots by which refusals are judged: equal where nothing happened, different after each kind of change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_subject import Forward
from optimizer_subject import Given, Stepped
from snapshots import bits, frozen

from offload_ref.simulator import Simulator


def _set(holder: Any, name: str, value: object) -> None:
    setattr(holder, name, value)


def _edit(tensor: Any, number: float) -> None:
    with torch.no_grad():
        tensor.add_(number)


GIVEN: dict[str, Callable[[Given], object]] = {
    "a value": lambda it: _edit(it.parameters[0], 1),
    "an edit that changes no value": lambda it: _edit(it.parameters[0], 0),
    "an unseen edit": lambda it: it.parameters[0].data.mul_(2),
    "another storage": lambda it: _set(it.parameters[0], "data", it.parameters[0].data.clone()),
    "an equal gradient": lambda it: _set(it.parameters[3], "grad", it.parameters[3].grad.clone()),
    "a gradient's value": lambda it: it.parameters[3].grad.add_(1),
    "no gradient": lambda it: _set(it.parameters[3], "grad", None),
    "a decoupled gradient": lambda it: _set(it.parameters[3], "decoupled_grad", it.parameters[3].grad),
    "frozen": lambda it: _set(it.parameters[1], "requires_grad", False),
    "a default in a group": lambda it: it.groups[0].setdefault("lr", 0.1),
    "an equal list of parameters": lambda it: it.groups[0].update(params=list(it.groups[0]["params"])),
    "a group more": lambda it: it.groups.append({"params": []}),
    "an equal group": lambda it: it.groups.__setitem__(0, dict(it.groups[0])),
}

STEPPED: dict[str, Callable[[Stepped], object]] = {
    "a hyperparameter": lambda it: it.optimizer.param_groups[1].update(lr=77.0),
    "a hyperparameter's type": lambda it: it.optimizer.param_groups[1].update(weight_decay=0),
    "a key": lambda it: it.optimizer.param_groups[1].update(name="second"),
    "a key less": lambda it: it.optimizer.param_groups[0].pop("name"),
    "a group less": lambda it: it.optimizer.param_groups.pop(),
    "a parameter less in a group": lambda it: it.optimizer.param_groups[1]["params"].pop(),
    "a default": lambda it: it.optimizer.defaults.update(lr=77.0),
    "a moment": lambda it: it.optimizer.state[it.parameters[0]]["exp_avg"].add_(1),
    "a step count": lambda it: it.optimizer.state[it.parameters[3]]["step"].add_(1),
    "a master": lambda it: it.optimizer.units[0].working.add_(1),
    "no state": lambda it: it.optimizer.state.clear(),
    "a unit less": lambda it: it.optimizer.units.pop(),
    "an empty bucket more": lambda it: it.optimizer.buckets.append(it.optimizer.buckets[0]),
}

FORWARD: dict[str, Callable[[Forward], object]] = {
    "a forward hook": lambda it: it.layers[0].register_forward_hook(lambda *_: None),
    "a forward pre-hook inside": lambda it: it.layers[2].linear.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda it: it.layers[0].register_full_backward_hook(lambda *_: None),
    "the pool": lambda it: it.offload.pool.lease(4),
    "the pass ended": lambda it: it.offload.reset(),
    "the pass went on": lambda it: it.offload.layer(1).__enter__(),
    "a weight": lambda it: _edit(it.layers[2].linear.bias, 1),
    "the input": lambda it: it.x.data.add_(1),
    "the output": lambda it: it.output.data.add_(1),
}


def snapshot_of(subject: Any) -> object:
    """A snapshot, or the error that a broken subject ends in."""
    try:
        return subject.snapshot()
    except KeyError as broken:
        return broken


@pytest.mark.quick
@pytest.mark.parametrize(
    ("new", "change"),
    [
        pytest.param(kind.new, change, id=f"{kind.__name__} {name}")
        for kind, changes in ((Given, GIVEN), (Stepped, STEPPED), (Forward, FORWARD))
        for name, change in changes.items()
    ],
)
def test_a_snapshot_sees(new: Callable[[], Any], change: Callable[[Any], object]) -> None:
    """Two snapshots of one state are equal; after the change the next one differs."""
    with Simulator(device_type="cuda"):
        subject = new()
        before = snapshot_of(subject)
        assert snapshot_of(subject) == before
        change(subject)
        assert snapshot_of(subject) != before


@pytest.mark.quick
def test_bits_tell_what_values_do_not() -> None:
    """Zeros of two signs, nans, dtypes and strides differ; two nans with the same bits are equal."""
    zero, nan = torch.zeros(2, 2), torch.full((2, 2), float("nan"))
    assert bits(zero) != bits(-zero)
    assert bits(nan) == bits(nan.clone())
    assert bits(zero) != bits(zero.double())
    assert bits(zero) != bits(zero.t())
    assert frozen({"a": 1, "b": 2}) != frozen({"b": 2, "a": 1})
    assert frozen([0.0, float("nan")]) == frozen([0.0, float("nan")])
    assert frozen(0.0) != frozen(-0.0)
    assert frozen(1) != frozen(True)

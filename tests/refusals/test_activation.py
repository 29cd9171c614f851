"""Bad arguments of activation offloading: refused in the middle of a forward pass, which then ends as without them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from activation_subject import Forward, assert_nothing_changed
from layered import assert_same, batch, build, offloaded, run_layers, train
from refusing import Case, Plain, assert_refused, case
from snapshots import of_layers, of_parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_ref import ActivationOffload, get_cpu_offload_context, mark_keep, mark_offload, offload_layers
from offload_ref.errors import (
    InPlaceEditError,
    LayerCountError,
    NoAcceleratorError,
    OffloadTypeError,
    OffloadValueError,
    UnsupportedError,
)
from offload_ref.simulator import Simulator

untyped: Any = ActivationOffload
"""The constructor without its types, for arguments of wrong ones."""

context: Any = get_cpu_offload_context
"""TransformerEngine's convention without its types."""


def enter(layers: Any, num_layers: Any, **options: Any) -> None:
    """Offload layers for no time."""
    with offload_layers(layers, num_layers, **options):
        pass


CONVENTIONS: dict[str, Callable[..., Any]] = {
    "ActivationOffload": lambda _, num_layers=1, **options: untyped(num_layers, 3, **options),
    "context": lambda _, num_layers=1, **options: context(True, num_layers, 3, **options),
    "offload_layers": lambda it, num_layers=1, **options: enter(it.layers, num_layers, **options),
}
"""Name -> offloading of K of three layers, by each of the three ways in."""

NO_COUNTS = {
    "below": -1,
    "all": 3,
    "more": 4,
    "huge": 10**30,
    "a float": 1.0,
    "a text": "1",
    "None": None,
    "a switch": True,
    "nan": float("nan"),
    "a list": [1],
    "float64": np.float64(1),
    "a numpy switch": np.True_,
    "complex": 1j,
}
"""What is no number of layers below three."""

COUNTS = [
    *(
        case(f"K is {name} in {way}", partial(convention, num_layers=value), LayerCountError, "ACT-5", value)
        for way, convention in CONVENTIONS.items()
        for name, value in NO_COUNTS.items()
    ),
    *(
        case(f"L is {name}", Plain(untyped, 1, value), LayerCountError, "ACT-5", value)
        for name, value in {
            "none": 0,
            "below": -1,
            "None": None,
            "a float": 3.0,
            "a text": "3",
            "a switch": True,
        }.items()
    ),
    case("no layers", Plain(enter, [], 0), LayerCountError, "ACT-5", 0),
    *(
        case(f"K is {name}", Plain(untyped, value, 3), LayerCountError, "ACT-5", value)
        for name, value in (
            ("a tensor of floats", torch.tensor(1.0)),
            ("several", torch.tensor([1, 2])),
            ("a tensor of one switch", torch.tensor(data=True)),
        )
    ),
]

FLOORS = [
    case(f"floor is {name} in {way}", partial(convention, min_offload_bytes=value), OffloadValueError, "ACT-10", value)
    for way, convention in CONVENTIONS.items()
    for name, value in {"below": -1, "a float": 0.5, "None": None, "a text": "1M", "a switch": True}.items()
]

OPTIONS = [
    *(
        case(
            f"{option} is {value!r} in {way}", partial(convention, **{option: value}), UnsupportedError, "ACT-17", value
        )
        for way, convention in CONVENTIONS.items()
        for option in ("double_buffering", "offload_weights")
        for value in (True, 1, "false")
    ),
    *(
        case(f"no activations: {value!r}", Plain(context, True, 1, 3, value), UnsupportedError, "ACT-17", value)
        for value in (False, None, 0)
    ),
    *(
        case(
            f"retain is {value!r}",
            Plain(untyped, 1, 3, retain_pinned_cpu_buffers=value),
            OffloadTypeError,
            "ACT-17",
            value,
        )
        for value in ("no", 2, None)
    ),
    *(
        case(f"enabled is {value!r}", Plain(context, value, 1, 3), OffloadTypeError, "ACT-17", value)
        for value in ("no", 2, None)
    ),
    case(
        "double_buffering is a tensor",
        Plain(untyped, 1, 3, double_buffering=torch.ones(2)),
        UnsupportedError,
        "ACT-17",
        torch.ones(2),
    ),
]


def entering(layer: Any) -> Callable[[Forward], None]:
    """Enter a layer of the running forward pass, and run one inside."""

    def call(subject: Forward) -> None:
        with subject.offload.layer(layer):
            subject.layers[1](subject.output)

    return call


LAYERS = [
    case(f"layer {name}", entering(value), LayerCountError, "ACT-6", value)
    for name, value in (
        ("below", -1),
        ("just outside", 3),
        ("far outside", 99),
        ("nan", float("nan")),
        ("infinite", float("inf")),
        ("a text", "1"),
        ("None", None),
        ("a list", [1]),
        ("half", 0.5),
        ("a float", 1.0),
        ("a switch", True),
    )
]

MARKS = [
    case(f"{mark.__name__} of {name}", Plain(mark, value), OffloadTypeError, "ACT-12", value)
    for mark in (mark_offload, mark_keep)
    for name, value in {"None": None, "a number": 3, "a text": "x", "a list": [1], "an array": np.ones(2)}.items()
]


def entering_also(value: Any) -> Callable[[Forward], None]:
    """Offload the layers and something else."""
    return lambda subject: enter([*subject.layers, value], 1)


NO_MODULE: dict[str, Any] = {"None": None, "a text": "x", "a number": 3, "a class": nn.Linear, "a list": []}
"""What is no module."""

NO_MODULES = [
    *(
        case(f"layers and {name}", entering_also(value), OffloadTypeError, "ACT-1", value)
        for name, value in NO_MODULE.items()
    ),
    case("a text for layers", Plain(enter, "abc", 1), OffloadTypeError, "ACT-1", "a"),
    case("a dict for layers", lambda it: enter({"first": it.layers[0]}, 0), OffloadTypeError, "ACT-1", "first"),
    case("None for layers", Plain(enter, None, 0), OffloadTypeError, "ACT-1", None),
    case("a number for layers", Plain(enter, 3, 0), OffloadTypeError, "ACT-1", 3),
    case("a class for layers", Plain(enter, nn.Linear, 0), OffloadTypeError, "ACT-1", nn.Linear),
]


def _in_a_layer(subject: Forward, x: torch.Tensor) -> torch.Tensor:
    with ActivationOffload(1, 3, min_offload_bytes=0).layer(1):
        return subject.layers[1](x)


def _in_a_context(subject: Forward, x: torch.Tensor) -> torch.Tensor:
    entered, sync = get_cpu_offload_context(True, 1, 3, min_offload_bytes=0)
    with entered:
        y = subject.layers[1](x)
    return sync(y)


def _in_the_modules(subject: Forward, x: torch.Tensor) -> torch.Tensor:
    with offloaded(subject.layers, 1):
        return subject.layers[0](x)


def checkpointing(run: Callable[[Forward, torch.Tensor], torch.Tensor], *, hooks: bool) -> Callable[[Forward], None]:
    """Forward and backward through a checkpoint around a layer, by hooks or by an autograd function."""

    def call(subject: Forward) -> None:
        x = subject.output.detach().requires_grad_()
        checkpoint(partial(run, subject), x, use_reentrant=not hooks).sum().backward()

    return call


CHECKPOINTS = [
    case(
        f"checkpoint {'with' if hooks else 'without'} hooks around {run.__name__.removeprefix('_in_')}",
        checkpointing(run, hooks=hooks),
        UnsupportedError,
        "ACT-17",
        "a checkpoint",
    )
    for run in (_in_a_layer, _in_a_context, _in_the_modules)
    for hooks in (True, False)
]


@pytest.mark.parametrize("refused", [*COUNTS, *FLOORS, *OPTIONS, *LAYERS, *MARKS, *NO_MODULES, *CHECKPOINTS])
def test_a_bad_call_changes_nothing(refused: Case) -> None:
    """It is refused; the forward pass under way keeps every bit, and ends with the same loss and gradients."""
    assert_nothing_changed(refused)


@pytest.mark.parametrize(
    "refused", [case(way, convention, NoAcceleratorError, "ACT-16", None) for way, convention in CONVENTIONS.items()]
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_no_accelerator_changes_nothing(refused: Case) -> None:
    """Offloading is refused where there is no device; the layers are as before and train as always."""
    forward = Forward(build(["tanh"] * 3, 8, "cpu"), batch(0, 6, 8, "cpu"), None, torch.empty(0))
    before = of_layers(forward.layers)
    assert_refused(refused, forward)
    assert of_layers(forward.layers) == before
    assert_same(train(forward.layers, [forward.x]), train(build(["tanh"] * 3, 8, "cpu"), [batch(0, 6, 8, "cpu")]))


def meeting(number: int, *, synced: bool = True) -> Callable[[Forward], None]:
    """Backward after a forward pass that meets a number of layers where three are declared."""

    def call(subject: Forward) -> None:
        entered, sync = get_cpu_offload_context(True, 1, 3, min_offload_bytes=0)
        subject.offload = entered._offload
        y = subject.x
        for i in range(number):
            with entered:
                y = subject.layers[i % 3](y)
            y = sync(y) if synced else y
        y.sum().backward()

    return call


MISCOUNTS = [
    *(
        case(f"{number} layers met", meeting(number), LayerCountError, "ACT-6", number % 3)
        for number in (1, 2, 4, 5, 7)
    ),
    case("layers not counted", meeting(3, synced=False), LayerCountError, "ACT-6", 0),
]


@pytest.mark.parametrize("refused", MISCOUNTS)
def test_a_miscount_leaves_nothing(refused: Case) -> None:
    """Backward is refused before any gradient; no host byte stays, and a good pass of the same layers is right."""
    with Simulator(device_type="cuda") as simulator:
        layers, x = build(["tanh"] * 3, 8, "cuda"), batch(0, 6, 8, "cuda")
        subject = Forward(layers, x, None, torch.empty(0))
        before = of_layers(layers), of_parameters([x])
        assert_refused(refused, subject)
        gc.collect()
        assert (of_layers(layers), of_parameters([x])) == before
        assert subject.offload.pool.leased_bytes == 0
        ours = train(layers, [x], offloading=offloaded(layers, 2))
        assert_same(ours, train(build(["tanh"] * 3, 8, "cuda"), [batch(0, 6, 8, "cuda")]))
    simulator.assert_race_free()


@pytest.mark.requirement("ACT-24", "ACT-31")
@pytest.mark.parametrize("edited", ["input", "activation", "weight"])
def test_an_edit_leaves_nothing(edited: str) -> None:
    """The error shows the versions; layers before the edit have no gradient, and no host byte or hook stays."""
    with Simulator(device_type="cuda"):
        layers, x = build(["tanh"] * 3, 8, "cuda"), batch(0, 6, 8, "cuda")
        kept: list[torch.Tensor] = []
        watch = layers[0].register_forward_hook(lambda _module, _arguments, output: kept.append(output))
        with offload_layers(layers, 2, min_offload_bytes=0) as offload:
            loss = run_layers(layers, x)
        watch.remove()
        torch.accelerator.synchronize()
        hooks = of_layers(layers)["hooks"]
        victim = {"input": x, "activation": kept[0], "weight": layers[1].linear.weight}[edited]
        with torch.no_grad():
            victim.add_(1)
        with pytest.raises(InPlaceEditError, match="ACT-24") as refusal:
            loss.backward()
        assert refusal.value.seen == f"version {victim._version}"
        assert x.grad is None
        del loss, refusal, victim
        kept.clear()
        gc.collect()
        assert offload.pool.leased_bytes == 0
        after = of_layers(layers)
        assert (after["hooks"], after["saved-tensor hooks"]) == (hooks, None)

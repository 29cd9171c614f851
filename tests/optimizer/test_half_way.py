"""A step or a load that fails half way changes nothing, or says what it has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizing import Training

from offload_ref import HybridDeviceOptimizer, host_memory, optimizer
from offload_ref.errors import PartialLoadError, PartialStepError
from offload_ref.simulator import Simulator

TRAINING = Training([(4,), (2, 3), (5,), (3,)], [[True] * 4] * 3, torch.bfloat16, masters=True)
"""Four parameters; with the options below each of the host's has a bucket of its own."""

KEYWORDS: dict[str, Any] = {"param_update_in_fp32": True, "bucket_bytes": 1, "lr": 0.1}


class FailureError(RuntimeError):
    """The fault that a test injects."""


class Fuse:
    """Burns out once, when it has been passed a given number of times more; at first it lasts for ever."""

    def __init__(self) -> None:
        self.passes = -1

    def pass_through(self) -> None:
        self.passes -= 1
        if self.passes == -1:
            raise FailureError


def fused_class(fuse: Fuse) -> type[torch.optim.Optimizer]:
    """AdamW that passes the fuse between any two parameters."""

    class Fused(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            listed = [p for group in self.param_groups for p in group["params"]]
            gradients = [p.grad for p in listed]
            for parameter, gradient in zip(listed, gradients, strict=True):
                fuse.pass_through()
                for other in listed:
                    other.grad = gradient if other is parameter else None
                super().step(closure)

    return Fused


@contextmanager
def allocations_pass(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every allocation of host memory pass the fuse."""
    allocate = host_memory.allocate_host

    def allocate_or_fail(nbytes: int, *, pin: bool = True) -> torch.Tensor:
        fuse.pass_through()
        return allocate(nbytes, pin=pin)

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "allocate_host", allocate_or_fail)
        yield


def everything(hybrid: HybridDeviceOptimizer, parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """The weight of each parameter with its state, master and count among it, as plain values."""
    states = hybrid.state_dict(copy=True)["state"]
    shown = []
    for number, parameter in enumerate(parameters):
        state = {name: value.tolist() for name, value in states.get(number, {}).items()}
        shown.append({"weight": parameter.tolist(), **state})
    return shown


def fused_optimizer(parameters: list[torch.nn.Parameter], fuse: Fuse) -> HybridDeviceOptimizer:
    """An optimizer that has made one step, with gradients for the second."""
    cls = fused_class(fuse)
    optimizer = HybridDeviceOptimizer(parameters, 0.5, cls, cls, **KEYWORDS)
    TRAINING.set_gradients(parameters, 0, "cuda")
    optimizer.step()
    TRAINING.set_gradients(parameters, 1, "cuda")
    return optimizer


def is_among(parameter: torch.nn.Parameter, parameters: tuple[object, ...]) -> bool:
    """Whether the very object is there."""
    return any(parameter is other for other in parameters)


@pytest.mark.quick
@pytest.mark.requirement("OPT-47")
@pytest.mark.parametrize("survived", range(4))
def test_a_kernel_fails(survived: int) -> None:
    """What the error names as stepped has made the step, and all but what it says to be in doubt is as before."""
    with Simulator(device_type="cuda") as simulator:
        parameters = TRAINING.parameters("cuda")
        never_failed = fused_optimizer(parameters, Fuse())
        never_failed.step()
        after = everything(never_failed, parameters)
        parameters, fuse = TRAINING.parameters("cuda"), Fuse()
        optimizer = fused_optimizer(parameters, fuse)
        before = everything(optimizer, parameters)
        fuse.passes = survived
        with pytest.raises(PartialStepError, match="OPT-47") as failure:
            optimizer.step()
        assert isinstance(failure.value.__cause__, FailureError)
        stepped, in_doubt = failure.value.stepped, failure.value.in_doubt
        assert [len(stepped), len(in_doubt)] == [[0, 2], [0, 2], [2, 1], [3, 1]][survived]
        for parameter, old, new, now in zip(parameters, before, after, everything(optimizer, parameters), strict=True):
            if not is_among(parameter, in_doubt):
                assert now == (new if is_among(parameter, stepped) else old)
    simulator.assert_race_free()


@pytest.mark.requirement("OPT-47", "MEM-10")
@pytest.mark.parametrize("survived", range(6))
def test_host_memory_runs_out_in_the_first_step(survived: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is raised as it is, weights and states are as before, and the same step then succeeds."""
    results = []
    for fails in (False, True):
        with Simulator(device_type="cuda") as simulator:
            parameters, fuse = TRAINING.parameters("cuda"), Fuse()
            optimizer = HybridDeviceOptimizer(parameters, 0.5, **KEYWORDS)
            TRAINING.set_gradients(parameters, 0, "cuda")
            with allocations_pass(fuse, monkeypatch):
                if fails:
                    _fail_and_replace_gradients(optimizer, parameters, fuse, survived)
                optimizer.step()
            results.append(everything(optimizer, parameters))
        simulator.assert_race_free()
    assert results[0] == results[1]


def _fail_and_replace_gradients(
    optimizer: HybridDeviceOptimizer, parameters: list[torch.nn.Parameter], fuse: Fuse, survived: int
) -> None:
    """Run into the failure, see that nothing has changed, and let other gradients take the place of the old ones."""
    weights = [parameter.tolist() for parameter in parameters]
    fuse.passes = survived
    with pytest.raises(FailureError):
        optimizer.step()
    assert not optimizer.state
    for weight, now in zip(weights, everything(optimizer, parameters), strict=True):
        assert now["weight"] == weight
        assert now.get("master_param", weight) == weight
        assert set(now) <= {"weight", "master_param"}
    TRAINING.set_gradients(parameters, 0, "cuda")


@pytest.mark.requirement("OPT-47", "OPT-25")
def test_weights_may_change_between_a_failed_first_step_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies made by the step that failed are not what the next one starts from."""
    with Simulator(device_type="cuda"):
        parameters, fuse = TRAINING.parameters("cuda"), Fuse()
        sgd = torch.optim.SGD
        optimizer = HybridDeviceOptimizer(parameters, 1.0, sgd, sgd, **KEYWORDS)
        TRAINING.set_gradients(parameters, 0, "cuda")
        with allocations_pass(fuse, monkeypatch):
            fuse.passes = 7
            with pytest.raises(FailureError):
                optimizer.step()
            for parameter in parameters:
                with torch.no_grad():
                    parameter.fill_(3.0)
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert all(parameter.tolist() == torch.full_like(parameter, 2.9).tolist() for parameter in parameters)


@pytest.mark.requirement("OPT-47")
def test_a_small_device_runs_out_of_memory() -> None:
    """Where gradients cannot be cast on the device, nothing has changed; with room again, the step succeeds."""
    training = Training([(1024,), (1024,)], [[True] * 2] * 2, torch.bfloat16, masters=True)
    with Simulator(device_type="cuda", device_memory_bytes=40_000) as simulator:
        parameters = training.parameters("cuda")
        optimizer = HybridDeviceOptimizer(parameters, 0.5, param_update_in_fp32=True)
        training.set_gradients(parameters, 0, "cuda")
        optimizer.step()
        training.set_gradients(parameters, 1, "cuda")
        before = everything(optimizer, parameters)
        ballast = torch.empty(40_000 - simulator.memory_allocated() - 1000, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        del ballast
        assert everything(optimizer, parameters) == before
        optimizer.step()
        assert everything(optimizer, parameters) != before


@pytest.mark.requirement("OPT-47", "OPT-9")
def test_a_closure_that_raises_changes_nothing() -> None:
    """The closure's own error comes through, before anything has been allocated or stepped."""
    with Simulator(device_type="cuda") as simulator:
        parameters = TRAINING.parameters("cuda")
        optimizer = HybridDeviceOptimizer(parameters, 0.5, **KEYWORDS)
        TRAINING.set_gradients(parameters, 0, "cuda")
        before = everything(optimizer, parameters)
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert everything(optimizer, parameters) == before
        assert simulator.max_pinned_allocated() == 0


@pytest.mark.requirement("OPT-47", "OPT-32")
@pytest.mark.parametrize("survived", [0, 5])
def test_a_load_fails(survived: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that runs out of memory among the states says so; loading again repairs everything."""
    with Simulator(device_type="cuda"):
        parameters, fuse = TRAINING.parameters("cuda"), Fuse()
        hybrid = fused_optimizer(parameters, fuse)
        saved, before = hybrid.state_dict(copy=True), everything(hybrid, parameters)
        placed = optimizer._placed

        def placed_or_fail(*arguments: Any) -> Any:
            fuse.pass_through()
            return placed(*arguments)

        monkeypatch.setattr(optimizer, "_placed", placed_or_fail)
        fuse.passes = survived
        with pytest.raises(PartialLoadError, match="OPT-47"):
            hybrid.load_state_dict(saved)
        hybrid.load_state_dict(saved)
        assert everything(hybrid, parameters) == before

"""Optimizers that bad inputs are tried on, before and after their construction, with twins that never meet them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from optimizing import Training
from refusing import Case, assert_refused
from snapshots import frozen, of_groups, of_optimizer, of_parameters
from torch import nn

from offload_ref import HybridDeviceOptimizer
from offload_ref.simulator import Simulator

TRAINING = Training([(4,), (2, 3), (5,), (3,)], [[True] * 4] * 2, torch.bfloat16, group_of=(0, 0, 1, 1), masters=True)
"""Two groups of two parameters; at fraction 0.5 the first two are the host's and the others the device's."""

KEYWORDS: dict[str, Any] = {"lr": 0.1, "param_update_in_fp32": True, "bucket_bytes": 1}
"""Keywords of a good construction."""

make: Any = HybridDeviceOptimizer
"""The constructor without its types, for arguments of wrong ones."""


def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of ones on the device that no optimizer has."""
    values = torch.ones(shape or (2,)).to(dtype).to("cuda")
    return nn.Parameter(values, requires_grad=dtype.is_floating_point or dtype.is_complex)


@dataclass
class Given:
    """What a constructor is given: parameters, and two groups of them."""

    parameters: list[nn.Parameter]
    groups: list[dict[str, Any]]

    @classmethod
    def new(cls) -> Given:
        """Parameters with gradients, to be made under a simulator."""
        parameters = TRAINING.parameters("cuda")
        TRAINING.set_gradients(parameters, 0, "cuda")
        return cls(parameters, TRAINING.groups(parameters))

    def snapshot(self) -> dict[str, object]:
        """Parameters and groups, bit for bit."""
        return {"parameters": of_parameters(self.parameters), "groups": of_groups(self.groups)}

    def stepped(self) -> Stepped:
        """A good construction, and its first step."""
        optimizer = HybridDeviceOptimizer(self.groups, **KEYWORDS)
        optimizer.step()
        return Stepped(self.parameters, optimizer)


@dataclass
class Stepped:
    """An optimizer that has made a step, and has gradients for the next one."""

    parameters: list[nn.Parameter]
    optimizer: Any

    @classmethod
    def new(cls) -> Stepped:
        """Always the same bits; to be made under a simulator."""
        subject = Given.new().stepped()
        TRAINING.set_gradients(subject.parameters, 1, "cuda")
        return subject

    def snapshot(self) -> dict[str, object]:
        """The optimizer, its parameters and its groups, bit for bit."""
        return of_optimizer(self.optimizer, self.parameters)

    def after_a_good_step(self) -> object:
        """Step with good gradients; the bits of all weights and states then."""
        for parameter in self.parameters:
            parameter.__dict__.pop("decoupled_grad", None)
        TRAINING.set_gradients(self.parameters, 1, "cuda")
        self.optimizer.step()
        return frozen([list(self.parameters), self.optimizer.state_dict(copy=True)])


def assert_nothing_changed(refused: Case, new: Callable[[], Given | Stepped]) -> None:
    """The call is refused, every bit is as before, and what follows is what it is without the call."""
    with Simulator(device_type="cuda") as simulator:
        subject, untouched = new(), new()
        refused.prepare(subject)
        before = subject.snapshot()
        assert_refused(refused, subject)
        assert subject.snapshot() == before
        results = [one.stepped() if isinstance(one, Given) else one for one in (subject, untouched)]
        assert results[0].after_a_good_step() == results[1].after_a_good_step()
    simulator.assert_race_free()

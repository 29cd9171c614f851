"""What the optimizer refuses: typed, with the value seen, and nothing changed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from offload_ref import HybridDeviceOptimizer
from offload_ref.errors import HostStepError, OffloadTypeError, OptimizerInputError, PartitionModeError
from offload_ref.simulator import Simulator


def parameter() -> nn.Parameter:
    """Two elements on the simulated device."""
    return nn.Parameter(torch.zeros(2).to("cuda"))


@pytest.mark.requirement("OPT-40")
def test_parameters_that_are_none() -> None:
    """No group, a bare tensor, None, a number, or a tensor that is no leaf."""
    with Simulator(device_type="cuda"):
        leaf = parameter()
        for params in ([], leaf, [None], [leaf, 3], [leaf * 2], [{"params": [leaf, None]}], [{"params": leaf * 2}]):
            with pytest.raises(OptimizerInputError, match="OPT-40"):
                HybridDeviceOptimizer(params)
        assert HybridDeviceOptimizer([{"params": []}]).param_groups[0]["params"] == []


class DeviceOnly(torch.optim.SGD):
    """A class that steps device tensors alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.device.type == "cpu":
                    raise RuntimeError("device tensors only")


@pytest.mark.requirement("OPT-41")
def test_a_class_that_cannot_step_on_the_host() -> None:
    """It is refused for a host share or a host parameter, and taken where nothing is stepped on the host."""
    with Simulator(device_type="cuda"):
        for params, fraction in (([parameter()], 0.5), ([nn.Parameter(torch.zeros(1))], 0.0)):
            with pytest.raises(HostStepError, match="OPT-41"):
                HybridDeviceOptimizer(params, fraction, DeviceOnly, DeviceOnly, lr=1.0)
        HybridDeviceOptimizer([parameter()], 0.0, DeviceOnly, DeviceOnly, lr=1.0)


@pytest.mark.requirement("OPT-42")
def test_a_class_that_may_not_be_split() -> None:
    """``exact`` takes the listed classes, or others that are vouched for."""
    with Simulator(device_type="cuda"):
        for cls, vouched in ((DeviceOnly, None), (torch.optim.Adafactor, None), (torch.optim.AdamW, False)):
            with pytest.raises(PartitionModeError, match="OPT-42"):
                HybridDeviceOptimizer([parameter()], 0.0, cls, cls, partition="exact", elementwise=vouched)
        HybridDeviceOptimizer([parameter()], 0.0, DeviceOnly, DeviceOnly, partition="exact", elementwise=True)
        with pytest.raises(PartitionModeError, match="OPT-42"):
            HybridDeviceOptimizer([parameter()], partition="balanced")


@pytest.mark.requirement("OPT-15")
def test_unknown_keywords() -> None:
    """What neither class knows is refused, unless it says what the class does anyway."""
    with Simulator(device_type="cuda"):
        for keywords in ({"momentum": 0.9}, {"bias_correction": False}, {"decoupled_weight_decay": False}):
            with pytest.raises(OffloadTypeError, match="OPT-15"):
                HybridDeviceOptimizer([parameter()], **keywords)
        optimizer = HybridDeviceOptimizer([parameter()], bias_correction=True)
        assert optimizer.param_groups[0]["bias_correction"] is True
        with pytest.raises(ValueError, match="learning rate"):
            HybridDeviceOptimizer([parameter()], lr=-1.0)


@pytest.mark.requirement("MEM-13")
def test_pinning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning however many buffers there are, pageable memory, and the same result."""
    with Simulator(device_type="cuda") as simulator:
        three = [parameter() for _ in range(3)]
        optimizer = HybridDeviceOptimizer(three, 1.0, torch.optim.SGD, torch.optim.SGD, bucket_bytes=1, lr=1.0)
        for one in three:
            one.grad = torch.ones(2).to("cuda")
        empty = torch.empty

        def no_pinning(*args: Any, **keywords: Any) -> torch.Tensor:
            if keywords.get("pin_memory"):
                raise RuntimeError("host allocation failed")
            return empty(*args, **keywords)

        monkeypatch.setattr(torch, "empty", no_pinning)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            optimizer.step()
        assert ["pageable" in str(one.message) for one in caught] == [True]
        assert [one.tolist() for one in three] == [[-1.0, -1.0]] * 3
        assert simulator.max_pinned_allocated() == 0

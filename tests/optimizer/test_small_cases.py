"""Small inputs with their right values, each a bug that some system had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implementations import Implementation
from torch import nn

from offload_ref import HybridDeviceOptimizer
from offload_ref.simulator import Simulator

FRACTIONS = (0.0, 0.5, 1.0)


def scalar(value: float) -> nn.Parameter:
    """A one-element parameter on the simulated device."""
    return nn.Parameter(torch.tensor([value]).to("cuda"))


def give(parameter: nn.Parameter, gradient: float) -> None:
    """Set the gradient, as device work does."""
    parameter.grad = torch.tensor([gradient]).to("cuda") * 1


def hybrid(parameters: Any, fraction: float, cls: Any = torch.optim.SGD, **keywords: Any) -> HybridDeviceOptimizer:
    """The same class on both sides."""
    return HybridDeviceOptimizer(parameters, fraction, cls, cls, **keywords)


@pytest.mark.requirement("OPT-13")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_bias_correction_over_buckets(fraction: float) -> None:
    """Three parameters in buckets of their own, two steps: 0.803482, 0.800919, 0.800268."""
    with Simulator(device_type="cuda") as simulator:
        parameters = [scalar(1.0) for _ in range(3)]
        optimizer = hybrid(parameters, fraction, torch.optim.AdamW, lr=0.1, weight_decay=0.0, bucket_bytes=1)
        for step in range(2):
            for i, parameter in enumerate(parameters):
                give(parameter, 1.0 + i + step)
            optimizer.step()
        values = [parameter.item() for parameter in parameters]
    simulator.assert_race_free()
    assert values == pytest.approx([0.803482, 0.800919, 0.800268], abs=1e-6)


@pytest.mark.requirement("OPT-31", "OPT-13")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_step_count_survives_saving_and_loading(implementation: Implementation, fraction: float) -> None:
    """Gradients 1, 2, then save, load, and -1: 0.761473 (lost: 0.737721, stale by one: 0.754547)."""
    keywords = {"lr": 0.1, "weight_decay": 0.0}
    with Simulator(device_type="cuda"):
        parameter = scalar(1.0)
        optimizer = implementation.optimizer([parameter], fraction, torch.optim.AdamW, **keywords)
        for gradient in (1.0, 2.0):
            give(parameter, gradient)
            optimizer.step()
        fresh = implementation.optimizer([parameter], 1.0 - fraction, torch.optim.AdamW, **keywords)
        fresh.load_state_dict(optimizer.state_dict())
        give(parameter, -1.0)
        fresh.step()
        assert parameter.item() == pytest.approx(0.761473, abs=1e-6)


@pytest.mark.requirement("OPT-6")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_accumulated_gradients(implementation: Implementation, fraction: float) -> None:
    """A scalar at 0, backward with gradient 1 and then 2, SGD with lr 1: -3."""
    with Simulator(device_type="cuda"):
        parameter = scalar(0.0)
        optimizer = implementation.optimizer([parameter], fraction, lr=1.0)
        for weight in (1.0, 2.0):
            (parameter * weight).sum().backward()
        optimizer.step()
        assert parameter.item() == -3.0


@pytest.mark.requirement("OPT-6")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_clipping_after_backward_reaches_the_step(implementation: Implementation, fraction: float) -> None:
    """Gradients 3 and 4, clipped to norm 1: the norm is 5 and the values are -0.6 and -0.8."""
    with Simulator(device_type="cuda") as simulator:
        parameters = [scalar(0.0), scalar(0.0)]
        optimizer = implementation.optimizer(parameters, fraction, lr=1.0)
        (parameters[0] * 3 + parameters[1] * 4).sum().backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        values = [parameter.item() for parameter in parameters]
        assert norm.item() == 5.0
    simulator.assert_race_free()
    assert values == pytest.approx([-0.6, -0.8], abs=1e-5)


@pytest.mark.requirement("OPT-24")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_weights_loaded_after_construction_are_the_start(fraction: float) -> None:
    """fp32 weights loaded, announced, then a step of SGD with lr 1 and gradient 1: 6 from 7."""
    with Simulator(device_type="cuda"):
        layer = nn.Linear(1, 1, bias=False).to("cuda")
        optimizer = hybrid(layer.parameters(), fraction, lr=1.0)
        layer.load_state_dict({"weight": torch.full((1, 1), 7.0)})
        optimizer.update_fp32_param_by_new_param()
        layer.weight.grad = torch.ones(1, 1).to("cuda")
        optimizer.step()
        assert layer.weight.item() == 6.0


@pytest.mark.requirement("OPT-33")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_fresh_state_dict_loads_back(implementation: Implementation, fraction: float) -> None:
    """The state of a just-built optimizer loads, into itself and into one that has made a step."""
    with Simulator(device_type="cuda"):
        parameter = scalar(1.0)
        fresh = implementation.optimizer([parameter], fraction, torch.optim.AdamW)
        fresh.load_state_dict(fresh.state_dict())
        stepped = implementation.optimizer([parameter], fraction, torch.optim.AdamW)
        give(parameter, 1.0)
        stepped.step()
        assert stepped.state_dict()["state"]
        stepped.load_state_dict(fresh.state_dict())
        assert not stepped.state_dict()["state"]


@pytest.mark.requirement("OPT-11")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_zero_grad_both_ways(implementation: Implementation, fraction: float) -> None:
    """Gradients set to None, to zeros after that, and given again: each step sees what is there."""
    with Simulator(device_type="cuda"):
        parameter = scalar(0.0)
        optimizer = implementation.optimizer([parameter], fraction, lr=1.0)
        give(parameter, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        give(parameter, 1.0)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert parameter.item() == -1.0


@pytest.mark.requirement("OPT-14")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_constructor_keywords_reach_both_sides(fraction: float) -> None:
    """Eps and betas given as keywords are in the groups and in every sub-optimizer."""
    with Simulator(device_type="cuda"):
        parameters = [scalar(1.0), scalar(1.0)]
        optimizer = hybrid(parameters, fraction, torch.optim.AdamW, eps=1e-3, betas=(0.8, 0.9))
        for parameter in parameters:
            give(parameter, 1.0)
        optimizer.step()
        groups = [*optimizer.param_groups, *(g for b in optimizer.buckets for g in b.optimizer.param_groups)]
        assert {(group["eps"], group["betas"]) for group in groups} == {(1e-3, (0.8, 0.9))}
        assert "offload_fraction" not in optimizer.param_groups[0]
        assert optimizer.defaults["offload_fraction"] == fraction


@pytest.mark.requirement("OPT-6", "OPT-11")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_decay_is_decoupled_and_skips_what_has_no_gradient(implementation: Implementation, fraction: float) -> None:
    """With lr 0.1 and decay 0.5 with a zero gradient: 0.95; with no gradient: 1, and no step is counted."""
    with Simulator(device_type="cuda"):
        decayed, idle = scalar(1.0), scalar(1.0)
        optimizer = implementation.optimizer([decayed, idle], fraction, torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        give(decayed, 0.0)
        optimizer.step()
        assert decayed.item() == pytest.approx(0.95)
        assert idle.item() == 1.0
        assert list(optimizer.state_dict()["state"]) == [0]


@pytest.mark.requirement("OPT-11")
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("masters", [False, True])
def test_a_gradient_that_is_none_is_not_the_last_one_again(fraction: float, masters: bool) -> None:
    """SGD with lr 1: step with gradients 1 and 2, then with the second alone: -1 and -4."""
    with Simulator(device_type="cuda"):
        parameters = [
            scalar(0.0).bfloat16().detach().requires_grad_(),
            scalar(0.0).bfloat16().detach().requires_grad_(),
        ]
        optimizer = hybrid(parameters, fraction, lr=1.0, param_update_in_fp32=masters)
        for active in ((True, True), (False, True)):
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, 1.0 + i) if active[i] else None
            optimizer.step()
        assert [parameter.item() for parameter in parameters] == [-1.0, -4.0]


@pytest.mark.requirement("OPT-9")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_closure_runs_once_with_gradients_enabled(implementation: Implementation, fraction: float) -> None:
    """The closure's gradients are the ones that are stepped with, and its value is returned."""
    with Simulator(device_type="cuda"):
        parameters = [scalar(1.0), scalar(1.0)]
        optimizer = implementation.optimizer(parameters, fraction, lr=1.0)
        calls = []

        def closure() -> float:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            (parameters[0] * 2 + parameters[1] * 3).sum().backward()
            return 42.0

        assert optimizer.step(closure) == 42.0
        assert calls == [True]
        assert [parameter.item() for parameter in parameters] == [-1.0, -2.0]


@pytest.mark.requirement("OPT-12")
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_decoupled_gradient_is_used(fraction: float) -> None:
    """A bf16 parameter with an fp32 ``decoupled_grad`` of 1 and no ``grad``: -1."""
    with Simulator(device_type="cuda"):
        parameter = scalar(0.0).detach().bfloat16().requires_grad_()
        optimizer = hybrid([parameter], fraction, lr=1.0, param_update_in_fp32=True)
        parameter.decoupled_grad = torch.ones(1).to("cuda")  # type: ignore[attr-defined]
        optimizer.step()
        assert parameter.item() == -1.0


@pytest.mark.requirement("OPT-7")
def test_an_optimizer_with_host_parameters_alone_works_without_an_accelerator() -> None:
    """Parameters on the host are stepped where they are, whatever the fraction, masters too."""
    for fraction in FRACTIONS:
        for dtype, masters in ((torch.float32, False), (torch.bfloat16, True)):
            parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
            optimizer = hybrid([parameter], fraction, lr=1.0, param_update_in_fp32=masters)
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert parameter.tolist() == [-1.0, -1.0]


@pytest.mark.requirement("OPT-7")
def test_host_and_device_parameters_in_one_group(implementation: Implementation) -> None:
    """Each is stepped on its side, and nothing of the host's own crosses."""
    with Simulator(device_type="cuda") as simulator:
        on_host, on_device = nn.Parameter(torch.zeros(1)), scalar(0.0)
        optimizer = implementation.optimizer([on_host, on_device], 0.0, lr=1.0)
        on_host.grad = torch.ones(1)
        give(on_device, 2.0)
        before = simulator.copies.d2h
        optimizer.step()
        assert simulator.copies.d2h == before
        assert (on_host.item(), on_device.item()) == (-1.0, -2.0)


@pytest.mark.requirement("OPT-8")
def test_shape_aware_classes_see_whole_shapes(implementation: Implementation) -> None:
    """A class that normalises rows gives the plain result on the host."""

    class RowNorm(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data.sub_(p.grad / p.grad.norm(dim=1, keepdim=True))

    with Simulator(device_type="cuda"):
        parameter = nn.Parameter(torch.zeros(2, 2).to("cuda"))
        optimizer = implementation.optimizer([parameter], 1.0, RowNorm, lr=1.0)
        parameter.grad = torch.tensor([[3.0, 4.0], [6.0, 8.0]]).to("cuda")
        optimizer.step()
        assert parameter.cpu().tolist() == [[pytest.approx(-0.6), pytest.approx(-0.8)]] * 2


@pytest.mark.requirement("OPT-6")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_channels_last_weights_are_right(fraction: float, fused: bool) -> None:
    """A channels_last weight with a contiguous gradient equals the contiguous one, fused or not."""
    values, gradient = torch.randn(2, 3, 2, 2), torch.randn(2, 3, 2, 2)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        with Simulator(device_type="cuda"):
            parameter = nn.Parameter(values.to("cuda").contiguous(memory_format=memory_format))
            optimizer = hybrid([parameter], fraction, torch.optim.Adam, fused=fused)
            for _ in range(2):
                parameter.grad = gradient.to("cuda")
                optimizer.step()
            results.append(parameter.detach().cpu().contiguous())
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-7)


@pytest.mark.requirement("OPT-16")
def test_a_group_is_added(implementation: Implementation) -> None:
    """A group added after a step is divided on its own and stepped with its own lr."""
    with Simulator(device_type="cuda"):
        first, second = scalar(0.0), scalar(0.0)
        optimizer = implementation.optimizer([first], 1.0, lr=1.0)
        give(first, 1.0)
        optimizer.step()
        optimizer.add_param_group({"params": [second], "lr": 10.0})
        give(second, 1.0)
        optimizer.step()
        assert (first.item(), second.item()) == (-2.0, -10.0)
        assert "offload_fraction" not in optimizer.param_groups[1]


@pytest.mark.requirement("OPT-4", "MEM-10")
def test_a_frozen_parameter_is_trained_once_it_has_a_gradient(implementation: Implementation) -> None:
    """Frozen at construction it costs nothing; unfrozen, it is stepped on the side that the rule gave it."""
    with Simulator(device_type="cuda") as simulator:
        frozen, trained = scalar(0.0), scalar(0.0)
        frozen.requires_grad = False
        optimizer = implementation.optimizer([frozen, trained], 1.0, lr=1.0)
        give(trained, 1.0)
        optimizer.step()
        assert simulator.pinned_allocated() == 2 * 4
        frozen.requires_grad = True
        give(frozen, 1.0)
        optimizer.step()
        assert (frozen.item(), trained.item()) == (-1.0, -2.0)


@pytest.mark.requirement("OPT-6")
def test_inf_is_skipped_by_the_gradient_scaler(implementation: Implementation) -> None:
    """A scaler's unscaled gradients reach both sides; a step with an infinite one changes nothing."""
    with Simulator(device_type="cuda"):
        parameters = [scalar(0.0), scalar(0.0)]
        optimizer = implementation.optimizer(parameters, 0.5, lr=1.0)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1000)
        for gradients in ((1.0, 2.0), (float("inf"), 2.0)):
            optimizer.zero_grad()
            loss = torch.stack([g * p.sum() for g, p in zip(gradients, parameters, strict=True)]).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert [parameter.item() for parameter in parameters] == [-1.0, -2.0]

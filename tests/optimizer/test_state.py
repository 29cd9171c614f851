"""The optimizer's state: saved, loaded anywhere, refused whole, live, and following the weights."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from host_ledger import HostLedger
from optimizing import Training, offloading
from torch import nn

from offload_ref import HybridDeviceOptimizer
from offload_ref.errors import StateDictError
from offload_ref.simulator import Simulator

TRAINING = Training([(4,), (2, 3), (5,)], [[True] * 3] * 3, torch.bfloat16, masters=True)


def stepped(
    fraction: float, partition: str = "greedy", training: Training = TRAINING
) -> tuple[list[nn.Parameter], HybridDeviceOptimizer]:
    """Parameters and their optimizer after one step; to be called under a simulator."""
    parameters = training.parameters("cuda")
    optimizer = offloading(training, parameters, fraction, partition=partition)
    training.set_gradients(parameters, 0, "cuda")
    optimizer.step()
    return parameters, optimizer


def host_copy(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict through a file, as plain tensors on the host."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


@pytest.mark.quick
@pytest.mark.requirement("OPT-30", "OPT-34")
@pytest.mark.parametrize("partition", ["greedy", "exact"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_the_layout_is_torchs_whatever_the_partition(fraction: float, partition: str) -> None:
    """Numbers, names, shapes and bits of the state do not depend on where it lives; masters are fp32."""
    with Simulator(device_type="cuda"):
        reference = host_copy(stepped(0.0)[1].state_dict())
        seen = host_copy(stepped(fraction, partition)[1].state_dict())
    assert seen["param_groups"] == reference["param_groups"]
    assert list(seen["state"]) == [0, 1, 2]
    for number, state in seen["state"].items():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
        assert state["master_param"].dtype is torch.float32
        for name, value in state.items():
            assert torch.equal(value, reference["state"][number][name]), (number, name)


@pytest.mark.requirement("OPT-31")
def test_a_plain_optimizers_state_loads() -> None:
    """The state of torch.optim.AdamW loads into the offloading one, and the other way round."""
    training = Training([(4,), (2, 3)], [[True] * 2] * 2)
    with Simulator(device_type="cuda"):
        parameters, optimizer = stepped(0.5, training=training)
        plain = torch.optim.AdamW(training.groups(parameters), lr=0.01, weight_decay=0.1, foreach=False)
        plain.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        again = host_copy(optimizer.state_dict())["state"]
        for number, state in host_copy(plain.state_dict())["state"].items():
            assert all(torch.equal(value, again[number][name]) for name, value in state.items())


def _drop_group(saved: dict[str, Any]) -> None:
    saved["param_groups"].pop()


def _drop_parameter(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"].pop()


def _grow_moment(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg"] = torch.zeros(7, 7)


def _shrink_master(saved: dict[str, Any]) -> None:
    saved["state"][2]["master_param"] = torch.zeros(2)


def _unknown_number(saved: dict[str, Any]) -> None:
    saved["state"][9] = saved["state"].pop(0)


def _drop_state(saved: dict[str, Any]) -> None:
    del saved["state"]


@pytest.mark.requirement("OPT-32")
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "spoil", [_drop_group, _drop_parameter, _grow_moment, _shrink_master, _unknown_number, _drop_state]
)
def test_a_misfit_is_refused_before_anything_changes(spoil: Any, fraction: float) -> None:
    """Groups, sizes, shapes or numbers that do not fit: a typed error, and state and groups as before."""
    with Simulator(device_type="cuda"):
        parameters, optimizer = stepped(fraction)
        before = host_copy(optimizer.state_dict())
        saved = host_copy(optimizer.state_dict())
        for group in saved["param_groups"]:
            group["lr"] = 77.0
        spoil(saved)
        with pytest.raises(StateDictError, match="OPT-32"):
            optimizer.load_state_dict(saved)
        after = host_copy(optimizer.state_dict())
        assert after["param_groups"] == before["param_groups"]
        for number, state in before["state"].items():
            assert all(torch.equal(value, after["state"][number][name]) for name, value in state.items())
        assert all(p.dtype is torch.bfloat16 for p in parameters)


@pytest.mark.requirement("OPT-35")
def test_a_copied_state_dict_is_not_touched_by_the_next_step() -> None:
    """``copy=True`` keeps its values over a step; a plain state dict shows the new ones."""
    for copied in (True, False):
        with Simulator(device_type="cuda"):
            parameters, optimizer = stepped(0.5)
            saved = optimizer.state_dict(copy=copied)
            before = host_copy(saved)
            TRAINING.set_gradients(parameters, 1, "cuda")
            optimizer.step()
            after = host_copy(saved)
        same = all(
            torch.equal(value, after["state"][number][name])
            for number, state in before["state"].items()
            for name, value in state.items()
        )
        assert same is copied


@pytest.mark.requirement("OPT-36")
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("assign", [False, True])
def test_state_is_live(fraction: float, assign: bool) -> None:
    """A momentum edited in place, or assigned, is the one that the next step uses: -1, then -1 - 10."""
    with Simulator(device_type="cuda"):
        parameter = nn.Parameter(torch.zeros(1).to("cuda"))
        sgd = torch.optim.SGD
        optimizer = HybridDeviceOptimizer([parameter], fraction, sgd, sgd, lr=1.0, momentum=1.0)
        parameter.grad = torch.ones(1).to("cuda")
        optimizer.step()
        momentum = optimizer.state[parameter]["momentum_buffer"]
        if assign:
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(momentum, 9.0)}
        else:
            momentum.fill_(9.0)
        optimizer.step()
        assert parameter.item() == -11.0


@pytest.mark.requirement("OPT-25", "OPT-20")
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("partition", ["greedy", "exact"])
@pytest.mark.parametrize("how", ["in place", "new storage"])
def test_a_step_never_reverts_a_change_of_weights(fraction: float, partition: str, how: str) -> None:
    """Weights changed from outside without notice are where the next step starts."""
    with Simulator(device_type="cuda") as simulator:
        parameters, optimizer = stepped(fraction, partition)
        with torch.no_grad():
            for parameter in parameters:
                if how == "in place":
                    parameter.fill_(64.0)
                else:
                    parameter.data = torch.full_like(parameter, 64.0)
        TRAINING.set_gradients(parameters, 1, "cuda")
        optimizer.step()
        values = torch.cat([p.detach().cpu().float().flatten() for p in parameters])
    simulator.assert_race_free()
    assert ((values - 64.0).abs() <= 0.5).all()


@pytest.mark.requirement("OPT-25")
def test_a_master_keeps_its_bits_where_it_still_rounds_to_the_weight() -> None:
    """Touching a weight without changing its value loses nothing of the master."""
    with Simulator(device_type="cuda"):
        parameters, optimizer = stepped(1.0)
        before = host_copy(optimizer.state_dict())["state"][0]["master_param"]
        with torch.no_grad():
            parameters[0].mul_(1.0)
        for parameter in parameters:
            parameter.grad = None
        parameters[1].grad = torch.zeros_like(parameters[1])
        optimizer.step()
        after = host_copy(optimizer.state_dict())["state"][0]["master_param"]
        assert torch.equal(before, after)
        assert not torch.equal(before, before.bfloat16().float())


@pytest.mark.requirement("OPT-25")
@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 2.0), (1.0, -1.0)])
def test_an_edit_through_data_has_to_be_announced(fraction: float, expected: float) -> None:
    """It bumps no version counter: the device's share steps from 3 to 2, the host's from the 0 that it has seen."""
    sgd = torch.optim.SGD
    with Simulator(device_type="cuda"):
        parameter = torch.nn.Parameter(torch.ones(1).to("cuda"))
        optimizer = HybridDeviceOptimizer([parameter], fraction, sgd, sgd, lr=1.0)
        for edit in (None, 3.0):
            if edit is not None:
                parameter.data.fill_(edit)
            parameter.grad = torch.ones(1).to("cuda")
            optimizer.step()
        assert parameter.item() == expected


@pytest.mark.requirement("OPT-24")
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_announced_changes_reach_every_copy(fraction: float) -> None:
    """After an edit through ``.data`` and the announcement, masters equal weights and counts stay."""
    with Simulator(device_type="cuda"):
        parameters, optimizer = stepped(fraction)
        for parameter in parameters:
            parameter.data.fill_(3.0)
        optimizer.update_fp32_param_by_new_param()
        for state in host_copy(optimizer.state_dict())["state"].values():
            assert (state["master_param"] == 3.0).all()
            assert state["step"] == 1
            assert state["exp_avg"].any()


@pytest.mark.requirement("OPT-10")
def test_groups_keep_their_identity() -> None:
    """The very dicts given are the groups, before and after loading, with their own keys."""
    with Simulator(device_type="cuda"):
        parameters = TRAINING.parameters("cuda")
        groups = TRAINING.groups(parameters)
        optimizer = HybridDeviceOptimizer(groups, 0.5, foreach=False)
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(ours is theirs for ours, theirs in zip(optimizer.param_groups, groups, strict=True))
        assert groups[0]["name"] == "first"
        assert groups[1]["params"] == []


@pytest.mark.requirement("OPT-30")
def test_named_parameters_and_hooks_work_as_in_torch() -> None:
    """Names are in the groups, and hooks of step, saving and loading run, in order."""
    with Simulator(device_type="cuda"):
        layer = nn.Linear(2, 2).to("cuda")
        optimizer = HybridDeviceOptimizer(layer.named_parameters(), 0.5)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after load"))
        layer(torch.ones(1, 2, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["before step", "after step", "before load", "after load"]
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.requirement("MEM-15")
def test_loading_makes_no_second_copy_of_the_states() -> None:
    """Beside the states there are, loading needs room for one more of 4,000 bytes, not for all eight anew."""
    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(4)]
    with HostLedger() as ledger:
        optimizer = HybridDeviceOptimizer(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones(1000)
        optimizer.step()
        saved = optimizer.state_dict(copy=True)
        for parameter in parameters:
            parameter.grad = None
        ledger.peak, before = 0, ledger.live()
        optimizer.load_state_dict(saved)
        assert before > 2 * 8 * 4000
        assert before <= ledger.peak <= before + 4000 + 64
        assert ledger.live() <= before

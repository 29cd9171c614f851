"""The simulator finds, in unmodified megatron-core, the race that a GPU shows, and finds none where there is none."""

from __future__ import annotations

import warnings

import pytest
import torch
from machines import SCHEDULES

from offload_ref.simulator import Eager, Race, Simulator

hybrid_optimizer = pytest.importorskip(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    reason="megatron-core 0.16 is not installed (it needs Python below 3.12)",
)


def one_step(schedule: str, dtype: torch.dtype) -> tuple[list[float], list[Race]]:
    """One step of SGD with lr 1 on parameters 1, 0, -2 with gradients 1, 2, 3, half of them on the host."""

    def sgd(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=1.0, foreach=False)

    with Simulator(schedule=SCHEDULES[schedule](), device_type="cuda") as simulator, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = [torch.nn.Parameter(torch.tensor([v]).to(dtype).to("cuda")) for v in (1.0, 0.0, -2.0)]
        optimizer = hybrid_optimizer.HybridDeviceOptimizer(
            [{"params": parameters}],
            offload_fraction=0.5,
            cpu_optimizer_cls=sgd,
            gpu_optimizer_cls=sgd,
            param_update_in_fp32=dtype is not torch.float32,
            overlap_cpu_optimizer_d2h_h2d=True,
            lr=1.0,
        )
        for parameter, gradient in zip(parameters, (1.0, 2.0, 3.0), strict=True):
            parameter.grad = torch.tensor([gradient]).to(dtype).to("cuda") * 1
        optimizer.step()
        return [p.detach().cpu().item() for p in parameters], simulator.races


@pytest.mark.quick
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp32_is_right_and_free_of_races(schedule: str) -> None:
    """fp32 gradients need no cast: 0, -2, -5 under every schedule, and no race."""
    assert one_step(schedule, torch.float32) == ([0.0, -2.0, -5.0], [])


@pytest.mark.quick
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bf16_gradients_are_read_while_a_side_stream_casts_them(schedule: str) -> None:
    """Under every schedule one race is reported, which names both lines and the missing wait."""
    _values, races = one_step(schedule, torch.bfloat16)
    (race,) = races
    assert (race.first.kind, race.second.kind) == ("writes", "reads")
    assert race.first.actor == "stream1"
    assert race.second.actor == "default"
    assert "_set_sub_optimizer_grads" in race.first.site
    assert race.missing_edge == "default.wait_event(an event recorded on stream1 after it)"


@pytest.mark.quick
def test_the_race_shows_when_the_side_stream_is_late() -> None:
    """By luck the values are right when the device keeps up, and wrong when the side stream is starved."""
    eager, late = (one_step(name, torch.bfloat16)[0] for name in ("eager", "starve-first-side-stream"))
    assert eager == [0.0, -2.0, -5.0]
    assert late != eager
    assert repr(Eager()) == "Eager()"

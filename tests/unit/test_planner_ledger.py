"""The plan against the simulator's ledger, byte for byte, after a first step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_ref import HybridDeviceOptimizer
from offload_ref.partition import MODES
from offload_ref.planner import OptimizerSettings, describe, predict
from offload_ref.simulator import Simulator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(40, 25), (7,), (0,), (), (16, 16), (3, 5, 2), (64, 8)]


def after_one_step(
    shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], fraction: float, mode: str, settings: OptimizerSettings
) -> tuple[int, int, list[torch.nn.Parameter]]:
    """Return device bytes, pinned bytes and the parameters of a training that has made its first step."""
    with Simulator(device_type="cuda") as simulator:
        parameters = [
            torch.nn.Parameter(torch.ones(shape, dtype=dtype, device="cuda"))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        optimizer = HybridDeviceOptimizer(
            parameters,
            fraction,
            param_update_in_fp32=settings.param_update_in_fp32,
            pin_cpu_grads=settings.pin_cpu_grads,
            pin_cpu_params=settings.pin_cpu_params,
            partition=mode,
            bucket_bytes=settings.bucket_bytes,
            lr=1e-3,
            foreach=False,
        )
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.cuda.synchronize()
        simulator.assert_race_free()
        return simulator.memory_allocated(), simulator.pinned_allocated(), parameters


@pytest.mark.quick
@pytest.mark.requirement("MEM-20", "MEM-22")
@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("mastered", [False, True], ids=["fp32", "bf16-masters"])
def test_the_ledger_at_every_quarter(mode: str, mastered: bool) -> None:
    """At every quarter the ledger has the planned bytes, and falls by the host share's states and masters."""
    dtypes = [torch.bfloat16 if mastered else torch.float32] * len(SHAPES)
    settings = OptimizerSettings(param_update_in_fp32=mastered)
    kept, _, _ = after_one_step(SHAPES, dtypes, 0, mode, settings)
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        device, pinned, parameters = after_one_step(SHAPES, dtypes, fraction, mode, settings)
        plan = predict(describe(parameters, all_on_device=True), fraction, partition=mode, settings=settings)
        assert (device, pinned) == (plan.device, plan.pinned)
        assert kept - device == plan.saved


@pytest.mark.requirement("MEM-20")
@given(data=st.data())
def test_the_ledger_of_any_optimizer(data: st.DataObject) -> None:
    """The ledger has the planned bytes for any shapes, dtypes, fraction, partition, pins and buckets."""
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    fraction, mode = data.draw(st.floats(0, 1)), data.draw(st.sampled_from(sorted(MODES)))
    settings = OptimizerSettings(
        param_update_in_fp32=data.draw(st.booleans()),
        pin_cpu_grads=data.draw(st.booleans()),
        pin_cpu_params=data.draw(st.booleans()),
        bucket_bytes=data.draw(st.sampled_from([1, 64, 3000, 32 << 20])),
    )
    device, pinned, parameters = after_one_step(shapes, dtypes, fraction, mode, settings)
    plan = predict(describe(parameters, all_on_device=True), fraction, partition=mode, settings=settings)
    assert (device, pinned) == (plan.device, plan.pinned)

"""Each wait of the host step is needed, and what it copies and allocates is counted."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from optimizing import Training, offloading

from offload_ref import HybridDeviceOptimizer
from offload_ref.buckets import Bucket
from offload_ref.simulator import Lazy, Simulator

WAITS = {
    "ORD-10": "stream.wait_event(ready)",
    "ORD-11": "self.copied.synchronize()",
    "ORD-15": "compute.wait_event(side.record_event())",
}
"""Rule -> the wait that keeps it, as the source says it."""

TRAINING = Training([(4,), (2, 3), (5,)], [[True] * 3] * 3, torch.bfloat16, masters=True)


@contextmanager
def without(wait: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Drop each wait of a stream or of the host that is written so; yields the lines dropped."""
    stream = torch.accelerator.current_stream()
    event = stream.record_event()
    dropped: list[str] = []

    def is_dropped() -> bool:
        caller = sys._getframe(2)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
        if line.startswith(wait):
            dropped.append(line)
        return line.startswith(wait)

    wait_event, synchronize = type(stream).wait_event, type(event).synchronize
    with monkeypatch.context() as patch:
        patch.setattr(type(stream), "wait_event", lambda s, e: None if is_dropped() else wait_event(s, e))
        patch.setattr(type(event), "synchronize", lambda e: None if is_dropped() else synchronize(e))
        yield dropped


def train(optimizer: HybridDeviceOptimizer, parameters: list[torch.nn.Parameter], steps: int = 3) -> None:
    """Steps whose gradients and weights are used on the device between."""
    for step in range(steps):
        TRAINING.set_gradients(parameters, step, "cuda")
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad += parameter.detach()
        optimizer.step()


@pytest.mark.quick
@pytest.mark.parametrize("rule", [pytest.param(r, marks=pytest.mark.requirement(r)) for r in WAITS])
def test_each_wait_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wait there is no race; without it the checker reports one."""
    for wait, racy in (("no such wait", False), (WAITS[rule], True)):
        with Simulator(schedule=Lazy(), device_type="cuda") as simulator:
            parameters = TRAINING.parameters("cuda")
            optimizer = offloading(TRAINING, parameters, 0.7, bucket_bytes=16)
            with without(wait, monkeypatch) as dropped:
                train(optimizer, parameters)
        assert bool(dropped) is racy
        assert bool(simulator.races) is racy, rule


@pytest.mark.requirement("ORD-13", "ORD-14")
def test_the_host_steps_after_the_device_has_done_with_the_last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """If gradients do not wait for the compute stream, old weights are overwritten while in use."""
    with Simulator(schedule=Lazy(), device_type="cuda") as simulator:
        parameters = TRAINING.parameters("cuda")
        optimizer = offloading(TRAINING, parameters, 1.0)
        with without(WAITS["ORD-10"], monkeypatch):
            train(optimizer, parameters)
    spaces = {race.block.split(" ")[0] for race in simulator.races}
    assert spaces == {"device", "pinned"}


@pytest.mark.requirement("ORD-12")
def test_a_weight_leaves_after_the_host_has_written_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying weights before the host step sends the old ones, and the host then writes under the copy."""
    with Simulator(schedule=Lazy(), device_type="cuda") as simulator:
        parameters = TRAINING.parameters("cuda")
        optimizer = offloading(TRAINING, parameters, 1.0, bucket_bytes=1 << 20)
        step = Bucket.step

        def leave_early(bucket: Bucket, begun: list[Bucket]) -> None:
            bucket.copy_weights(torch.accelerator.current_stream())
            step(bucket, begun)

        monkeypatch.setattr(Bucket, "step", leave_early)
        train(optimizer, parameters)
    assert simulator.races


@pytest.mark.requirement("ORD-16")
def test_device_gradients_are_cast_on_the_stream_that_steps() -> None:
    """bf16 gradients of the device share are cast where they are used: 0, -2, -5 from 1, 0, -2."""
    with Simulator(schedule=Lazy(), device_type="cuda") as simulator:
        parameters = [torch.nn.Parameter(torch.tensor([v]).bfloat16().to("cuda")) for v in (1.0, 0.0, -2.0)]
        optimizer = HybridDeviceOptimizer(
            parameters, 0.5, torch.optim.SGD, torch.optim.SGD, param_update_in_fp32=True, lr=1.0
        )
        for gradient, parameter in zip((1.0, 2.0, 3.0), parameters, strict=True):
            parameter.grad = torch.tensor([gradient]).bfloat16().to("cuda") * 1
        optimizer.step()
        values = [parameter.detach() for parameter in parameters]
    simulator.assert_race_free()
    assert [value.item() for value in map(torch.Tensor.clone, values)] == [0.0, -2.0, -5.0]


@pytest.mark.quick
@pytest.mark.requirement("OPT-21", "MEM-10", "MEM-11", "MEM-12", "MEM-14")
@pytest.mark.parametrize("overlap", [True, False])
def test_copies_and_bytes_are_counted(overlap: bool) -> None:
    """With 15 bf16 elements on the host: 30 bytes a step each way in 3 copies, 60 bytes pinned once."""
    with Simulator(device_type="cuda") as simulator:
        parameters = TRAINING.parameters("cuda")
        optimizer = offloading(TRAINING, parameters, 1.0, overlap_cpu_optimizer_d2h_h2d=overlap)
        assert simulator.pinned_allocated() == 0
        train(optimizer, parameters, steps=1)
        assert simulator.pinned_allocated() == 60
        seen = []
        for _ in range(20):
            copies = simulator.copies
            before = (copies.d2h, copies.d2h_bytes, copies.h2d, copies.h2d_bytes)
            allocations = simulator.counters.pinned_allocations
            bytes_before = simulator.memory_allocated()
            TRAINING.set_gradients(parameters, 1, "cuda")
            filled = (copies.h2d, copies.h2d_bytes)
            optimizer.step()
            seen.append(
                (
                    copies.d2h - before[0],
                    copies.d2h_bytes - before[1],
                    copies.h2d - filled[0],
                    copies.h2d_bytes - filled[1],
                    simulator.counters.pinned_allocations - allocations,
                    simulator.memory_allocated() - bytes_before,
                )
            )
        assert set(seen) == {(3, 30, 3, 30, 0, 0)}


@pytest.mark.requirement("MEM-12")
@pytest.mark.parametrize(("grads", "params"), [(False, False), (True, False), (False, True), (True, True)])
def test_what_is_not_to_be_pinned_is_not(grads: bool, params: bool) -> None:
    """30 bytes each of gradients and of weights are pinned if asked for."""
    with Simulator(device_type="cuda") as simulator:
        parameters = TRAINING.parameters("cuda")
        optimizer = offloading(TRAINING, parameters, 1.0, pin_cpu_grads=grads, pin_cpu_params=params)
        train(optimizer, parameters, steps=2)
        assert simulator.max_pinned_allocated() == 30 * (grads + params)
    simulator.assert_race_free()


@pytest.mark.requirement("MEM-14", "MEM-10")
def test_a_thousand_steps_do_not_grow() -> None:
    """Device, pinned bytes, and objects of the simulator are after 1,000 steps what they are after ten."""
    with Simulator(device_type="cuda") as simulator:
        parameters = TRAINING.parameters("cuda")
        optimizer = offloading(TRAINING, parameters, 0.5)
        seen = []
        for step in range(1000):
            TRAINING.set_gradients(parameters, 0, "cuda")
            optimizer.step()
            if step % 330 == 9:
                live = (simulator.memory_allocated(), simulator.pinned_allocated())
                seen.append((*live, len(simulator.memory.blocks)))
        assert len(set(seen)) == 1
    simulator.assert_race_free()

"""What a step costs in copies, bytes, events, host waits and allocations, counted exactly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from optimizing import Training, offloading
from torch import nn

from offload_ref import offload_layers
from offload_ref.simulator import Simulator

FLOAT_BYTES = 4
ROWS, WIDTH, LAYERS = 16, 8, 6


@dataclass(frozen=True)
class Counts:
    """Differences over one step."""

    d2h: int
    d2h_bytes: int
    h2d: int
    h2d_bytes: int
    events: int
    host_syncs: int
    pinned_allocations: int

    @classmethod
    def now(cls, simulator: Simulator) -> Counts:
        """The simulator's counts so far."""
        copies, counters = simulator.copies, simulator.counters
        return cls(
            copies.d2h,
            copies.d2h_bytes,
            copies.h2d,
            copies.h2d_bytes,
            counters.events_recorded,
            counters.host_syncs,
            counters.pinned_allocations,
        )

    def __sub__(self, earlier: Counts) -> Counts:
        pairs = zip(vars(self).values(), vars(earlier).values(), strict=True)
        return Counts(*(after - before for after, before in pairs))


class Sine(nn.Module):
    """A layer that saves one activation of ROWS x WIDTH floats."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1).sin()


@pytest.mark.quick
@pytest.mark.requirement("OVH-1", "OVH-2", "OVH-3")
@pytest.mark.parametrize("num_layers", range(LAYERS))
def test_an_activation_step_by_count(num_layers: int) -> None:
    """Per offloaded storage: one copy and four events; no host wait; no pinned allocation after the first step."""
    with Simulator(device_type="cuda") as simulator:
        layers = nn.ModuleList(Sine() for _ in range(LAYERS))
        seen = []
        with offload_layers(layers, num_layers, min_offload_bytes=0, retain_pinned_cpu_buffers=True):
            for _ in range(3):
                x = torch.ones(ROWS, WIDTH, device="cuda", requires_grad=True)
                before = Counts.now(simulator)
                y = x
                for layer in layers:
                    y = layer(y)
                y.sum().backward()
                seen.append(Counts.now(simulator) - before)
    moved = num_layers * ROWS * WIDTH * FLOAT_BYTES
    steady = Counts(num_layers, moved, num_layers, moved, 4 * num_layers, 0, 0)
    assert seen[1:] == [steady, steady]
    assert seen[0].pinned_allocations == num_layers


@pytest.mark.quick
@pytest.mark.requirement("OVH-1", "OVH-2", "OVH-3")
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 3), (40, 2), (1 << 20, 1)])
def test_an_optimizer_step_by_count(bucket_bytes: int, buckets: int) -> None:
    """Per host parameter one copy each way; per bucket one host wait and one event; three events around all."""
    training = Training([(4,), (2, 3), (5,)], [[True] * 3], torch.bfloat16, masters=True)
    with Simulator(device_type="cuda") as simulator:
        parameters = training.parameters("cuda")
        optimizer = offloading(training, parameters, 1.0, bucket_bytes=bucket_bytes)
        seen = []
        for _ in range(3):
            training.set_gradients(parameters, 0, "cuda")
            before = Counts.now(simulator)
            optimizer.step()
            seen.append(Counts.now(simulator) - before)
    steady = Counts(3, 30, 3, 30, 3 + buckets, buckets, 0)
    assert seen[1:] == [steady, steady]
    assert seen[0].pinned_allocations == 2 * buckets


@pytest.mark.requirement("OVH-4")
def test_off_costs_nothing() -> None:
    """K = 0 and fraction 0: no copy, no event, no host wait, no pinned byte, no stream."""
    training = Training([(4,), (2, 3)], [[True] * 2])
    with Simulator(device_type="cuda") as simulator:
        parameters = training.parameters("cuda")
        optimizer = offloading(training, parameters, 0.0)
        layers = nn.ModuleList(Sine() for _ in range(LAYERS))
        training.set_gradients(parameters, 0, "cuda")
        x = torch.ones(ROWS, WIDTH, device="cuda", requires_grad=True)
        before = Counts.now(simulator)
        with offload_layers(layers, 0):
            y = x
            for layer in layers:
                y = layer(y)
            y.sum().backward()
        optimizer.step()
        assert Counts.now(simulator) - before == Counts(0, 0, 0, 0, 0, 0, 0)
        assert len(simulator.streams) == 1

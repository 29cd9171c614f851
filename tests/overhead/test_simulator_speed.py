"""Time of twenty training steps with both kinds of offloading on the simulated accelerator."""

from __future__ import annotations

import pytest
import torch
from layered import batch, build, run_layers
from pytest_benchmark.fixture import BenchmarkFixture

from offload_ref import HybridDeviceOptimizer, offload_layers
from offload_ref.simulator import Simulator

STEPS, LAYERS, WIDTH, ROWS = 20, 4, 64, 32

MOST_SECONDS = 10.0
"""Twenty steps of a four-layer transformer of width 64, on two cores."""


def train() -> None:
    """Twenty steps under the checker."""
    with Simulator(device_type="cuda") as simulator:
        layers = build(["attention"] * LAYERS, WIDTH, "cuda")
        optimizer = HybridDeviceOptimizer(layers.parameters(), 1.0, foreach=False)
        with offload_layers(layers, LAYERS - 1, min_offload_bytes=0):
            for step in range(STEPS):
                run_layers(layers, batch(step, ROWS, WIDTH, "cuda")).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.accelerator.synchronize()
    simulator.assert_race_free()


@pytest.mark.benchmark(group="simulator")
def test_twenty_steps(benchmark: BenchmarkFixture) -> None:
    """At most ten seconds."""
    benchmark.pedantic(train, rounds=1, warmup_rounds=1)  # type: ignore[no-untyped-call]
    assert benchmark.stats.stats.median <= MOST_SECONDS

"""Time of an offloaded forward and backward beside torch's own save_on_cpu, interleaved, as a ratio."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from statistics import median

import pytest
import torch
from layered import build, offloaded, run_layers
from machines import Machine
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from torch.autograd.graph import save_on_cpu

ROUNDS = 7

MOST_SIMULATED_RATIO = 1.5
"""On the simulated accelerator time is Python's alone: hooks, copies and events per saved tensor."""

MOST_REAL_RATIO = 1.0
"""On a real one save_on_cpu copies weights too, and waits for every copy."""


def seconds(layers: nn.ModuleList, x: torch.Tensor, offloading: AbstractContextManager[object]) -> float:
    """One forward and backward, to the end of the device's work."""
    torch.accelerator.synchronize()
    start = time.perf_counter()
    with offloading:
        loss = run_layers(layers, x)
    loss.backward()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


@pytest.mark.requirement("OVH-10")
@pytest.mark.benchmark(group="activations")
def test_forward_and_backward_beside_save_on_cpu(machine: Machine, benchmark: BenchmarkFixture) -> None:
    """The median over rounds of (ours / save_on_cpu) stays at or below its bound."""
    width, rows, bound = (16, 16, MOST_SIMULATED_RATIO) if machine.simulated else (2048, 2048, MOST_REAL_RATIO)
    with machine.run():
        layers = build(["attention"] * 6, width, machine.device)
        x = torch.randn(rows, width).to(machine.device).requires_grad_()
        ratios: list[float] = []

        def one_round() -> None:
            theirs = seconds(layers, x, save_on_cpu(pin_memory=True))
            ours = seconds(layers, x, offloaded(layers, 5, retain_pinned_cpu_buffers=True))
            ratios.append(ours / theirs)

        benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]
    ratio = median(ratios[1:])
    benchmark.extra_info["ours / save_on_cpu"] = round(ratio, 3)
    assert ratio <= bound

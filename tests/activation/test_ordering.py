"""Each wait of activation offloading is needed: without it the checker names a race."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from layered import batch, build, offloaded, run_layers
from torch import nn

from offload_ref import ActivationOffload
from offload_ref.host_memory import PinnedPool
from offload_ref.simulator import Lazy, Simulator

WAITS = {
    "ORD-1": "self.d2h.wait_event(compute.record_event())",
    "ORD-2": "self.compute.wait_event(self.unsettled)",
    "ORD-3": "self.h2d.wait_event(copied)",
    "ORD-4": "self.h2d.wait_event(compute.record_event())",
    "ORD-5": "stream.wait_event(self.arrived)",
    "ORD-6": "self.d2h.wait_event(buffer.last_use)",
}
"""Rule -> the wait that keeps it, as the source says it."""


@contextmanager
def without(wait: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Drop each ``wait_event`` that is written so in the source; yields the lines dropped."""
    stream_type = type(torch.accelerator.current_stream())
    wait_event = stream_type.wait_event
    dropped: list[str] = []

    def wait_unless_dropped(stream: torch.Stream, event: torch.Event) -> None:
        caller = sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
        if line.startswith(wait):
            dropped.append(line)
        else:
            wait_event(stream, event)

    with monkeypatch.context() as patch:
        patch.setattr(stream_type, "wait_event", wait_unless_dropped)
        yield dropped


def three_steps(layers: nn.ModuleList) -> None:
    """Forward and backward, three times."""
    for i in range(3):
        run_layers(layers, batch(i, 6, 8, "cuda")).backward()


def backward_that_stops_half_way(layers: nn.ModuleList) -> None:
    """Backward to the middle leaves layer 0 on its way back while the next forward wants a buffer."""
    for i in range(3):
        middle = layers[1](layers[0](batch(i, 6, 8, "cuda")))
        loss = layers[3](layers[2](middle)).sum()
        torch.autograd.grad(loss, middle)
        run_layers(layers, batch(i, 6, 8, "cuda"))


def backward_after_one_layer(_layers: nn.ModuleList) -> None:
    """A packed column whose storage is gone is read back before its layer was ever released."""
    offload = ActivationOffload(1, 2, min_offload_bytes=0)
    with offload.layer(0):
        y = (batch(0, 6, 8, "cuda") * 1)[:, :1].sin()
    y.sum().backward()


PROGRAMS = {"ORD-3": backward_after_one_layer, "ORD-6": backward_that_stops_half_way}
"""Rule -> the program that needs its wait; the others are needed in any step."""


@pytest.mark.quick
@pytest.mark.parametrize("rule", [pytest.param(r, marks=pytest.mark.requirement(r)) for r in WAITS])
def test_each_wait_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wait there is no race; without it the checker reports one."""
    for wait, racy in (("no such wait", False), (WAITS[rule], True)):
        with Simulator(schedule=Lazy(), device_type="cuda") as simulator:
            layers = build(["attention", "tanh", "views", "tanh"], 8, "cuda")
            with without(wait, monkeypatch) as dropped, offloaded(layers, 2, retain_pinned_cpu_buffers=True):
                PROGRAMS.get(rule, three_steps)(layers)
        assert bool(dropped) is racy
        assert bool(simulator.races) is racy


@pytest.mark.requirement("ORD-6")
def test_the_pool_hands_out_the_event_of_the_last_use() -> None:
    """A buffer that is given back carries its event to whoever leases it next."""
    with Simulator(device_type="cuda"):
        pool = PinnedPool(retain=True)
        buffer = pool.lease(64)
        event = torch.accelerator.current_stream().record_event()
        pool.give_back(buffer, event)
        assert pool.lease(64) is buffer
        assert buffer.last_use is event
        assert pool.lease(64) is not buffer
        assert (pool.allocations, pool.leased_bytes, pool.free_bytes) == (2, 128, 0)

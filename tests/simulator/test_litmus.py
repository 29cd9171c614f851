"""Pairs of programs that differ in one edge: the good one is clean, the bad one is named and shows by value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from machines import SCHEDULES, observed

from offload_ref.simulator import Simulator

SIZE = 4


class Bench:
    """A current stream, two side streams, and what the programs observe on the device."""

    def __init__(self) -> None:
        self.compute = torch.accelerator.current_stream()
        self.d2h, self.h2d = torch.Stream(), torch.Stream()
        self.seen: list[torch.Tensor] = []

    def host_values(self, value: float) -> torch.Tensor:
        """A pinned tensor."""
        return torch.full((SIZE,), value).pin_memory()

    def device_values(self, value: float) -> torch.Tensor:
        """A device tensor that the compute stream has filled."""
        return torch.full((SIZE,), value, device="cuda") * 1


def reload_wait(bench: Bench, good: bool) -> None:
    """Compute reads what the H2D stream brings."""
    host, target = bench.host_values(3.0), bench.device_values(0.0)
    bench.h2d.wait_stream(bench.compute)
    with bench.h2d:
        target.copy_(host, non_blocking=True)
    if good:
        bench.compute.wait_stream(bench.h2d)
    bench.seen.append(target * 2)


def d2h_after_compute(bench: Bench, good: bool) -> None:
    """The D2H stream reads what compute has produced."""
    host, source = bench.host_values(0.0), bench.device_values(3.0)
    if good:
        bench.d2h.wait_stream(bench.compute)
    with bench.d2h:
        host.copy_(source, non_blocking=True)
    bench.d2h.synchronize()
    bench.compute.wait_stream(bench.d2h)
    bench.seen.append(host.to("cuda"))


def early_free(bench: Bench, good: bool) -> None:
    """The source of a D2H is freed, and its memory reused, before the copy has read it."""
    host, source = bench.host_values(0.0), bench.device_values(3.0)
    bench.d2h.wait_stream(bench.compute)
    with bench.d2h:
        host.copy_(source, non_blocking=True)
    if good:
        bench.compute.wait_stream(bench.d2h)
    del source
    bench.seen.append(bench.device_values(5.0))
    bench.d2h.synchronize()
    bench.seen.append(host.to("cuda"))


def pinned_reuse(bench: Bench, good: bool) -> None:
    """The host rewrites a pinned buffer that an H2D still reads."""
    host, target = bench.host_values(3.0), bench.device_values(0.0)
    bench.h2d.wait_stream(bench.compute)
    with bench.h2d:
        target.copy_(host, non_blocking=True)
    if good:
        bench.h2d.synchronize()
    host.fill_(5.0)
    bench.compute.wait_stream(bench.h2d)
    bench.seen.append(target * 1)


def host_step_before_d2h(bench: Bench, good: bool) -> None:
    """The host steps with a gradient that has not arrived."""
    arrival, gradient = bench.host_values(0.0), bench.device_values(3.0)
    bench.d2h.wait_stream(bench.compute)
    with bench.d2h:
        arrival.copy_(gradient, non_blocking=True)
    if good:
        bench.d2h.synchronize()
    weight = torch.ones(SIZE) - arrival
    bench.d2h.synchronize()
    bench.seen.append(weight.to("cuda"))


def forward_before_h2d(bench: Bench, good: bool) -> None:
    """The next forward reads a weight that is still on its way."""
    weight, stepped = bench.device_values(1.0), bench.host_values(3.0)
    bench.h2d.wait_stream(bench.compute)
    with bench.h2d:
        weight.copy_(stepped, non_blocking=True)
    if good:
        bench.compute.wait_stream(bench.h2d)
    bench.seen.append(weight + 1)


def missing_record_stream(bench: Bench, good: bool) -> None:
    """Memory of the H2D stream is read by compute, freed, and reused on its own stream."""
    host = bench.host_values(3.0)
    with bench.h2d:
        target = host.to("cuda", non_blocking=True)
    bench.compute.wait_stream(bench.h2d)
    bench.seen.append(target * 1)
    if good:
        target.record_stream(bench.compute)
    del target
    with bench.h2d:
        reused = torch.full((SIZE,), 5.0, device="cuda")
    bench.compute.wait_stream(bench.h2d)
    bench.seen.append(reused)


def cast_on_a_side_stream(bench: Bench, good: bool) -> None:
    """A gradient is cast on a side stream and stepped with on the compute stream."""
    gradient = bench.device_values(3.0).bfloat16()
    bench.d2h.wait_stream(bench.compute)
    with bench.d2h:
        cast = gradient.float()
    if good:
        bench.compute.wait_stream(bench.d2h)
    bench.seen.append(torch.ones(SIZE, device="cuda") - cast)
    cast.record_stream(bench.compute)
    gradient.record_stream(bench.d2h)


def fresh_memory_on_another_stream(bench: Bench, good: bool) -> None:
    """Memory that compute has just freed is allocated again and first written by the H2D stream."""
    host, old = bench.host_values(3.0), bench.device_values(5.0)
    bench.seen.append(old * 2)
    del old
    target = torch.empty(SIZE, device="cuda")
    if good:
        bench.h2d.wait_stream(bench.compute)
    with bench.h2d:
        target.copy_(host, non_blocking=True)
    bench.compute.wait_stream(bench.h2d)
    bench.seen.append(target * 1)


PAIRS: list[tuple[Callable[[Bench, bool], None], str]] = [
    (reload_wait, "default.wait_event"),
    (d2h_after_compute, "stream1.wait_event"),
    (early_free, "default.wait_event"),
    (pinned_reuse, "event.synchronize() on the host"),
    (host_step_before_d2h, "event.synchronize() on the host"),
    (forward_before_h2d, "default.wait_event"),
    (missing_record_stream, "tensor.record_stream(default)"),
    (cast_on_a_side_stream, "default.wait_event"),
    (fresh_memory_on_another_stream, "stream2.wait_event"),
]
"""Program, and the wait that its bad half lacks."""


UNSEEN_BY_VALUE = {fresh_memory_on_another_stream}
"""The simulator gives each block bytes of its own, so the checker alone sees an early write into reused memory."""


def run(program: Callable[[Bench, bool], None], good: bool, schedule: str) -> tuple[list[list[float]], Simulator]:
    """One twin on a bench of its own."""
    return observed(Bench, program, good, schedule)


@pytest.mark.quick
@pytest.mark.parametrize(("program", "missing"), PAIRS)
def test_the_missing_edge_is_named_and_shows_by_value(program: Callable[[Bench, bool], None], missing: str) -> None:
    """Good: no race and the same values everywhere. Bad: one missing wait everywhere, other values somewhere."""
    expected = run(program, True, "eager")[0]
    values = []
    for schedule in SCHEDULES:
        seen, simulator = run(program, True, schedule)
        assert not simulator.races
        assert seen == expected
        seen, simulator = run(program, False, schedule)
        assert any(missing in race.missing_edge for race in simulator.races), simulator.races
        values.append(str(seen))
    assert (set(values) == {str(expected)}) is (program in UNSEEN_BY_VALUE)

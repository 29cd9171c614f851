"""Drawn programs in which edits alone may be unordered: a race is listed just where values differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import SCHEDULES

from offload_ref.simulator import Simulator
from offload_ref.simulator.schedules import Schedule

place = st.integers(0, 4)
actions = st.one_of(
    st.tuples(st.just("edit"), st.sampled_from(["at once", "after the mark", "after all copies"])),
    st.tuples(st.just("mark")),
    st.tuples(st.just("to_host"), place),
    st.tuples(st.just("to_device"), place),
    st.tuples(st.just("host_reads"), place),
    st.tuples(st.just("host_writes"), place),
    st.tuples(st.just("host_adds"), place),
    st.tuples(st.just("free"), place),
)


class Drawn:
    """Drawn actions on one device tensor and two buffers, with all waits that there can be except those of edits."""

    def __init__(self) -> None:
        self.compute = torch.accelerator.current_stream()
        self.d2h, self.h2d = torch.Stream(), torch.Stream()
        self.marked = self.d2h.record_event()
        self.source = torch.ones(2, device="cuda")
        self.buffers = [torch.zeros(4, pin_memory=True), torch.zeros(3, pin_memory=True)]
        self.seen: list[torch.Tensor] = []

    def part(self, place: int) -> torch.Tensor:
        """Two elements of a buffer; parts of one buffer overlap."""
        return self.buffers[place // 3][place % 3 :][:2]

    def edit(self, when: str) -> None:
        if when == "after the mark":
            self.compute.wait_event(self.marked)
        elif when == "after all copies":
            self.compute.wait_stream(self.d2h)
        self.source.mul_(3)

    def mark(self) -> None:
        self.marked = self.d2h.record_event()

    def to_host(self, place: int) -> None:
        self.d2h.wait_stream(self.compute)
        self.d2h.wait_stream(self.h2d)
        with self.d2h:
            self.part(place).copy_(self.source, non_blocking=True)

    def to_device(self, place: int) -> None:
        self.h2d.wait_stream(self.d2h)
        with self.h2d:
            self.seen.append(torch.empty(2, device="cuda").copy_(self.part(place), non_blocking=True))

    def host_reads(self, place: int) -> None:
        self.seen.append(self._settled(place).clone())

    def host_writes(self, place: int) -> None:
        self._settled(place).fill_(5)

    def host_adds(self, place: int) -> None:
        self._settled(place).add_(1)
        self.host_reads(place)

    def free(self, place: int) -> None:
        self.buffers[place // 3] = torch.zeros_like(self.buffers[place // 3], pin_memory=True)

    def _settled(self, place: int) -> torch.Tensor:
        self.d2h.synchronize()
        self.h2d.synchronize()
        return self.part(place)


def run_drawn(program: list[tuple[object, ...]], schedule: Schedule) -> tuple[str, list[list[str]]]:
    """What the program observes, without what is left in its buffers; its races and its stale copies."""
    with Simulator(schedule=schedule, device_type="cuda") as simulator:
        drawn = Drawn()
        for name, *arguments in program:
            getattr(drawn, str(name))(*arguments)
        torch.accelerator.synchronize()
        seen = str([t.cpu().tolist() for t in (*drawn.seen, drawn.source)])
    return seen, [[str(one) for one in listed] for listed in (simulator.races, simulator.stale_copies)]


@settings(max_examples=600)
@given(
    before=st.lists(actions, max_size=3),
    copied=place,
    between=st.lists(actions, max_size=2),
    after=st.lists(actions, max_size=4),
)
@pytest.mark.requirement("ORD-17")
def test_a_spoiled_copy_is_a_race_if_and_only_if_values_differ(
    before: list[tuple[object, ...]], copied: int, between: list[tuple[object, ...]], after: list[tuple[object, ...]]
) -> None:
    """Every schedule lists the same, and results differ between schedules just where a race is listed."""
    program = [*before, ("to_host", copied), *between, ("edit", "at once"), *after]
    results, verdicts = zip(*(run_drawn(program, make()) for make in SCHEDULES.values()), strict=True)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    races, _stale = verdicts[0]
    assert (len(set(results)) > 1) is bool(races)

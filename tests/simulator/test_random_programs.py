"""The simulator judged by itself: if values differ between schedules, a race has been reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import SCHEDULES

from offload_ref.simulator import Eager, Simulator, Tape
from offload_ref.simulator.schedules import Schedule

STREAMS, BUFFERS = 3, 3

stream, buffer = st.integers(0, STREAMS - 1), st.integers(0, BUFFERS - 1)
actions = st.one_of(
    st.tuples(st.just("kernel"), stream, buffer, buffer),
    st.tuples(st.just("record"), stream),
    st.tuples(st.just("wait"), stream, stream),
    st.tuples(st.just("synchronize"), stream),
    st.tuples(st.just("to host"), stream, buffer),
    st.tuples(st.just("to device"), stream, buffer),
    st.tuples(st.just("host reads")),
    st.tuples(st.just("host writes")),
    st.tuples(st.just("free and allocate"), stream, buffer),
    st.tuples(st.just("allocate on another stream"), stream, buffer),
    st.tuples(st.just("record_stream"), stream, buffer),
)


class Run:
    """A program of drawn actions on three streams, three device buffers and one pinned buffer."""

    def __init__(self) -> None:
        self.streams = [torch.accelerator.current_stream(), *(torch.Stream() for _ in range(STREAMS - 1))]
        self.events: list[torch.Event | None] = [None] * STREAMS
        self.buffers = [torch.full((2,), float(i + 1), device="cuda") for i in range(BUFFERS)]
        self.pinned = torch.zeros(2, pin_memory=True)
        self.observed: list[torch.Tensor] = []
        torch.accelerator.synchronize()

    def perform(self, action: tuple[object, ...]) -> None:
        """Do one action."""
        name, *arguments = action
        method: Callable[..., None] = getattr(self, str(name).replace(" ", "_"))
        method(*arguments)

    def kernel(self, on: int, target: int, source: int) -> None:
        with self.streams[on]:
            self.buffers[target].mul_(3.0).add_(self.buffers[source])

    def record(self, on: int) -> None:
        self.events[on] = self.streams[on].record_event()

    def wait(self, on: int, other: int) -> None:
        event = self.events[other]
        if event is not None:
            self.streams[on].wait_event(event)

    def synchronize(self, on: int) -> None:
        self.streams[on].synchronize()

    def to_host(self, on: int, source: int) -> None:
        with self.streams[on]:
            self.pinned.copy_(self.buffers[source], non_blocking=True)

    def to_device(self, on: int, target: int) -> None:
        with self.streams[on]:
            self.buffers[target].copy_(self.pinned, non_blocking=True)

    def host_reads(self) -> None:
        self.observed.append(self.pinned.clone())

    def host_writes(self) -> None:
        self.pinned.mul_(2.0).add_(1.0)

    def free_and_allocate(self, on: int, target: int) -> None:
        self.buffers[target] = torch.empty(0)
        with self.streams[on]:
            self.buffers[target] = torch.full((2,), 5.0, device="cuda")

    def allocate_on_another_stream(self, on: int, target: int) -> None:
        self.buffers[target] = torch.empty(0)
        fresh = torch.empty(2, device="cuda")
        with self.streams[on]:
            fresh.fill_(7.0)
        self.buffers[target] = fresh

    def record_stream(self, on: int, target: int) -> None:
        self.buffers[target].record_stream(self.streams[on])


def run(program: list[tuple[object, ...]], schedule: Schedule) -> tuple[list[list[float]], bool]:
    """What the program observes, and whether a race is reported."""
    with Simulator(schedule=schedule, device_type="cuda") as simulator:
        state = Run()
        for action in program:
            state.perform(action)
        torch.accelerator.synchronize()
        values = [t.tolist() for t in (*state.observed, *(b.cpu() for b in state.buffers), state.pinned)]
    return values, bool(simulator.races)


@settings(max_examples=1200)
@given(program=st.lists(actions, max_size=12), tape=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_value_that_depends_on_the_schedule_is_a_reported_race(
    program: list[tuple[object, ...]], tape: list[int]
) -> None:
    """No race reported: the same values under the whole family. And every schedule reports the same verdict."""
    expected, racy = run(program, Eager())
    for schedule in (*(make() for name, make in SCHEDULES.items() if name != "eager"), Tape(tape)):
        values, verdict = run(program, schedule)
        assert verdict == racy, schedule
        if not racy:
            assert str(values) == str(expected), schedule


@pytest.mark.quick
def test_an_empty_program_is_free_of_races() -> None:
    """Nothing happens, and nothing is reported."""
    assert run([], Eager()) == ([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [0.0, 0.0]], False)

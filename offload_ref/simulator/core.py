"""Streams, events and the host of a simulated accelerator. No tensors: work is a function to call later.

Each stream is a queue of work. What is enqueued runs when the schedule says so, or when the host waits for it.
Beside the queues runs a vector clock per stream and one for the host (index 0): they know which work is ordered
before which in *every* schedule, whatever this schedule happened to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from offload_ref.simulator.schedules import Schedule
from offload_ref.simulator.sites import Site, call_site

if TYPE_CHECKING:
    import torch

HOST = 0
"""The host's index in a vector clock; stream i has index i + 1."""

Clock = list[int]
"""One tick per actor: how far each actor had come when this point was ordered after it."""


def join(clock: Clock, other: Clock) -> None:
    """Order the owner of ``clock`` after everything that ``other`` has seen."""
    for actor, tick in enumerate(other):
        clock[actor] = max(clock[actor], tick)


@dataclass(slots=True, eq=False)
class Work:
    """One item of a stream's queue: a function, or a wait for another stream to reach a position."""

    run: Callable[[], None] | None
    what: str
    site: Site | None
    after: tuple[Stream, int] | None = None


class Stream:
    """A queue of work that runs in order, and its vector clock."""

    priority = 0

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.index = len(machine.streams)
        self.actor = self.index + 1
        self.name = name
        self.created_at = call_site()
        self.queue: deque[Work] = deque()
        self.enqueued = 0
        self.done = 0
        self.clock: Clock = [0] * self.actor
        machine.add(self)

    def __repr__(self) -> str:
        return f"<simulated stream {self.name}>"

    def is_ready(self) -> bool:
        """Whether the first item of the queue may run."""
        after = self.queue[0].after
        return after is None or after[0].done >= after[1]

    # What a program calls

    @property
    def device(self) -> torch.device:
        """The device whose stream it is."""
        return self.machine.device

    def wait_event(self, event: Event) -> None:
        """Order all later work of this stream after the event's record."""
        if event.clock is None or event.stream is None:
            self.machine.warn(f"{self.name}.wait_event() on an event that was never recorded does nothing")
            return
        join(self.clock, event.clock)
        join(self.clock, self.machine.host_clock)
        self.machine.push(self, Work(None, "wait_event", None, (event.stream, event.position)))

    def wait_stream(self, stream: Stream) -> None:
        """Order all later work of this stream after all work that ``stream`` has now."""
        if stream is not self:
            self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event (a new one by default) behind all work that this stream has now."""
        event = event or Event(self.machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the host until this stream's work is done."""
        self.machine.host_syncs += 1
        self.machine.drain(self, self.enqueued)
        join(self.machine.host_clock, self.clock)

    def query(self) -> bool:
        """Whether all work is done; True orders the host after it, as in CUDA."""
        self.machine.pump()
        if self.done >= self.enqueued:
            join(self.machine.host_clock, self.clock)
            return True
        return False

    def is_capturing(self) -> bool:
        """Whether a device graph is being captured: never, since graphs are not simulated."""
        return False

    def __enter__(self) -> Self:
        self.machine.stack.append(self)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.machine.stack.pop()


class Event:
    """A point in a stream's queue that streams and the host can wait for."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stream: Stream | None = None
        self.position = 0
        self.clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Move the event behind all work that the stream (default: the current one) has now."""
        stream = stream or self.machine.current
        join(stream.clock, self.machine.host_clock)
        self.stream, self.position, self.clock = stream, stream.enqueued, list(stream.clock)
        self.machine.events_recorded += 1

    def wait(self, stream: Stream | None = None) -> None:
        """Make the stream (default: the current one) wait for the event."""
        (stream or self.machine.current).wait_event(self)

    def synchronize(self) -> None:
        """Block the host until the event has passed."""
        if self.clock is None or self.stream is None:
            return
        self.machine.host_syncs += 1
        self.machine.drain(self.stream, self.position)
        join(self.machine.host_clock, self.clock)

    def query(self) -> bool:
        """Whether the event has passed (True if never recorded); True orders the host after it, as in CUDA."""
        if self.clock is None or self.stream is None:
            return True
        self.machine.pump()
        if self.stream.done >= self.position:
            join(self.machine.host_clock, self.clock)
            return True
        return False


@dataclass(eq=False)
class Machine:
    """The host, the streams of one accelerator, and the schedule that runs them.

    Attributes:
        schedule: decides what runs when nothing forces it.
        device: what the program calls the accelerator.
        streams: all streams, the default stream first.
        stack: the streams that ``with`` made current, innermost last.
        warnings: calls that do nothing and were surely not meant.
        events_recorded, host_syncs: counts.
    """

    schedule: Schedule
    device: torch.device
    streams: list[Stream] = field(default_factory=list)
    stack: list[Stream] = field(default_factory=list)
    host_clock: Clock = field(default_factory=lambda: [0])
    warnings: list[str] = field(default_factory=list)
    events_recorded: int = 0
    host_syncs: int = 0
    running: bool = False
    around_work: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        self.default = Stream(self, "default")
        self.stack.append(self.default)

    @property
    def current(self) -> Stream:
        """The stream that new work goes to."""
        return self.stack[-1]

    def set_stream(self, stream: Stream) -> None:
        """Make a stream current until further notice."""
        self.stack[-1] = stream

    def add(self, stream: Stream) -> None:
        """Register a stream: every clock gets a tick for it."""
        for clock in [self.host_clock, *(s.clock for s in self.streams), stream.clock]:
            clock.append(0)
        self.streams.append(stream)

    def new_stream(self, name: str | None = None) -> Stream:
        """A further stream, named ``stream<index>`` by default."""
        return Stream(self, name or f"stream{len(self.streams)}")

    def warn(self, message: str) -> None:
        """Note a call that does nothing."""
        self.warnings.append(f"{message} [{call_site()}]")

    # Running

    def push(self, stream: Stream, work: Work) -> None:
        """Append work to a stream's queue and let the schedule run what it likes."""
        stream.enqueued += 1
        stream.queue.append(work)
        if not self.running:
            self.pump()

    def pump(self) -> None:
        """Run work for as long as the schedule picks some."""
        while ready := [s for s in self.streams if s.queue and s.is_ready()]:
            stream = self.schedule.pick(ready)
            if stream is None:
                return
            self._run_one(stream)

    def drain(self, stream: Stream, position: int) -> None:
        """Run until ``stream`` has done ``position`` items; the schedule's wishes first, then only what is needed."""
        while stream.done < position:
            ready = [s for s in self.streams if s.queue and s.is_ready()]
            picked = self.schedule.pick(ready) or _first_needed(stream)
            self._run_one(picked)

    def synchronize(self) -> None:
        """Block the host until all streams are done."""
        for stream in list(self.streams):
            stream.synchronize()

    def _run_one(self, stream: Stream) -> None:
        work = stream.queue.popleft()
        stream.done += 1
        if work.run is None:
            return
        self.running = True
        try:
            work.run()
        except Exception as error:
            error.add_note(f"raised by {work.what} on {stream.name}, enqueued at {work.site}")
            raise
        finally:
            self.running = False


def _first_needed(stream: Stream) -> Stream:
    """The stream at the end of the chain of waits that blocks ``stream``."""
    while not stream.is_ready():
        after = stream.queue[0].after
        assert after is not None  # noqa: S101 - what is_ready() has just said
        stream = after[0]
    return stream


@contextmanager
def current_stream_is(stream: Stream | None) -> Iterator[None]:
    """Make a stream current; None changes nothing, as in torch."""
    if stream is None:
        yield
        return
    with stream:
        yield

"""The simulator: one object that ties streams, memory, race detector, dispatch mode and patched names together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from offload_ref.simulator.core import HOST, Clock, Machine, Stream, Work, join
from offload_ref.simulator.device import DispatchMode
from offload_ref.simulator.landings import Landing, StaleCopy
from offload_ref.simulator.memory import DEVICE, PINNED, Memory
from offload_ref.simulator.names import patched_names
from offload_ref.simulator.races import READ, WRITE, Access, Race, RaceDetector
from offload_ref.simulator.schedules import Eager, Lazy, Schedule, Starve
from offload_ref.simulator.sites import call_site


@dataclass(slots=True)
class Copies:
    """Transfers since the simulator began, in numbers and bytes."""

    h2d: int = 0
    h2d_bytes: int = 0
    d2h: int = 0
    d2h_bytes: int = 0
    d2d: int = 0
    d2d_bytes: int = 0

    def count(self, direction: str, nbytes: int) -> None:
        """Count one copy in ``direction`` (h2d, d2h or d2d)."""
        setattr(self, direction, getattr(self, direction) + 1)
        setattr(self, f"{direction}_bytes", getattr(self, f"{direction}_bytes") + nbytes)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a program asked for besides copies.

    Attributes:
        events_recorded: events recorded, those of wait_stream included.
        host_syncs: times that the host waited for a stream or an event.
        kernels: kernels and copies launched.
        device_allocations, pinned_allocations: blocks allocated.
        device_allocated_bytes, pinned_allocated_bytes: their bytes, never reduced by frees.
    """

    events_recorded: int
    host_syncs: int
    kernels: int
    device_allocations: int
    device_allocated_bytes: int
    pinned_allocations: int
    pinned_allocated_bytes: int


class DeviceRng:
    """The device's own random generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu")
        self.seed(torch.initial_seed())

    def seed(self, seed: int) -> None:
        """Start anew."""
        self.generator.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        """The state, as bytes on the host."""
        return self.generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Continue from a state."""
        self.generator.set_state(state)

    @contextmanager
    def borrowed(self, state: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
        """Let kernels, which draw from the host's default generator, draw from ``state`` instead."""
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            yield torch.default_generator.get_state
        finally:
            torch.default_generator.set_state(host)


class Simulator:
    """A simulated accelerator; inside ``with``, ``device_type`` means it.

    Args:
        schedule: which stream runs when; see ``schedules``.
        check: run the happens-before detector.
        device_type: the name that the device goes by ("cuda", "xpu", ...).
        device_memory_bytes: capacity; an allocation beyond it raises torch.OutOfMemoryError.

    Attributes:
        races: list of Race, empty when every access is ordered.
        stale_copies: list of StaleCopy, copies to the host that an edit may have spoiled and that nobody has read.
        copies: numbers and bytes of transfers.
        warnings: calls that silently do nothing.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        check: bool = True,
        device_type: str = "cuda",
        device_memory_bytes: int = 80 << 30,
    ) -> None:
        self.schedule: Schedule = schedule or Eager()
        self.check = check
        self.device_type = device_type
        self.device = torch.device(device_type, 0)
        self.machine = Machine(self.schedule, self.device)
        self.memory = Memory(self.machine, check, device_memory_bytes)
        self.detector = RaceDetector(self.machine)
        self.copies = Copies()
        self.rng = DeviceRng()
        self.mode = DispatchMode(self)
        self._kernels = 0
        self._exit = ExitStack()

    # What a test asks

    @property
    def races(self) -> list[Race]:
        """All races found, in the order found."""
        return self.detector.races

    @property
    def stale_copies(self) -> list[StaleCopy]:
        """Copies to the host whose source was edited, perhaps too early, and that nobody has read; no failure.

        One that is read later, by the host or by work on the device, leaves this list and is a race. What is read
        after the simulator's ``with`` is not seen: a copy listed here then holds values that depend on the schedule.
        """
        return self.detector.stale_copies

    @property
    def warnings(self) -> list[str]:
        """Calls that did nothing and were surely not meant."""
        return self.machine.warnings

    @property
    def streams(self) -> list[Stream]:
        """All streams, the default stream first."""
        return self.machine.streams

    @property
    def counters(self) -> Counters:
        """Counts of what the program asked for."""
        device, pinned = self.memory.device, self.memory.pinned
        return Counters(
            self.machine.events_recorded,
            self.machine.host_syncs,
            self._kernels,
            device.allocations,
            device.allocated_bytes,
            pinned.allocations,
            pinned.allocated_bytes,
        )

    def assert_race_free(self) -> None:
        """Raise AssertionError listing every race, if there is one."""
        if self.races:
            listed = "\n".join(map(str, self.races))
            raise AssertionError(f"{len(self.races)} race(s) under {self.schedule!r}:\n{listed}")

    def memory_allocated(self) -> int:
        """Live device bytes, as requested."""
        self.memory.reap()
        return self.memory.device.live

    def max_memory_allocated(self) -> int:
        """Peak device bytes since the start or the last reset."""
        self.memory.reap()
        return self.memory.device.peak

    def pinned_allocated(self) -> int:
        """Live pinned host bytes, as requested."""
        self.memory.reap()
        return self.memory.pinned.live

    def max_pinned_allocated(self) -> int:
        """Peak pinned host bytes since the start or the last reset."""
        self.memory.reap()
        return self.memory.pinned.peak

    def reset_peak_memory_stats(self) -> None:
        """Let both peaks start again from what is live."""
        self.memory.reap()
        for ledger in (self.memory.device, self.memory.pinned):
            ledger.peak = ledger.live

    def name_stream(self, stream: Stream, name: str) -> None:
        """Give a stream a name for reports and for Starve."""
        stream.name = name

    # Activation

    def __enter__(self) -> Self:
        if _active:
            raise RuntimeError("a Simulator is active already: simulated accelerators do not nest")
        with ExitStack() as stack:
            stack.enter_context(patched_names(self))
            stack.enter_context(self.mode)
            _active.append(self)
            stack.callback(_active.remove, self)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let all work end, so that what outlives the block holds its values; then restore torch."""
        with self._exit:
            if error is None:
                self.machine.synchronize()

    # What the mode asks

    def launch(
        self,
        run: Callable[[], object],
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        landing: Landing | None = None,
    ) -> None:
        """Enqueue a kernel on the current stream; a copy to pinned memory comes with its landing."""
        stream = self.machine.current
        self._kernels += 1
        join(stream.clock, self.machine.host_clock)
        stream.clock[stream.actor] += 1
        site = call_site()
        self._access(stream.actor, stream.clock, name, reads, writes, landing)
        for tensor in writes:
            block = self.memory.block_of(tensor)
            if block is not None and (poison := self.memory.poison_victims(block)) is not None:
                self.machine.push(stream, Work(poison, "reuse of freed memory", site))
        self.machine.push(stream, Work(lambda: _ignore(run()), name, site))

    def host_access(self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Note that the host reads and writes memory now."""
        clock = self.machine.host_clock
        clock[HOST] += 1
        self._access(HOST, clock, name, reads, writes)

    def _access(
        self, actor: int, clock: Clock, name: str, reads: Any, writes: Any, landing: Landing | None = None
    ) -> None:
        if not self.check:
            return
        site = call_site()
        for kind, tensors in ((READ, reads), (WRITE, writes)):
            for tensor in tensors:
                if tensor.layout is torch.strided and (block := self.memory.block_of(tensor)) is not None:
                    low, high, layout = _extent(tensor)
                    access = Access(actor, clock[actor], kind, low, high, name, site, layout, landing)
                    self.detector.access(block, access, clock)


_active: list[Simulator] = []
"""The simulator whose ``with`` is running, if there is one."""


def active_simulator() -> Simulator | None:
    """The simulator whose ``with`` is running."""
    return _active[-1] if _active else None


def _ignore(_value: object) -> None:
    return None


def _extent(tensor: torch.Tensor) -> tuple[int, int, Any]:
    """First byte, byte after the last, and the layout if there are gaps between them."""
    if tensor.numel() == 0:
        return 0, 0, None
    itemsize, size, stride = tensor.element_size(), tuple(tensor.size()), tensor.stride()
    start = int(tensor.storage_offset())
    elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    layout = None if elements <= tensor.numel() else (itemsize, size, stride, start)
    return start * itemsize, (start + elements) * itemsize, layout


def adversaries(simulator: Simulator) -> list[Schedule]:
    """The schedules that a program with these streams has to stand: Lazy, and each stream starved."""
    return [Lazy(), *(Starve(stream.index) for stream in simulator.streams)]


def for_each_schedule(
    program: Callable[[], Any], *, device_type: str = "cuda", check: bool = True
) -> list[tuple[Schedule, Simulator, Any]]:
    """Run a program under Eager and under every adversary; returns schedule, simulator and result of each."""
    runs: list[tuple[Schedule, Simulator, Any]] = []
    schedules: list[Schedule] = [Eager()]
    while schedules:
        schedule = schedules.pop(0)
        with Simulator(schedule, check, device_type) as simulator:
            result = program()
        if not runs:
            schedules = adversaries(simulator)
        runs.append((schedule, simulator, result))
    return runs


__all__ = ["DEVICE", "PINNED", "Copies", "Counters", "Simulator", "adversaries", "for_each_schedule"]

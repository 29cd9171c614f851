"""An edit that may come before the copy of the older version: stale while nobody reads the copy, else a race."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from machines import SCHEDULES, observed
from torch import nn

from offload_ref import minimal, offload_layers
from offload_ref.errors import InPlaceEditError
from offload_ref.simulator import Simulator, StaleCopy
from offload_ref.simulator.landings import Landing
from offload_ref.simulator.memory import Block
from offload_ref.simulator.races import Access

SIZE = 4


class Bench:
    """A device tensor of ones, a pinned buffer twice as long, two side streams, and what the program observes."""

    def __init__(self) -> None:
        self.compute = torch.accelerator.current_stream()
        self.d2h, self.h2d = torch.Stream(), torch.Stream()
        self.source = torch.ones(SIZE, device="cuda") * 1
        self.buffer = torch.zeros(2 * SIZE).pin_memory()
        self.host = self.buffer[:SIZE]
        self.seen: list[torch.Tensor] = []

    def copy(self, host: torch.Tensor | None = None) -> None:
        """Copy the device tensor to the host behind what compute has now."""
        self.d2h.wait_stream(self.compute)
        with self.d2h:
            (self.host if host is None else host).copy_(self.source, non_blocking=True)

    def edit(self) -> None:
        """Edit the device tensor without waiting for the copy."""
        self.source.mul_(2)

    def reload(self, host: torch.Tensor) -> None:
        """Copy pinned memory back into fresh device memory, behind all earlier copies to the host."""
        target = torch.zeros(host.shape, device="cuda")
        self.h2d.wait_stream(self.compute)
        self.h2d.wait_stream(self.d2h)
        with self.h2d:
            target.copy_(host, non_blocking=True)
        self.seen.append(target)

    def read(self, host: torch.Tensor) -> None:
        """Read pinned memory on the host once the copies to it are done."""
        self.d2h.synchronize()
        self.seen.append(host.clone())


def read_by_the_host(bench: Bench, good: bool) -> None:
    """The host reads the copy, or does not."""
    bench.copy()
    bench.edit()
    if not good:
        bench.read(bench.host)


def reloaded_after_the_edit(bench: Bench, good: bool) -> None:
    """A copy back reads the copy, or the other half of the buffer."""
    bench.copy()
    bench.edit()
    bench.reload(bench.buffer[SIZE:] if good else bench.host)


def reloaded_before_the_edit(bench: Bench, good: bool) -> None:
    """A copy back is issued before the edit and after the copy, or before both."""
    if good:
        bench.reload(bench.host)
        bench.d2h.wait_stream(bench.h2d)
    bench.copy()
    if not good:
        bench.reload(bench.host)
    bench.edit()


def read_in_part(bench: Bench, good: bool) -> None:
    """What is read begins at the copy's last element, or right behind it."""
    bench.copy()
    bench.edit()
    bench.read(bench.buffer[SIZE - (not good) : SIZE + 2])


def overwritten_by_a_copy_and_read(bench: Bench, good: bool) -> None:
    """A copy of the edited tensor takes the place of the first, or of half of it."""
    bench.copy()
    bench.edit()
    bench.copy(bench.host if good else bench.buffer[SIZE // 2 :][:SIZE])
    bench.read(bench.host)


def overwritten_by_halves_and_read(bench: Bench, good: bool) -> None:
    """The host writes the copy's end and its beginning, or twice its end."""
    bench.copy()
    bench.edit()
    bench.d2h.synchronize()
    bench.host[SIZE // 2 :].fill_(7)
    bench.host[0 if good else SIZE // 2 :][: SIZE // 2].zero_()
    bench.read(bench.host)


def overwritten_in_place_and_read(bench: Bench, good: bool) -> None:
    """A write that needs the old values counts as reading them."""
    bench.copy()
    bench.edit()
    bench.d2h.synchronize()
    if good:
        bench.host.fill_(7)
    else:
        bench.host.add_(7)
    bench.read(bench.host)


def freed(bench: Bench, good: bool) -> None:
    """The program drops the whole buffer, or keeps a view of it."""
    host = torch.zeros(SIZE).pin_memory()
    view = host[:1]
    bench.copy(host)
    bench.edit()
    del host
    if good:
        del view
    else:
        bench.read(view)


def freed_before_the_edit(bench: Bench, good: bool) -> None:
    """The buffer is dropped before the edit, without or with a read."""
    host = torch.zeros(SIZE).pin_memory()
    bench.copy(host)
    if not good:
        bench.reload(host)
    del host
    bench.edit()


def seen_through_an_array(bench: Bench, good: bool) -> None:
    """An array of numpy over the buffer is read by no operator: it counts as read whenever a copy lands in it."""
    array = (torch.zeros(SIZE) if good else bench.host).numpy()
    bench.copy()
    bench.edit()
    bench.d2h.synchronize()
    bench.seen.append(torch.tensor(array.tolist()))


def first_of_two_copies_read(bench: Bench, good: bool) -> None:
    """Two copies of one version by one stream: the second one, unread, does not hide the first."""
    bench.copy()
    bench.copy(bench.buffer[SIZE:])
    bench.edit()
    if not good:
        bench.read(bench.host)


def first_of_two_copies_read_before_the_second(bench: Bench, good: bool) -> None:
    """The same, where the first copy has been read before the second is made; good: the edit waits for the first."""
    bench.copy()
    copied = bench.d2h.record_event()
    bench.reload(bench.host)
    bench.copy(bench.buffer[SIZE:])
    if good:
        bench.compute.wait_event(copied)
    bench.edit()


PROGRAMS: list[Callable[[Bench, bool], None]] = [
    read_by_the_host,
    reloaded_after_the_edit,
    reloaded_before_the_edit,
    read_in_part,
    overwritten_by_a_copy_and_read,
    overwritten_by_halves_and_read,
    overwritten_in_place_and_read,
    freed,
    freed_before_the_edit,
    seen_through_an_array,
    first_of_two_copies_read,
    first_of_two_copies_read_before_the_second,
]
"""Good: the copy is spoiled and never read. Bad: some of its bytes are read."""


def run(program: Callable[[Bench, bool], None], good: bool, schedule: str) -> tuple[list[list[float]], Simulator]:
    """One twin on a bench of its own."""
    return observed(Bench, program, good, schedule)


@pytest.mark.quick
@pytest.mark.requirement("ORD-17")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_spoiled_copy_is_stale_until_it_is_read(program: Callable[[Bench, bool], None]) -> None:
    """Good: no race, a stale copy, one value. Bad: a race that shows by value, and no stale copy of those bytes."""
    good_values, bad_values = set(), set()
    for schedule in SCHEDULES:
        seen, simulator = run(program, True, schedule)
        simulator.assert_race_free()
        assert simulator.stale_copies
        good_values.add(str(seen))
        seen, simulator = run(program, False, schedule)
        assert any(race.reader is not None and "edit" in race.second.site for race in simulator.races)
        bad_values.add(str(seen))
    assert len(good_values) == 1
    assert len(bad_values) > 1


@pytest.mark.requirement("ORD-17")
def test_what_is_listed_names_the_copy_the_edit_and_the_bytes() -> None:
    """A stale copy says who may have spoiled which bytes; the race that it becomes says who has read them."""
    with Simulator(device_type="cuda") as simulator:
        bench = Bench()
        bench.copy(bench.buffer[SIZE:])
        bench.edit()
        (stale,) = simulator.stale_copies
        assert isinstance(stale, StaleCopy)
        for words in ("stale copy of device block", "stream1 reads in copy_ (d2h)", "default writes in mul_"):
            assert words in str(stale)
        assert "unread:  bytes [16, 32) of pinned block" in str(stale)
        assert "missing: default.wait_event(an event recorded on stream1 after it)" in str(stale)
        bench.read(bench.buffer)
    assert simulator.stale_copies == []
    (race,) = simulator.races
    assert (race.first, race.second, race.block) == (stale.first, stale.second, stale.block)
    assert "then:    host reads in clone" in str(race)


@pytest.mark.requirement("ORD-17")
def test_one_stale_copy_read_leaves_another_listed() -> None:
    """The same lines spoil two copies, and one of them is read: a race, and still a stale copy."""
    with Simulator(device_type="cuda") as simulator:
        bench = Bench()
        for half in bench.buffer.chunk(2):
            bench.copy(half)
            bench.edit()
            bench.compute.wait_stream(bench.d2h)
        assert len(simulator.stale_copies) == 1
        bench.read(bench.host)
        assert len(simulator.races) == len(simulator.stale_copies) == 1
        bench.read(bench.buffer)
        assert len(simulator.races) == 1
        assert simulator.stale_copies == []


READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "list": lambda host: host.tolist(),
    "view of another library": torch.utils.dlpack.from_dlpack,
    "pickle": pickle.dumps,
    "deep copy": copy.deepcopy,
    "file": lambda host: torch.save(host, io.BytesIO()),
    "file of a parameter": lambda host: torch.save(nn.Parameter(host), io.BytesIO()),
    "storage": lambda host: host.untyped_storage().tolist(),
}
"""Ways to read a host tensor without an operator on it."""


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_readers_that_no_operator_shows_are_seen(reader: Callable[[torch.Tensor], object]) -> None:
    """Each of them makes a race of a stale copy."""
    with Simulator(device_type="cuda") as simulator:
        bench = Bench()
        bench.copy()
        bench.edit()
        bench.d2h.synchronize()
        assert simulator.stale_copies
        reader(bench.host)
        assert simulator.races
        assert not simulator.stale_copies


def test_other_readers_are_races_at_once() -> None:
    """A kernel's read, a copy on the device, a copy to pageable memory and reuse of freed memory are never stale."""

    def kernel(source: torch.Tensor) -> object:
        return source * 1

    def on_the_device(source: torch.Tensor) -> object:
        return torch.empty_like(source).copy_(source)

    for reader in (kernel, on_the_device):
        with Simulator(device_type="cuda") as simulator:
            bench = Bench()
            bench.d2h.wait_stream(bench.compute)
            with bench.d2h:
                _result = reader(bench.source)
            bench.edit()
        assert simulator.races
        assert not simulator.stale_copies
    with Simulator(device_type="cuda") as simulator:
        bench = Bench()
        bench.copy()
        del bench.source
        _reused = torch.ones(SIZE, device="cuda")
    assert [race.second.kind for race in simulator.races] == ["reuses"]
    assert not simulator.stale_copies


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("older_graph_lives", [False, True])
@pytest.mark.parametrize(
    "offload", [minimal.offload_layers, partial(offload_layers, min_offload_bytes=0)], ids=["first lesson", "core"]
)
@pytest.mark.requirement("ORD-17", "ORD-7", "ACT-24")
def test_an_offloaded_layer_may_edit_what_it_has_saved(
    schedule: str, offload: Callable[..., AbstractContextManager[object]], older_graph_lives: bool
) -> None:
    """Saved, edited, saved again: no race, the older version's copy is listed, the gradient is right."""
    older: list[torch.Tensor] = []

    class Edits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * 1
            older.append(h.sin())
            if not older_graph_lives:
                older.clear()
            h.mul_(2)
            return h.sin()

    with Simulator(schedule=SCHEDULES[schedule](), device_type="cuda") as simulator:
        layers = nn.ModuleList([Edits(), nn.Identity()])
        x = torch.full((3,), 0.5, device="cuda", requires_grad=True)
        with offload(layers, 1):
            y = layers[1](layers[0](x))
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.cpu(), 2 * torch.ones(3).cos())
        if older_graph_lives:
            with pytest.raises(InPlaceEditError, match="ACT-24"):
                older[0].sum().backward()
    simulator.assert_race_free()
    assert [stale.second.op for stale in simulator.stale_copies] == ["mul_.Tensor"] * older_graph_lives


def copy_and_read(bench: Bench) -> None:
    """The copy is read."""
    bench.copy()
    bench.read(bench.host)
    bench.seen.clear()


def copy_over_the_last(bench: Bench) -> None:
    """The copy is overwritten by the next one, with gaps between its elements."""
    bench.copy()
    bench.copy(bench.buffer[::2])


def copy_and_drop(bench: Bench) -> None:
    """The copy is freed."""
    bench.copy(torch.empty(SIZE, pin_memory=True))


def copy_edit_and_drop(bench: Bench) -> None:
    """The copy of a tensor that is edited and freed is spoiled."""
    source, bench.source = bench.source, bench.source * 1
    bench.copy(torch.empty(SIZE, pin_memory=True))
    bench.edit()
    bench.compute.wait_stream(bench.d2h)
    bench.source = source


@pytest.mark.parametrize("iterate", [copy_and_read, copy_over_the_last, copy_and_drop, copy_edit_and_drop])
def test_a_thousand_iterations_leave_no_more_records_than_ten(iterate: Callable[[Bench], None]) -> None:
    """Copies that are read, overwritten, dropped or spoiled are forgotten, and so is memory that is freed."""

    def records() -> int:
        gc.collect()
        return sum(type(one) in (Access, Block, Landing, StaleCopy) for one in gc.get_objects())

    with Simulator(device_type="cuda") as simulator:
        bench, counted = Bench(), []
        for iterations in (10, 990):
            for _ in range(iterations):
                iterate(bench)
            counted.append(records())
        assert counted[1] <= counted[0]
        assert len(simulator.stale_copies) == (iterate is copy_edit_and_drop)

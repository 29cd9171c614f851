"""The schedule of K of L layers: its two tables, its order of events, and the bound on resident layers."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_ref.schedule import Schedule, check_num_layers
from offload_ref.timeline import Event, events

COUNTS = st.integers(1, 40).flatmap(
    lambda model_layers: st.tuples(st.integers(0, model_layers - 1), st.just(model_layers))
)
"""Every legal pair of K and L up to 40 layers."""


def resident_after_each(order: list[Event]) -> list[set[int]]:
    """Return which layers' activations are on the device after each event, or fail where one is not."""
    resident: set[int] = set()
    on_host: set[int] = set()
    history = []
    for event in order:
        match event.kind:
            case "forward":
                resident.add(event.layer)
            case "leave":
                on_host.add(event.layer)
            case "release":
                assert event.layer in on_host, "released without a host copy"
                resident.remove(event.layer)
            case "reload":
                assert event.layer in on_host, "reloaded without a host copy"
                assert event.layer not in resident, "reloaded although it is resident"
                resident.add(event.layer)
            case "backward":
                assert event.layer in resident, "backward without activations"
                history.append(set(resident))
                resident.remove(event.layer)
        history.append(set(resident))
    assert not resident, "activations left after backward"
    return history


@pytest.mark.quick
@pytest.mark.requirement("MEM-1")
@given(COUNTS)
def test_at_most_the_rest_is_resident(counts: tuple[int, int]) -> None:
    """At most L-K layers are resident at any moment, every backward finds its layer, and the bound is met."""
    num_layers, model_layers = counts
    history = resident_after_each(events(num_layers, model_layers))
    most = max(len(resident) for resident in history)
    assert most == model_layers - num_layers


@pytest.mark.quick
@pytest.mark.requirement("ACT-1")
@given(COUNTS)
def test_the_first_layers_leave_once(counts: tuple[int, int]) -> None:
    """Of L layers the first K, and no others, leave, are released and return, each exactly once."""
    num_layers, model_layers = counts
    order = events(num_layers, model_layers)
    for kind in ("leave", "release", "reload"):
        assert Counter(e.layer for e in order if e.kind == kind) == Counter(range(num_layers))
    for kind in ("forward", "backward"):
        assert Counter(e.layer for e in order if e.kind == kind) == Counter(range(model_layers))


@pytest.mark.quick
@pytest.mark.requirement("ACT-2")
@given(st.integers(1, 40))
def test_zero_layers_is_plain_training(model_layers: int) -> None:
    """With K = 0 the events are forward and backward alone."""
    assert {event.kind for event in events(0, model_layers)} == {"forward", "backward"}


@pytest.mark.requirement("ACT-3")
@given(COUNTS)
def test_release_at_the_start_of_a_later_layer(counts: tuple[int, int]) -> None:
    """Layer i is released when forward enters layer L-K+i, and at no other layer."""
    num_layers, model_layers = counts
    schedule = Schedule(num_layers, model_layers)
    table = {layer: schedule.released_when_entering(layer) for layer in range(model_layers)}
    assert {released: layer for layer, released in table.items() if released is not None} == {
        i: model_layers - num_layers + i for i in range(num_layers)
    }


@pytest.mark.requirement("ACT-4")
@given(COUNTS)
def test_reload_at_the_backward_of_a_later_layer(counts: tuple[int, int]) -> None:
    """The reload of layer i starts when backward enters layer L-1-K+i, and at no other layer."""
    num_layers, model_layers = counts
    schedule = Schedule(num_layers, model_layers)
    table = {layer: schedule.due_back_when_backward_of(layer) for layer in range(model_layers)}
    assert {due: layer for layer, due in table.items() if due is not None} == {
        i: model_layers - 1 - num_layers + i for i in range(num_layers)
    }


@pytest.mark.quick
@pytest.mark.requirement("ACT-1", "ACT-3", "ACT-4")
def test_two_of_four() -> None:
    """The events of K = 2 of L = 4, written out."""
    assert [f"{event.kind} {event.layer}" for event in events(2, 4)] == [
        *("forward 0", "leave 0", "forward 1", "leave 1"),
        *("release 0", "forward 2", "release 1", "forward 3"),
        *("backward 3", "reload 1", "backward 2", "reload 0", "backward 1", "backward 0"),
    ]


@pytest.mark.quick
@pytest.mark.requirement("ACT-4")
def test_all_but_one_reload_late() -> None:
    """With K = L-1 each reload starts at the backward that needs it."""
    order = events(3, 4)
    for number, event in enumerate(order):
        if event.kind == "reload":
            assert order[number + 1] == Event("backward", event.layer)


@pytest.mark.requirement("ACT-1")
@given(COUNTS, st.integers(-5, 60))
def test_layers_outside_the_model_have_no_events(counts: tuple[int, int], layer: int) -> None:
    """A number that is no offloaded layer leaves nothing, and no layer outside the model has a trigger."""
    schedule = Schedule(*counts)
    assert schedule.offloads(layer) == (layer in range(counts[0]))
    if layer not in range(counts[1]):
        assert schedule.released_when_entering(layer) is None
    if layer not in range(counts[1] - 1):
        assert schedule.due_back_when_backward_of(layer) is None


@pytest.mark.quick
@pytest.mark.requirement("ACT-5")
def test_whole_numbers_of_any_kind_are_counts() -> None:
    """Integers of numpy are counts of layers."""
    check_num_layers(np.int64(3), np.int32(4))

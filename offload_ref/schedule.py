"""When each offloaded layer leaves, is released and returns: pure arithmetic on K of L layers.

The first K layers are offloaded, because backward needs them last. Device memory of layer i is released only
when forward enters layer L-K+i, by which time its copy to the host has had L-K layers of compute to finish;
its reload starts when backward enters layer L-1-K+i. So at most L-K layers are resident at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Literal

from offload_ref.errors import LayerCountError

__all__ = ["Event", "Schedule", "check_num_layers", "events"]

Kind = Literal["release", "forward", "leave", "reload", "backward"]
"""What an event says of its layer; all but ``leave`` name a moment just before or at a layer's compute."""


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of a training step: what happens, and to which layer (counted from 0)."""

    kind: Kind
    layer: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of one forward and backward pass.

    Attributes:
        num_layers: K, how many layers are offloaded; 0 offloads nothing.
        model_layers: L, how many layers the model has.

    Raises:
        LayerCountError: K is outside [0, L), L is below 1, or either is no whole number.
    """

    num_layers: int
    model_layers: int

    def __post_init__(self) -> None:
        check_num_layers(self.num_layers, self.model_layers)

    @property
    def most_resident_layers(self) -> int:
        """Most layers whose activations are on the device at once, the running layer included: L-K."""
        return self.model_layers - self.num_layers

    def offloads(self, layer: int) -> bool:
        """Return whether the layer's activations leave the device."""
        return 0 <= layer < self.num_layers  # ACT-1

    def released_when_entering(self, layer: int) -> int | None:
        """Return the layer whose device memory is let go when forward enters ``layer``, or None."""
        candidate = layer - (self.model_layers - self.num_layers)  # ACT-3
        return candidate if self.offloads(candidate) else None

    def due_back_when_backward_of(self, layer: int) -> int | None:
        """Return the layer whose reload starts when backward enters ``layer``, or None."""
        candidate = layer - (self.model_layers - 1 - self.num_layers)  # ACT-4
        return candidate if self.offloads(candidate) else None


def check_num_layers(num_layers: object, model_layers: object) -> None:
    """Accept K of L layers, or refuse them.

    Raises:
        LayerCountError: L is no whole number of at least 1, or K no whole number in [0, L).
    """
    model, offloaded = _whole_number(model_layers), _whole_number(num_layers)
    if model is None or model < 1:
        raise LayerCountError("model layers", seen=model_layers, required="at least 1", rule="ACT-5")
    if offloaded is None or not 0 <= offloaded < model:  # ACT-5
        raise LayerCountError(
            "offloaded layers", seen=num_layers, required=f"a whole number in [0, {model})", rule="ACT-5"
        )


def events(num_layers: int, model_layers: int) -> list[Event]:
    """Return the events of one forward and backward pass in the order in which the host issues them.

    ``release`` and ``reload`` come just before the compute of the layer that triggers them; ``leave`` stands
    after the forward of its own layer, whose copies have been issued one by one while it ran.
    """
    schedule = Schedule(num_layers, model_layers)
    order: list[Event] = []
    for layer in range(model_layers):
        released = schedule.released_when_entering(layer)
        order += [] if released is None else [Event("release", released)]
        order += [Event("forward", layer)]
        order += [Event("leave", layer)] if schedule.offloads(layer) else []
    for layer in reversed(range(model_layers)):
        due = schedule.due_back_when_backward_of(layer)
        order += [] if due is None else [Event("reload", due)]
        order += [Event("backward", layer)]
    return order


def _whole_number(value: object) -> int | None:
    """Return an integer of any kind as an int, or None; a bool is a switch, not a count."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    return index(value)

"""The schedule of one training step as a list of moments, in the order in which the host issues them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload_ref.schedule import Schedule

__all__ = ["Event", "events"]

Kind = Literal["release", "forward", "leave", "reload", "backward"]
"""What an event says of its layer; all but ``leave`` name a moment just before or at a layer's compute."""


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of a training step: what happens, and to which layer (counted from 0)."""

    kind: Kind
    layer: int


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

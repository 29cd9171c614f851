"""When each offloaded layer leaves, is released and returns: pure arithmetic on K of L layers.

The first K layers are offloaded, because backward needs them last. Device memory of layer i is released only
when forward enters layer L-K+i, by which time its copy to the host has had L-K layers of compute to finish;
its reload starts when backward enters layer L-1-K+i. So at most L-K layers are resident at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_ref.errors import LayerCountError, require, whole_number

__all__ = ["Schedule", "check_num_layers"]


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
    model, offloaded = whole_number(model_layers), whole_number(num_layers)
    known = model is not None and model >= 1
    require(known, LayerCountError, "model layers", model_layers, "at least 1", "ACT-5")
    fits = offloaded is not None and 0 <= offloaded < (model or 0)
    require(fits, LayerCountError, "offloaded layers", num_layers, f"a whole number in [0, {model})", "ACT-5")

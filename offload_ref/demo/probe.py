"""Peak device bytes between the points of a training step where offloading can act.

The points are the starts of each layer's forward and backward, the ends of both passes, and the optimizer
step. At each the probe notes the bytes that are allocated and that offloading has moved out, and starts a new
peak. It must fire before the offloading's own hooks at the same point, so it watches the layers first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from offload_ref.activation import ActivationOffload


class MemoryMeter(Protocol):
    """The device's ledger: bytes allocated now, and at most since the last reset."""

    def allocated(self) -> int:
        """Return the bytes allocated now."""

    def peak(self) -> int:
        """Return the most bytes allocated since the last reset."""

    def reset_peak(self) -> None:
        """Let the peak start again from the bytes allocated now."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What the ledger says between two points.

    Attributes:
        step: training step, from 0.
        point: name of the point that opens the segment.
        start_bytes: device bytes at that point.
        peak_bytes: most device bytes until the next point.
        away_bytes: device bytes of activations that offloading has moved away at that point.
        next_away_bytes: the same at the next point.
    """

    step: int
    point: str
    start_bytes: int
    peak_bytes: int
    away_bytes: int
    next_away_bytes: int


class MemoryProbe:
    """Cuts a run into segments; one probe per run.

    Attributes:
        segments: those that are closed, in order.
        engine: the activation offloading whose records say what is away, or None.
    """

    def __init__(self, meter: MemoryMeter, advance: Callable[[], None]) -> None:
        self.segments: list[Segment] = []
        self.engine: ActivationOffload | None = None
        self._meter = meter
        self._advance = advance
        self._step = 0
        self._open = self._here("begin")

    def phase(self, point: str) -> None:
        """Close the segment that is open and open one named ``point``."""
        step, name, start, out = self._open
        opened = self._here(point)
        self.segments.append(Segment(step, name, start, self._meter.peak(), out, opened[-1]))
        self._meter.reset_peak()
        self._open = opened

    def step_done(self) -> None:
        """Count a training step and tell whoever shows the progress."""
        self.phase("end of the step")
        self._step += 1
        self._advance()

    def watch(self, layers: torch.nn.ModuleList) -> None:
        """Put a point at the start of each layer's forward and backward, and at the end of both passes."""
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before_forward(index))
            layer.register_forward_hook(self._after_forward(index, last=index + 1 == len(layers)))

    def _here(self, point: str) -> tuple[int, str, int, int]:
        return self._step, point, self._meter.allocated(), self._away()

    def _away(self) -> int:
        """Return the bytes that would be on the device, less those that are there again."""
        return 0 if self.engine is None else self.engine.bytes_out() - self.engine.bytes_back()

    def _before_forward(self, index: int) -> Callable[[torch.nn.Module, Any], None]:
        def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.phase(f"forward of layer {index}")
            if index == 0 and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: self.phase("end of the layers' backward"))

        return hook

    def _after_forward(self, index: int, *, last: bool) -> Callable[[torch.nn.Module, Any, torch.Tensor], None]:
        def hook(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
            if last:
                self.phase("end of the layers' forward")
            if output.requires_grad:
                output.register_hook(lambda _: self.phase(f"backward of layer {index}"))

        return hook

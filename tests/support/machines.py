"""The machines that tests run on: the simulated one always, a real accelerator where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from offload_ref.simulator import Eager, Lazy, Simulator, Starve
from offload_ref.simulator.schedules import Schedule

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "eager": Eager,
    "lazy": Lazy,
    "starve-default": lambda: Starve(0),
    "starve-first-side-stream": lambda: Starve(1),
    "starve-second-side-stream": lambda: Starve(2),
}
"""The family under which a missing wait shows: each stream in turn as late as the program allows."""


@dataclass(frozen=True)
class Machine:
    """Where a test's program runs.

    Attributes:
        device: what the program calls its device.
        simulated: whether that is the simulator's.
    """

    device: str
    simulated: bool

    @contextmanager
    def run(self, schedule: Schedule | None = None) -> Iterator[Simulator | None]:
        """Run the body on the machine; on the simulated one, no race may be left at the end."""
        if not self.simulated:
            yield from self._run_for_real()
            return
        with Simulator(schedule=schedule or Lazy(), device_type=self.device) as simulator:
            yield simulator
        simulator.assert_race_free()

    def _run_for_real(self) -> Iterator[None]:
        was_strict = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield None
            torch.accelerator.synchronize()
        finally:
            torch.use_deterministic_algorithms(was_strict)


class Observing(Protocol):
    """A bench on which a program collects what it observes."""

    seen: list[torch.Tensor]


Bench = TypeVar("Bench", bound=Observing)


def observed(
    bench: Callable[[], Bench], program: Callable[[Bench, bool], None], good: bool, schedule: str
) -> tuple[list[list[float]], Simulator]:
    """What the good or bad twin of a program observes on a simulated device, read on the host at the end alone."""
    with Simulator(schedule=SCHEDULES[schedule](), device_type="cuda") as simulator:
        made = bench()
        program(made, good)
        torch.accelerator.synchronize()
        return [t.cpu().tolist() for t in made.seen], simulator

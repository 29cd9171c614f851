"""The device that a run trains on: this machine's accelerator, or a simulated one."""

from __future__ import annotations

import gc
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from offload_ref.demo.settings import RULE
from offload_ref.errors import DemoSettingError, NoAcceleratorError
from offload_ref.simulator import Eager, Lazy, Simulator, Starve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offload_ref.demo.settings import DemoSettings

SIMULATED_TYPE = "cuda"
"""Device type that the simulator stands in for."""

DEFAULT_SCHEDULE = "lazy"
"""Every stream runs as late as the program allows: where a wait is missing, values go wrong."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Copies between device and host: how many, and how many bytes."""

    d2h_copies: int
    d2h_bytes: int
    h2d_copies: int
    h2d_bytes: int

    def since(self, before: Traffic) -> Traffic:
        """Return what was added since ``before``."""
        now, then = asdict(self), asdict(before)
        return Traffic(**{name: now[name] - then[name] for name in now})


@dataclass(slots=True)
class Machine:
    """One device and its ledger.

    Attributes:
        device: where the run's tensors live.
        name: what the report calls it.
        simulator: what stands in for it, or None for a real accelerator.
        bytes_before: device bytes allocated before the run, such as a library's workspace.
        traffic_before: copies made before training began.
        pinned_peak: most pinned host bytes before the last reset.
    """

    device: torch.device
    name: str
    simulator: Simulator | None = None
    bytes_before: int = 0
    traffic_before: Traffic | None = None
    pinned_peak: int | None = None

    def allocated(self) -> int:
        """Return the device bytes that the run holds now."""
        return torch.accelerator.memory_allocated() - self.bytes_before

    def peak(self) -> int:
        """Return the most device bytes that the run held since the last reset."""
        return torch.accelerator.max_memory_allocated() - self.bytes_before

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now; the simulator's pinned peak goes with it."""
        if self.simulator is not None:
            self.pinned_peak = self.peak_pinned()
        torch.accelerator.reset_peak_memory_stats()

    def peak_pinned(self) -> int | None:
        """Return the most pinned host bytes, or None where the device's module does not tell."""
        if self.simulator is not None:
            return max(self.pinned_peak or 0, self.simulator.max_pinned_allocated())
        statistics = getattr(torch.get_device_module(self.device), "host_memory_stats", None)
        return None if statistics is None else int(statistics().get("allocated_bytes.peak", 0))

    def start_counting(self) -> None:
        """Leave the copies made so far out of `traffic`."""
        self.traffic_before = self._traffic()

    def traffic(self) -> Traffic | None:
        """Return the copies since `start_counting`, or None on a real accelerator, which counts none."""
        now = self._traffic()
        return None if now is None or self.traffic_before is None else now.since(self.traffic_before)

    def races(self) -> tuple[str, ...] | None:
        """Return the reports of the simulator's happens-before checker, or None on a real accelerator."""
        return None if self.simulator is None else tuple(str(race) for race in self.simulator.races)

    def require_stream(self, schedule: str | None) -> None:
        """Refuse a schedule that starves a stream which the program has not made.

        Raises:
            DemoSettingError: the schedule would be ``eager`` under another name.
        """
        kind, _, name = (schedule or "").partition(":")
        if self.simulator is None or kind != "starve":
            return
        names = [stream.name for stream in self.simulator.streams]
        if name not in names:
            raise DemoSettingError(
                "--schedule", seen=schedule, required=f"a stream of this run: {', '.join(names)}", rule=RULE
            )

    def _traffic(self) -> Traffic | None:
        if self.simulator is None:
            return None
        copies = self.simulator.copies
        return Traffic(copies.d2h, copies.d2h_bytes, copies.h2d, copies.h2d_bytes)


def is_simulated(settings: DemoSettings) -> bool:
    """Return whether the settings mean the simulator on this machine.

    Raises:
        NoAcceleratorError: they name a device type that this machine does not have.
        DemoSettingError: the schedule is none, or it is given to a real accelerator.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if settings.device == "simulated" or (settings.device == "auto" and accelerator is None):
        make_schedule(settings.schedule or DEFAULT_SCHEDULE)
        return True
    if settings.device not in {"auto", "" if accelerator is None else accelerator.type}:
        offered = "auto or simulated" if accelerator is None else f"auto, simulated or {accelerator.type}"
        raise NoAcceleratorError("--device", seen=settings.device, required=f"{offered} on this machine", rule=RULE)
    if settings.schedule is not None:
        raise DemoSettingError(
            "--schedule", seen=settings.schedule, required="no schedule on a real accelerator", rule=RULE
        )
    return False


def make_schedule(text: str) -> Eager | Lazy | Starve:
    """Return the schedule that ``eager``, ``lazy`` or ``starve:NAME`` means."""
    kind, _, stream = text.partition(":")
    if kind == "starve" and stream:
        return Starve(stream)
    if text not in {"eager", "lazy"}:
        raise DemoSettingError("--schedule", seen=text, required="eager, lazy or starve:NAME", rule=RULE)
    return Eager() if text == "eager" else Lazy()


@contextmanager
def open_machine(settings: DemoSettings) -> Iterator[Machine]:
    """Enter a fresh simulator, or the accelerator under strict deterministic algorithms, with peaks reset."""
    gc.collect()
    with ExitStack() as stack:
        if is_simulated(settings):
            schedule = make_schedule(settings.schedule or DEFAULT_SCHEDULE)
            stack.enter_context(one_thread())
            simulator = stack.enter_context(Simulator(schedule=schedule, device_type=SIMULATED_TYPE))
            yield Machine(torch.device(SIMULATED_TYPE), f"simulated {SIMULATED_TYPE}", simulator)
        else:
            stack.enter_context(strict_determinism())
            yield real_machine()


def real_machine() -> Machine:
    """Return this machine's accelerator, its caches empty and its peaks reset."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise NoAcceleratorError("accelerator", seen=None, required="one that torch can use", rule=RULE)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    before_torch_2_12 = getattr(torch._C, "_host_emptyCache", lambda: None)
    getattr(torch.accelerator, "empty_host_cache", before_torch_2_12)()
    torch.accelerator.reset_peak_memory_stats()
    module = torch.get_device_module(device)
    getattr(module, "reset_peak_host_memory_stats", lambda: None)()
    name = getattr(module, "get_device_name", lambda: device.type)()
    return Machine(device, name, bytes_before=torch.accelerator.memory_allocated())


@contextmanager
def one_thread() -> Iterator[None]:
    """Let kernels run on one thread: small ones are faster so, and the losses do not depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def strict_determinism() -> Iterator[None]:
    """Let torch use deterministic algorithms alone and refuse what has none."""
    mode, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)

"""A simulated accelerator: streams, events, device and pinned memory on a machine without one.

Inside ``with Simulator() as simulator:`` the name "cuda" (or another) means the simulated device, and code that
knows nothing of the simulator runs on it. Two oracles judge how the code orders its work: a happens-before detector
(``simulator.races``, and ``simulator.stale_copies`` for what would be one if it were read), and schedules that run
work as late as the program allows over poisoned memory.

Reading order: ``core`` (streams, events), ``schedules``, ``races``, ``landings``, ``memory``, ``operators``,
``device``, ``names``, ``simulator``.
"""

from offload_ref.simulator.errors import NotSimulatedError
from offload_ref.simulator.landings import StaleCopy
from offload_ref.simulator.races import Race, RacyAccess
from offload_ref.simulator.schedules import Eager, Lazy, Schedule, Starve, Tape
from offload_ref.simulator.simulator import (
    Copies,
    Counters,
    Simulator,
    active_simulator,
    adversaries,
    for_each_schedule,
)

__all__ = [
    "Copies",
    "Counters",
    "Eager",
    "Lazy",
    "NotSimulatedError",
    "Race",
    "RacyAccess",
    "Schedule",
    "Simulator",
    "StaleCopy",
    "Starve",
    "Tape",
    "active_simulator",
    "adversaries",
    "for_each_schedule",
]

"""CPU offloading in LLM training: a readable reference, a specification and a conformance oracle.

Reading order: ``minimal`` (both mechanisms in 250 lines, the first lesson); then ``partition`` and ``schedule``
(pure arithmetic), ``host_memory`` (pinned pool and ledger), ``activation`` (per-layer activation offloading),
``optimizer`` (optimizer states on the host), ``config`` (fields and constraints), ``errors``; then ``simulator``, on
which all of it is tested without a GPU.

Importing this package imports no torch: each public name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload_ref.activation import (
        ActivationOffload,
        get_cpu_offload_context,
        mark_keep,
        mark_offload,
        offload_layers,
    )
    from offload_ref.config import ActivationOffloadConfig, OptimizerOffloadConfig
    from offload_ref.optimizer import HybridDeviceOptimizer

__all__ = [
    "ActivationOffload",
    "ActivationOffloadConfig",
    "HybridDeviceOptimizer",
    "OptimizerOffloadConfig",
    "get_cpu_offload_context",
    "mark_keep",
    "mark_offload",
    "offload_layers",
]

_HOME = {
    "ActivationOffload": "activation",
    "ActivationOffloadConfig": "config",
    "HybridDeviceOptimizer": "optimizer",
    "OptimizerOffloadConfig": "config",
    "get_cpu_offload_context": "activation",
    "mark_keep": "activation",
    "mark_offload": "activation",
    "offload_layers": "activation",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

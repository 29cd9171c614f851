"""What the demo was asked to do: flags and configuration overrides, merged and checked. Imports no torch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Any

from offload_ref.config import Config, from_overrides
from offload_ref.errors import DemoSettingError, UnsupportedError
from offload_ref.partition import MODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RULE = "offload-ref demo --help"
"""Where the ranges of the demo's own settings are written down."""

OWN_CONFIG = (
    "model.num_layers=4",
    "model.cpu_offloading=true",
    "optimizer.optimizer_cpu_offload=true",
    "optimizer.optimizer_offload_fraction=0.5",
    "optimizer.overlap_cpu_optimizer_d2h_h2d=true",
    "optimizer.use_torch_optimizer_for_cpu_offload=true",
    "optimizer.use_distributed_optimizer=true",
)
"""Where the demo's defaults differ from the configuration's: both mechanisms are on, with overlap.

Its optimizer is torch's, and its one rank holds the one shard of a distributed optimizer.
"""

HONOURED = frozenset(
    {
        "num_layers",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "cpu_offloading_double_buffering",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
    }
)
"""Fields that the demo hands on; any other one has to keep the value that the demo gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes, seeds and options of one demo; ``resolve`` builds and checks it.

    Attributes:
        config: both namespaces of Megatron's fields; its ``num_layers`` is the depth of the model.
        notes: what the configuration warns of, one line each.
        min_offload_bytes: smaller saved tensors stay on the device.
        device: ``auto``, ``simulated`` or a device type.
        schedule: how the simulator runs its streams, or None for a real accelerator's own way.
    """

    config: Config
    notes: tuple[str, ...] = ()
    hidden: int = 64
    heads: int = 4
    sequence: int = 64
    batch: int = 16
    accumulation: int = 2
    steps: int = 60
    learning_rate: float = 2e-3
    seed: int = 0
    data_seed: int = 1
    min_offload_bytes: int = 16384
    partition: str = "greedy"
    device: str = "auto"
    schedule: str | None = None
    bf16: bool = False
    foreach: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "sequence", "batch", "accumulation", "steps"):
            _require(name, getattr(self, name), "at least 1", holds=getattr(self, name) >= 1)
        for name in ("seed", "data_seed", "min_offload_bytes"):
            _require(name, getattr(self, name), "at least 0", holds=getattr(self, name) >= 0)
        rate = self.learning_rate
        _require("learning_rate", rate, "a finite number above 0", holds=isfinite(rate) and rate > 0)
        _require("heads", self.heads, f"a divisor of {self.hidden}", holds=self.hidden % self.heads == 0)
        _require("partition", self.partition, " or ".join(MODES), holds=self.partition in MODES)

    @property
    def layers(self) -> int:
        """Depth of the model."""
        return self.config.model.num_layers

    @property
    def offloaded_layers(self) -> int:
        """How many layers' activations are offloaded; 0 where the mechanism is off."""
        model = self.config.model
        moves = model.cpu_offloading_activations or model.cpu_offloading_weights
        return model.cpu_offloading_num_layers if model.cpu_offloading and moves else 0

    @property
    def host_fraction(self) -> float:
        """Fraction of the parameters whose states live on the host; 0.0 where the mechanism is off."""
        optimizer = self.config.optimizer
        return optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0


def resolve(
    *,
    layers: int | None = None,
    offload_layers: int | None = None,
    fraction: float | None = None,
    overrides: Sequence[str] = (),
    **sizes: Any,
) -> DemoSettings:
    """Merge the demo's defaults, the overrides and the flags into settings; None is a flag not given.

    Raises:
        DemoSettingError: a size is out of range, or a flag and an override contradict each other.
        UnsupportedError: an override asks for what the demo does not do.
        OffloadValueError: the configuration refuses an override.
    """
    flags = {
        "--layers": [] if layers is None else [f"model.num_layers={layers}"],
        "--offload-layers": []
        if offload_layers is None
        else ["model.cpu_offloading=true", f"model.cpu_offloading_num_layers={offload_layers}"],
        "--fraction": []
        if fraction is None
        else ["optimizer.optimizer_cpu_offload=true", f"optimizer.optimizer_offload_fraction={fraction!r}"],
    }
    refuse_contradictions(flags, overrides)
    asked = [*overrides, *(line for lines in flags.values() for line in lines)]
    depth = from_overrides([*OWN_CONFIG, *asked]).model.num_layers
    _require("--layers", depth, "at least 1", holds=depth >= 1)
    config = from_overrides([*OWN_CONFIG, f"model.cpu_offloading_num_layers={depth // 2}", *asked])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.validate()
    refuse_unhonoured(config)
    given = {name: value for name, value in sizes.items() if value is not None}
    return DemoSettings(config=config, notes=tuple(str(each.message) for each in caught), **given)


def refuse_contradictions(flags: Mapping[str, Sequence[str]], overrides: Sequence[str]) -> None:
    """Refuse an override that gives a field another value than a flag does."""
    by_field = {line.partition("=")[0].strip(" +"): line for line in overrides}
    for flag, lines in flags.items():
        for line in lines:
            field = line.partition("=")[0]
            override = by_field.get(field)
            if override is not None and _value(line, field) != _value(override, field):
                raise DemoSettingError(
                    f"{flag} and an override of the same field",
                    seen=f"{line} and {override}",
                    required="one of them, or the same value in both",
                    rule=RULE,
                )


def refuse_unhonoured(config: Config) -> None:
    """Refuse fields that the demo would have to ignore."""
    own = from_overrides(list(OWN_CONFIG))
    for namespace in ("model", "optimizer"):
        asked, offered = getattr(config, namespace), getattr(own, namespace)
        for field in (each.name for each in fields(asked)):
            if field not in HONOURED and getattr(asked, field) != getattr(offered, field):
                raise UnsupportedError(
                    f"{namespace}.{field} in the demo",
                    seen=getattr(asked, field),
                    required=repr(getattr(offered, field)),
                    rule=RULE,
                )


def _value(line: str, field: str) -> Any:
    """Return what one override line makes of its field."""
    namespace, _, name = field.partition(".")
    return getattr(getattr(from_overrides([line]), namespace), name)


def _require(name: str, seen: object, required: str, *, holds: bool) -> None:
    """Raise `DemoSettingError` unless the condition holds."""
    if not holds:
        flag = name if name.startswith("--") else f"--{name.replace('_', '-')}"
        raise DemoSettingError(flag, seen=seen, required=required, rule=RULE)

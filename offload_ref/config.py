"""Megatron's offloading fields, their defaults, and the one table of constraints among them.

Field names, defaults and messages are megatron-core's and Megatron Bridge's, so that an override line or an
error text means the same here. The constraints that Megatron alone has are skipped with ``megatron=False``:
the reference itself composes with recomputation, pipelines and full-iteration graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from decimal import Decimal
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType
from typing import Any

from offload_ref import errors
from offload_ref.errors import require
from offload_ref.partition import check_fraction


@dataclass(frozen=True, slots=True)
class ActivationOffloadConfig:
    """Fields of the ``model`` namespace: activation offloading, and what it is incompatible with.

    Raises:
        ConfigTypeError: a value is of another type than its field.
    """

    cpu_offloading: bool = False
    """Master switch of activation offloading."""
    cpu_offloading_num_layers: int = 0
    """K: the first K of the model's layers are offloaded."""
    cpu_offloading_activations: bool = True
    """Whether activations are offloaded."""
    cpu_offloading_weights: bool = False
    """Whether weights are offloaded."""
    cpu_offloading_double_buffering: bool = False
    """Whether reloads alternate between two sets of device buffers."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    """Whether pinned host buffers are kept and reused by the next iteration."""

    num_layers: int = 0
    """L: how many transformer layers the model has."""
    pipeline_model_parallel_size: int = 1
    """Number of pipeline stages."""
    recompute_granularity: str | None = None
    """``"full"`` or ``"selective"`` activation recomputation; None is off."""
    fine_grained_activation_offloading: bool = False
    """Megatron's other activation offloading, by module instead of by layer."""
    moe_paged_stash: bool = False
    """Megatron's paged stash of expert activations."""
    cuda_graph_impl: str = "none"
    """``"none"``, ``"local"``, ``"transformer_engine"`` or ``"full_iteration"``."""
    cuda_graph_scope: str | tuple[str, ...] = "full"
    """What a graph covers; ``"full_iteration"`` under ``local`` is the older way to say full iteration."""
    use_transformer_engine_full_layer_spec: bool = False
    """Whether Bridge builds whole TransformerEngine layers."""

    def __post_init__(self) -> None:
        _check_types(self, "model")

    def validate(self, *, megatron: bool = True) -> None:
        """Raise the first violated constraint; see `validate`."""
        validate(self, megatron=megatron)


@dataclass(frozen=True, slots=True)
class OptimizerOffloadConfig:
    """Fields of the ``optimizer`` namespace: optimizer offloading, and what it requires.

    Raises:
        ConfigTypeError: a value is of another type than its field.
    """

    optimizer_cpu_offload: bool = False
    """Master switch of optimizer offloading."""
    optimizer_offload_fraction: float = 0.0
    """Part of the parameters whose states live on the host, in [0, 1]."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Whether transfers overlap with compute during the step."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """Whether the host steps with a ``torch.optim`` class instead of the fused one."""
    pin_cpu_grads: bool = True
    """Whether host gradients are pinned."""
    pin_cpu_params: bool = True
    """Whether host parameters are pinned."""

    use_distributed_optimizer: bool = False
    """Whether the optimizer's state is sharded over data-parallel ranks."""
    decoupled_weight_decay: bool = True
    """Whether weight decay is AdamW's; False is the L2 term of plain Adam."""
    skip_megatron_wrapping: bool = False
    """Whether Megatron is asked for the bare optimizer."""

    def __post_init__(self) -> None:
        _check_types(self, "optimizer")

    def validate(self, *, megatron: bool = True) -> None:
        """Raise the first violated constraint; see `validate`."""
        validate(self, megatron=megatron)


@dataclass(frozen=True, slots=True)
class Config:
    """Both namespaces of an override line."""

    model: ActivationOffloadConfig = field(default_factory=ActivationOffloadConfig)
    optimizer: OptimizerOffloadConfig = field(default_factory=OptimizerOffloadConfig)

    def __post_init__(self) -> None:
        for part, kind in ((self.model, ActivationOffloadConfig), (self.optimizer, OptimizerOffloadConfig)):
            require(isinstance(part, kind), errors.ConfigTypeError, "namespace", part, kind.__name__, "CFG-2")

    def validate(self, *, megatron: bool = True) -> None:
        """Raise the first violated constraint of both; see `validate`."""
        validate(self, megatron=megatron)


AnyConfig = ActivationOffloadConfig | OptimizerOffloadConfig | Config


@dataclass(frozen=True, slots=True)
class Constraint:
    """One row of the table.

    Attributes:
        rule: id of the requirement.
        reason: class of the error or warning.
        fields: what the row is about; the values are shown by the error.
        message: exact text, with fields in braces.
        required: what would satisfy the row, in words.
        violated: whether the namespace that has these fields violates the row.
    """

    rule: str
    reason: type[errors.ConstraintError | errors.OffloadWarning]
    fields: tuple[str, ...]
    message: str
    required: str
    violated: Callable[[Any], bool]


def _captures_layers(model: ActivationOffloadConfig) -> bool:
    """Return whether CUDA graphs are on that cover less than the whole iteration."""
    scope = model.cuda_graph_scope
    scopes = scope.split(",") if isinstance(scope, str) else list(scope)
    whole = model.cuda_graph_impl == "local" and scopes == ["full_iteration"]
    return model.cuda_graph_impl not in {"none", "full_iteration"} and not whole


def _fraction_refused(optimizer: OptimizerOffloadConfig) -> bool:
    """Return whether the partition would refuse the fraction."""
    try:
        check_fraction(optimizer.optimizer_offload_fraction)
    except errors.FractionError:
        return True
    return False


CONSTRAINTS = (
    Constraint(
        "CFG-10",
        errors.OffloadedLayersError,
        ("cpu_offloading_num_layers", "num_layers"),
        "CPU offloading can be done only for layers less than {num_layers}",
        "0 <= cpu_offloading_num_layers < num_layers",
        lambda model: model.cpu_offloading and not 0 <= model.cpu_offloading_num_layers < model.num_layers,
    ),
    Constraint(
        "CFG-11",
        errors.PipelineParallelError,
        ("pipeline_model_parallel_size",),
        "Currently there is no support for Pipeline parallelism with CPU offloading",
        "pipeline_model_parallel_size=1",
        lambda model: model.cpu_offloading and model.pipeline_model_parallel_size > 1,
    ),
    Constraint(
        "CFG-12",
        errors.RecomputationError,
        ("recompute_granularity",),
        "CPU offloading does not work when activation recomputation is enabled",
        "recompute_granularity=null",
        lambda model: model.cpu_offloading and model.recompute_granularity is not None,
    ),
    Constraint(
        "CFG-13",
        errors.FineGrainedOffloadError,
        ("cpu_offloading", "fine_grained_activation_offloading"),
        "fine_grained_activation_offloading cannot be enabled with cpu_offloading.",
        "one of the two",
        lambda model: model.cpu_offloading and model.fine_grained_activation_offloading,
    ),
    Constraint(
        "CFG-14",
        errors.PagedStashError,
        ("cpu_offloading", "moe_paged_stash"),
        "moe_paged_stash cannot be enabled with cpu_offloading.",
        "one of the two",
        lambda model: model.cpu_offloading and model.moe_paged_stash,
    ),
    Constraint(
        "CFG-15",
        errors.CudaGraphError,
        ("cuda_graph_impl", "cuda_graph_scope"),
        "CUDA graphs not supported with CPU offloading.",
        "cuda_graph_impl=none, or full-iteration graphs",
        lambda model: model.cpu_offloading and _captures_layers(model),
    ),
    Constraint(
        "CFG-16",
        errors.FullLayerCudaGraphError,
        ("use_transformer_engine_full_layer_spec", "cuda_graph_impl", "recompute_granularity"),
        "Cudagraphs not supported",
        "cuda_graph_impl=none, or neither cpu_offloading nor recompute_granularity",
        lambda model: (
            model.use_transformer_engine_full_layer_spec
            and _captures_layers(model)
            and (model.cpu_offloading or model.recompute_granularity is not None)
        ),
    ),
    Constraint(
        "CFG-17",
        errors.ConfigFractionError,
        ("optimizer_offload_fraction",),
        "optimizer_offload_fraction is {optimizer_offload_fraction}: it has to be a number in [0, 1]",
        "a number in [0, 1]",
        _fraction_refused,
    ),
    Constraint(
        "CFG-18",
        errors.DistributedOptimizerError,
        ("use_distributed_optimizer",),
        "optimizer_cpu_offload requires use_distributed_optimizer.",
        "use_distributed_optimizer=true",
        lambda optimizer: optimizer.optimizer_cpu_offload and not optimizer.use_distributed_optimizer,
    ),
    Constraint(
        "CFG-19",
        errors.MegatronWrappingError,
        ("skip_megatron_wrapping",),
        "skip_megatron_wrapping=True is incompatible with optimizer_cpu_offload.",
        "skip_megatron_wrapping=false",
        lambda optimizer: optimizer.optimizer_cpu_offload and optimizer.skip_megatron_wrapping,
    ),
    Constraint(
        "CFG-20",
        errors.WeightDecayError,
        ("decoupled_weight_decay",),
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode).",
        "decoupled_weight_decay=true",
        lambda optimizer: optimizer.optimizer_cpu_offload and not optimizer.decoupled_weight_decay,
    ),
    Constraint(
        "CFG-30",
        errors.NothingOffloadedWarning,
        ("optimizer_offload_fraction",),
        "optimizer_cpu_offload is on, but optimizer_offload_fraction is 0.0: nothing is offloaded",
        "optimizer_offload_fraction above 0",
        lambda optimizer: optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction == 0,
    ),
    Constraint(
        "CFG-31",
        errors.NoOverlapWarning,
        ("cpu_offloading_num_layers", "num_layers"),
        "all layers but one are offloaded, {cpu_offloading_num_layers} of {num_layers}: no reload overlaps",
        "cpu_offloading_num_layers at most num_layers - 2",
        lambda model: model.cpu_offloading and 0 < model.cpu_offloading_num_layers == model.num_layers - 1,
    ),
    Constraint(
        "CFG-32",
        errors.NothingOffloadedWarning,
        ("cpu_offloading_num_layers",),
        "cpu_offloading is on, but cpu_offloading_num_layers is 0: nothing is offloaded",
        "cpu_offloading_num_layers above 0",
        lambda model: model.cpu_offloading and model.cpu_offloading_num_layers == 0,
    ),
    Constraint(
        "CFG-33",
        errors.NothingOffloadedWarning,
        ("cpu_offloading_activations", "cpu_offloading_weights"),
        "cpu_offloading is on, but neither activations nor weights are: nothing is offloaded",
        "cpu_offloading_activations=true or cpu_offloading_weights=true",
        lambda model: model.cpu_offloading and not (model.cpu_offloading_activations or model.cpu_offloading_weights),
    ),
)
"""Every constraint, in the order in which Megatron meets them; warnings last."""

REFERENCE_RULES = ("CFG-10", "CFG-17")
"""The constraints that the reference itself has; the others are Megatron's alone."""


def validate(config: AnyConfig, *, megatron: bool = True) -> None:
    """Raise the first violated constraint, or else warn of settings that are surely not meant.

    Args:
        config: either namespace, or both.
        megatron: whether the constraints bind that only Megatron has.

    Raises:
        ConstraintError: its text is Megatron's exact message where Megatron has one; its note says the
            values seen, the value required and the rule.
    """
    for error in violations(config, megatron=megatron):
        raise error  # CFG-6
    for caution in cautions(config):
        warnings.warn(caution, stacklevel=3)


def violations(config: AnyConfig, *, megatron: bool = True) -> list[errors.ConstraintError]:
    """Return one error per violated constraint, in the order of the table; none when all hold."""
    found = [one for one in _findings(config) if isinstance(one, errors.ConstraintError)]
    return [error for error in found if megatron or error.rule in REFERENCE_RULES]  # CFG-8


def cautions(config: AnyConfig) -> list[errors.OffloadWarning]:
    """Return one warning per setting that is legal and yet surely not meant."""
    return [one for one in _findings(config) if isinstance(one, errors.OffloadWarning)]


def _findings(config: AnyConfig) -> Iterator[errors.ConstraintError | errors.OffloadWarning]:
    """Yield the error or warning of every row that is violated, in the order of the table."""
    require(isinstance(config, AnyConfig), errors.ConfigTypeError, "config", config, str(AnyConfig), "CFG-2")
    parts = (config.model, config.optimizer) if isinstance(config, Config) else (config,)
    for row in CONSTRAINTS:
        for part in parts:
            if hasattr(part, row.fields[0]) and row.violated(part):
                seen = {name: getattr(part, name) for name in row.fields}
                text = row.message.format(**seen)
                yield row.reason(text, seen=seen, required=row.required, rule=row.rule)


def from_overrides(overrides: Iterable[str]) -> Config:
    """Read override lines in Hydra's style; the last of several lines for a field counts.

    ``["model.cpu_offloading=true", "++optimizer.optimizer_offload_fraction=0.5"]``: an optional ``+`` or
    ``++``, a namespace, a field, ``=``, and a value that is null, true, false, a number, a bracketed list,
    a quoted text or a bare text.

    Raises:
        OverrideSyntaxError: a line is no such assignment.
        UnknownFieldError: there is no such field; the error names the nearest one.
        ConfigTypeError: a value is of another type than its field.
    """
    values: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    required = "[+|++]namespace.field=value"
    require(isinstance(overrides, Iterable), errors.OverrideSyntaxError, "overrides", overrides, required, "CFG-4")
    for line in overrides:
        require(isinstance(line, str), errors.OverrideSyntaxError, "override", line, required, "CFG-4")
        name, equals, text = line.partition("=")
        name = name.strip().removeprefix("+").removeprefix("+")
        fits = bool(equals and name) and not name.startswith("~")
        require(fits, errors.OverrideSyntaxError, "override", line, required, "CFG-4")
        _check_name(name)
        namespace, _, field_name = name.partition(".")
        values[namespace][field_name] = _value(text)
    return Config(ActivationOffloadConfig(**values["model"]), OptimizerOffloadConfig(**values["optimizer"]))


_NAMES = tuple(
    f"{namespace}.{one.name}"
    for namespace, part in (("model", ActivationOffloadConfig), ("optimizer", OptimizerOffloadConfig))
    for one in fields(part)
)
"""Every field, with its namespace."""


def _check_name(name: str) -> None:
    """Refuse a name that is no field, and name the nearest one."""
    if name not in _NAMES:  # CFG-3
        (nearest,) = get_close_matches(name, _NAMES, n=1, cutoff=0.0)
        raise errors.UnknownFieldError("override", seen=name, required=f"a field such as {nearest}", rule="CFG-3")


def _value(text: str) -> object:
    """Return the value that an override's text stands for."""
    text = text.strip()
    if text[:1] == "[" and text[-1:] == "]":
        return tuple(_value(entry) for entry in text[1:-1].split(",") if entry.strip())
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


_WORDS = {"null": None, "true": True, "false": False}
"""Bare words that are no text."""


_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (Integral,)),
    "float": ("a number", (Real, Decimal)),
    "str": ("a text", (str,)),
    "str | None": ("a text or null", (str, NoneType)),
    "str | tuple[str, ...]": ("a text or a list of texts", (str, tuple, list)),
}
"""Annotation of a field -> what it takes, in words and as types."""


def _check_types(part: ActivationOffloadConfig | OptimizerOffloadConfig, namespace: str) -> None:
    """Refuse the first field whose value is of another type; a bool is no number."""
    for one in fields(part):
        words, types = _TYPES[str(one.type)]
        value = getattr(part, one.name)
        entries = value if isinstance(value, tuple | list) else ()
        fits = isinstance(value, types) and (types == (bool,) or not isinstance(value, bool))
        if not fits or not all(isinstance(entry, str) for entry in entries):  # CFG-2
            raise errors.ConfigTypeError(f"{namespace}.{one.name}", seen=value, required=words, rule="CFG-2")

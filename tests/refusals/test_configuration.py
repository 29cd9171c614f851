"""Bad configurations and override lines: refused by class, with arguments and results as before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from refusing import Case, Plain, assert_arguments_kept, case

from offload_ref import config, errors

C: Any = config
"""The module without its types, for arguments of wrong ones."""

LEGAL_MODEL: Mapping[str, Any] = {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "num_layers": 4}
LEGAL_OPTIMIZER: Mapping[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "use_distributed_optimizer": True,
}
"""Fields with which each namespace offloads and satisfies every constraint."""


def good() -> object:
    """A good reading and validation."""
    read = config.from_overrides(["model.num_layers=4", "optimizer.optimizer_offload_fraction=0.5"])
    config.validate(read)
    return read


def model(**fields: Any) -> Any:
    """The model's namespace, legal besides the fields given."""
    return C.ActivationOffloadConfig(**{**LEGAL_MODEL, **fields})


def optimizer(**fields: Any) -> Any:
    """The optimizer's namespace, legal besides the fields given."""
    return C.OptimizerOffloadConfig(**{**LEGAL_OPTIMIZER, **fields})


SWITCHES = (
    *("cpu_offloading", "cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering"),
    *("cpu_offloading_retain_pinned_cpu_buffers", "fine_grained_activation_offloading", "moe_paged_stash"),
    "use_transformer_engine_full_layer_spec",
)
"""Fields of the model's namespace that are true or false."""

OPTIMIZER_SWITCHES = (
    *("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_torch_optimizer_for_cpu_offload"),
    *("pin_cpu_grads", "pin_cpu_params", "use_distributed_optimizer", "decoupled_weight_decay"),
    "skip_megatron_wrapping",
)
"""Fields of the optimizer's namespace that are true or false."""

TYPES = [
    case(f"{name} is {value!r}", Plain(part, **{name: value}), errors.ConfigTypeError, "CFG-2", value)
    for part, names, values in (
        (model, SWITCHES, ("false", 0, None)),
        (optimizer, OPTIMIZER_SWITCHES, ("false", 0, None)),
        (model, ("num_layers", "cpu_offloading_num_layers", "pipeline_model_parallel_size"), ("4", 4.0, True, None)),
        (model, ("recompute_granularity", "cuda_graph_impl"), (False, 1, ("full",))),
        (model, ("cuda_graph_scope",), (None, 1, ("attn", 1), ["attn", None], {"attn"}, b"full")),
        (
            optimizer,
            ("optimizer_offload_fraction",),
            ("0.5", True, None, [0.5], 0.5j, np.array(0.5), torch.tensor(0.5)),
        ),
    )
    for name in names
    for value in values
]

NAMESPACES = [
    case(f"Config with {name}", Plain(C.Config, **parts), errors.ConfigTypeError, "CFG-2", seen)
    for name, parts, seen in (
        ("a number for model", {"model": 3}, 3),
        ("None for model", {"model": None}, None),
        ("a text for optimizer", {"optimizer": "on"}, "on"),
        ("the other namespace", {"model": C.OptimizerOffloadConfig()}, C.OptimizerOffloadConfig()),
    )
]

LINES = [
    *(
        case(f"line {line!r}", Plain(C.from_overrides, [line]), errors.OverrideSyntaxError, "CFG-4", line)
        for line in (
            *("", "=", "+", "++", "++=1", "=true", "model.num_layers", "model.num_layers:4", "model.num_layers 4"),
            *("~model.num_layers", "~model.num_layers=1", "+~model.num_layers=1", "++~model.num_layers=1"),
        )
    ),
    *(
        case(f"line {line!r}", Plain(C.from_overrides, [line]), errors.UnknownFieldError, "CFG-3", seen)
        for line, seen in (
            ("model=1", "model"),
            ("model.=1", "model."),
            (".num_layers=1", ".num_layers"),
            ("num_layers=1", "num_layers"),
            ("-model.num_layers=1", "-model.num_layers"),
            ("+++model.num_layers=1", "+model.num_layers"),
            ("+ model.num_layers=1", " model.num_layers"),
            ("MODEL.num_layers=1", "MODEL.num_layers"),
            ("model .num_layers=1", "model .num_layers"),
            ("model.validate=1", "model.validate"),
            ("model.__class__=1", "model.__class__"),
            ("optimizer.model.num_layers=1", "optimizer.model.num_layers"),
            ("optimizer.num_layers=1", "optimizer.num_layers"),
        )
    ),
    *(
        case(f"line {line!r}", Plain(C.from_overrides, [line]), errors.ConfigTypeError, "CFG-2", seen)
        for line, seen in (
            ("model.num_layers=", ""),
            ("model.num_layers=four", "four"),
            ("model.num_layers=1e3", 1000.0),
            ("model.num_layers=0x10", "0x10"),
            ("model.num_layers=[4", "[4"),
            ("model.num_layers=[4]", (4,)),
            ("model.cpu_offloading='true", "'true"),
            ("model.cpu_offloading=on", "on"),
            ("model.cuda_graph_scope=[[attn],mlp]", (("attn",), "mlp")),
            ("optimizer.optimizer_offload_fraction=0.5,", "0.5,"),
            ("optimizer.optimizer_offload_fraction=50%", "50%"),
        )
    ),
    case(
        "a bad line after good ones",
        Plain(C.from_overrides, ["model.num_layers=4", "model.cpu_offloading=true", "model.num_layer=4"]),
        errors.UnknownFieldError,
        "CFG-3",
        "model.num_layer",
    ),
    case("one text", Plain(C.from_overrides, "model.num_layers=4"), errors.OverrideSyntaxError, "CFG-4", "m"),
    case(
        "a dict",
        Plain(C.from_overrides, {"model.num_layers": 4}),
        errors.OverrideSyntaxError,
        "CFG-4",
        "model.num_layers",
    ),
    *(
        case(f"lines {value!r}", Plain(C.from_overrides, value), errors.OverrideSyntaxError, "CFG-4", seen)
        for value, seen in ((None, None), (3, 3), ([None], None), ([3], 3), ([b"a=1"], b"a=1"), ([["a=1"]], ["a=1"]))
    ),
]

CONSTRAINTS = [
    case(
        f"{part.__name__} with {name}={value!r}",
        Plain(lambda part, fields: C.validate(part(**fields)), part, {name: value}),
        error,
        rule,
        {name: value, **others},
    )
    for part, name, value, error, rule, others in (
        (model, "cpu_offloading_num_layers", 4, errors.OffloadedLayersError, "CFG-10", {"num_layers": 4}),
        (model, "cpu_offloading_num_layers", -1, errors.OffloadedLayersError, "CFG-10", {"num_layers": 4}),
        (model, "pipeline_model_parallel_size", 2, errors.PipelineParallelError, "CFG-11", {}),
        (model, "recompute_granularity", "", errors.RecomputationError, "CFG-12", {}),
        (model, "recompute_granularity", "full", errors.RecomputationError, "CFG-12", {}),
        (optimizer, "optimizer_offload_fraction", -1, errors.ConfigFractionError, "CFG-17", {}),
        (optimizer, "optimizer_offload_fraction", float("inf"), errors.ConfigFractionError, "CFG-17", {}),
        (optimizer, "use_distributed_optimizer", False, errors.DistributedOptimizerError, "CFG-18", {}),
        (optimizer, "skip_megatron_wrapping", True, errors.MegatronWrappingError, "CFG-19", {}),
        (optimizer, "decoupled_weight_decay", False, errors.WeightDecayError, "CFG-20", {}),
    )
]

NO_CONFIGS = [
    case(f"{function.__name__} of {value!r}", Plain(function, value), errors.ConfigTypeError, "CFG-2", value)
    for function in (C.validate, C.violations, C.cautions)
    for value in (None, "model", {"model": None})
]


@pytest.mark.quick
@pytest.mark.parametrize("refused", [*TYPES, *NAMESPACES, *LINES, *CONSTRAINTS, *NO_CONFIGS])
def test_a_bad_configuration_changes_nothing(refused: Case) -> None:
    """It is refused; its arguments are as before, and good calls return what they returned."""
    assert_arguments_kept(refused, good)

"""Fields, defaults, and every row of the constraints table with its exact message."""

import re
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
from overriding import to_overrides

from offload_ref import errors
from offload_ref.config import (
    CONSTRAINTS,
    ActivationOffloadConfig,
    Config,
    OptimizerOffloadConfig,
    cautions,
    from_overrides,
    validate,
    violations,
)

CHAPTER = Path(__file__).parents[2] / "spec" / "60-config.md"
LEGAL = [
    *("model.cpu_offloading=true", "model.cpu_offloading_num_layers=2", "model.num_layers=4"),
    *("optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.5"),
    "optimizer.use_distributed_optimizer=true",
]
"""Override lines of a configuration with both mechanisms on and every constraint satisfied."""


def violating(*lines: str) -> Config:
    """Return the legal configuration with the given lines on top."""
    return from_overrides([*LEGAL, *lines])


ROWS = [
    pytest.param(
        ("model.cpu_offloading_num_layers=4",),
        errors.OffloadedLayersError,
        "CPU offloading can be done only for layers less than 4",
        "CFG-10",
        id="all-layers",
    ),
    pytest.param(
        ("model.cpu_offloading_num_layers=-1",),
        errors.OffloadedLayersError,
        "CPU offloading can be done only for layers less than 4",
        "CFG-10",
        id="negative-layers",
    ),
    pytest.param(
        ("model.num_layers=0", "model.cpu_offloading_num_layers=0"),
        errors.OffloadedLayersError,
        "CPU offloading can be done only for layers less than 0",
        "CFG-10",
        id="undeclared-layers",
    ),
    pytest.param(
        ("model.pipeline_model_parallel_size=2",),
        errors.PipelineParallelError,
        "Currently there is no support for Pipeline parallelism with CPU offloading",
        "CFG-11",
        id="pipeline",
    ),
    pytest.param(
        ("model.recompute_granularity=selective",),
        errors.RecomputationError,
        "CPU offloading does not work when activation recomputation is enabled",
        "CFG-12",
        id="recompute",
    ),
    pytest.param(
        ("model.fine_grained_activation_offloading=true",),
        errors.FineGrainedOffloadError,
        "fine_grained_activation_offloading cannot be enabled with cpu_offloading.",
        "CFG-13",
        id="fine-grained",
    ),
    pytest.param(
        ("model.moe_paged_stash=true",),
        errors.PagedStashError,
        "moe_paged_stash cannot be enabled with cpu_offloading.",
        "CFG-14",
        id="paged-stash",
    ),
    pytest.param(
        ("model.cuda_graph_impl=transformer_engine",),
        errors.CudaGraphError,
        "CUDA graphs not supported with CPU offloading.",
        "CFG-15",
        id="te-graphs",
    ),
    pytest.param(
        ("model.cuda_graph_impl=transformer_engine", "model.cuda_graph_scope=full_iteration"),
        errors.CudaGraphError,
        "CUDA graphs not supported with CPU offloading.",
        "CFG-15",
        id="te-graphs-have-no-full-iteration",
    ),
    pytest.param(
        ("model.cuda_graph_impl=local", "model.cuda_graph_scope=[attn,mlp]"),
        errors.CudaGraphError,
        "CUDA graphs not supported with CPU offloading.",
        "CFG-15",
        id="local-graphs-of-parts",
    ),
    pytest.param(
        (
            *("model.cpu_offloading=false", "model.recompute_granularity=full"),
            *("model.cuda_graph_impl=local", "model.use_transformer_engine_full_layer_spec=true"),
        ),
        errors.FullLayerCudaGraphError,
        "Cudagraphs not supported",
        "CFG-16",
        id="full-layer-graphs",
    ),
    pytest.param(
        ("optimizer.optimizer_offload_fraction=1.5",),
        errors.ConfigFractionError,
        "optimizer_offload_fraction is 1.5: it has to be a number in [0, 1]",
        "CFG-17",
        id="fraction-above",
    ),
    pytest.param(
        ("optimizer.optimizer_offload_fraction=nan",),
        errors.ConfigFractionError,
        "optimizer_offload_fraction is nan: it has to be a number in [0, 1]",
        "CFG-17",
        id="fraction-nan",
    ),
    pytest.param(
        ("optimizer.optimizer_cpu_offload=false", "optimizer.optimizer_offload_fraction=-0.1"),
        errors.ConfigFractionError,
        "optimizer_offload_fraction is -0.1: it has to be a number in [0, 1]",
        "CFG-17",
        id="fraction-below-while-off",
    ),
    pytest.param(
        ("optimizer.use_distributed_optimizer=false",),
        errors.DistributedOptimizerError,
        "optimizer_cpu_offload requires use_distributed_optimizer.",
        "CFG-18",
        id="not-distributed",
    ),
    pytest.param(
        ("optimizer.skip_megatron_wrapping=true",),
        errors.MegatronWrappingError,
        "skip_megatron_wrapping=True is incompatible with optimizer_cpu_offload.",
        "CFG-19",
        id="bare-optimizer",
    ),
    pytest.param(
        ("optimizer.decoupled_weight_decay=false",),
        errors.WeightDecayError,
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode).",
        "CFG-20",
        id="coupled-decay",
    ),
]
"""Lines that violate one row, the class raised, the whole text, the rule."""


@pytest.mark.quick
@pytest.mark.requirement(*(f"CFG-{number}" for number in range(10, 21)))
@pytest.mark.parametrize(("lines", "error", "message", "rule"), ROWS)
def test_each_constraint_is_raised_with_its_exact_message(
    lines: tuple[str, ...], error: type[errors.ConstraintError], message: str, rule: str
) -> None:
    """A violated row raises its own class with the exact text, the values seen and the rule."""
    config = violating(*lines)
    with pytest.raises(error) as raised:
        validate(config)
    assert str(raised.value) == message
    assert raised.value.rule == rule
    assert isinstance(raised.value.seen, dict)
    assert f"[{rule}]" in raised.value.__notes__[0]
    assert [found.rule for found in violations(config)] == [rule]


@pytest.mark.quick
@pytest.mark.requirement("CFG-6", "CFG-7")
def test_every_error_row_is_in_the_test_table() -> None:
    """The rows of the table that raise are those that the tests above violate, in the chapter's order."""
    raised = [row.rule for row in CONSTRAINTS if issubclass(row.reason, errors.ConstraintError)]
    assert raised == sorted({str(row.values[3]) for row in ROWS})
    assert [row.rule for row in CONSTRAINTS] == re.findall(
        r"^### (CFG-[1-9]\d):", CHAPTER.read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.quick
@pytest.mark.requirement("CFG-10", "CFG-11", "CFG-12", "CFG-13", "CFG-14", "CFG-15", "CFG-16", "CFG-19", "CFG-20")
def test_messages_are_those_of_the_chapter() -> None:
    """Every message that the chapter quotes is the row's message, letter by letter."""
    chapter = " ".join(CHAPTER.read_text(encoding="utf-8").split())
    for row in CONSTRAINTS:
        if row.rule not in {"CFG-17", "CFG-18"} and issubclass(row.reason, errors.ConstraintError):
            sentence = chapter.split(f"### {row.rule}:")[1].split("###")[0]
            assert f"with the text `{row.message}`" in sentence


@pytest.mark.quick
@pytest.mark.requirement("CFG-13", "CFG-16", "CFG-20")
def test_asserted_constraints_are_caught_either_way() -> None:
    """What Megatron asserts is an AssertionError as well as a ValueError; the rest is a ValueError alone."""
    asserted = {"CFG-13", "CFG-16", "CFG-20"}
    for row in CONSTRAINTS:
        if issubclass(row.reason, errors.ConstraintError):
            assert issubclass(row.reason, ValueError)
            assert issubclass(row.reason, AssertionError) == (row.rule in asserted)
    assert issubclass(errors.OffloadedLayersError, errors.LayerCountError)
    assert issubclass(errors.ConfigFractionError, errors.FractionError)


@pytest.mark.quick
@pytest.mark.requirement("CFG-6", "CFG-7")
def test_the_first_of_several_is_raised_and_all_are_listed() -> None:
    """Of several violated rows validation raises the first; the list has all, in order."""
    config = violating(
        "optimizer.decoupled_weight_decay=false", "model.moe_paged_stash=true", "model.pipeline_model_parallel_size=8"
    )
    with pytest.raises(errors.PipelineParallelError):
        config.validate()
    assert [found.rule for found in violations(config)] == ["CFG-11", "CFG-14", "CFG-20"]
    assert [found.rule for found in violations(config.optimizer)] == ["CFG-20"]


@pytest.mark.quick
@pytest.mark.requirement("CFG-8")
@pytest.mark.parametrize(("lines", "error", "message", "rule"), ROWS)
def test_reference_mode_has_two_constraints(
    lines: tuple[str, ...], error: type[errors.ConstraintError], message: str, rule: str
) -> None:
    """The reference itself refuses the range of K and of the fraction, and nothing else."""
    config = violating(*lines)
    if rule in {"CFG-10", "CFG-17"}:
        with pytest.raises(error, match=re.escape(message)):
            validate(config, megatron=False)
    else:
        validate(config, megatron=False)


@pytest.mark.quick
@pytest.mark.requirement("CFG-11", "CFG-12", "CFG-13", "CFG-14", "CFG-15", "CFG-18", "CFG-19", "CFG-20")
def test_constraints_bind_only_while_the_mechanism_is_on() -> None:
    """With both master switches off every other setting is legal."""
    validate(
        from_overrides(
            [
                *("model.pipeline_model_parallel_size=8", "model.recompute_granularity=full"),
                *("model.fine_grained_activation_offloading=true", "model.moe_paged_stash=true"),
                *("model.cuda_graph_impl=local", "model.cpu_offloading_num_layers=9"),
                *("optimizer.skip_megatron_wrapping=true", "optimizer.decoupled_weight_decay=false"),
            ]
        )
    )


@pytest.mark.quick
@pytest.mark.requirement("CFG-15")
@pytest.mark.parametrize(
    ("implementation", "scope"),
    [
        pytest.param("none", "full", id="off"),
        pytest.param("full_iteration", (), id="full-iteration"),
        pytest.param("local", "full_iteration", id="local-text"),
        pytest.param("local", ("full_iteration",), id="local-tuple"),
    ],
)
def test_full_iteration_graphs_are_legal(implementation: str, scope: str | tuple[str, ...]) -> None:
    """Graphs that cover the whole iteration go with activation offloading."""
    model = ActivationOffloadConfig(
        cpu_offloading=True,
        cpu_offloading_num_layers=2,
        num_layers=4,
        cuda_graph_impl=implementation,
        cuda_graph_scope=scope,
        use_transformer_engine_full_layer_spec=True,
    )
    assert violations(model) == []


@pytest.mark.quick
@pytest.mark.requirement("CFG-15", "CFG-16")
def test_layer_graphs_violate_both_rows_of_graphs() -> None:
    """Per-layer graphs of whole TransformerEngine layers are refused twice; the ValueError comes first."""
    config = violating("model.cuda_graph_impl=local", "model.use_transformer_engine_full_layer_spec=true")
    assert [found.rule for found in violations(config)] == ["CFG-15", "CFG-16"]


@pytest.mark.quick
@pytest.mark.requirement("CFG-30", "CFG-31", "CFG-32", "CFG-33")
@pytest.mark.parametrize(
    ("lines", "warning", "message"),
    [
        pytest.param(
            ("optimizer.optimizer_offload_fraction=0",),
            errors.NothingOffloadedWarning,
            "optimizer_cpu_offload is on, but optimizer_offload_fraction is 0.0: nothing is offloaded [CFG-30]",
            id="fraction-zero",
        ),
        pytest.param(
            ("model.cpu_offloading_num_layers=3",),
            errors.NoOverlapWarning,
            "all layers but one are offloaded, 3 of 4: no reload overlaps [CFG-31]",
            id="all-but-one",
        ),
        pytest.param(
            ("model.cpu_offloading_num_layers=0",),
            errors.NothingOffloadedWarning,
            "cpu_offloading is on, but cpu_offloading_num_layers is 0: nothing is offloaded [CFG-32]",
            id="no-layers",
        ),
        pytest.param(
            ("model.cpu_offloading_num_layers=0", "model.num_layers=1"),
            errors.NothingOffloadedWarning,
            "cpu_offloading is on, but cpu_offloading_num_layers is 0: nothing is offloaded [CFG-32]",
            id="no-layers-of-one",
        ),
        pytest.param(
            ("model.cpu_offloading_activations=false",),
            errors.NothingOffloadedWarning,
            "cpu_offloading is on, but neither activations nor weights are: nothing is offloaded [CFG-33]",
            id="neither",
        ),
    ],
)
def test_surely_unmeant_settings_warn(
    lines: tuple[str, ...], warning: type[errors.OffloadWarning], message: str
) -> None:
    """A legal setting that cannot have been meant warns, once, in both modes, and raises nothing."""
    config = violating(*lines)
    assert violations(config) == []
    assert [str(found) for found in cautions(config)] == [message]
    for megatron in (True, False):
        with pytest.warns(warning) as caught:
            validate(config, megatron=megatron)
        assert [str(one.message) for one in caught] == [message]


@pytest.mark.quick
@pytest.mark.requirement("CFG-30")
def test_the_switch_alone_warns() -> None:
    """`optimizer_cpu_offload` with the default fraction warns; the configuration as it is built does not."""
    with pytest.warns(errors.NothingOffloadedWarning):
        OptimizerOffloadConfig(optimizer_cpu_offload=True, use_distributed_optimizer=True).validate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config().validate()
        ActivationOffloadConfig().validate()
        violating().validate()


def defaults_in_the_chapter() -> dict[str, str]:
    """Return the chapter's table of defaults."""
    row = re.compile(r"^\| `(\w+)` \| `(\w+)` \| `([^`]+)` \|", re.MULTILINE)
    return {
        f"{namespace}.{name}": default for namespace, name, default in row.findall(CHAPTER.read_text(encoding="utf-8"))
    }


@pytest.mark.quick
@pytest.mark.requirement("CFG-1")
def test_defaults_are_those_of_the_chapter() -> None:
    """The chapter's table and the dataclasses have the same fields with the same defaults."""
    built = Config()
    values = {
        f"{namespace}.{one.name}": getattr(part, one.name)
        for namespace, part in (("model", built.model), ("optimizer", built.optimizer))
        for one in fields(part)
    }
    table = defaults_in_the_chapter()
    assert list(values) == list(table)
    assert from_overrides([f"{name}={default}" for name, default in table.items()]) == built
    assert to_overrides(built) == []


@pytest.mark.quick
@pytest.mark.requirement("CFG-1")
def test_public_defaults() -> None:
    """The fields that users set have the defaults that Megatron documents."""
    built = Config()
    assert [getattr(built.model, one.name) for one in fields(built.model)[:6]] == [
        *(False, 0, True),
        *(False, False, False),
    ]
    assert [getattr(built.optimizer, one.name) for one in fields(built.optimizer)[:6]] == [
        *(False, 0.0, False),
        *(False, True, True),
    ]

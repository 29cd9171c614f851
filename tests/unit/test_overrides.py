"""Override lines in Hydra's style: what they mean, what they refuse, and that they round-trip."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overriding import to_overrides

from offload_ref import errors
from offload_ref.config import ActivationOffloadConfig, Config, OptimizerOffloadConfig, from_overrides

WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="_. -"), max_size=12)
"""Texts that a field may hold, among them ``true``-like words and numbers."""
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": st.integers(),
    "float": st.floats(allow_nan=False),
    "str": WORDS,
    "str | None": st.none() | WORDS,
    "str | tuple[str, ...]": WORDS | st.lists(WORDS, max_size=3).map(tuple),
}
"""Annotation of a field -> every kind of value that it takes."""


def configs_of(part: type[ActivationOffloadConfig] | type[OptimizerOffloadConfig]) -> st.SearchStrategy[Any]:
    """Return a strategy that draws one namespace, legal or not."""
    return st.builds(part, **{one.name: VALUES[str(one.type)] for one in fields(part)})


@pytest.mark.quick
@pytest.mark.requirement("CFG-4")
@given(st.builds(Config, configs_of(ActivationOffloadConfig), configs_of(OptimizerOffloadConfig)))
def test_overrides_round_trip(config: Config) -> None:
    """Every configuration is read back from the lines that describe it."""
    assert from_overrides(to_overrides(config)) == config


@pytest.mark.quick
@pytest.mark.requirement("CFG-4")
@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        pytest.param("model.cpu_offloading=true", "cpu_offloading", True, id="true"),
        pytest.param("model.cpu_offloading=True", "cpu_offloading", True, id="capital-true"),
        pytest.param("+model.cpu_offloading=true", "cpu_offloading", True, id="plus"),
        pytest.param("++model.cpu_offloading=true", "cpu_offloading", True, id="plus-plus"),
        pytest.param("model.cpu_offloading = true", "cpu_offloading", True, id="spaces"),
        pytest.param("model.num_layers=48", "num_layers", 48, id="int"),
        pytest.param("model.num_layers=-1", "num_layers", -1, id="negative"),
        pytest.param("model.recompute_granularity=null", "recompute_granularity", None, id="null"),
        pytest.param("model.recompute_granularity=full", "recompute_granularity", "full", id="text"),
        pytest.param("model.recompute_granularity='null'", "recompute_granularity", "null", id="single"),
        pytest.param('model.recompute_granularity="full"', "recompute_granularity", "full", id="double"),
        pytest.param("model.recompute_granularity=a=b", "recompute_granularity", "a=b", id="equals-inside"),
        pytest.param("model.recompute_granularity=", "recompute_granularity", "", id="empty"),
        pytest.param("model.cuda_graph_scope=[attn, mlp]", "cuda_graph_scope", ("attn", "mlp"), id="list"),
        pytest.param("model.cuda_graph_scope=[]", "cuda_graph_scope", (), id="empty-list"),
    ],
)
def test_lines_of_the_model(line: str, field: str, expected: object) -> None:
    """A line sets its field to the value that its text stands for, and no other field."""
    read = from_overrides([line])
    assert getattr(read.model, field) == expected
    assert type(getattr(read.model, field)) is type(expected)
    assert read == Config(ActivationOffloadConfig(**{field: expected}))  # type: ignore[arg-type]


@pytest.mark.quick
@pytest.mark.requirement("CFG-4")
@pytest.mark.parametrize("text", ["0.5", ".5", "5e-1", "+0.5", "1", "0", "inf"])
def test_numbers_are_fractions(text: str) -> None:
    """Every spelling of a number is read as that number; its range is validation's matter."""
    read = from_overrides([f"optimizer.optimizer_offload_fraction={text}"])
    assert read.optimizer.optimizer_offload_fraction == float(text)


@pytest.mark.quick
@pytest.mark.requirement("CFG-4")
def test_the_last_line_counts() -> None:
    """Of several lines for one field the last one counts; no lines give the defaults."""
    assert from_overrides(["model.num_layers=4", "model.num_layers=8"]).model.num_layers == 8
    assert from_overrides([]) == Config()


@pytest.mark.quick
@pytest.mark.requirement("CFG-3")
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("cpu_offloading", "model.cpu_offloading"),
        ("model.cpu_ofloading_num_layers", "model.cpu_offloading_num_layers"),
        ("model.optimizer_cpu_offload", "optimizer.optimizer_cpu_offload"),
        ("optimizer.offload_fraction", "optimizer.optimizer_offload_fraction"),
        ("+++model.num_layers", "model.num_layers"),
    ],
)
def test_unknown_fields_name_the_nearest(name: str, nearest: str) -> None:
    """A name that is no field is refused with the nearest one that is."""
    with pytest.raises(errors.UnknownFieldError, match=rf"{nearest} \[CFG-3\]") as refused:
        from_overrides([f"{name}=1"])
    assert str(refused.value.seen) in name


@pytest.mark.quick
@pytest.mark.requirement("CFG-3", "CFG-4")
@given(st.text(max_size=30))
def test_any_other_text_is_refused_by_name(line: str) -> None:
    """A text that is no override line ends in one of the typed errors, whatever it is."""
    with pytest.raises((errors.UnknownFieldError, errors.OverrideSyntaxError)):
        from_overrides([line])


@pytest.mark.quick
@pytest.mark.requirement("CFG-2")
@pytest.mark.parametrize(
    "line",
    [
        "model.cpu_offloading=1",
        "model.cpu_offloading=yes",
        "model.cpu_offloading='true'",
        "model.cpu_offloading=null",
        "model.num_layers=4.0",
        "model.num_layers=true",
        "model.cuda_graph_scope=[1,2]",
        "model.recompute_granularity=[full]",
        "optimizer.optimizer_offload_fraction='0.5'",
        "optimizer.optimizer_offload_fraction=half",
        "optimizer.optimizer_offload_fraction=0.5.0",
    ],
)
def test_values_of_other_types_are_refused(line: str) -> None:
    """A value of another type than its field's is refused with the field named."""
    with pytest.raises(errors.ConfigTypeError, match=line.split("=", maxsplit=1)[0]):
        from_overrides([line])

"""What flags and overrides mean together."""

import json
from dataclasses import asdict

import pytest

from offload_ref.demo.settings import DemoSettings, resolve
from offload_ref.errors import (
    ConfigTypeError,
    ConstraintError,
    DemoSettingError,
    OffloadError,
    UnknownFieldError,
    UnsupportedError,
)


def test_both_mechanisms_are_on_by_default() -> None:
    """Without arguments half of four layers are offloaded, and half of the states, with overlap."""
    settings = resolve()
    assert (settings.layers, settings.offloaded_layers, settings.host_fraction) == (4, 2, 0.5)
    assert settings.config.optimizer.overlap_cpu_optimizer_d2h_h2d
    assert settings.notes == ()


@pytest.mark.parametrize(("layers", "offloaded"), [(1, 0), (2, 1), (5, 2), (8, 4)])
def test_half_of_the_layers_are_offloaded(layers: int, offloaded: int) -> None:
    """K follows L, rounded down, so it is always below L."""
    assert resolve(layers=layers).offloaded_layers == offloaded
    assert resolve(overrides=[f"model.num_layers={layers}"]).offloaded_layers == offloaded


def test_flags_and_overrides_map_onto_the_same_settings() -> None:
    """Each flag equals its override line, and the two together are no contradiction."""
    by_flag = resolve(layers=6, offload_layers=3, fraction=0.25)
    lines = ["model.num_layers=6", "++model.cpu_offloading_num_layers=3", "optimizer.optimizer_offload_fraction=.25"]
    assert by_flag == resolve(overrides=lines) == resolve(layers=6, offload_layers=3, fraction=0.25, overrides=lines)


@pytest.mark.parametrize(
    ("flags", "override"),
    [
        ({"layers": 6}, "model.num_layers=5"),
        ({"offload_layers": 1}, "model.cpu_offloading_num_layers=2"),
        ({"offload_layers": 1}, "+model.cpu_offloading=false"),
        ({"fraction": 0.5}, "optimizer.optimizer_offload_fraction=0.25"),
        ({"fraction": 0.5}, "optimizer.optimizer_cpu_offload=false"),
    ],
)
def test_a_flag_that_contradicts_an_override_is_refused(flags: dict[str, float], override: str) -> None:
    """The message names the flag and both lines."""
    with pytest.raises(DemoSettingError, match="an override of the same field") as refused:
        resolve(overrides=[override], **flags)  # type: ignore[arg-type]
    assert override in str(refused.value)


def test_a_switch_turns_its_mechanism_off() -> None:
    """With both switches off nothing is offloaded."""
    settings = resolve(overrides=["model.cpu_offloading=false", "optimizer.optimizer_cpu_offload=false"])
    assert (settings.offloaded_layers, settings.host_fraction) == (0, 0.0)


def test_what_the_configuration_warns_of_is_kept() -> None:
    """Fraction 0 and K = 0 are legal, and the report says that nothing is offloaded."""
    settings = resolve(offload_layers=0, fraction=0.0)
    assert len(settings.notes) == 2
    assert all("nothing is offloaded" in note for note in settings.notes)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("model.pipeline_model_parallel_size=2", ConstraintError),
        ("model.recompute_granularity=full", ConstraintError),
        ("model.cpu_offloading_num_layers=4", ConstraintError),
        ("model.cpu_offloading_num_layers=-1", ConstraintError),
        ("model.num_layers=0", DemoSettingError),
        ("optimizer.optimizer_offload_fraction=nan", ConstraintError),
        ("optimizer.optimizer_offload_fraction=1.5", ConstraintError),
        ("optimizer.decoupled_weight_decay=false", ConstraintError),
        ("optimizer.use_torch_optimizer_for_cpu_offload=false", UnsupportedError),
        ("model.num_layers=many", ConfigTypeError),
        ("model.num_layer=4", UnknownFieldError),
        ("model.num_layers", OffloadError),
    ],
)
def test_a_bad_override_is_refused(override: str, error: type[OffloadError]) -> None:
    """What the constraints forbid, what the demo does not do, and what is no assignment."""
    with pytest.raises(error):
        resolve(overrides=[override])


def test_a_field_that_the_demo_would_ignore_is_refused() -> None:
    """Pipeline stages are legal without activation offloading, and the demo has none."""
    with pytest.raises(UnsupportedError, match="pipeline_model_parallel_size in the demo: got 2, required 1"):
        resolve(overrides=["model.cpu_offloading=false", "model.pipeline_model_parallel_size=2"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", 0),
        ("heads", 0),
        ("heads", 3),
        ("sequence", 0),
        ("batch", -1),
        ("accumulation", 0),
        ("steps", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("seed", -1),
        ("data_seed", -1),
        ("min_offload_bytes", -1),
        ("partition", "half"),
    ],
)
def test_a_size_out_of_range_is_refused(name: str, value: object) -> None:
    """The message names the option as it is typed, and the value seen."""
    with pytest.raises(DemoSettingError, match=f"--{name.replace('_', '-')}: got {value!r}"):
        resolve(**{name: value})  # type: ignore[arg-type]


def test_settings_can_be_written_as_json() -> None:
    """They hold nothing but plain values."""
    assert json.loads(json.dumps(asdict(resolve())))["hidden"] == DemoSettings(config=resolve().config).hidden

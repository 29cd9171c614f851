"""The optimizer's memory, predicted: closed forms, the saving, and what torch's pinned allocator takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_ref.partition import MODES, partition
from offload_ref.planner import (
    OptimizerMemory,
    OptimizerSettings,
    Parameter,
    describe,
    itemsize,
    pinned_rounding,
    predict,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
QUARTERS = (0, 0.25, 0.5, 0.75, 1)
PARAMETERS = st.lists(
    st.builds(
        Parameter,
        numel=st.integers(0, 10_000),
        dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
        gradient_dtype=st.sampled_from([None, "float32"]),
        trainable=st.booleans(),
        on_host=st.booleans(),
    ),
    max_size=8,
)
SETTINGS = st.builds(
    OptimizerSettings,
    param_update_in_fp32=st.booleans(),
    state_tensors=st.integers(0, 3),
    device_step_bytes=st.sampled_from([0, 4]),
    pin_cpu_grads=st.booleans(),
    pin_cpu_params=st.booleans(),
)
FRACTIONS = st.sampled_from(QUARTERS) | st.floats(0, 1)


@pytest.mark.quick
@pytest.mark.requirement("MEM-20")
def test_bf16_with_masters_at_one_half() -> None:
    """Two bf16 parameters of 1,000 elements at one half: 2+2 bytes on the device each, 12 on its side."""
    plan = predict([Parameter(1000, "bfloat16")] * 2, 0.5, settings=OptimizerSettings(param_update_in_fp32=True))
    assert plan == OptimizerMemory(
        device_weights=4000,
        device_gradients=4000,
        device_masters=4000,
        device_states=8000,
        host_working=4000,
        host_states=8000,
        host_gradients=2000,
        host_staging=2000,
        pinned=4000,
        pinned_taken=4096,
        saved=12000,
    )
    assert (plan.device, plan.host) == (20000, 16000)


@pytest.mark.quick
@pytest.mark.requirement("MEM-20")
def test_fp32_weights_are_their_own_masters() -> None:
    """An fp32 parameter has no master and no staging: its pinned working copy leaves for the device."""
    plan = predict([Parameter(1000)], 1, settings=OptimizerSettings(param_update_in_fp32=True))
    assert plan == OptimizerMemory(
        device_weights=4000,
        device_gradients=4000,
        host_working=4000,
        host_states=8000,
        host_gradients=4000,
        pinned=8000,
        pinned_taken=8192,
        saved=8000,
    )


@pytest.mark.quick
@pytest.mark.requirement("MEM-20")
def test_frozen_and_host_resident_parameters_move_nothing() -> None:
    """A frozen parameter costs its weight, one on the host costs the device nothing; neither is pinned."""
    plan = predict([Parameter(10, trainable=False), Parameter(100, on_host=True)], 1)
    assert plan == OptimizerMemory(device_weights=40, host_weights=400, host_states=800, host_gradients=400)


@pytest.mark.quick
@pytest.mark.requirement("MEM-22")
@pytest.mark.parametrize("fraction", QUARTERS)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_the_saving_is_the_host_share_times_the_state_bytes(mode: str, fraction: float) -> None:
    """At every quarter the saved bytes are 8 per fp32 and 12 per mastered bf16 element of the host share."""
    sizes = [300, 7, 0, 512, 64, 1]
    elements = sum(share.host_elements for share in partition(sizes, fraction, mode))
    plain = predict([Parameter(size) for size in sizes], fraction, partition=mode)
    mastered = predict(
        [Parameter(size, "bfloat16") for size in sizes],
        fraction,
        partition=mode,
        settings=OptimizerSettings(param_update_in_fp32=True),
    )
    assert (plain.saved, mastered.saved) == (8 * elements, 12 * elements)


@pytest.mark.quick
@pytest.mark.requirement("MEM-20", "MEM-22")
@given(PARAMETERS, FRACTIONS, SETTINGS, st.sampled_from(sorted(MODES)))
def test_what_leaves_one_side_is_on_the_other(
    parameters: list[Parameter], fraction: float, settings: OptimizerSettings, mode: str
) -> None:
    """The saving is the difference to fraction 0; states and working copies only change sides."""
    plan = predict(parameters, fraction, partition=mode, settings=settings)
    kept = predict(parameters, 0, partition=mode, settings=settings)
    assert plan.saved == kept.device - plan.device
    assert (plan.device_weights, plan.device_gradients) == (kept.device_weights, kept.device_gradients)
    moved_steps = plan.saved - (plan.host_states - kept.host_states) - (kept.device_masters - plan.device_masters)
    whole = [
        share.whole_host
        for share in partition(
            [one.numel for one in parameters if not one.on_host],
            fraction,
            mode,
            [one.trainable for one in parameters if not one.on_host],
        )
    ]
    trained = [one.trainable for one in parameters if not one.on_host]
    assert moved_steps == settings.device_step_bytes * sum(map(min, whole, trained))


@pytest.mark.quick
@pytest.mark.requirement("MEM-20")
@given(PARAMETERS, FRACTIONS)
def test_pins_are_what_the_flags_say(parameters: list[Parameter], fraction: float) -> None:
    """With both flags off nothing is pinned; each flag pins its own buffers, and both add up."""
    pinned = {
        (grads, params): predict(
            parameters,
            fraction,
            settings=OptimizerSettings(param_update_in_fp32=True, pin_cpu_grads=grads, pin_cpu_params=params),
        ).pinned
        for grads in (False, True)
        for params in (False, True)
    }
    assert pinned[False, False] == 0
    assert pinned[True, True] == pinned[True, False] + pinned[False, True]


@pytest.mark.quick
@pytest.mark.requirement("MEM-20")
@pytest.mark.parametrize("mode", sorted(MODES))
def test_describe_reads_real_tensors(mode: str) -> None:
    """Planned from a model's own tensors, on the host or as if on the device."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)).bfloat16()
    model[1].weight.requires_grad = False
    described = describe(model.parameters(), all_on_device=True)
    assert [(one.numel, one.trainable, one.on_host) for one in described] == [
        *((32, True, False), (4, True, False)),
        *((8, False, False), (2, True, False)),
    ]
    plan = predict(described, 1, partition=mode)
    assert (plan.device_weights, plan.device_gradients, plan.saved) == (92, 76, 2 * 38 * 2)
    resident = predict(describe(model.parameters()), 1, partition=mode)
    assert (resident.device, resident.host_weights, resident.pinned) == (0, 92, 0)


@pytest.mark.quick
@pytest.mark.requirement("MEM-20")
def test_describe_reads_gradients_in_their_own_dtype() -> None:
    """A gradient that is there says its dtype; its absence leaves the weight's."""
    weight = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16, device="meta"))
    weight.grad_dtype = None
    weight.grad = torch.zeros(6, device="meta")
    plan = predict(describe([weight]), 1)
    assert (plan.device_gradients, plan.host_gradients) == (24, 24)


@pytest.mark.quick
@pytest.mark.requirement("MEM-20")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("torch.bfloat16", 2), (torch.float16, 2), (torch.float64, 8), (torch.float8_e4m3fn, 1), (2, 2)],
    ids=str,
)
def test_dtypes_have_sizes(dtype: object, size: int) -> None:
    """A dtype is given by name, as torch's object, or as its bytes."""
    assert itemsize(dtype) == size


@pytest.mark.quick
@pytest.mark.requirement("MEM-21")
@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        pytest.param(129 * MIB + 512 * KIB, 256 * MIB, id="129.5-MiB"),
        pytest.param(112 * MIB, 128 * MIB, id="112-MiB"),
        pytest.param(int(20.4 * GIB), 32 * GIB, id="20.4-GiB"),
        pytest.param(128 * MIB, 128 * MIB, id="a-power"),
        pytest.param(128 * MIB + 1, 256 * MIB, id="one-more"),
        pytest.param(1, 1, id="one"),
        pytest.param(3, 4, id="three"),
        pytest.param(0, 0, id="none"),
    ],
)
def test_the_pinned_allocator_takes_powers_of_two(asked: int, taken: int) -> None:
    """A pinned request takes the next power of two; nothing takes nothing."""
    assert pinned_rounding(asked) == taken

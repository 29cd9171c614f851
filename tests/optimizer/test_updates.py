"""An offloaded step gives the plain step's bits, at any fraction, under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import SCHEDULES
from optimizing import CLASSES, Training, offloaded_run, plain

from offload_ref import HybridDeviceOptimizer


@pytest.mark.quick
@pytest.mark.requirement("OPT-6", "OPT-20", "ORD-10", "ORD-11", "ORD-15", "ORD-16", "ORD-7")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("partition", ["greedy", "exact"])
@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, False), (torch.bfloat16, True)])
def test_updates_are_bit_equal(schedule: str, overlap: bool, partition: str, dtype: torch.dtype, masters: bool) -> None:
    """Three steps of AdamW at fraction 0.5, with and without overlap and masters, equal the plain loop."""
    training = Training([(3, 4), (5,), (), (2, 2)], [[True] * 4] * 3, dtype, masters=masters)
    options: dict[str, Any] = {"partition": partition, "overlap_cpu_optimizer_d2h_h2d": overlap, "bucket_bytes": 64}
    seen = offloaded_run(training, 0.5, SCHEDULES[schedule](), **options)
    assert all(torch.equal(a, b) for a, b in zip(seen, plain(training), strict=True))


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    """Shapes (empty and 0-dim ones too), dtypes, groups, classes, and which parameters are active when."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5))
    count = len(shapes)
    dtype, masters = draw(
        st.sampled_from([(torch.float32, False), (torch.bfloat16, True), (torch.float16, True), (torch.float32, True)])
    )
    return Training(
        shapes=shapes,
        steps=draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=1, max_size=4)),
        dtype=dtype,
        masters=masters and dtype is not torch.float32,
        group_of=draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)),
        optimizer=draw(st.sampled_from(sorted(CLASSES))),
        foreach=draw(st.booleans()),
        options={"param_update_in_fp32": masters},
    )


fractions = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1))


@pytest.mark.requirement("OPT-6", "OPT-10", "OPT-11", "OPT-13", "ORD-7")
@settings(max_examples=150)
@given(
    training=trainings(),
    fraction=fractions,
    partition=st.sampled_from(["greedy", "exact"]),
    overlap=st.booleans(),
    bucket_bytes=st.sampled_from([1, 64, 1 << 20]),
    pinned=st.booleans(),
    schedule=st.sampled_from(sorted(SCHEDULES)),
)
def test_any_training_is_bit_equal(
    training: Training, fraction: float, partition: str, overlap: bool, bucket_bytes: int, pinned: bool, schedule: str
) -> None:
    """Whatever is drawn, the parameters at the end are those of the plain loop, and no race is found."""
    seen = offloaded_run(
        training,
        fraction,
        SCHEDULES[schedule](),
        partition=partition,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        bucket_bytes=bucket_bytes,
        pin_cpu_grads=pinned,
        pin_cpu_params=pinned,
    )
    assert all(torch.equal(a, b) for a, b in zip(seen, plain(training), strict=True))


@pytest.mark.requirement("OPT-31", "OPT-34", "OPT-30")
@settings(max_examples=60)
@given(
    training=trainings(),
    before=fractions,
    after=fractions,
    modes=st.tuples(st.sampled_from(["greedy", "exact"]), st.sampled_from(["greedy", "exact"])),
    when=st.integers(0, 3),
)
def test_saving_and_loading_at_another_fraction_changes_no_bit(
    training: Training, before: float, after: float, modes: tuple[str, str], when: int
) -> None:
    """A state saved after any step and loaded at another fraction continues as if nothing were."""

    def move(optimizer: HybridDeviceOptimizer, step: int) -> HybridDeviceOptimizer:
        if step != when % len(training.steps):
            return optimizer
        keywords = {**optimizer.defaults, "offload_fraction": after, "partition": modes[1]}
        fresh = HybridDeviceOptimizer(optimizer.param_groups, **keywords)
        fresh.load_state_dict(optimizer.state_dict(copy=True))
        return fresh

    seen = offloaded_run(training, before, between=move, partition=modes[0])
    assert all(torch.equal(a, b) for a, b in zip(seen, plain(training), strict=True))

"""Drawn host programs: whatever a training loop does, in whatever order, offloading changes no bit of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from host_programs import Action, World, judge, minimal_world, offloading_world, plain_world
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from layered import KINDS
from optimizing import CLASSES
from trainers import Setting

PROGRAMS = 60
"""Programs drawn per run, each run under every schedule."""

ACTIONS = 14
"""Most actions of a program."""

SMALL = st.integers(0, 7)
"""Numbers of parameters, losses and batches; each is taken modulo how many there are."""


@st.composite
def drawn_settings(draw: st.DrawFn) -> Setting:
    """Models of two to four layers, in fp32, or in bf16 with and without masters."""
    kinds = tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=4)))
    dtype, masters = draw(st.sampled_from([(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)]))
    ends = {kinds[0], kinds[-1]}
    setting = Setting(
        kinds,
        dtype,
        masters,
        tied=draw(st.booleans()) and ends <= {"tanh", "in-place"},
        optimizer=draw(st.sampled_from(sorted(CLASSES))),
        foreach=draw(st.booleans()),
        num_layers=draw(st.integers(0, len(kinds) - 1)),
        fraction=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        bucket_bytes=draw(st.sampled_from([1, 600, 1 << 20])),
        overlap=draw(st.booleans()),
        context_per_forward=draw(st.booleans()),
    )
    return replace(setting, partition=draw(st.sampled_from(setting.partitions)))


class HostProgram(RuleBasedStateMachine):
    """Each rule acts on the plain world at once; at the end the whole program is run with offloading."""

    build: Callable[[Setting], World] = staticmethod(offloading_world)

    def __init__(self) -> None:
        super().__init__()
        self.program: list[Action] = []

    @initialize(setting=drawn_settings())
    def begin(self, setting: Setting) -> None:
        self.setting, self.plain = setting, plain_world(setting)

    def act(self, name: str, **arguments: Any) -> None:
        """Add an action to the program."""
        self.program.append(Action(name, arguments))
        self.plain.perform(self.program[-1])

    def teardown(self) -> None:
        if self.program:
            judge(self.setting, self.program, self.plain.notes, self.build)

    @rule(batch=SMALL, ends=st.sampled_from(["in a loss", "in a loss", "early", "interrupted", "without gradients"]))
    def forward(self, batch: int, ends: str) -> None:
        self.act("forward", batch=batch, ends=ends)

    @precondition(lambda self: self.plain.losses)
    @rule(which=SMALL, retain=st.booleans())
    def backward(self, which: int, retain: bool) -> None:
        self.act("backward", which=which, retain=retain)

    @rule(batch=SMALL)
    def forward_backward_step(self, batch: int) -> None:
        self.act("forward", batch=batch, ends="in a loss")
        self.act("backward", which=-1, retain=False)
        self.act("step")

    @precondition(lambda self: self.plain.losses)
    @rule(which=SMALL)
    def drop(self, which: int) -> None:
        self.act("drop", which=which)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.act("zero_grad", set_to_none=set_to_none)

    @rule()
    def clip(self) -> None:
        self.act("clip")

    @precondition(lambda self: self.setting.masters)
    @rule(which=SMALL)
    def decouple(self, which: int) -> None:
        self.act("decouple", which=which)

    @rule()
    def step(self) -> None:
        self.act("step")

    @rule(batch=SMALL)
    def step_with_closure(self, batch: int) -> None:
        self.act("step_with_closure", batch=batch)

    @rule()
    def step_with_failing_closure(self) -> None:
        self.act("step_with_failing_closure")

    @rule(infinite=st.booleans())
    def scaled_step(self, infinite: bool) -> None:
        self.act("scaled_step", infinite=infinite)

    @rule(which=SMALL, key=st.sampled_from(["lr", "weight_decay"]), factor=st.sampled_from([0.5, 1.5, 0.0]))
    def edit_group(self, which: int, key: str, factor: float) -> None:
        self.act("edit_group", which=which, key=key, factor=factor)

    @rule(which=SMALL, trainable=st.booleans())
    def set_trainable(self, which: int, trainable: bool) -> None:
        self.act("set_trainable", which=which, trainable=trainable)

    @rule(which=SMALL, seed=SMALL, how=st.sampled_from(["in place", "in a new storage", "announced"]))
    def replace_weight(self, which: int, seed: int, how: str) -> None:
        self.act("replace_weight", which=which, seed=seed, how=how)

    @precondition(lambda self: self.setting.optimizer != "Adagrad")  # before torch 2.13 its new groups have no states
    @rule()
    def add_head(self) -> None:
        self.act("add_head")

    @rule()
    def save(self) -> None:
        self.act("save")

    @precondition(lambda self: self.plain.saved)
    @rule(weights_first=st.booleans())
    def load(self, weights_first: bool) -> None:
        self.act("load", weights_first=weights_first)

    @rule(fraction=st.sampled_from([0.0, 0.3, 0.7, 1.0]), number=st.integers(0, 1))
    def move(self, fraction: float, number: int) -> None:
        partitions = self.setting.partitions
        self.act("move", fraction=fraction, partition=partitions[number % len(partitions)])


class MinimalHostProgram(HostProgram):
    """The same programs for the first lesson, without masters and exact partitions, which it leaves out."""

    build = staticmethod(minimal_world)

    @initialize(setting=drawn_settings())
    def begin(self, setting: Setting) -> None:
        super().begin(replace(setting, masters=False, partition="greedy"))


def run_programs(kind: type[HostProgram], number: int) -> None:
    """Draw so many programs and judge each."""
    health = list(HealthCheck)
    profile = settings(max_examples=number, stateful_step_count=ACTIONS, suppress_health_check=health)
    run_state_machine_as_test(kind, settings=profile)


@pytest.mark.requirement("ACT-20", "ACT-30", "ACT-31", "OPT-6", "OPT-10", "OPT-11", "OPT-25", "OPT-31", "ORD-7")
def test_any_host_program_is_bit_equal_under_every_schedule() -> None:
    """After each action values, gradients, losses and states equal the plain run's, with no race."""
    run_programs(HostProgram, PROGRAMS)


@pytest.mark.requirement("ACT-20", "ACT-30", "ACT-31", "OPT-6", "OPT-10", "OPT-11", "OPT-25", "OPT-31", "ORD-7")
def test_any_host_program_is_bit_equal_in_the_first_lesson() -> None:
    """What the first lesson offers is as right as the whole."""
    run_programs(MinimalHostProgram, PROGRAMS)

"""Host programs: a list of actions on one model and one optimizer, run plainly and run with offloading.

A *world* is a model with an optimizer on some device. A program is a list of actions, each the name of a world's
method with its arguments; the same program means the same in every world. After each action a world notes what a
user could see: values and gradients of all parameters, losses, norms, states, whether something was refused. Nothing
is read on the host before the program has ended, so the notes order nothing that the program does not order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from layered import KINDS
from torch import nn
from trainers import MinimalTrainer, OffloadingTrainer, PlainTrainer, Setting

from offload_ref import minimal, offload_layers
from offload_ref.buckets import gradient_of
from offload_ref.simulator import Eager, Lazy, Simulator, Starve
from offload_ref.simulator.schedules import Schedule

WIDTH, ROWS = 8, 6
"""Features, and rows of each input."""


@dataclass(frozen=True)
class Action:
    """One call of a world's method."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"


class InterruptedForwardError(Exception):
    """What a layer raises when a program interrupts a forward pass."""


class World:
    """A model of some layers and a head, with an optimizer for the layers.

    Args:
        setting: what is trained.
        device: where.
        trainer: builds the optimizer.
        offloading: a context for the layers, in which their activations may be offloaded.
    """

    def __init__(
        self,
        setting: Setting,
        device: str,
        trainer: Callable[[list[dict[str, Any]], Setting], Any],
        offloading: Callable[[nn.ModuleList], AbstractContextManager[object]],
    ) -> None:
        self.setting, self.device, self.offloading = setting, device, offloading
        torch.manual_seed(0)
        modules = [KINDS[kind](WIDTH) for kind in (*setting.kinds, "tanh")]
        *layers, self.head = (module.to(setting.dtype).to(device) for module in modules)
        self.layers = nn.ModuleList(layers)
        if setting.tied:
            self.layers[-1].linear.weight = self.layers[0].linear.weight
        trained = list(dict.fromkeys(self.layers.parameters()))
        self.parameters = [*trained, *self.head.parameters()]
        lr = setting.classes[1]["lr"]
        self.trainer = trainer([{"params": trained[:3]}, {"params": trained[3:], "lr": lr / 2}], setting)
        self.scaler = torch.amp.GradScaler(device, init_scale=4.0)
        self.losses: list[torch.Tensor | None] = []
        self.saved: tuple[list[torch.Tensor], dict[str, Any]] | None = None
        self.notes: list[list[Any]] = []

    def perform(self, action: Action) -> None:
        """Do it, and note what it gave with all values and gradients as they are now."""
        given = getattr(self, action.name)(**action.arguments)
        gradients = [gradient_of(parameter) for parameter in self.parameters]
        seen = [*(given if isinstance(given, list) else [given]), *self.parameters, *gradients]
        self.notes.append([one.detach().clone() if isinstance(one, torch.Tensor) else one for one in seen])

    def run(self, program: Sequence[Action]) -> None:
        """Perform a program, with offloading on for the whole of it or for one forward pass after another."""
        with ExitStack() as stack:
            if not self.setting.context_per_forward:
                stack.enter_context(self.offloading(self.layers))
                self.offloading = lambda _layers: nullcontext()
            for action in program:
                self.perform(action)
            self.losses.clear()

    # Forward and backward

    def forward(self, batch: int, ends: str) -> torch.Tensor | str:
        """A forward pass that ends in a loss, early in a loss, by an exception, or without gradients."""
        generator = torch.Generator().manual_seed(batch)
        values = torch.randn(ROWS, WIDTH, generator=generator).to(self.setting.dtype).to(self.device)
        x = (values * 1).requires_grad_()
        with self.offloading(self.layers), torch.set_grad_enabled(ends != "without gradients"):
            try:
                loss = self._loss(x, ends)
            except InterruptedForwardError:
                return "interrupted"
        if ends != "without gradients":
            self.losses.append(loss)
        return loss

    def _loss(self, x: torch.Tensor, ends: str) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if ends == "early" and number == len(self.layers) - 1:
                break
            interruption = layer.register_forward_pre_hook(_interrupt) if ends == "interrupted" and number else None
            try:
                x = layer(x)
            finally:
                if interruption is not None:
                    interruption.remove()
        return self.head(x).float().pow(2).mean()

    def backward(self, which: int, retain: bool) -> str:
        """Backward of a loss that is there, or what autograd says against it."""
        loss = self._pending(which)
        if loss is None:
            return "no loss"
        try:
            loss.backward(retain_graph=retain)
        except RuntimeError:
            return "refused"
        return "done"

    def drop(self, which: int) -> None:
        """Drop the graph of a loss."""
        if self.losses:
            self.losses[which % len(self.losses)] = None

    def _pending(self, which: int) -> torch.Tensor | None:
        return self.losses[which % len(self.losses)] if self.losses else None

    # Gradients

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear gradients, either way."""
        self.trainer.zero_grad(set_to_none)

    def clip(self) -> torch.Tensor:
        """Clip the gradients' norm."""
        return nn.utils.clip_grad_norm_(self.parameters, 0.01, foreach=False)

    def decouple(self, which: int) -> None:
        """Give a gradient as ``decoupled_grad``, in fp32, which the next step uses."""
        parameter = self._parameter(which)
        if parameter.grad is not None:
            parameter.decoupled_grad = parameter.grad.float()  # type: ignore[attr-defined]

    # Steps

    def step(self) -> None:
        """One step."""
        self.trainer.step()
        for parameter in self.parameters:
            parameter.decoupled_grad = None  # type: ignore[attr-defined]

    def step_with_closure(self, batch: int) -> torch.Tensor:
        """A step whose closure computes the gradients."""

        def closure() -> torch.Tensor:
            self.trainer.zero_grad(True)
            loss = self.forward(batch, "in a loss")
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return loss

        with torch.enable_grad():
            return self.trainer.step(closure)

    def step_with_failing_closure(self) -> str:
        """A closure that raises."""
        try:
            self.trainer.step(_interrupt)
        except InterruptedForwardError:
            return "interrupted"
        return "not interrupted"

    def scaled_step(self, infinite: bool) -> None:
        """A step by way of a gradient scaler, which skips it if a gradient is infinite."""
        gradients = [p.grad for p in self._trained() if p.grad is not None]
        if gradients:
            self.scaler.scale(torch.ones(1, device=self.device))
            gradients[0][(0,) * gradients[0].dim()] = float("inf") if infinite else 1.0
            self.trainer.scaled_step(self.scaler)
            self.scaler.update()

    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.trainer.param_groups for p in group["params"]]

    # What users change

    def edit_group(self, which: int, key: str, factor: float) -> None:
        """What a scheduler does, or a user."""
        groups = self.trainer.optimizer.param_groups
        groups[which % len(groups)][key] *= factor

    def set_trainable(self, which: int, trainable: bool) -> None:
        """Freeze or unfreeze a parameter."""
        self._parameter(which).requires_grad_(trainable)

    def replace_weight(self, which: int, seed: int, how: str) -> None:
        """Give a parameter other values: in place, in a new storage, or through ``.data`` with an announcement."""
        parameter, generator = self._parameter(which), torch.Generator().manual_seed(seed)
        values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype).to(self.device)
        if how == "in place":
            with torch.no_grad():
                parameter.copy_(values)
        elif how == "in a new storage":
            self.losses = [None] * len(self.losses)
            parameter.data = values * 1
        else:
            parameter.data.copy_(values)
            self.trainer.announce()

    def add_head(self) -> None:
        """Add the head's parameters as a group, the first time."""
        if len(self.trainer.optimizer.param_groups) == 2:
            self.trainer.add({"params": list(self.head.parameters()), "lr": 0.05})

    def _parameter(self, which: int) -> nn.Parameter:
        return self.parameters[which % len(self.parameters)]

    # State

    def save(self) -> list[Any]:
        """Remember weights and state; returns what is in the state of each parameter that has been stepped."""
        state = self.trainer.state()
        self.saved = [p.detach().clone() for p in self.parameters], state
        stepped = [
            one for _, one in sorted(state["state"].items()) if set(one) > {"master_param"} and one.get("step") != 0
        ]
        entries = [one[name] for one in stepped for name in sorted(one)]
        return [len(entries), *entries]

    def load(self, weights_first: bool) -> str:
        """Continue from what was remembered, if it fits."""
        if self.saved is None:
            return "nothing saved"
        weights, state = self.saved
        if len(state["param_groups"]) != len(self.trainer.optimizer.param_groups):
            return self._load_misfit(state)
        steps = [lambda: self._restore(weights), lambda: self.trainer.load(state)]
        for restore in steps if weights_first else reversed(steps):
            restore()
        return "loaded"

    def _load_misfit(self, state: dict[str, Any]) -> str:
        try:
            self.trainer.load(state)
        except ValueError:
            return "refused"
        return "loaded what does not fit"

    def _restore(self, weights: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)

    def move(self, fraction: float, partition: str) -> None:
        """Go on with another optimizer that has this one's state and another placement."""
        self.trainer = self.trainer.rebuilt(fraction, partition)


def _interrupt(*_: object) -> torch.Tensor:
    raise InterruptedForwardError


def plain_world(setting: Setting) -> World:
    """The program's own meaning: no offloading, on the host."""
    return World(setting, "cpu", PlainTrainer, lambda _layers: nullcontext())


def offloading_world(setting: Setting) -> World:
    """Both mechanisms, on the device."""
    return World(
        setting, "cuda", OffloadingTrainer, lambda ls: offload_layers(ls, setting.num_layers, min_offload_bytes=0)
    )


def minimal_world(setting: Setting) -> World:
    """Both mechanisms as the first lesson has them."""
    return World(setting, "cuda", MinimalTrainer, lambda layers: minimal.offload_layers(layers, setting.num_layers))


def judge(
    setting: Setting,
    program: Sequence[Action],
    expected: Sequence[Sequence[Any]],
    build: Callable[[Setting], World] = offloading_world,
) -> None:
    """Run the program under Eager, Lazy and with each stream starved: the same notes, and no race.

    Raises:
        AssertionError: says the setting, the program, the schedule that replays it, and what differs.
    """
    schedules: list[Schedule] = [Eager(), Lazy()]
    while schedules:
        schedule = schedules.pop(0)
        with Simulator(schedule, device_type="cuda") as simulator:
            world = build(setting)
            world.run(program)
            found = first_difference(program, world.notes, expected)
        if isinstance(schedule, Eager):
            schedules += [Starve(stream.index) for stream in simulator.streams]
        findings = [*([found] if found else []), *map(str, simulator.races)]
        if findings:
            lines = [f"{setting!r}", *(f"  {action}" for action in program), f"under {schedule!r}:", *findings]
            raise AssertionError("\n".join(lines))


def first_difference(
    program: Sequence[Action], seen: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]]
) -> str | None:
    """The first note of the first action that is not what it is in the plain run, bit for bit."""
    for number, (action, ours, theirs) in enumerate(zip(program, seen, expected, strict=True)):
        if len(ours) != len(theirs):
            return f"after action {number}, {action}: {len(ours)} notes, expected {len(theirs)}"
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not same(a, b):
                return f"after action {number}, {action}, note {place}: {a}, expected {b}"
    return None


def same(a: Any, b: Any) -> bool:
    """Equality of bits for tensors, and of values for what is none."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    return type(a) is type(b) and bool(a == b)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

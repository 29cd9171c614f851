"""Activation offloading changes no bit, whatever the model, the schedule or the order of passes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from implementations import Implementation
from layered import KINDS, Outcome, assert_same, batch, build, offloaded, run_layers, train
from machines import SCHEDULES, Machine
from torch import nn

from offload_ref import ActivationOffload, get_cpu_offload_context
from offload_ref.simulator import Simulator

WIDTH = 8
ROWS = 6


@pytest.mark.quick
@pytest.mark.requirement("ACT-20", "ORD-1", "ORD-2", "ORD-3", "ORD-4", "ORD-5", "ORD-7")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_bit_equal_under_every_schedule(
    implementation: Implementation, machine: Machine, kind: str, schedule: str
) -> None:
    """Four layers, three of them offloaded: losses and gradients equal the plain run's."""
    outcomes = []
    for num_layers in (0, 3):
        with machine.run(SCHEDULES[schedule]()):
            layers = build([kind] * 4, WIDTH, machine.device)
            inputs = [batch(0, ROWS, WIDTH, machine.device)]
            outcomes.append(train(layers, inputs, offloading=implementation.offload(layers, num_layers)))
    assert_same(outcomes[1], outcomes[0])


@dataclass(frozen=True)
class Program:
    """One drawn host program."""

    kinds: list[str]
    offloaded_share: float
    backward_order: list[int]
    dtype: torch.dtype
    min_offload_bytes: int
    retain_pinned_cpu_buffers: bool
    steps: int
    frozen: set[int]
    schedule: str

    def run(self, num_layers: int) -> list[Outcome]:
        """Each step's outcome with the first ``num_layers`` layers offloaded."""
        count = len(self.backward_order)
        options = {
            "min_offload_bytes": self.min_offload_bytes,
            "retain_pinned_cpu_buffers": self.retain_pinned_cpu_buffers,
        }
        with Simulator(schedule=SCHEDULES[self.schedule](), device_type="cuda") as simulator:
            layers = build(self.kinds, WIDTH, "cuda", self.dtype)
            for i in self.frozen:
                layers[i % len(layers)].requires_grad_(requires_grad=False)
            outcomes = []
            with offloaded(layers, num_layers, **options):
                for step in range(self.steps):
                    numbers = range(step * count, (step + 1) * count)
                    inputs = [batch(n, ROWS, WIDTH, "cuda", self.dtype) for n in numbers]
                    outcomes.append(train(layers, inputs, self.backward_order))
        simulator.assert_race_free()
        return outcomes


programs = st.builds(
    Program,
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=6),
    offloaded_share=st.floats(0, 1),
    backward_order=st.integers(1, 3).flatmap(lambda count: st.permutations(range(count))),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    min_offload_bytes=st.sampled_from([0, 64, 256, 1 << 20]),
    retain_pinned_cpu_buffers=st.booleans(),
    steps=st.integers(1, 2),
    frozen=st.sets(st.integers(0, 5), max_size=2),
    schedule=st.sampled_from(sorted(SCHEDULES)),
)


@pytest.mark.requirement("ACT-20", "ACT-30", "ORD-7")
@settings(max_examples=60)
@given(program=programs)
def test_any_program_is_bit_equal_and_free_of_races(program: Program) -> None:
    """Models, K, dtypes, floors, frozen layers, micro-batches and backward orders are drawn; all agree."""
    num_layers = round(program.offloaded_share * (len(program.kinds) - 1))
    for seen, expected in zip(program.run(num_layers), program.run(0), strict=True):
        assert_same(seen, expected)


@pytest.mark.requirement("ACT-30")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_backwards_run_in_any_order(implementation: Implementation, machine: Machine, order: tuple[int, ...]) -> None:
    """Three forwards, then their backwards in any order: each gets its own gradients."""
    outcomes = []
    for num_layers in (0, 2):
        with machine.run():
            layers = build(["attention", "tanh", "views"], WIDTH, machine.device)
            inputs = [batch(i, ROWS, WIDTH, machine.device) for i in range(3)]
            outcomes.append(train(layers, inputs, order, implementation.offload(layers, num_layers)))
    assert_same(outcomes[1], outcomes[0])


@pytest.mark.requirement("ACT-30")
def test_two_forwards_then_two_backwards_of_a_scalar_weight(implementation: Implementation, machine: Machine) -> None:
    """L = 2, K = 1, y = w x with x = 1, then 100: the gradient of the first loss is 1, not 100."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    with machine.run():
        layers = nn.ModuleList([Scale(), Scale()]).to(machine.device)
        with implementation.offload(layers, 1):
            small, large = (layers[1](layers[0](torch.tensor(x).to(machine.device))) for x in (1.0, 100.0))
        weight = next(layers[0].parameters())
        first = torch.autograd.grad(small, weight)[0]
        second = torch.autograd.grad(large, weight)[0]
        assert (first.item(), second.item()) == (1.0, 100.0)


@pytest.mark.requirement("ACT-20")
def test_each_of_the_first_layers_gets_its_own_gradient(implementation: Implementation, machine: Machine) -> None:
    """16 layers, K = 4, layer i scales the inputs 1..: the gradients are those of the plain run."""

    class Scale(nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(float(i)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    def gradients(num_layers: int) -> list[float]:
        with machine.run():
            layers = nn.ModuleList(Scale(1 + i % 2) for i in range(16)).to(machine.device)
            x = torch.arange(1.0, 5.0).to(machine.device)
            with implementation.offload(layers, num_layers):
                loss = run_layers(layers, x)
            loss.backward()
            return [layer.weight.grad.item() for layer in layers]

    assert gradients(4) == gradients(0)


@pytest.mark.requirement("ACT-20")
def test_square_activations_are_saved_with_two_strides(implementation: Implementation, machine: Machine) -> None:
    """A 3x3 tensor saved with strides (1, 3) and (3, 1) comes back right in both."""

    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * 1
            return (h @ h.T).sum() + ((torch.tanh(h) @ (2 * h.T)) ** 2).sum()

    def gradient(num_layers: int) -> torch.Tensor:
        with machine.run():
            layers = nn.ModuleList([Square(), nn.Identity()])
            x = torch.arange(9.0).reshape(3, 3).div(9).to(machine.device).requires_grad_()
            with implementation.offload(layers, num_layers):
                loss = layers[1](layers[0](x))
            loss.backward()
            assert x.grad is not None
            return x.grad.cpu()

    assert torch.equal(gradient(1), gradient(0))


@pytest.mark.requirement("ACT-23")
def test_a_retained_graph_is_walked_again(implementation: Implementation, machine: Machine) -> None:
    """Two backwards over one graph give twice the same gradient."""
    with machine.run():
        layers = build(["attention", "views", "tanh"], WIDTH, machine.device)
        x = batch(0, ROWS, WIDTH, machine.device)
        with implementation.offload(layers, 2):
            loss = run_layers(layers, x)
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x)[0]
        assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.requirement("ACT-23")
def test_double_backward(implementation: Implementation, machine: Machine) -> None:
    """A gradient of a gradient equals the plain run's."""
    results = []
    for num_layers in (0, 2):
        with machine.run():
            layers = build(["tanh", "tanh", "tanh"], WIDTH, machine.device)
            x = batch(0, ROWS, WIDTH, machine.device)
            with implementation.offload(layers, num_layers):
                (gradient,) = torch.autograd.grad(run_layers(layers, x), x, create_graph=True)
                (second,) = torch.autograd.grad(gradient.pow(2).sum(), x)
            results.append(second.cpu())
    assert torch.equal(results[0], results[1])


@pytest.mark.requirement("ACT-23")
def test_a_custom_function_reads_its_saved_tensors_twice(implementation: Implementation, machine: Machine) -> None:
    """``ctx.saved_tensors`` may be asked for any number of times, and may hold None."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, None)  # type: ignore[arg-type]
            return x**3

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
            once, nothing = ctx.saved_tensors  # type: ignore[attr-defined]
            twice, _ = ctx.saved_tensors  # type: ignore[attr-defined]
            assert nothing is None
            return 3 * once * twice * gradient

    class CubeLayer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Cube.apply(x * 1)  # type: ignore[no-untyped-call]

    with machine.run():
        layers = nn.ModuleList([CubeLayer(), nn.Identity()])
        x = torch.full((4,), 2.0, device=machine.device, requires_grad=True)
        with implementation.offload(layers, 1):
            y = layers[1](layers[0](x))
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [12.0] * 4


@pytest.mark.requirement("ACT-20", "ACT-6")
@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_the_counting_convention_gives_the_same_bits(machine: Machine, num_layers: int) -> None:
    """A context around each layer and ``sync`` between them equal the plain run, over two forwards."""
    outcomes = []
    for enabled in (False, True):
        with machine.run():
            layers = build(["attention", "views", "tanh"], WIDTH, machine.device)
            inputs = [batch(i, ROWS, WIDTH, machine.device) for i in range(2)]
            context, sync = get_cpu_offload_context(enabled, num_layers, len(layers), min_offload_bytes=0)
            losses = []
            for y in inputs:
                for layer in layers:
                    with context:
                        y = layer(y)  # noqa: PLW2901 - the convention's own loop
                    y = sync(y)  # noqa: PLW2901
                losses.append(y.pow(2).mean())
            for loss in losses:
                loss.backward()
            outcomes.append([p.grad.cpu() for p in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.requirement("ACT-20")
def test_the_hand_written_loop_gives_the_same_bits(machine: Machine) -> None:
    """``ActivationOffload.layer(i)`` around each layer equals the plain run."""
    outcomes = []
    for num_layers in (0, 2):
        with machine.run():
            layers = build(["attention", "views", "tanh"], WIDTH, machine.device)
            x = batch(0, ROWS, WIDTH, machine.device)
            offload = ActivationOffload(num_layers, len(layers), min_offload_bytes=0)
            for i, layer in enumerate(layers):
                with offload.layer(i):
                    x = layer(x)
            x.pow(2).mean().backward()
            outcomes.append([p.grad.cpu() for p in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.requirement("ACT-32")
def test_no_random_number_is_drawn(implementation: Implementation, machine: Machine) -> None:
    """The generators of host and device stand after an offloaded step where a plain step leaves them."""
    states = []
    for num_layers in (0, 1):
        with machine.run():
            torch.manual_seed(7)
            layers = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
            with implementation.offload(layers, num_layers):
                y = run_layers(layers, batch(0, ROWS, WIDTH, machine.device))
            y.backward()
            states.append((torch.get_rng_state(), torch.rand(3, device=machine.device).cpu()))
    (plain_host, plain_device), (host, device) = states
    assert torch.equal(host, plain_host)
    assert device.tolist() == plain_device.tolist()


@pytest.mark.requirement("ACT-20")
@example(layers_run=[0])
@example(layers_run=[0, 2, 3])
@given(layers_run=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(sorted))
@settings(max_examples=15)
def test_layers_may_be_skipped(implementation: Implementation, layers_run: list[int]) -> None:
    """A forward through some of the layers, in order, is differentiated as without offloading."""
    results = []
    for num_layers in (0, 3):
        with Simulator(device_type="cuda") as simulator:
            layers = build(["tanh", "views", "attention", "tanh"], WIDTH, "cuda")
            x = batch(0, ROWS, WIDTH, "cuda")
            with implementation.offload(layers, num_layers):
                loss = run_layers(nn.ModuleList(layers[i] for i in layers_run), x)
            loss.backward()
            assert x.grad is not None
            results.append(x.grad.cpu())
        simulator.assert_race_free()
    assert torch.equal(results[0], results[1])

"""Which saved tensors leave, how many bytes that takes, and how they come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import batch, build, offloaded, run_layers, train
from machines import Machine
from torch import nn

from offload_ref import ActivationOffload, mark_keep, mark_offload, offload_layers
from offload_ref.activation import get_cpu_offload_context
from offload_ref.simulator import Simulator

FLOAT_BYTES = 4


class Apply(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def copied(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, floor: int = 0) -> ActivationOffload:
    """Run the function as the one offloaded layer of two, there and back; ``stats`` say what crossed."""
    layers = nn.ModuleList([Apply(function), nn.Identity()])
    with offload_layers(layers, 1, min_offload_bytes=floor) as offload:
        y = layers[1](layers[0](x))
    y.sum().backward()
    return offload


@pytest.mark.quick
@pytest.mark.requirement("ACT-2")
def test_zero_layers_copies_nothing() -> None:
    """K = 0: no copy, no pinned byte, no stream."""
    with Simulator(device_type="cuda") as simulator:
        layers = build(["attention"] * 3, 8, "cuda")
        before = (simulator.copies.d2h, len(simulator.streams))
        with offloaded(layers, 0):
            run_layers(layers, torch.ones(4, 8, device="cuda", requires_grad=True)).backward()
        assert (simulator.copies.d2h, len(simulator.streams)) == before
        assert simulator.max_pinned_allocated() == 0


@pytest.mark.requirement("ACT-14", "MEM-3")
def test_a_chain_of_tanh_makes_six_copies(machine: Machine) -> None:
    """Six tanh on 1,000 elements whose addresses may repeat: six host copies of 4,000 bytes."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x.tanh()
        return x

    with machine.run():
        stats = copied(chain, torch.randn(1000, device=machine.device, requires_grad=True)).stats
        assert (stats.copies_to_host, stats.bytes_to_host) == (6, 6 * 1000 * FLOAT_BYTES)


@pytest.mark.requirement("ACT-14")
def test_many_views_of_one_storage_make_one_copy(machine: Machine) -> None:
    """Three slices of one projection, each a third of it, and the whole: one copy."""

    def attention_like(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        q, k, v = h.chunk(3, dim=1)
        return q.sin() * k.sin() * v.sin() * h.sin().sum()

    with machine.run():
        x = torch.randn(30, 9, device=machine.device, requires_grad=True)
        everything = copied(lambda x: (x * 2).sin(), x).stats.bytes_to_host
        stats = copied(attention_like, x.detach().requires_grad_()).stats
        factors = 5 * 30 * 3 + 1
        assert everything == 30 * 9 * FLOAT_BYTES
        assert stats.bytes_to_host == (30 * 9 + factors) * FLOAT_BYTES


@pytest.mark.requirement("ACT-14", "ACT-24")
def test_a_storage_is_copied_once_for_each_version(machine: Machine) -> None:
    """Saved, edited, saved again: two copies, and the gradient of the second save is right."""

    def edited(x: torch.Tensor) -> torch.Tensor:
        h = x * 1
        _unused = h.sin()
        h.mul_(2)
        return h.sin()

    with machine.run():
        x = torch.full((3,), 0.5, device=machine.device, requires_grad=True)
        stats = copied(edited, x).stats
        assert stats.copies_to_host == 2
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * torch.full((3,), 1.0, device=machine.device).cos())


@pytest.mark.requirement("MEM-4", "ACT-15")
def test_an_expanded_row_costs_one_row(machine: Machine) -> None:
    """A (1, 1000) row expanded to (1000, 1000) takes 4,000 host bytes, not 4,000,000."""
    with machine.run():
        x = torch.randn(1, 1000, device=machine.device, requires_grad=True)
        offload = copied(lambda x: (x * 1).expand(1000, 1000).sin(), x)
        assert offload.stats.bytes_to_host == 1000 * FLOAT_BYTES


@pytest.mark.requirement("ACT-15")
def test_a_small_part_is_packed(machine: Machine) -> None:
    """One column of eight takes an eighth of the bytes; two columns of eight take the whole storage."""
    with machine.run():
        for columns, elements in ((1, 16), (2, 16 * 8)):
            x = torch.randn(16, 8, device=machine.device, requires_grad=True)
            offload = copied(lambda x, n=columns: (x * 1)[:, :n].sin(), x)  # type: ignore[misc]
            assert offload.stats.bytes_to_host == elements * FLOAT_BYTES


@pytest.mark.requirement("ACT-10")
def test_below_the_floor_nothing_moves(machine: Machine) -> None:
    """500 tensors of 16 bytes and a large one: the small ones stay, at any floor the gradient is the same."""

    def many(x: torch.Tensor) -> torch.Tensor:
        small = sum((x[i : i + 4] * 1).sin().sum() for i in range(500))
        return (x * 1).sin().sum() + small

    gradients = []
    with machine.run():
        for floor, copies in ((17, 1), (0, 501), (1 << 20, 0)):
            x = torch.linspace(0, 1, 1000, device=machine.device).requires_grad_()
            assert copied(many, x, floor).stats.copies_to_host == copies
            assert x.grad is not None
            gradients.append(x.grad.cpu())
    assert all(torch.equal(g, gradients[0]) for g in gradients)


@pytest.mark.requirement("ACT-11")
def test_weights_and_their_views_are_never_copied(machine: Machine) -> None:
    """A linear layer saves its input and a transpose of its weight: the input alone crosses."""
    with machine.run():
        layers = nn.ModuleList([nn.Linear(8, 8), nn.Identity()]).to(machine.device)
        with offload_layers(layers, 1, min_offload_bytes=0) as offload:
            y = layers[1](layers[0](torch.ones(2, 8, device=machine.device, requires_grad=True) * 1))
        y.sum().backward()
        assert offload.stats.bytes_to_host == 2 * 8 * FLOAT_BYTES
        assert offload.stats.kept["weight"] == 1


@pytest.mark.requirement("ACT-11")
def test_weights_are_known_by_storage_and_buffers_too(machine: Machine) -> None:
    """A detached alias of a parameter and a buffer stay, though neither object is a parameter."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("rope", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.detach() * self.rope

    with machine.run():
        layers = nn.ModuleList([Scaled(), nn.Identity()]).to(machine.device)
        with offload_layers(layers, 1, min_offload_bytes=0) as offload:
            layers[1](layers[0](torch.ones(8, device=machine.device, requires_grad=True))).sum().backward()
        assert offload.stats.copies_to_host == 0
        assert offload.stats.kept["weight"] == 2


@pytest.mark.requirement("ACT-12")
def test_marks(machine: Machine) -> None:
    """A mark to offload beats the floor, by function or by attribute; a mark to keep beats everything."""

    def marked(mark: Callable[[torch.Tensor], None]) -> int:
        def layer(x: torch.Tensor) -> torch.Tensor:
            h = x * 1
            mark(h)
            return h.view(2, 2).sin()

        x = torch.ones(4, device=machine.device, requires_grad=True)
        return copied(layer, x, floor=1 << 20).stats.copies_to_host

    def attribute(t: torch.Tensor) -> None:
        t.activation_offloading = True  # type: ignore[attr-defined]

    def both(t: torch.Tensor) -> None:
        attribute(t)
        mark_keep(t)

    with machine.run():
        marks = (lambda _: None, mark_offload, attribute, mark_keep, both)
        assert [marked(mark) for mark in marks] == [0, 1, 1, 0, 0]


@pytest.mark.requirement("ACT-10")
def test_what_cannot_leave_passes_through_with_a_reason(machine: Machine) -> None:
    """Integers, host tensors, sparse tensors and subclasses stay, and are counted by reason."""

    class Tagged(torch.Tensor):
        pass

    def layer(x: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([0, 1], device=x.device)
        return (x[rows] * 1).as_subclass(Tagged).sin().as_subclass(torch.Tensor)

    with machine.run():
        x = torch.ones(3, device=machine.device, requires_grad=True)
        kept = copied(layer, x).stats.kept
        assert kept["dtype"] == 1
        assert kept["subclass"] == 1


@pytest.mark.requirement("ACT-10")
def test_tensors_on_the_host_already_stay_there(machine: Machine) -> None:
    """A layer that computes on the host saves host tensors, which are not copied."""
    with machine.run():
        x = torch.ones(3, requires_grad=True)
        stats = copied(lambda x: (x * 1).sin(), x).stats
        assert (stats.copies_to_host, stats.kept["host"]) == (0, 1)


@settings(max_examples=80)
@given(
    size=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    permutation=st.randoms(use_true_random=False),
    starts=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    steps=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    expand=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    share=st.sampled_from([1, 8]),
)
@pytest.mark.requirement("ACT-21", "ACT-22", "ACT-20")
def test_any_view_comes_back_as_it_left(
    size: list[int],
    permutation: object,
    starts: list[int],
    steps: list[int],
    expand: int,
    dtype: torch.dtype,
    share: int,
) -> None:
    """Dtype, shape, strides, device, values and alignment of a drawn view survive the way there and back."""
    met: list[tuple[torch.Tensor, int]] = []

    def view_of(storage: torch.Tensor) -> torch.Tensor:
        t = storage[: storage.numel() // share].view([n + 3 for n in size])
        t = t[tuple(slice(a, None, b) for a, b in zip(starts[: t.dim()], steps, strict=False))]
        order = list(range(t.dim()))
        permutation.shuffle(order)  # type: ignore[attr-defined]
        return t.permute(order).unsqueeze(0).expand(expand, *[-1] * t.dim())

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            met.append((x.cpu(), x.data_ptr() % 512))
            met[-1][0].geometry = (x.dtype, x.shape, x.stride(), x.device)  # type: ignore[attr-defined]
            return x * 1

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            saved, alignment = met[-1]
            assert (x.dtype, x.shape, x.stride(), x.device) == saved.geometry  # type: ignore[attr-defined]
            assert torch.equal(x.cpu(), saved)
            assert x.numel() == 0 or x.data_ptr() % 512 == alignment
            return gradient

    elements = share
    for n in size:
        elements *= n + 3
    with Simulator(device_type="cuda") as simulator:
        x = torch.arange(elements, dtype=dtype, device="cuda").requires_grad_()
        copied(lambda x: Keep.apply(view_of(x * 1)), x)  # type: ignore[no-untyped-call]
    simulator.assert_race_free()


@pytest.mark.requirement("ACT-1")
@pytest.mark.parametrize("num_layers", range(5))
def test_the_first_layers_and_no_others(machine: Machine, num_layers: int) -> None:
    """Of five layers that save 64 bytes each, K x 64 bytes cross each way, less what never left."""
    with machine.run():
        layers = nn.ModuleList(Apply(lambda x: (x * 1).sin()) for _ in range(5))
        with offload_layers(layers, num_layers, min_offload_bytes=0) as offload:
            x = torch.ones(16, device=machine.device, requires_grad=True)
            train(layers, [x])
        assert offload.stats.bytes_to_host == num_layers * 64
        assert offload.stats.bytes_to_device == num_layers * 64


@pytest.mark.requirement("ACT-17")
def test_scaled_dot_product_attention_is_offloaded(machine: Machine) -> None:
    """Its output is saved with strides that make the base non-contiguous, and still leaves."""
    with machine.run():
        layers = build(["attention", "attention"], 8, machine.device)
        with offload_layers(layers, 1, min_offload_bytes=0) as offload:
            run_layers(layers, batch(0, 6, 8, machine.device)).backward()
        assert not set(offload.stats.kept) - {"weight", "dtype", "host"}


@pytest.mark.requirement("ACT-11")
def test_the_counting_convention_knows_parameters() -> None:
    """Without modules at hand, a parameter and its views are still recognised."""
    with Simulator(device_type="cuda") as simulator:
        linear = nn.Linear(8, 8).to("cuda")
        context, sync = get_cpu_offload_context(True, 1, 2, min_offload_bytes=0)
        x = torch.ones(2, 8, device="cuda", requires_grad=True)
        before = simulator.copies.d2h_bytes
        with context:
            y = linear(x * 1)
        y = sync(y)
        with context:
            y = y * 1
        sync(y).sum().backward()
        assert simulator.copies.d2h_bytes - before == 2 * 8 * FLOAT_BYTES

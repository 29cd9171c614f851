"""What is resident when, to the byte, and that nothing is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import KINDS, batch, build, offloaded, run_layers
from torch import nn

from offload_ref import ActivationOffload, get_cpu_offload_context, offload_layers
from offload_ref.simulator import Simulator

WIDTH, ROWS = 8, 16


@contextmanager
def simulated() -> Iterator[Simulator]:
    """A simulated accelerator, free of earlier garbage, race-free at the end."""
    gc.collect()
    with Simulator(device_type="cuda") as simulator:
        yield simulator
    simulator.assert_race_free()


class Watch:
    """Device bytes at each boundary of a layer's forward and backward, with what the records say is out."""

    def __init__(self, simulator: Simulator, layers: nn.ModuleList, offload: ActivationOffload) -> None:
        self.simulator, self.offload = simulator, offload
        self.moments: list[tuple[str, int, int]] = []
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, i=i: self.note(f"forward {i} begins"))
            layer.register_forward_hook(lambda *_, i=i: self.note(f"forward {i} ends"))
            layer.register_full_backward_pre_hook(lambda *_, i=i: self.note(f"backward {i} begins"))
            layer.register_full_backward_hook(lambda *_, i=i: self.note(f"backward {i} ends"))

    def note(self, moment: str) -> None:
        saved = self.offload.bytes_out() - self.offload.bytes_back()
        self.moments.append((moment, self.simulator.memory_allocated(), saved))


@pytest.mark.requirement("MEM-1", "MEM-2", "MEM-5")
@settings(max_examples=25)
@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=6), share=st.floats(0, 1, exclude_max=True))
def test_device_bytes_are_the_baselines_less_what_is_out(kinds: list[str], share: float) -> None:
    """At every layer boundary: allocated = the plain run's bytes - storages out + reloads, to the byte."""
    num_layers = int(share * len(kinds))
    runs = []
    for k in (0, num_layers):
        with simulated() as simulator:
            layers = build(kinds, WIDTH, "cuda")
            with offload_layers(layers, k, min_offload_bytes=0) as offload:
                watch = Watch(simulator, layers, offload)
                run_layers(layers, batch(0, ROWS, WIDTH, "cuda")).backward()
            watch.note("end")
            runs.append(watch.moments)
            assert (offload.pool.leased_bytes, offload.pool.free_bytes) == (0, 0)
    for (moment, plain_bytes, _), (_, bytes_seen, bytes_saved) in zip(*runs, strict=True):
        assert bytes_seen == plain_bytes - bytes_saved, moment


@pytest.mark.requirement("MEM-1", "ACT-3", "ACT-4")
@pytest.mark.parametrize("num_layers", range(6))
def test_at_most_l_minus_k_layers_are_resident(num_layers: int) -> None:
    """Six layers that save 4,000 bytes each: never more than (6 - K) x 4,000 resident, at any boundary."""

    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1).sin()

    model_layers, saved_bytes = 6, 4000
    with simulated() as simulator:
        layers = nn.ModuleList(Sine() for _ in range(model_layers))
        x = torch.ones(1000, device="cuda", requires_grad=True)
        with offload_layers(layers, num_layers, min_offload_bytes=0) as offload:
            watch = Watch(simulator, layers, offload)
            loss = run_layers(layers, x)
            out_after_forward = offload.bytes_out()
            loss.backward()
        assert out_after_forward == num_layers * saved_bytes
        entering = {m: saved for m, _, saved in watch.moments}
        for layer in range(model_layers):
            released = min(max(layer - (model_layers - num_layers), 0), num_layers)
            allowed = {released * saved_bytes, (released + 1) * saved_bytes}
            assert entering[f"forward {layer} begins"] in allowed
        assert offload.bytes_out() == offload.bytes_back() == 0


@pytest.mark.quick
@pytest.mark.requirement("MEM-1")
def test_peak_activations_of_eight_layers_at_six() -> None:
    """At K = 6 of 8 the activations' peak is at most 45 % of the plain run's."""
    peaks = []
    for num_layers in (0, 6):
        with simulated() as simulator:
            layers = build(["attention"] * 8, 32, "cuda")
            x = batch(0, 64, 32, "cuda")
            start = simulator.memory_allocated()
            simulator.reset_peak_memory_stats()
            with offloaded(layers, num_layers):
                loss = run_layers(layers, x)
            forward_peak = simulator.max_memory_allocated() - start
            loss.backward()
            peaks.append(forward_peak)
    assert peaks[1] <= 0.45 * peaks[0], peaks


@pytest.mark.requirement("ACT-13", "MEM-2")
@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_an_output_that_its_own_node_saves_is_not_leaked(num_layers: int) -> None:
    """20 dropped graphs of tanh, offloaded or passed through: no storage is left, without a garbage run."""
    gc.disable()
    try:
        with simulated() as simulator:
            layers = build(["tanh", "tanh", "tanh"], WIDTH, "cuda")
            before = simulator.memory_allocated()
            storages = []
            with offloaded(layers, num_layers):
                for i in range(20):
                    y = layers[2](layers[1](layers[0](batch(i, ROWS, WIDTH, "cuda"))))
                    storages.append(weakref.ref(y.untyped_storage()))
                    del y
            assert [r() for r in storages] == [None] * 20
            assert simulator.memory_allocated() == before
    finally:
        gc.enable()


def _raise_in_third(layers: nn.ModuleList) -> None:
    class Broken(Exception):  # noqa: N818 - a test's own
        pass

    def fail(*_: object) -> None:
        raise Broken

    handle = layers[2].register_forward_pre_hook(fail)
    with suppress(Broken):
        run_layers(layers, batch(0, ROWS, WIDTH, "cuda"))
    handle.remove()


def _stop_after_first(layers: nn.ModuleList) -> None:
    layers[0](batch(0, ROWS, WIDTH, "cuda")).sum().backward()


def _drop_graph(layers: nn.ModuleList) -> None:
    run_layers(layers, batch(0, ROWS, WIDTH, "cuda"))


def _no_grad(layers: nn.ModuleList) -> None:
    with torch.no_grad():
        run_layers(layers, batch(0, ROWS, WIDTH, "cuda"))


def _evaluate(layers: nn.ModuleList) -> None:
    layers.eval()
    run_layers(layers, batch(0, ROWS, WIDTH, "cuda").detach())
    layers.train()


def _unused_branch(layers: nn.ModuleList) -> None:
    x = batch(0, ROWS, WIDTH, "cuda")
    h = layers[0](x)
    _unused = layers[1](h.detach())
    h.sum().backward()


@pytest.mark.requirement("ACT-31", "MEM-5")
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize(
    "irregular", [_raise_in_third, _stop_after_first, _drop_graph, _no_grad, _evaluate, _unused_branch]
)
def test_an_irregular_pass_leaves_nothing_behind(irregular: Callable[[nn.ModuleList], None], retain: bool) -> None:
    """After it no host buffer is leased, no device byte is held, and the next step is as ever."""
    with simulated() as simulator:
        layers = build(["attention", "tanh", "views", "tanh"], WIDTH, "cuda")
        with offload_layers(layers, 3, min_offload_bytes=0, retain_pinned_cpu_buffers=retain) as offload:
            run_layers(layers, batch(9, ROWS, WIDTH, "cuda")).backward()
            expected = [p.grad.cpu() for p in layers.parameters()]
            layers.zero_grad()
            before = simulator.memory_allocated()
            irregular(layers)
            layers.zero_grad()
            gc.collect()
            assert offload.pool.leased_bytes == 0
            assert offload.bytes_out() == offload.bytes_back() == 0
            assert simulator.memory_allocated() == before
            run_layers(layers, batch(9, ROWS, WIDTH, "cuda")).backward()
        assert all(torch.equal(p.grad.cpu(), g) for p, g in zip(layers.parameters(), expected, strict=True))


@pytest.mark.requirement("MEM-6", "ORD-6")
def test_retained_buffers_are_reused() -> None:
    """With retained buffers ten further steps allocate no pinned memory; without, none stays pinned."""
    for retain in (True, False):
        with simulated() as simulator:
            layers = build(["attention", "views", "tanh"], WIDTH, "cuda")
            with offload_layers(layers, 2, min_offload_bytes=0, retain_pinned_cpu_buffers=retain) as offload:
                run_layers(layers, batch(0, ROWS, WIDTH, "cuda")).backward()
                after_first = offload.pool.allocations
                for i in range(10):
                    run_layers(layers, batch(i, ROWS, WIDTH, "cuda")).backward()
            assert (offload.pool.allocations == after_first) is retain
            assert (simulator.pinned_allocated() > 0) is retain


@pytest.mark.requirement("MEM-5", "MEM-6")
def test_shapes_may_change_between_steps_with_retained_buffers() -> None:
    """Rows and dtypes change from step to step; every gradient is right."""
    single, half = torch.float32, torch.bfloat16
    shapes = [(3, single), (7, single), (3, half), (6, half), (3, single)]
    gradients = []
    for num_layers in (0, 2):
        with simulated():
            layers = build(["views", "tanh", "tanh"], WIDTH, "cuda")
            with offloaded(layers, num_layers, retain_pinned_cpu_buffers=True):
                for rows, dtype in shapes:
                    x = batch(0, rows, WIDTH, "cuda", dtype)
                    run_layers(layers.to(dtype), x).backward()
                    assert x.grad is not None
                    gradients.append(x.grad.cpu())
    plain, seen = gradients[: len(shapes)], gradients[len(shapes) :]
    assert all(torch.equal(a, b) for a, b in zip(seen, plain, strict=True))


@pytest.mark.requirement("ACT-31", "ACT-6")
def test_an_exception_resets_the_count() -> None:
    """After a failure inside the context the next layer is layer 0 again."""
    with simulated():
        context, sync = get_cpu_offload_context(True, 1, 2, min_offload_bytes=0)
        with suppress(ZeroDivisionError), context:
            raise ZeroDivisionError
        x = batch(0, ROWS, WIDTH, "cuda")
        y = x
        for _ in range(2):
            with context:
                y = (y * 1).sin()
            y = sync(y)
        y.sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad.cpu(), (x.sin().cos() * x.cos()).detach().cpu())


@pytest.mark.requirement("MEM-2", "MEM-7")
def test_storages_that_user_code_holds_are_not_counted_as_out() -> None:
    """A layer output that the program keeps stays as it is, and is neither out nor copied back but counted as held."""
    with simulated():
        layers = build(["tanh", "tanh", "tanh"], WIDTH, "cuda")
        x = batch(0, ROWS, WIDTH, "cuda")
        with offload_layers(layers, 1, min_offload_bytes=0) as offload:
            kept = layers[0](x)
            y = layers[2](layers[1](kept))
        assert offload.bytes_out() == 0
        assert offload.bytes_held() == kept.nbytes + x.nbytes
        assert torch.equal(kept, layers[0].linear(x).tanh())
        y.sum().backward()
        assert offload.stats.copies_to_device == 0

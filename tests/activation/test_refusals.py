"""Bad input and edits behind autograd's back: a typed error that says what was seen, and nothing changed."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from layered import batch, build, offloaded, run_layers
from machines import Machine
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_ref import ActivationOffload, get_cpu_offload_context, offload_layers
from offload_ref.errors import InPlaceEditError, LayerCountError, NoAcceleratorError, UnsupportedError
from offload_ref.simulator import Simulator


@pytest.mark.requirement("ACT-16")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_no_accelerator_and_no_simulator() -> None:
    """K > 0 needs a device to offload from; K = 0 and a disabled context do not."""
    with pytest.raises(NoAcceleratorError, match="ACT-16"):
        ActivationOffload(1, 2)
    ActivationOffload(0, 2)
    context, sync = get_cpu_offload_context(False, 1, 2)
    with context:
        y = torch.ones(2, requires_grad=True) * 2
    assert sync(y) is y


@pytest.mark.requirement("ACT-6")
def test_fewer_layers_than_declared(machine: Machine) -> None:
    """Backward after two of three declared layers is refused; after ``reset`` it is legal."""
    with machine.run():
        for reset in (False, True):
            context, sync = get_cpu_offload_context(True, 1, 3, min_offload_bytes=0)
            x = torch.ones(4, device=machine.device, requires_grad=True)
            y = x
            for _ in range(2):
                with context:
                    y = (y * 1).sin()
                y = sync(y)
            if reset:
                context.reset()
            with nullcontext() if reset else pytest.raises(LayerCountError, match="ACT-6") as refusal:
                y.sum().backward()
            if refusal is not None and not reset:
                assert (refusal.value.seen, x.grad) == (2, None)


@pytest.mark.requirement("ACT-6")
def test_more_layers_than_declared(machine: Machine) -> None:
    """Three layers where two are declared: the third begins a forward pass that never ends: refused."""
    with machine.run():
        context, sync = get_cpu_offload_context(True, 1, 2, min_offload_bytes=0)
        y = torch.ones(4, device=machine.device, requires_grad=True)
        for _ in range(3):
            with context:
                y = (y * 1).sin()
            y = sync(y)
        with pytest.raises(LayerCountError, match="ACT-6"):
            y.sum().backward()
        offload = ActivationOffload(1, 2)
        with pytest.raises(LayerCountError, match="ACT-6"), offload.layer(2):
            pass


@pytest.mark.quick
@pytest.mark.requirement("ACT-24")
@pytest.mark.parametrize("edited", ["activation", "weight", "weight of a layer that stays"])
def test_an_edit_between_save_and_use_is_found(machine: Machine, edited: str) -> None:
    """Offloaded activations, parameters and what passes through: an edit raises and names the tensor."""
    with machine.run():
        layers = build(["tanh", "tanh", "tanh"], 8, machine.device)
        kept: list[torch.Tensor] = []
        layers[0].register_forward_hook(lambda _module, _arguments, output: kept.append(output))
        with offloaded(layers, 2):
            loss = run_layers(layers, batch(0, 6, 8, machine.device))
        torch.accelerator.synchronize()
        with torch.no_grad():
            victims = [kept[0], layers[0].linear.weight, layers[2].linear.weight]
            victims[["activation", "weight", "weight of a layer that stays"].index(edited)].add_(1)
        with pytest.raises(InPlaceEditError, match=r"torch.float32, shape .*modified in place.*ACT-24"):
            loss.backward()


@pytest.mark.requirement("ACT-17")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_layer_is_refused(machine: Machine, use_reentrant: bool) -> None:
    """Checkpointing of an offloaded layer is refused by name, when it would go wrong."""
    with machine.run():
        layers = build(["tanh", "tanh"], 8, machine.device)
        x = batch(0, 6, 8, machine.device)
        with offloaded(layers, 1), pytest.raises(UnsupportedError, match="checkpoint"):
            checkpoint(layers[0], x, use_reentrant=use_reentrant).sum().backward()


@pytest.mark.requirement("ACT-20")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_a_layer_is_right(machine: Machine, use_reentrant: bool) -> None:
    """A layer may checkpoint a part of itself."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant).sin()

    gradients = []
    for num_layers in (0, 2):
        with machine.run():
            torch.manual_seed(0)
            layers = nn.ModuleList(Checkpointed() for _ in range(3)).to(machine.device)
            with offloaded(layers, num_layers):
                loss = run_layers(layers, batch(0, 6, 8, machine.device))
            loss.backward()
            gradients.append([p.grad.cpu() for p in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.requirement("ACT-31")
def test_hooks_are_gone_after_the_context(machine: Machine) -> None:
    """Neither module hooks nor saved-tensor hooks outlive ``offload_layers``, also when a layer raises."""
    with machine.run():
        layers = build(["tanh", "tanh"], 8, machine.device)
        layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), offloaded(layers, 1):
            run_layers(layers, batch(0, 6, 8, machine.device))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert not layers[0]._forward_pre_hooks
        assert not layers[0]._forward_hooks


def test_inside_context_is_never_true() -> None:
    """megatron-core asks for it, and raises on True where TransformerEngine is absent."""
    with Simulator(device_type="cuda"):
        context, _ = get_cpu_offload_context(True, 1, 2)
        with context:
            assert context.inside_context is False


@pytest.mark.requirement("ACT-31")
def test_a_copy_of_a_layer_is_no_layer(machine: Machine) -> None:
    """A model that is copied under offloading runs as an ordinary model: its copied hooks do nothing."""
    with machine.run():
        layers = build(["tanh", "tanh"], 8, machine.device)
        with offload_layers(layers, 1, min_offload_bytes=0) as offload:
            copied = copy.deepcopy(layers)
            run_layers(copied, batch(0, 6, 8, machine.device)).backward()
        assert offload.stats.copies_to_host == 0

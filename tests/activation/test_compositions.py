"""What training loops combine with activation offloading: autocast and compiled layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layered import assert_same, batch, build, offloaded, train
from machines import Machine
from torch import nn

from offload_ref import offload_layers

WIDTH, ROWS = 8, 6


@pytest.mark.requirement("ACT-20")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(machine: Machine, dtype: torch.dtype) -> None:
    """Layers that compute in 16 bits under autocast give the plain run's bits; the casts of weights leave too."""
    outcomes = []
    for num_layers in (0, 2):
        with machine.run():
            layers = build(["attention", "tanh", "in-place"], WIDTH, machine.device)
            with torch.autocast(machine.device, dtype=dtype):
                outcomes.append(
                    train(layers, [batch(0, ROWS, WIDTH, machine.device)], None, offloaded(layers, num_layers))
                )
    assert_same(outcomes[1], outcomes[0])


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
@pytest.mark.requirement("ACT-20", "ACT-2")
@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_compiled_layers_are_offloaded(backend: str, in_place: bool) -> None:
    """Compiled layers give the bits of compiled layers without offloading, and their activations leave."""
    machine = Machine("cuda", simulated=False)
    outcomes, out = [], []
    for num_layers in (0, 2):
        torch.compiler.reset()
        with machine.run():
            layers = build(["attention", "tanh", "tanh"], WIDTH, machine.device)
            for layer in layers if in_place else ():
                layer.compile(backend=backend)
            wrappers: list[Any] = [torch.compile(layer, backend=backend) for layer in layers]
            compiled = layers if in_place else nn.ModuleList(wrappers)
            inputs = [batch(i, ROWS, WIDTH, machine.device) for i in range(2)]
            with offload_layers(compiled, num_layers, min_offload_bytes=0) as offload:
                outcomes.append(train(compiled, inputs))
            out.append(offload.stats.copies_to_device)
    assert_same(outcomes[1], outcomes[0])
    assert out[0] == 0
    assert out[1] > 0

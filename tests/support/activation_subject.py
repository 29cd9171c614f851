"""Layers in the middle of an offloaded forward pass: what bad inputs of activation offloading are tried on."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from layered import batch, build
from refusing import Case, assert_refused
from snapshots import bits, frozen, of_layers, of_parameters
from torch import nn

from offload_ref import ActivationOffload
from offload_ref.simulator import Simulator


@dataclass
class Forward:
    """Three layers, of which the first has run forward, offloaded.

    Attributes:
        layers: all of them.
        x: what the first one was given.
        offload: its offloading, in the middle of a forward pass.
        output: what the first one gave; its graph holds a host buffer.
    """

    layers: nn.ModuleList
    x: torch.Tensor
    offload: Any
    output: torch.Tensor

    @classmethod
    def new(cls) -> Forward:
        """Always the same bits; to be made under a simulator."""
        layers, x = build(["tanh"] * 3, 8, "cuda"), batch(0, 6, 8, "cuda")
        offload = ActivationOffload(1, 3, min_offload_bytes=0)
        with offload.layer(0):
            output = layers[0](x)
        return cls(layers, x, offload, output)

    def snapshot(self) -> dict[str, object]:
        """Layers with their hooks, the input, the pool of host buffers, what was copied, and the layer reached."""
        pool, stats = self.offload.pool, self.offload.stats
        current = self.offload._current
        return {
            **of_layers(self.layers),
            "input": of_parameters([self.x]),
            "output": (id(self.output), self.output._version, bits(self.output)),
            "pool": (pool.leased_bytes, pool.free_bytes, pool.allocations),
            "stats": (stats.copies_to_host, stats.copies_to_device, dict(stats.kept)),
            "forward pass": (id(current), current and current.entered),
        }

    def gradients_at_the_end(self) -> object:
        """Run the other layers and backward; the bits of the loss and of every gradient."""
        y = self.output
        for number in (1, 2):
            with self.offload.layer(number):
                y = self.layers[number](y)
        loss = y.pow(2).mean()
        loss.backward()
        return frozen([loss, self.x.grad, *(p.grad for p in self.layers.parameters())])


def assert_nothing_changed(refused: Case) -> None:
    """The call is refused, every bit is as before, and the forward and backward pass ends as without the call."""
    with Simulator(device_type="cuda") as simulator:
        subject, untouched = Forward.new(), Forward.new()
        refused.prepare(subject)
        before = subject.snapshot()
        assert before["pool"] != (0, 0, 0)
        assert_refused(refused, subject)
        if subject.snapshot() != before:
            gc.collect()  # a traceback may hold tensors in a cycle
        assert subject.snapshot() == before
        assert subject.gradients_at_the_end() == untouched.gradients_at_the_end()
    simulator.assert_race_free()

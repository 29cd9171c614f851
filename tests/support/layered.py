"""Small layered models, and a run that trains one with or without activation offloading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from offload_ref import offload_layers


class Attention(nn.Module):
    """A pre-norm transformer block with plain scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(1, rows, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tanh(nn.Module):
    """A layer whose activation saves its own output, which the next layer saves as its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Views(nn.Module):
    """A layer that saves transposes, columns, an expanded row and a view of an unused larger tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.scale
        gram = h.t() @ h
        column = h[:, :1] * h[:, 1:2]
        row = h[:1].expand_as(h)
        return (h @ gram.sin()).tanh() + column * h + row.sigmoid() * h


class InPlace(nn.Module):
    """A layer with legal in-place operations: an activation in place, and an edit after an unused save."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu_().mul(x.sigmoid()) + x


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "attention": Attention,
    "tanh": Tanh,
    "views": Views,
    "in-place": InPlace,
}
"""Layer kinds by name; each takes a (rows, width) tensor to another one."""


@dataclass(frozen=True)
class Outcome:
    """What a run computed: a loss per micro-batch, gradients of inputs and parameters; on the host."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def build(kinds: Sequence[str], width: int, device: str, dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """Layers of the given kinds, the same every time."""
    torch.manual_seed(0)
    return nn.ModuleList(KINDS[kind](width) for kind in kinds).to(dtype).to(device)


def batch(index: int, rows: int, width: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Input number ``index``: each differs from the others; every run draws the same."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(rows, width, generator=generator).to(dtype).to(device).requires_grad_()


def run_layers(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Forward through all layers to a scalar loss."""
    for layer in layers:
        x = layer(x)
    return x.float().pow(2).mean()


def train(
    layers: nn.ModuleList,
    inputs: Sequence[torch.Tensor],
    backward_order: Sequence[int] | None = None,
    offloading: AbstractContextManager[object] | None = None,
) -> Outcome:
    """Run all forwards, then all backwards in the given order; read nothing before all is issued."""
    with offloading or nullcontext():
        losses = [run_layers(layers, x) for x in inputs]
    for i in backward_order or range(len(inputs)):
        losses[i].backward()
    gradients = [t.grad for t in (*inputs, *layers.parameters())]
    return Outcome(
        losses=[loss.detach().cpu() for loss in losses], gradients=[None if g is None else g.cpu() for g in gradients]
    )


def offloaded(layers: nn.ModuleList, num_layers: int, **options: int | bool) -> AbstractContextManager[object]:
    """Offloading of small layers: no size floor unless one is asked for."""
    return offload_layers(layers, num_layers, **{"min_offload_bytes": 0, **options})


def assert_same(seen: Outcome, expected: Outcome) -> None:
    """Every loss and every gradient is equal bit for bit."""
    for name, ours, theirs in (
        ("loss", seen.losses, expected.losses),
        ("gradient", seen.gradients, expected.gradients),
    ):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a is None) == (b is None), f"{name} {i}: one of the runs has none"
            if a is not None and b is not None:
                assert torch.equal(a, b), f"{name} {i} differs by at most {(a - b).abs().max()}"

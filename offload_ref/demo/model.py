"""A byte-level GPT: embeddings, pre-norm blocks, a head tied to the token embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from offload_ref.demo.settings import DemoSettings

WEIGHT_STD = 0.02
"""Standard deviation of the initial matrices, as in GPT-2."""

MLP_RATIO = 4
"""Width of the feed-forward layer over the width of the model."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind its norm, each added to the residual stream.

    Input and output have shape (batch, sequence, hidden).
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, MLP_RATIO * hidden)
        self.down = nn.Linear(MLP_RATIO * hidden, hidden)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Let each position attend to itself and to what precedes it."""
        batch, sequence, hidden = x.shape
        split_heads = self.qkv(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = split_heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: torch.Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        widened: torch.Tensor = functional.gelu(self.up(self.mlp_norm(x)))
        return torch.add(x, self.down(widened))


class GPT(nn.Module):
    """The model that the demo trains; ``blocks`` are the layers that activation offloading counts."""

    def __init__(self, vocabulary: int, layers: int, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, sequence, vocabulary) for int64 tokens (batch, sequence)."""
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = self.token_embedding(tokens) + positions
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.final_norm(x), self.token_embedding.weight)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats, computed in fp32."""
        logits = self(tokens).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initial_model(settings: DemoSettings, vocabulary: int) -> GPT:
    """Build the fp32 model on the host, its weights a pure function of the settings and the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        model = GPT(vocabulary, settings.layers, settings.hidden, settings.heads, settings.sequence)
        for name, parameter in model.named_parameters():
            initialise(name, parameter, settings.layers)
    return model


@torch.no_grad()
def initialise(name: str, parameter: nn.Parameter, layers: int) -> None:
    """Draw one parameter as GPT-2 does: matrices normal, residual outputs scaled by depth, biases zero."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim > 1:
        residual_output = name.endswith(("projection.weight", "down.weight"))
        parameter.normal_(std=WEIGHT_STD * ((2 * layers) ** -0.5 if residual_output else 1.0))

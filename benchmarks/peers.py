"""Layers of others at the shape of ours, to be timed in the same run. Each is optional."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import gpu

WIDTH, HEADS = 1024, 16


class SoftmaxAttention(nn.Module):
    """Causal attention by torch's own kernels: what everybody compares with."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.project(x), "b t (n h d) -> n b h t d", n=3, h=HEADS)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(y, "b h t d -> b t (h d)"))


class Peer(nn.Module):
    """A layer of another package, whatever it returns besides its output."""

    def __init__(self, layer: nn.Module, autocast: bool = False):
        super().__init__()
        self.layer, self.autocast = layer, autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(gpu.DEVICE, torch.bfloat16) if self.autocast else nullcontext():
            y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


def attention() -> nn.Module:
    return SoftmaxAttention().to(gpu.DEVICE, torch.bfloat16)


def fla_layer(name: str, **options: object) -> nn.Module:
    """Of flash-linear-attention: the package `fla-core` has no layers."""
    import fla.layers  # pyright: ignore[reportMissingImports]

    layer = getattr(fla.layers, name)(hidden_size=WIDTH, **options)
    return Peer(layer).to(gpu.DEVICE, torch.bfloat16)


def titans_pytorch(batch_size: int | None) -> nn.Module:
    """A two-layer MLP, expansion 4, chunks of 64, in float32 under autocast as its author runs it.

    With batch_size=64 gradients are taken at the memory of each chunk's start, as the paper says
    and as we do; by default all at the initial memory, which is a weaker model.
    """
    from titans_pytorch import NeuralMemory  # pyright: ignore[reportMissingImports]
    from titans_pytorch.memory_models import MemoryMLP  # pyright: ignore[reportMissingImports]

    head = WIDTH // HEADS
    network = MemoryMLP(dim=head, depth=2, expansion_factor=4.0)
    memory = NeuralMemory(
        dim=WIDTH, chunk_size=64, batch_size=batch_size, dim_head=head, heads=HEADS, model=network
    )
    return Peer(memory, autocast=True).to(gpu.DEVICE)


PEERS: dict[str, Callable[[], nn.Module]] = {
    "attention": attention,
    "gla": partial(fla_layer, "GatedLinearAttention", num_heads=4),
    "fla_delta_net": partial(fla_layer, "DeltaNet", num_heads=8),
    "fla_gated_delta_net": partial(fla_layer, "GatedDeltaNet", num_heads=4, head_dim=192),
    "mesa_net": partial(fla_layer, "MesaNet", num_heads=8, head_dim=128),
    "titans_pytorch": partial(titans_pytorch, None),
    "titans_pytorch_64": partial(titans_pytorch, 64),
}
"""In the order in which they are timed: the one that may run out of memory last."""


def chosen(names: str) -> list[str]:
    """ "all", "none", or names with commas between."""
    if names == "none":
        return []
    if names == "all":
        return list(PEERS)
    unknown = sorted(set(names.split(",")) - PEERS.keys())
    if unknown:
        raise SystemExit(f"--peers: unknown {', '.join(unknown)}; known are {', '.join(PEERS)}")
    return names.split(",")

"""From named tensors to the flat arrays of kernels and back, and which sizes a rule runs at."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import combinations_with_replacement

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.triton.sizes import GATED, LINEAR, Sizes, block, feature_block, stays_in_registers
from atlas_lm.rules import Rule
from atlas_lm.shapes import Weights

NETWORKS = {"linear": 0, "mlp": 1, "gated_mlp": 2}
OBJECTIVES = {"l2": 0, "dot": 1}
FEW = 16
DOTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def sizes_of(
    rule: Rule, weights: Weights, d_k: int, d_v: int, length: int, terms: int, team: int = 1
) -> Sizes:
    """For pieces of this many slots; weights `[h out in]` or `[b h out in]`."""
    heads, hidden, width = weights["w" if rule.network == "linear" else "w2"].shape[-3:]
    hidden = 0 if rule.network == "linear" else hidden
    return _sizes(rule, heads, hidden, width, d_k, d_v, length, terms, team)


@cache
def _sizes(
    rule: Rule, heads: int, hidden: int, width: int, d_k: int, d_v: int, length: int, terms: int,
    team: int,
) -> Sizes:  # fmt: skip
    step = feature_block(d_k, width)
    muon = rule.optimizer == "muon"
    pulls = terms + 1
    pitch = width if width == d_k else -(-width // step) * step
    blocks = -(-pitch // step)
    share = (hidden or d_v) // team
    network = NETWORKS[str(rule.network)]
    size = d_v * (hidden or pitch) + network * hidden * pitch
    return Sizes(
        network=network,
        norm=bool(rule.norm),
        objective=OBJECTIVES[str(rule.objective)],
        heads=heads,
        d_k=d_k,
        d_v=d_v,
        features=width,
        pitch=pitch,
        hidden=hidden,
        length=length,
        tail=rule.window - 1,
        terms=terms,
        written=not muon,
        pulls=pulls,
        block_length=block(length),
        block_tail=block(rule.window - 1),
        block_k=block(d_k),
        block_v=block(d_v),
        block_f=min(64, block(hidden)),
        block_d=step,
        blocks=blocks,
        block_share=min(64, block(share)) if hidden else block(share),
        block_terms=triton.next_power_of_2(max(1, terms)),
        block_pulls=triton.next_power_of_2(pulls),
        team=team,
        share=share,
        few=FEW,
        pairs=rule.window - 1 + length,
        size=size,
        resident=not muon
        and stays_in_registers(
            network, block(share), block(d_v), blocks * step, block(length), terms
        ),
        tiles=blocks if network == LINEAR else 1 + network * blocks,
    )


def flatten(weights: Weights, sizes: Sizes) -> Tensor:
    """Fast weights `[... out in]` as `[... size]`."""
    fill = sizes.pitch - sizes.features
    names = (
        ("w",) if sizes.network == LINEAR else ("w1", "w2", "w3")[: 2 + (sizes.network == GATED)]
    )
    parts = [
        functional.pad(weights[n], (0, fill)) if fill and n != "w1" else weights[n] for n in names
    ]
    return (
        parts[0].flatten(-2) if len(parts) == 1 else torch.cat([p.flatten(-2) for p in parts], -1)
    )


def unflatten(flat: Tensor, sizes: Sizes) -> Weights:
    """Fast weights by name from `[... size]`."""
    if sizes.network == LINEAR:
        return {"w": flat.unflatten(-1, (sizes.d_v, sizes.pitch))[..., : sizes.features]}
    second, first = sizes.d_v * sizes.hidden, sizes.hidden * sizes.pitch
    shares = [second, first, first][: 2 + (sizes.network == GATED)]
    w1, *rest = flat.split(shares, -1)
    made = {"w1": w1.unflatten(-1, (sizes.d_v, sizes.hidden))}
    for name, part in zip(("w2", "w3"), rest, strict=False):
        made[name] = part.unflatten(-1, (sizes.hidden, sizes.pitch))[..., : sizes.features]
    return made


@lru_cache(maxsize=32)
def monomials(d_k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each feature of degree <= 2: its two factors (d_k: the number 1), degree and weight."""
    pairs = [(d_k, d_k), *((i, d_k) for i in range(d_k))]
    pairs += combinations_with_replacement(range(d_k), 2)
    left, right = torch.tensor(pairs, dtype=torch.int32, device=device).unbind(1)
    degree = (left < d_k).long() + (right < d_k).long()
    weight = torch.where((degree == 2) & (left != right), 2**0.5, 1.0)
    return left.contiguous(), right.contiguous(), degree, weight.float()

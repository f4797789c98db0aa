"""Associative recall: pairs are told once, then every key is asked for.

    tokens    k1 v1 k2 v2 k3 v3   k2 k3 k1
    targets    -  -  -  -  -  -   v2 v3 v1

A model that cannot carry a pair through its memory stays at chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atlas_lm.models.lm import NO_TARGET


def associative_recall(
    batch: int, pairs: int, vocab: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and targets `[b 3*pairs]`; keys, each once, from the vocabulary's lower half."""
    half = vocab // 2
    if not 1 <= pairs <= half:
        raise ValueError(f"pairs: {pairs} different keys do not fit the {half} of vocab={vocab}")
    keys = torch.rand(batch, half, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(half, vocab, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    told = torch.stack([keys, values], 2).flatten(1)
    tokens = torch.cat([told, keys.gather(1, order)], 1)
    targets = torch.full_like(tokens, NO_TARGET)
    targets[:, 2 * pairs :] = values.gather(1, order)
    return tokens, targets

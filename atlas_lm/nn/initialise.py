"""Every initial value of every layer and model, in one place.

Linear maps start with std in^-1/2; those whose result is added to a residual stream are divided by
the square root of how many add to it, so that its size does not grow with depth. Memories start as
`init_memory` says, never at zero: a memory of zeros has no gradient. A gate starts at its bias,
with small differences between tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from atlas_lm.nn.norm import RMSNorm

GATE_SPREAD = 0.1
"""Standard deviation of a gate's map around its bias, in units of the map."""


@torch.no_grad()
def quiet_head(norm: RMSNorm, head: nn.Linear | None) -> None:
    """Nearly equal logits: a tied head would otherwise bet on the token it has just read."""
    if head is None:
        norm.weight.fill_(norm.weight.shape[0] ** -0.5)
    else:
        nn.init.normal_(head.weight, std=1 / head.in_features)


@torch.no_grad()
def initialise(module: nn.Module, branches: int = 1) -> None:
    """Initialise a layer or a model whose residual stream has this many branches added to it."""
    from atlas_lm.nn.conv import ShortConv
    from atlas_lm.nn.gates import GateMaps

    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
            if name.split(".")[-1] == "out":
                part.weight /= branches**0.5
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)
        elif isinstance(part, ShortConv):
            nn.init.normal_(part.weight, std=0.1)
            part.weight[0] += 1
    for part in module.modules():
        if isinstance(part, GateMaps):
            nn.init.normal_(part.up.weight, std=GATE_SPREAD * part.up.in_features**-0.5)
            part.up.bias.copy_(part.initial_bias())

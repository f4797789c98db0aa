"""What everything that reads a stream checks: its sizes, the embeddings, the state."""

from __future__ import annotations

import torch
from torch import Tensor

from atlas_lm.shapes import TokenFlag


def checked(layer, state, x: Tensor):
    """The state to go on from; a new one where there is none."""
    if x.ndim != 3 or x.shape[-1] != layer.config.dim:
        raise ValueError(
            f"x: shape {tuple(x.shape)}, expected [batch, time, {layer.config.dim}] "
            f"for this {type(layer).__name__}"
        )
    if state is None:
        return layer.begin(x.shape[0])
    if state.batch != x.shape[0]:
        raise ValueError(f"state: holds {state.batch} rows, x has a batch of {x.shape[0]}")
    return state


def tokens_only(x: Tensor, mask: TokenFlag | None) -> Tensor:
    """Embeddings `[b t d]`, zero where there is no token, whatever was there."""
    return x if mask is None else torch.where(mask[..., None], x, 0)


def expect_count(name: str, value: object) -> None:
    """Refuse sizes of a layer that are none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: {value!r} must be a whole number, 1 or more")

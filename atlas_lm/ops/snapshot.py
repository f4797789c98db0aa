"""A memory at one moment, finite or on the exponential map.

On phi* a layer has no finite weights. What it has learned is kept in the span of the keys it saw:
W phi*(x) = F [1; x] + sum_i u_i exp(k_i.x).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.networks import Frozen
from atlas_lm.shapes import Product, Weights


class Snapshot(NamedTuple):
    """Weights `[b h out in]` (F where a layer reads phi*), u of the first s keys `[b h s f]`."""

    weights: Weights
    coefficients: Weights

    def scaled(self, factor: Tensor) -> Snapshot:
        return Snapshot(*({n: factor * x for n, x in part.items()} for part in self))


class SnapshotMaps(Frozen):
    """A snapshot as the maps of a network; `keys` `[b h . k]` begin with those it has seen."""

    def __init__(
        self,
        snapshot: Snapshot,
        slow: Weights,
        keys: Tensor | None,
        product: Product = torch.matmul,
    ):
        super().__init__(snapshot.weights, slow, product)
        self.coefficients, self.keys = snapshot.coefficients, keys

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self.coefficients:
            return super().__call__(name, x)
        u, finite = self.coefficients[name], self.weights[name]
        learned = self.product(self.scores(x[..., 1:], u).exp(), u)
        # a normalised memory stores one column more than F has, and its F is zero
        return learned if u.shape[3] > finite.shape[2] else learned + super().__call__(name, x)

    def scores(self, x: Tensor, u: Tensor) -> Tensor:
        """x.k_i for the keys that have coefficients u."""
        assert self.keys is not None
        return self.product(x, self.keys[:, :, : u.shape[2]].mT)

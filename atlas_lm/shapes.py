"""The letters of every shape in the library, and the tensors that travel between its parts.

b batch, t time, h heads, k key width, v value width, f hidden width of a memory, D feature width,
c window, p polynomial degree, d embedding width. One layout everywhere, `[b, t, h, d]`; inside
`ops`, where a memory reads many tokens with one set of weights, `[b, h, t, d]`.
"""

from collections.abc import Callable

from jaxtyping import Bool, Float, Int
from torch import Tensor

Keys = Float[Tensor, "b t h k"]
Values = Float[Tensor, "b t h v"]
Gate = Float[Tensor, "b t h"]
WindowGate = Float[Tensor, "b t h c"]
TokenFlag = Bool[Tensor, "b t"]
Position = Int[Tensor, "b"]

Weights = dict[str, Tensor]
"""Matrices of a memory by name: `[h out in]` where it begins, `[b h out in]` inside a state."""

Embeddings = Float[Tensor, "b t d"]
TokenIds = Int[Tensor, "b t"]

Product = Callable[[Tensor, Tensor], Tensor]
"""A matrix product; `ops.precision` decides how its operands are rounded."""

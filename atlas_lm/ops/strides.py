"""Where muon steps inside a piece, and which tokens read the memory between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Strides:
    """For r rows (1: all alike), m steps, g memories between them that are read w times at most."""

    points: Tensor
    """`[r m]`: slot of each step."""
    live: Tensor
    """`[r m]`: False where a row has fewer steps."""
    skips_entry: bool
    """No token reads the memory as it entered the piece."""
    cells: Tensor
    """`[r g*w]`: the slot whose token is read in each cell; cells of one memory stand together."""
    place: Tensor
    """`[r l]`: the cell of each slot."""
    since: Tensor
    """`[r g*w]`: 0, or 1 + the slot of the last step, for the token in each cell."""
    groups: int
    aligned: bool
    """Cells are the slots themselves."""


@lru_cache(maxsize=256)
def strides_of(
    starts: tuple[int, ...], lengths: tuple[int, ...], width: int, stride: int, device: torch.device
) -> Strides:
    """For rows whose piece starts at these positions and has these lengths."""
    rows = list(zip(starts, lengths, strict=True))
    points = [[s for s in range(n) if (p + s + 1) % stride == 0] for p, n in rows]
    group = [
        [sum(s <= slot for s in row) for slot in range(n)]
        for row, (_, n) in zip(points, rows, strict=True)
    ]
    steps = max(map(len, points))
    skips = steps > 0 and all(g > 0 for row in group for g in row)
    rank = [[row[:i].count(g) for i, g in enumerate(row)] for row in group]
    wide = 1 + max((i for row in rank for i in row), default=0)
    count = steps + (not skips)
    cells = [[0] * (count * wide) for _ in rows]
    since = [[0] * (count * wide) for _ in rows]
    place = [[0] * width for _ in rows]
    for r, row in enumerate(group):
        for slot, g in enumerate(row):
            cell = (g - skips) * wide + rank[r][slot]
            cells[r][cell], place[r][slot] = slot, cell
            since[r][cell] = 1 + points[r][g - 1] if g else 0
    live = [[True] * len(row) + [False] * (steps - len(row)) for row in points]
    padded = [row + [0] * (steps - len(row)) for row in points]

    def tensor(rows: list, dtype=torch.int64) -> Tensor:
        return torch.tensor(rows, dtype=dtype, device=device).view(len(starts), -1)

    aligned = all(row == list(range(width)) for row in cells)
    return Strides(
        points=tensor(padded),
        live=tensor(live, torch.bool),
        skips_entry=skips,
        cells=tensor(cells),
        place=tensor(place),
        since=tensor(since),
        groups=count,
        aligned=aligned,
    )

"""Multi-query associative recall (Arora et al. 2023): pairs are told, keys come back among noise.

    tokens    k1 v1 k2 v2 k3 v3   k2  .  k1  .   .  .  k3  .
    targets    -  -  -  -  -  -   v2  -  v1  -   -  -  v3  -

Every key comes back once, on an even place after the pairs; the gap before it is drawn from a power
law, so that most come soon and some late. A dot is any token of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atlas_lm.models.lm import NO_TARGET

MOST_PAIRS = 256
"""Where the number of pairs is not said: no more than in the longest published rows."""


def mqar(
    count: int,
    length: int,
    generator: torch.Generator | None = None,
    *,
    vocab: int = 8192,
    pairs: int = 0,
    power: float = 0.01,
) -> tuple[Tensor, Tensor]:
    """Tokens and targets `[b t]`.

    vocab    keys are 1 to vocab/2 - 1 and values the upper half, both without repetition in a row;
             0 is no key, since the authors' code fills with random tokens where it finds a 0
    pairs    told in a row; 0: a quarter of its tokens, as in the published tests, at most 256
    power    gap g = 1, 2, ... has probability proportional to g^(power - 1); 1 is uniform
    """
    half, pairs = vocab // 2, mqar_told(length, pairs=pairs)
    if not (1 <= pairs < half and 4 * pairs <= length):
        raise ValueError(
            f"mqar: {pairs} pairs in {length} tokens with {max(half - 1, 0)} keys; expected at "
            "least 4 tokens a pair, and a vocab of at least twice the pairs and 2"
        )
    keys = distinct(count, pairs, half - 1, generator) + 1
    values = distinct(count, pairs, vocab - half, generator) + half
    asked = 2 * pairs + 2 * power_law_gaps(
        count, pairs, (length - 2 * pairs) // 2, power, generator
    )
    tokens = torch.randint(vocab, (count, length), generator=generator)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    tokens.scatter_(1, asked, keys)
    targets = torch.full_like(tokens, NO_TARGET).scatter_(1, asked, values)
    return tokens, targets


def mqar_answers(*, vocab: int, **_: float) -> int:
    """Possible answers: every value of the vocabulary."""
    return vocab - vocab // 2


def mqar_told(length: int, *, pairs: int, **_: float) -> int:
    """Values that a row of so many tokens tells."""
    return pairs or min(length // 4, MOST_PAIRS)


def distinct(count: int, size: int, most: int, generator: torch.Generator | None) -> Tensor:
    """`[b size]` of 0 to most - 1, none twice in a row, every such row equally likely."""
    if 4 * size > most:
        order = torch.rand(count, most, generator=generator, dtype=torch.float64).argsort(1)
        return order[:, :size]
    # what repeats is drawn again; no id is treated unlike another, so no row is likelier
    found = torch.randint(most, (count, size), generator=generator)
    while True:
        ordered, place = found.sort(dim=1, stable=True)
        repeats = torch.zeros_like(found, dtype=torch.bool)
        repeats.scatter_(1, place[:, 1:], ordered[:, 1:] == ordered[:, :-1])
        again = int(repeats.sum())
        if not again:
            return found
        found[repeats] = torch.randint(most, (again,), generator=generator)


def power_law_gaps(
    count: int, size: int, room: int, power: float, generator: torch.Generator | None
) -> Tensor:
    """`[b size]` of 0 to room - 1: drawn one after the other by the power law, none twice.

    A race gives the same in one go: the first of independent exponential times, each with its
    probability for rate, is drawn by the law, the second by the law of what is left, and so on.
    """
    rate = torch.arange(1, room + 1, dtype=torch.float64) ** (power - 1)
    drawn = torch.rand(count, room, generator=generator, dtype=torch.float64)
    times = -torch.log1p(-drawn) / rate
    return times.argsort(1)[:, :size]

"""What is left of a pair after so many tokens, for rules and retentions.

Two streams of up to 100,000 tokens, read as they come and never held as a whole:

    open      every token is a new random pair and is written; at the end pairs of every age are
              asked for. What is forgotten here is overwritten
    closed    a few pairs are stored, then the rate is 0 for the rest of the stream and only the
              retention acts; the pairs are asked for on the way

A pair is recalled if its value is nearest, in direction, to what is read, among it and 63 values
that were never told: chance is 1/64. Layers normalise what is read, so there its length does not
count; how much of the value is left is told beside it, for what is written later comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, product

import torch
from torch import Tensor

from atlas_lm.eval.mechanism.measured import Interval, Result, Watch, interval
from atlas_lm.eval.mechanism.pairs import (
    Pairs,
    Setting,
    check_rules,
    constant_gates,
    initial_memory,
    random_pairs,
    read,
    settings_grid,
    store_best,
    with_chunk,
    write,
)
from atlas_lm.ops import MemoryState
from atlas_lm.rules import RULES, Rule
from atlas_lm.shapes import Weights

SEGMENT = 2048


@dataclass(frozen=True, kw_only=True)
class ForgettingSettings:
    """How far, and what is kept on the way."""

    rules: tuple[str, ...] = (
        "linear_attention",
        "gated_delta_net",
        "swla",
        "dla",
        "titans",
        "omeganet",
        "atlas",
    )
    retentions: tuple[float, ...] = (1.0, 0.9999, 0.999, 0.99)
    tokens: int = 100_000
    asked: int = 32
    """Pairs of about one age."""
    pairs: int = 8
    """Stored before the gate closes."""
    passes: int = 32
    others: int = 63
    d_k: int = 12
    d_v: int = 24
    hidden: int = 48
    chunk: int = 8
    """Of rules that have a longer one, and the stride of those with muon."""
    draws: int = 4
    tuned_on: int = 1024
    """Tokens after which the gates that recall the last 16 best are chosen, for each retention."""
    multiples: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_rules(self.rules)


QUICK = ForgettingSettings(
    rules=("delta_net", "titans"), retentions=(1.0, 0.99), tokens=512, draws=2, asked=8, tuned_on=64
)


@dataclass(frozen=True)
class Forgetting:
    """Recall at one distance."""

    rule: str
    gate: str
    """`open` or `closed`."""
    retention: float
    distance: int
    """Tokens since; with an open gate the middle of a range of ages, by their logarithm."""
    accuracy: Interval
    strength: Interval
    """<answer, value>; with a closed gate, as a share of what it was when the gate closed."""
    rate: float
    """0 where the gate is closed."""


def measure_forgetting(
    settings: ForgettingSettings | None = None, watch: Watch[tuple[str, str]] = iter
) -> Result:
    settings = settings or ForgettingSettings()
    streams = {"open": open_stream, "closed": closed_stream}
    cases = list(product(settings.rules, streams))
    rows = [row for name, gate in watch(cases) for row in streams[gate](name, settings)]
    return Result("forgetting", settings, tuple(rows))


def open_stream(name: str, settings: ForgettingSettings) -> list[Forgetting]:
    """New pairs all the time; at the end, pairs of every age are asked for."""
    rule, weights, others = made(name, settings)
    gates = best_for_the_newest(rule, weights, others, settings)
    state: MemoryState | None = None
    for start, stop in spans(0, settings.tokens):
        part = stream_part(start, stop, settings)
        state = write(part, rule, constant_gates(rule, gates, len(part), part.keys), weights, state)
    assert state is not None
    rows = []
    for first, last in age_ranges(settings.tokens):
        asked = pairs_of_age(first, last, settings)
        middle = round((first * last) ** 0.5)
        rows += rows_at("open", middle, gates, name, asked, state, settings)
    return rows


def closed_stream(name: str, settings: ForgettingSettings) -> list[Forgetting]:
    """Pairs stored, then a rate of 0; only the retention acts."""
    rule, weights, others = made(name, settings)
    pairs = random_pairs(
        settings.pairs, settings.draws, settings.d_k, settings.d_v, settings.seed + 4
    )
    grid = settings_grid(rule, settings.multiples)
    stored = store_best(pairs, rule, grid, weights, settings.passes, others)
    gates = [replace(stored.setting.closed(), retention=a) for a in settings.retentions]
    state, rows = stored.state[[0] * len(gates)], []
    begin = strength(read(pairs.keys, rule, weights, state), pairs)
    for before, distance in pairwise((0, *distances(settings.tokens))):
        for start, stop in spans(before, distance):
            part = stream_part(start, stop, settings)
            state = write(
                part, rule, constant_gates(rule, gates, len(part), part.keys), weights, state
            )
        rows += rows_at("closed", distance, gates, name, pairs, state, settings, begin)
    return rows


def rows_at(
    gate: str,
    distance: int,
    gates: list[Setting],
    name: str,
    asked: Pairs,
    state: MemoryState,
    settings: ForgettingSettings,
    begin: Tensor | float = 1.0,
) -> list[Forgetting]:
    """What the memories, one row a retention, say to these pairs."""
    rule, weights, others = made(name, settings)
    found = read(asked.keys, rule, weights, state)
    right, left = recalled(found, asked, others), strength(found, asked) / begin
    return [
        Forgetting(name, gate, g.retention, distance, interval(r, 0, 1), interval(s), g.rate)
        for g, r, s in zip(gates, right, left, strict=True)
    ]


def made(name: str, settings: ForgettingSettings) -> tuple[Rule, Weights, Tensor]:
    """A rule, its initial memory, and values that are never told."""
    rule, draws = with_chunk(RULES[name], settings.chunk), settings.draws
    if rule.optimizer == "muon":
        rule = replace(rule, stride=rule.chunk)
    sizes = draws, settings.d_k, settings.d_v
    weights = initial_memory(rule, *sizes, settings.seed + 2, settings.hidden)
    return rule, weights, random_pairs(settings.others, *sizes, settings.seed + 3).values


def best_for_the_newest(
    rule: Rule, weights: Weights, others: Tensor, settings: ForgettingSettings
) -> list[Setting]:
    """For each retention, the constant gates that recall most of the last pairs of a stream."""
    part = stream_part(0, settings.tuned_on, settings)
    newest, best = part[-16:], []
    for retention in settings.retentions:
        grid = settings_grid(rule, settings.multiples, retention=retention)
        state = write(part, rule, constant_gates(rule, grid, len(part), part.keys), weights)
        right = recalled(read(newest.keys, rule, weights, state), newest, others)
        best.append(grid[int(right.mean(1).argmax())])
    return best


def recalled(found: Tensor, asked: Pairs, others: Tensor) -> Tensor:
    """The share of pairs whose value beats all that were never told: `[rows draws]`."""
    own = (found * asked.values).sum(-1, keepdim=True)
    rivals = torch.einsum("rnhv,mhv->rnhm", found, others)
    # below the smallest normal number decay rounds to itself, and what is left is signs
    least = torch.finfo(found.dtype).tiny
    return (own > rivals.clamp(min=least)).all(-1).double().mean(1)


def strength(found: Tensor, asked: Pairs) -> Tensor:
    """How long answers are in the direction of what was told: `[rows draws]`."""
    return (found * asked.values).sum(-1).mean(1)


def stream_part(start: int, stop: int, settings: ForgettingSettings) -> Pairs:
    """Tokens of the stream, the same however it is cut: every block has a seed of its own."""
    blocks = []
    for block in range(start // SEGMENT, (stop - 1) // SEGMENT + 1):
        seed = settings.seed + 10_000 + block
        blocks.append(random_pairs(SEGMENT, settings.draws, settings.d_k, settings.d_v, seed))
    keys, values = (torch.cat([getattr(b, n) for b in blocks]) for n in ("keys", "values"))
    first = start // SEGMENT * SEGMENT
    return Pairs(keys, values)[start - first : stop - first]


def spans(start: int, stop: int) -> list[tuple[int, int]]:
    """From start to stop, cut where blocks of the stream end."""
    inner = range((start // SEGMENT + 1) * SEGMENT, stop, SEGMENT)
    return list(pairwise((start, *inner, stop)))


def age_ranges(tokens: int) -> list[tuple[int, int]]:
    """1 to 8, 9 to 16, 17 to 32 tokens ago, and so on."""
    ends = [0, min(8, tokens)]
    while ends[-1] < tokens:
        ends.append(min(2 * ends[-1], tokens))
    return [(a + 1, b) for a, b in pairwise(ends)]


def distances(tokens: int) -> list[int]:
    """1, 4, 16, ... and the end."""
    return [*(4**i for i in range(40) if 4**i < tokens), tokens]


def pairs_of_age(first: int, last: int, settings: ForgettingSettings) -> Pairs:
    """Some pairs that were told first to last tokens before the end; 1 is the last token."""
    ages = torch.linspace(first, last, min(settings.asked, last - first + 1)).round().long()
    places = (settings.tokens - ages).unique()
    blocks = [stream_part(int(p), int(p) + 1, settings) for p in places]
    return Pairs(torch.cat([b.keys for b in blocks]), torch.cat([b.values for b in blocks]))

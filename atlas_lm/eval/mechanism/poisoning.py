"""What a burst of bad tokens costs the pairs that were stored before it.

Bursts, all of keys and values of the same length as good ones:

    misleading    the stored keys, each with the value of another
    random        pairs that have nothing to do with the stored ones
    adversarial   one document made to erase: keys and values moved by gradient, through the
                  operation and its gate, to where the error on the stored pairs is largest

Gates during the burst:

    open      as they were when the pairs were stored
    surprise  the rate times min(1, s / e): e how far the memory is from a token's value before
              the burst, s the median of the same over the stored pairs. A token that surprises
              more is listened to less
    closed    rate 0, retention 1
    masked    the operation is told that there are no such tokens

`learned` is the share of the burst's own pairs that are recalled after it: a gate that refuses
everything protects everything and learns nothing.

A closed gate costs exactly nothing with gd and with muon. With momentum it does not: W moves on by
theta S, the momentum that was there before, and only the mask stops that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from atlas_lm.eval.mechanism.measured import Interval, Result, Watch, interval
from atlas_lm.eval.mechanism.pairs import (
    Pairs,
    Stored,
    accuracy,
    check_rules,
    constant_gates,
    initial_memory,
    random_pairs,
    read,
    settings_grid,
    store_best,
    unit,
    values_of,
    with_chunk,
)
from atlas_lm.ops import Gates, MemoryState, memorize
from atlas_lm.rules import RULES, Rule

BURSTS = ("misleading", "random", "adversarial")
GATES = ("open", "surprise", "closed", "masked")


@dataclass(frozen=True, kw_only=True)
class PoisoningSettings:
    """What is stored, and what comes after it."""

    rules: tuple[str, ...] = (
        "linear_attention",
        "delta_net",
        "swla",
        "dla",
        "titans",
        "omeganet",
        "atlas",
    )
    pairs: int = 8
    passes: int = 16
    tokens: tuple[int, ...] = (1, 4, 16, 64)
    """Of the burst."""
    others: int = 56
    """Values that were never told, among which the right one has to be found too."""
    d_k: int = 8
    d_v: int = 16
    hidden: int = 32
    chunk: int = 8
    """Of rules that have a longer one: a step for every telling of the pairs."""
    draws: int = 12
    ascent_steps: int = 30
    multiples: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_rules(self.rules)


QUICK = PoisoningSettings(
    rules=("delta_net", "titans"), tokens=(4,), draws=2, passes=8, ascent_steps=3
)


@dataclass(frozen=True)
class Poisoning:
    """One burst through one gate."""

    rule: str
    burst: str
    gate: str
    tokens: int
    before: Interval
    after: Interval
    lost: Interval
    """Accuracy on the stored pairs before the burst, less that after it."""
    learned: Interval
    """The share of the burst's pairs that are recalled after it."""


def measure_poisoning(
    settings: PoisoningSettings | None = None, watch: Watch[str] = iter
) -> Result:
    settings = settings or PoisoningSettings()
    rows = [row for name in watch(settings.rules) for row in poison_rule(name, settings)]
    return Result("poisoning", settings, tuple(rows))


def poison_rule(name: str, settings: PoisoningSettings) -> list[Poisoning]:
    """Every burst through every gate, on memories that hold the same pairs."""
    draws, d_k, d_v = settings.draws, settings.d_k, settings.d_v
    pairs = random_pairs(settings.pairs, draws, d_k, d_v, settings.seed)
    others = random_pairs(settings.others, draws, d_k, d_v, settings.seed + 1).values
    stored = store(with_chunk(RULES[name], settings.chunk), pairs, others, settings)
    rows = []
    for burst, tokens, gate in product(BURSTS, settings.tokens, GATES):
        poison = burst_of(burst, tokens, pairs, stored, settings, gate)
        state = after_burst(poison, gate, pairs, stored)
        found = read(pairs.keys, stored.rule, stored.weights, state)
        after = accuracy(found, pairs.values, others)[0]
        own = read(poison.keys, stored.rule, stored.weights, state)
        rows.append(
            Poisoning(
                rule=name,
                burst=burst,
                gate=gate,
                tokens=tokens,
                before=interval(stored.accuracy, 0, 1),
                after=interval(after, 0, 1),
                lost=interval(stored.accuracy - after),
                learned=interval(learned(own, poison, others), 0, 1),
            )
        )
    return rows


def store(rule: Rule, pairs: Pairs, others: Tensor, settings: PoisoningSettings) -> Stored:
    draws, d_k, d_v = settings.draws, settings.d_k, settings.d_v
    weights = initial_memory(rule, draws, d_k, d_v, settings.seed + 2, settings.hidden)
    grid = settings_grid(rule, settings.multiples)
    return store_best(pairs, rule, grid, weights, settings.passes, others)


def burst_of(
    burst: str,
    tokens: int,
    pairs: Pairs,
    stored: Stored,
    settings: PoisoningSettings,
    gate: str = "open",
) -> Pairs:
    """The bad tokens, in order. An adversary knows the gate; a gate that is shut has nothing to
    climb, and meets what was made for an open one."""
    draws, d_k, d_v = settings.draws, settings.d_k, settings.d_v
    noise = random_pairs(tokens, draws, d_k, d_v, settings.seed + 3)
    if burst == "misleading":
        at = torch.arange(tokens) % len(pairs)
        return Pairs(pairs.keys[at], pairs.values[(at + 1) % len(pairs)])
    if burst == "random":
        return noise
    known = gate if gate == "surprise" else "open"
    return adversarial(noise, pairs, stored, settings.ascent_steps, known)


def adversarial(start: Pairs, pairs: Pairs, stored: Stored, steps: int, gate: str) -> Pairs:
    """Gradient ascent on the error of the stored pairs, over the tokens of the burst; keys and
    values keep their length. Where it did most harm is kept."""
    free = [x.clone().requires_grad_() for x in (start.keys, start.values)]
    optimizer = torch.optim.Adam(free, lr=0.2)
    worst, most = start, torch.full((start.keys.shape[1],), -torch.inf)
    for _ in range(steps + 1):
        burst = Pairs(unit(free[0]), values_of(free[1]))
        state = after_burst(burst, gate, pairs, stored)
        found = read(pairs.keys, stored.rule, stored.weights, state)[0]
        # what decides is the direction of an answer, so that is what is turned away
        harm = -(unit(found) * pairs.values).sum((0, 2))
        better = (harm > most).detach()[:, None]
        now = Pairs(burst.keys.detach(), burst.values.detach())
        worst = Pairs(
            torch.where(better, now.keys, worst.keys), torch.where(better, now.values, worst.values)
        )
        most = torch.maximum(most, harm.detach())
        optimizer.zero_grad()
        (-harm.sum()).backward()
        optimizer.step()
    return worst


def after_burst(burst: Pairs, gate: str, pairs: Pairs, stored: Stored) -> MemoryState:
    """The memory, one row, after the burst went through a gate."""
    rule, setting = stored.rule, stored.setting
    setting = setting.closed() if gate == "closed" else setting
    gates = constant_gates(rule, [setting], len(burst), burst.keys)
    if gate == "surprise":
        gates = less_for_surprise(gates, burst, pairs, stored)
    mask = torch.zeros(1, len(burst), dtype=torch.bool) if gate == "masked" else None
    keys, values = burst.keys[None], burst.values[None]
    return memorize(keys, keys, values, gates, stored.weights, rule, state=stored.state, mask=mask)[
        1
    ]


def less_for_surprise(gates: Gates, burst: Pairs, pairs: Pairs, stored: Stored) -> Gates:
    def surprise(asked: Pairs) -> Tensor:
        found = read(asked.keys, stored.rule, stored.weights, stored.state)
        return (found - asked.values).norm(dim=-1)

    usual = surprise(pairs).median(1, keepdim=True).values
    share = (usual / surprise(burst).clamp(min=1e-9)).clamp(max=1)
    return gates._replace(rate=gates.rate * share)


def learned(found: Tensor, burst: Pairs, others: Tensor) -> Tensor:
    """Each value of the burst against those that were never told: `[draws]`."""
    own = (found * burst.values).sum(-1, keepdim=True)
    rivals = torch.einsum("rnhv,mhv->rnhm", found, others)
    return (own > rivals).all(-1).double().mean(1)[0]

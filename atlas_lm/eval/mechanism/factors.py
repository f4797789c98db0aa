"""One factor at a time around `atlas`: what it does to recall, and what a token then costs.

Random pairs are told a few times, then all are asked for: the share whose value is the nearest to
what is read. Every variant runs at the best constant gates of the same grid of multiples of its
natural rate, so that none is judged by a rate made for another. Time is that of the operation
alone, forward, of the processor, in units of `atlas` itself, run in turns with it: the fastest of a
few runs each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import process_time

from atlas_lm.eval.mechanism.measured import Interval, Result, Watch, interval
from atlas_lm.eval.mechanism.pairs import (
    Setting,
    constant_gates,
    initial_memory,
    random_pairs,
    settings_grid,
    store_best,
    write,
)
from atlas_lm.rules import RULES, Rule

FACTORS: dict[str, tuple] = {
    "degree": (1, 2, 3),
    "window": (1, 4, 16, 64),
    "stride": (1, 4, 16, 64),
    "ns_steps": (1, 3, 5, 8),
    "chunk": (4, 16, 64, 256),
    "retention": (1.0, 0.999, 0.99, 0.9),
    "optimizer": ("gd", "momentum", "muon"),
    "network": ("linear", "mlp", "gated_mlp"),
    "features": ("identity", "polynomial"),
    "norm": (False, True),
}
"""Fields of a rule and the values they take; retention is the gate."""


@dataclass(frozen=True, kw_only=True)
class FactorSettings:
    """The pairs that every variant is asked for."""

    factors: tuple[str, ...] = tuple(FACTORS)
    pairs: int = 64
    passes: int = 4
    d_k: int = 8
    d_v: int = 16
    hidden: int = 32
    draws: int = 8
    multiples: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0)
    momenta: tuple[float, ...] = (0.5, 0.9, 0.97)
    timed_tokens: int = 512
    timed_runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [f for f in self.factors if f not in FACTORS]
        if unknown:
            raise ValueError(f"factors: {unknown[0]!r} is not one of {', '.join(FACTORS)}")


QUICK = FactorSettings(
    factors=("window", "stride"), pairs=16, passes=2, draws=2, multiples=(1.0, 3.0),
    momenta=(0.9,), timed_tokens=128, timed_runs=1,
)  # fmt: skip


@dataclass(frozen=True)
class Factor:
    """`atlas` with one field at another value."""

    factor: str
    value: str
    base: bool
    """Whether this is `atlas` as it is."""
    accuracy: Interval
    error: Interval
    time: float
    """Of a token; `atlas` is 1."""
    state_bytes: int
    """Of one head."""
    rate: float
    momentum: float


def measure_factors(
    settings: FactorSettings | None = None, watch: Watch[tuple[str, object]] = iter
) -> Result:
    settings = settings or FactorSettings()
    cases = [(factor, value) for factor in settings.factors for value in FACTORS[factor]]
    rows, atlas = [], None
    for factor, value in watch(cases):
        if variant(factor, value) == variant("retention", 1.0) and atlas is not None:
            rows.append(replace(atlas, factor=factor, value=str(value)))
            continue
        row = factor_of(factor, value, settings)
        rows.append(row)
        atlas = row if row.base else atlas
    return Result("factors", settings, tuple(rows))


def factor_of(factor: str, value, settings: FactorSettings) -> Factor:
    rule, retention = variant(factor, value)
    pairs = random_pairs(settings.pairs, settings.draws, settings.d_k, settings.d_v, settings.seed)
    weights = initial_memory(
        rule, settings.draws, settings.d_k, settings.d_v, settings.seed + 1, settings.hidden
    )
    grid = settings_grid(rule, settings.multiples, settings.momenta, retention)
    stored = store_best(pairs, rule, grid, weights, settings.passes)
    base = (rule, retention) == variant("retention", 1.0)
    return Factor(
        factor=factor,
        value=str(value),
        base=base,
        accuracy=interval(stored.accuracy, 0, 1),
        error=interval(stored.error, 0),
        time=1.0 if base else time_beside_atlas(rule, stored.setting, settings),
        state_bytes=stored.state.nbytes // settings.draws,
        rate=stored.setting.rate,
        momentum=stored.setting.momentum,
    )


def variant(factor: str, value) -> tuple[Rule, float]:
    """`atlas` with one field changed, and what cannot be there without it taken back."""
    atlas = RULES["atlas"]
    if factor == "retention":
        return atlas, value
    changes = {factor: value}
    if value == "linear":
        changes["norm"] = False
    return replace(atlas, **changes), 1.0


def time_beside_atlas(rule: Rule, setting: Setting, settings: FactorSettings) -> float:
    """The fastest run over the fastest of `atlas`, which took turns on the same tokens."""
    times: dict[Rule, list[float]] = {}
    for _ in range(settings.timed_runs):
        for each in (RULES["atlas"], rule):
            times.setdefault(each, []).append(seconds(each, setting, settings))
    return min(times[rule]) / min(times[RULES["atlas"]])


def seconds(rule: Rule, setting: Setting, settings: FactorSettings) -> float:
    """Of the processor, for one reading."""
    tokens, draws = settings.timed_tokens, settings.draws
    pairs = random_pairs(tokens, draws, settings.d_k, settings.d_v, settings.seed + 2)
    weights = initial_memory(
        rule, draws, settings.d_k, settings.d_v, settings.seed + 1, settings.hidden
    )
    gates = constant_gates(rule, [setting], tokens, pairs.keys)
    start = process_time()
    write(pairs, rule, gates, weights)
    return process_time() - start

"""How many pairs a memory holds, against the number of its parameters.

Random pairs are written until one of two things breaks: `exact`, the read error is below 5 % of the
values (0.01 % for least squares, exact or not), or `retrieval`, the value nearest to what
is read is the right one for 95 % of the pairs. Each memory is filled in several ways:

    least_squares   linear memories only: the best matrix there is, and keys of any length. It
                    holds D pairs, the width of its features, because D independent columns are a
                    basis: D = C(d + p, p), or d for plain keys
    unit_keys       the same for keys of length 1, as layers make them. Their squares add up to 1,
                    so monomials depend on each other: C(d + p - 2, p - 2) fewer pairs
    offline         deep memories only: Adam on all pairs at once, which no rule may do; what the
                    network could hold, found from below
    one_pass        the rule's own optimiser, every pair read once
    many_passes     the same, every pair read many times

Inner optimisers run at the best constant gates of a small grid: the delta rule for linear memories,
the better of momentum and muon for deep ones.

No memory can hold more than P / d_v pairs of arbitrary values exactly: n pairs are n d_v equations
in P unknowns, and the image of a smooth map has no volume in a space of more dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import comb

import torch
from torch import Tensor

from atlas_lm.eval.mechanism.measured import Interval, Result, Watch, interval
from atlas_lm.eval.mechanism.pairs import (
    Pairs,
    accuracy,
    constant_gates,
    initial_memory,
    random_pairs,
    read,
    relative_error,
    settings_grid,
    unit,
    write,
)
from atlas_lm.ops.features import default_coefficients, feature_width, features_of
from atlas_lm.ops.networks import SLOW
from atlas_lm.ops.recall import recall
from atlas_lm.ops.state import Recollection
from atlas_lm.rules import Rule

Error = Tensor
Accuracy = Tensor
Fit = Callable[[Rule, Pairs, "CapacitySettings"], tuple[Error, Accuracy]]
"""Fills a memory with pairs; error and accuracy of every draw."""


@dataclass(frozen=True, kw_only=True)
class CapacitySettings:
    """Which memories are filled, and with how much patience."""

    networks: tuple[str, ...] = ("linear", "mlp", "gated_mlp")
    degrees: tuple[int, ...] = (1, 2, 3)
    """1: the keys themselves."""
    widths: tuple[int, ...] = (4, 8, 16)
    """d_k; values are twice as wide, the hidden layer four times."""
    draws: int = 4
    passes: int = 32
    offline_steps: int = 700
    most_parameters: int = 6_000
    """Larger memories are left out."""
    most_inner_parameters: int = 2_000
    """Larger memories, twice as large where linear, are not filled by inner optimisers."""
    error: float = 0.05
    accuracy: float = 0.95
    seed: int = 0


QUICK = CapacitySettings(degrees=(1,), widths=(4,), draws=2, passes=8, offline_steps=100)


@dataclass(frozen=True)
class Capacity:
    """Pairs that one kind of memory held, filled in one way."""

    network: str
    degree: int
    d_k: int
    d_v: int
    parameters: int
    features: int
    """D, the width of what the first layer sees."""
    fit: str
    exact: Interval
    retrieval: Interval
    counting_bound: float
    """P / d_v."""


@dataclass(frozen=True)
class Case:
    network: str
    degree: int
    d_k: int

    @property
    def rule(self) -> Rule:
        features = "identity" if self.degree == 1 else "polynomial"
        degree = self.degree if self.degree > 1 else 2
        # the propositions are about plain networks
        norm = None if self.network == "linear" else False
        return Rule(
            network=self.network, features=features, degree=degree, norm=norm, retention="none"
        )

    @property
    def d_v(self) -> int:
        return 2 * self.d_k

    def memory(self, draws: int, seed: int = 0):
        return initial_memory(self.rule, draws, self.d_k, self.d_v, seed)

    @property
    def parameters(self) -> int:
        return sum(w[0].numel() for n, w in self.memory(1).items() if n not in SLOW)


def measure_capacity(
    settings: CapacitySettings | None = None, watch: Watch[tuple[Case, str]] = iter
) -> Result:
    """Every memory filled in every way that it can be."""
    settings = settings or CapacitySettings()
    rows = [capacity_of(case, fit, settings) for case, fit in watch(cases_of(settings))]
    return Result("capacity", settings, tuple(rows))


def cases_of(settings: CapacitySettings) -> list[tuple[Case, str]]:
    cases = []
    for names in product(settings.networks, settings.degrees, settings.widths):
        case = Case(*names)
        if case.parameters > settings.most_parameters:
            continue
        most = settings.most_inner_parameters * (2 if case.network == "linear" else 1)
        best = ("least_squares", "unit_keys") if case.network == "linear" else ("offline",)
        cases += [(case, fit) for fit in best]
        cases += [(case, "one_pass"), (case, "many_passes")] if case.parameters <= most else []
    return cases


def capacity_of(case: Case, fit: str, settings: CapacitySettings) -> Capacity:
    """More and more pairs, until no draw can hold them."""
    bound = case.parameters / case.d_v
    held = {name: torch.zeros(settings.draws) for name in ("exact", "retrieval")}
    going = {name: torch.ones(settings.draws, dtype=torch.bool) for name in held}
    tolerance = 1e-4 if fit in ("least_squares", "unit_keys") else settings.error
    for count in counts_to_try(bound, unit_key_rank(case.degree, case.d_k)):
        pairs = random_pairs(count, settings.draws, case.d_k, case.d_v, settings.seed + count)
        error, right = FITS[fit](case.rule, pairs, settings)
        passed = {"exact": error < tolerance, "retrieval": right >= settings.accuracy}
        for name in held:
            going[name] = going[name] & passed[name]
            held[name] = torch.where(going[name], float(count), held[name])
        if not any(bool(g.any()) for g in going.values()):
            break
    return Capacity(
        network=case.network,
        degree=case.degree,
        d_k=case.d_k,
        d_v=case.d_v,
        parameters=case.parameters,
        features=feature_width(case.rule, case.d_k),
        fit=fit,
        exact=interval(held["exact"], at_least=0),
        retrieval=interval(held["retrieval"], at_least=0),
        counting_bound=bound,
    )


def counts_to_try(bound: float, rank: int) -> list[int]:
    """Shares of the bound, and both limits of linear memories with one pair more."""
    shares = (
        *(i / 16 for i in (1, 2, 3, 4, 6, 8, 10, 12, 14)),
        1.0,
        1.125,
        1.25,
        1.5,
        2.0,
        3.0,
        4.0,
    )
    exact = {rank, rank + 1, int(bound) + 1}
    return sorted({max(int(bound * share), 1) for share in shares} | exact)


def unit_key_rank(degree: int, d_k: int) -> int:
    """How many independent features keys of length 1 have."""
    return d_k if degree == 1 else comb(d_k + degree, degree) - comb(d_k + degree - 2, degree - 2)


def unit_keys(rule: Rule, pairs: Pairs, settings: CapacitySettings) -> tuple[Error, Accuracy]:
    """Keys of length 1 to the last digit."""
    return best_matrix(rule, unit(pairs.keys.double()), pairs.values.double())


def least_squares(rule: Rule, pairs: Pairs, settings: CapacitySettings) -> tuple[Error, Accuracy]:
    """Keys of lengths 0.5 to 1.5."""
    generator = torch.Generator().manual_seed(settings.seed)
    lengths = 0.5 + torch.rand(*pairs.keys.shape[:2], 1, generator=generator, dtype=torch.float64)
    return best_matrix(rule, unit(pairs.keys.double()) * lengths, pairs.values.double())


def best_matrix(rule: Rule, keys: Tensor, values: Tensor) -> tuple[Error, Accuracy]:
    """The one that errs least."""
    phi = features_of(rule, default_coefficients(rule, keys))(keys.transpose(0, 1))
    inverse = torch.linalg.pinv(phi, rtol=1e-11)
    found = (phi @ (inverse @ values.transpose(0, 1))).transpose(0, 1)[None]
    return relative_error(found, values)[0], accuracy(found, values)[0]


def offline(rule: Rule, pairs: Pairs, settings: CapacitySettings) -> tuple[Error, Accuracy]:
    """Adam on all pairs together, from the initial memory of the rule."""
    draws, d_k, d_v = *pairs.keys.shape[1:], pairs.values.shape[-1]
    weights = initial_memory(rule, draws, d_k, d_v, settings.seed)
    fast = {n: w.clone().requires_grad_() for n, w in weights.items() if n not in SLOW}
    optimizer = torch.optim.Adam(fast.values(), lr=0.02, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=settings.offline_steps + 1, pct_start=0.1
    )

    def found() -> Tensor:
        now = Recollection(rule=rule, weights={n: w[None] for n, w in fast.items()}, past={})
        return recall(pairs.keys[None], weights, rule, now)

    for _ in range(settings.offline_steps):
        optimizer.zero_grad()
        (found() - pairs.values).square().sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        last = found()
    return relative_error(last, pairs.values)[0], accuracy(last, pairs.values)[0]


def inner(
    rule: Rule, pairs: Pairs, settings: CapacitySettings, passes: int
) -> tuple[Error, Accuracy]:
    """The optimisers of the rules, each draw at the best gates of the grid for all draws."""
    told = pairs.repeated(passes)
    draws, d_k, d_v = *pairs.keys.shape[1:], pairs.values.shape[-1]
    weights = initial_memory(rule, draws, d_k, d_v, settings.seed)
    errors, rights = [], []
    for variant, multiples in inner_rules(rule):
        grid = settings_grid(variant, multiples, momenta=(0.9,))
        state = write(told, variant, constant_gates(variant, grid, len(told), told.keys), weights)
        found = read(pairs.keys, variant, weights, state)
        errors.append(relative_error(found, pairs.values))
        rights.append(accuracy(found, pairs.values))
    error, right = torch.cat(errors), torch.cat(rights)
    return error[error.mean(1).argmin()], right[right.mean(1).argmax()]


def inner_rules(rule: Rule) -> list[tuple[Rule, tuple[float, ...]]]:
    """The rule with the optimisers that it is filled by, and multiples of their natural rates."""
    if not rule.deep:
        return [(replace(rule, chunk=1), (0.25, 0.5, 1.0, 1.5))]
    return [
        (replace(rule, optimizer="momentum", chunk=8), (0.3, 1.0, 3.0, 6.0)),
        (replace(rule, optimizer="muon", chunk=8, stride=8), (0.01, 0.03, 0.1)),
    ]


def one_pass(rule: Rule, pairs: Pairs, settings: CapacitySettings) -> tuple[Error, Accuracy]:
    return inner(rule, pairs, settings, 1)


def many_passes(rule: Rule, pairs: Pairs, settings: CapacitySettings) -> tuple[Error, Accuracy]:
    return inner(rule, pairs, settings, settings.passes)


FITS: dict[str, Fit] = {
    "least_squares": least_squares,
    "unit_keys": unit_keys,
    "offline": offline,
    "one_pass": one_pass,
    "many_passes": many_passes,
}


def proposition(network: str, degree: int, d_k: int, d_v: int) -> float | None:
    """What the paper says a memory holds, with the constant of its O() taken as 1.

    Proposition 1: a matrix on the keys, d_k. Proposition 2: on their monomials, of which there are
    C(d_k + p, p). Theorem 1: a deep memory on the keys, at least d_k d_v. It says nothing of deep
    memories on monomials.
    """
    if network != "linear":
        return float(d_k * d_v) if degree == 1 else None
    return float(d_k if degree == 1 else comb(d_k + degree, degree))

"""Context against tokens: pairs that no rule of window 1 can hold, and a window of c tokens can.

    a1 b1 . . . . . .   a2 b2 . . . . . .   ...     `.` is a pause: key and value 0

Two keys of length 1 that are alike, <a, b> = rho, have orthonormal values; then comes a pause.
Groups are orthogonal to each other. At the end every key is read from a linear memory. A matrix
that holds all pairs exactly exists, since the keys are linearly independent.

Why window 1 fails, with gd or momentum, at any rates, retention and momentum, even a different one
for every token. Let v be the value of b and w = v^T W the row of the memory that answers in its
direction; W is zero at first. Before b no token has any part of v, so w = 0. The gradient at b,
(W b - v) b^T, has the part -b^T in it. After b every pause has gradient 0, and other groups have
keys orthogonal to a and b and no part of v. So w ends as s b^T, for some number s: it answers s at
b, where 1 was told, and s rho at a, where 0 was told. The squared error of a group is at least

    min over s of (1 - s)^2 + (s rho)^2 = rho^2 / (1 + rho^2)

out of 2. A window of c visits both pairs together c - 1 times, each a step of gradient descent on
both errors: at a rate of 1 either direction keeps rho^(c-1) of its error.

It is an effect of optimisation, not of information: the memory is large enough, and window 1 solves
the task too if the pairs are told again and again (`told_again`, as many times as a window would
visit them). What a window buys is that they need not be. The argument does not cover muon, which
mixes rows; it is measured here, with a rate that falls to 0 while the pairs leave the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from atlas_lm.eval.mechanism.measured import Interval, Result, Watch, interval
from atlas_lm.eval.mechanism.pairs import Pairs, read, relative_error, write
from atlas_lm.ops import Gates
from atlas_lm.rules import Rule


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """How alike keys are, and what is tried."""

    windows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    optimizers: tuple[str, ...] = ("gd", "momentum", "muon")
    alike: tuple[float, float] = (0.85, 0.95)
    """rho of every group, drawn between these."""
    groups: int = 4
    span: int = 66
    """Tokens of a group with its pause: no less than the longest window and 2."""
    rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 4.0)
    muon_rates: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    momenta: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    draws: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.span < max(self.windows) + 2:
            raise ValueError(
                f"span: {self.span} tokens end before a window of {max(self.windows)} has left the "
                f"pairs; expected {max(self.windows) + 2} or more"
            )


QUICK = ContextSettings(windows=(1, 2, 8, 32), span=34, draws=2, momenta=(0.5,))


@dataclass(frozen=True)
class Context:
    """Read error at the best gates of the grid, next to what window 1 cannot get below."""

    optimizer: str
    window: int
    visits: int
    """How often each pair is seen: once by each step whose window it is in."""
    told_again: bool
    error: Interval
    floor: Interval
    """Of every rule with window 1 and gd or momentum that is told each pair once."""
    rate: float
    momentum: float | None


@dataclass(frozen=True)
class Case:
    optimizer: str
    window: int
    times: int
    """How often the pairs of a group are told."""


def measure_context(settings: ContextSettings | None = None, watch: Watch[Case] = iter) -> Result:
    """Windows swept for every optimiser; and window 1, told as often as a window would visit."""
    settings = settings or ContextSettings()
    cases = [Case(o, c, 1) for o, c in product(settings.optimizers, settings.windows)]
    cases += [Case("gd", 1, c) for c in settings.windows if 2 * c <= settings.span]
    return Result("context", settings, tuple(context_of(c, settings) for c in watch(cases)))


def context_of(case: Case, settings: ContextSettings) -> Context:
    told, keys, alike = groups(settings, case.times)
    rule = Rule(window=case.window, optimizer=case.optimizer, chunk=1, retention="none")
    rates = settings.muon_rates if case.optimizer == "muon" else settings.rates
    momenta = settings.momenta if rule.uses_momentum else (0.5,)
    grid = list(product(rates, momenta))
    weights = {"w": torch.zeros(settings.draws, *told.values.shape[-1:], keys.keys.shape[-1])}
    weights = {n: w.to(told.keys.dtype) for n, w in weights.items()}
    gates = gates_of(rule, grid, told, settings)
    error = relative_error(
        read(keys.keys, rule, weights, write(told, rule, gates, weights)), keys.values
    )
    best = int(error.mean(1).argmin())
    return Context(
        optimizer=case.optimizer,
        window=case.window,
        visits=case.window * case.times,
        told_again=case.times > 1,
        error=interval(error[best], at_least=0),
        floor=interval(error_floor(alike)),
        rate=grid[best][0],
        momentum=grid[best][1] if rule.uses_momentum else None,
    )


def groups(settings: ContextSettings, times: int = 1) -> tuple[Pairs, Pairs, Tensor]:
    """All tokens in order; the pairs to ask for; rho of every group and draw `[g h]`."""
    generator = torch.Generator().manual_seed(settings.seed)
    width, count, draws = 2 * settings.groups, settings.groups, settings.draws

    def basis() -> Tensor:
        square = torch.randn(draws, width, width, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(square)[0].transpose(0, 1)

    low, high = settings.alike
    alike = low + (high - low) * torch.rand(count, draws, generator=generator, dtype=torch.float64)
    directions, values = basis(), basis()
    first, second = directions[0::2], directions[1::2]
    rho = alike.unsqueeze(-1)
    second = rho * first + (1 - rho**2).sqrt() * second
    keys = torch.stack([first, second], 1).flatten(0, 1)
    tokens = torch.arange(count)[:, None] * settings.span + torch.arange(2 * times)
    pair = 2 * torch.arange(count)[:, None] + torch.arange(2 * times) % 2
    stream = Pairs(*(torch.zeros(count * settings.span, draws, width).double() for _ in range(2)))
    stream.keys[tokens.flatten()] = keys[pair.flatten()]
    stream.values[tokens.flatten()] = values[pair.flatten()]
    return stream, Pairs(keys, values), alike


def gates_of(rule: Rule, grid: list, told: Pairs, settings: ContextSettings) -> Gates:
    """Constant for gd and momentum. Muon steps by its rate whatever the gradient, so its rate
    falls to 0 from the second pair to the end of the window."""
    rows, (tokens, draws) = len(grid), told.keys.shape[:2]
    rate, momentum = (told.keys.new_tensor(x)[:, None, None] for x in zip(*grid, strict=True))
    shape = torch.ones(tokens).to(told.keys)
    if rule.optimizer == "muon":
        since = torch.arange(tokens) % settings.span
        shape = (1 - (since - 1).clamp(min=0) / rule.window).clamp(min=0).to(told.keys)
    ones = told.keys.new_ones(rows, tokens, draws)
    return Gates(
        retention=ones,
        rate=ones * rate * shape[:, None],
        momentum=ones * momentum if rule.uses_momentum else None,
        importance=told.keys.new_ones(rows, tokens, draws, rule.window),
    )


def error_floor(alike: Tensor) -> Tensor:
    """What no rule of window 1 with gd or momentum gets below: rho `[g h]`, floor `[h]`."""
    return (alike**2 / (1 + alike**2) / 2).mean(0).sqrt()

"""What the memories of the recall table hold where nothing but gates and a start can be learned.

    python -m benchmarks.evidence.binding --out results/binding

Two heads, values of 32 numbers, keys of 32, or of 16 on polynomial features, all of them drawn at
random, so that no layer has to find them. Two questions to the operation:

told      random pairs told once, no other tokens, nothing learned: which are recalled at the gates
          that a layer begins with, and at the best constant ones
learned   rows like those of MQAR, where the token of a key writes something that nobody asks for
          before the token of its value writes the pair, and so does every token that asks. Adam
          learns the gates of each of these three kinds of tokens, the initial memory, and how it
          is read. Said: the share recalled before, after, and on longer rows
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, rms_norm, silu

from atlas_lm.eval.mechanism.measured import Interval, Result, interval
from atlas_lm.eval.mechanism.pairs import (
    Pairs,
    Setting,
    accuracy,
    constant_gates,
    initial_memory,
    random_pairs,
    read,
    unit,
    write,
)
from atlas_lm.nn.gates import GateMaps
from atlas_lm.nn.initialise import initialise
from atlas_lm.ops import init_memory, memorize
from atlas_lm.ops.features import default_coefficients
from atlas_lm.rules import RULES, Rule
from atlas_lm.whole_files import write_whole
from benchmarks.command import run
from benchmarks.evidence.models import changed
from benchmarks.evidence.tables import ATLAS, NEWEST

HEADS, D_V = 2, 32
"""Of a layer of the table at width 64."""
MULTIPLES = tuple(2.0**i for i in range(-6, 4))
"""Of the highest rate that a layer can have."""
MOMENTA = (0.5, 0.9, 0.98)
START = Setting(rate=0.5, momentum=0.9, retention=0.999)
"""What a layer begins with, its rate as a share of the highest."""
KINDS = 3
"""Of tokens in a row: of a key, of its value, and one that asks."""


@dataclass(frozen=True)
class Case:
    """A memory of the table, or one that differs from it in a part."""

    name: str
    rule: Rule
    d_k: int = 32
    coefficients: tuple[float, ...] | None = None
    """Of polynomial features, to begin with; None: 1 / i!."""
    newest: float | None = None
    """Share of the newest pair in a window, to begin with; None: that of each other."""
    weighed: bool = False
    """Whether the gate of the rate weighs what a token adds to the gradients, too, so that Muon's
    momentum, which takes in every token alike, can leave one out."""

    def first_coefficients(self) -> Tensor | None:
        if self.coefficients is None:
            return default_coefficients(self.rule, torch.ones(1))
        return torch.tensor(self.coefficients)


def of_table(name: str, **fields: object) -> Case:
    """A model of the recall table, with these fields changed."""
    rule = changed(name, **ATLAS) if RULES[name].deep else RULES[name]
    rule = replace(rule, **fields)  # pyright: ignore[reportArgumentType]
    said = " ".join(f"{n}={v}" for n, v in fields.items())
    return Case(f"{name} {said}".strip(), rule, 16 if rule.features == "polynomial" else 32)


def beginning(case: Case, coefficients: tuple[float, ...]) -> Case:
    said = ",".join(f"{a:g}" for a in coefficients)
    return replace(case, name=f"{case.name} a={said}", coefficients=coefficients)


def newest_first(case: Case) -> Case:
    return replace(case, name=f"{case.name} newest={NEWEST}", newest=NEWEST)


def weighed(case: Case) -> Case:
    return replace(case, name=f"{case.name}, weighed", weighed=True)


def cases() -> list[Case]:
    """Models of the table, and from titans to atlas by single parts, the quick ones first."""
    names = ("linear_attention", "gated_delta_net", "dla", "titans", "omeganet")
    found = [of_table(name) for name in names]
    wide = replace(of_table("omeganet"), name="omeganet d_k=32", d_k=32)
    short = replace(of_table("titans"), name="titans d_k=16", d_k=16)
    found += [
        of_table("titans", window=16),
        short,
        of_table("titans", features="polynomial"),
        of_table("omeganet", window=1),
        wide,
        beginning(of_table("omeganet"), (0.1, 1.0, 0.5)),
        beginning(of_table("omeganet"), (0.1, 1.0, 1.0)),
        beginning(of_table("omeganet"), (0.01, 1.0, 1.0)),
        replace(
            of_table("linear_attention", objective="l2", optimizer="muon", chunk=16, stride=4),
            name="linear memory, muon",
        ),
        of_table("titans", optimizer="muon", stride=16),
        of_table("titans", optimizer="muon", stride=4),
        weighed(of_table("titans", optimizer="muon", stride=4)),
        of_table("titans", optimizer="muon", stride=4, window=16),
        of_table("atlas"),
        weighed(of_table("atlas")),
        beginning(of_table("atlas"), (0.1, 1.0, 1.0)),
        newest_first(of_table("omeganet")),
        newest_first(of_table("atlas")),
    ]
    return found


PARTS = ("told", "without_noise", "learned")
WITHOUT_NOISE = (
    "gated_delta_net",
    "titans",
    "omeganet",
    "linear memory, muon",
    "titans optimizer=muon stride=4",
    "atlas",
)
"""Cases that also learn from rows in which tokens of keys write nothing."""


# Told once


@dataclass(frozen=True)
class Told:
    """Pairs told once to memories that nobody trained."""

    case: str
    pairs: int
    keys: str
    start: Interval
    """Share recalled at the gates that a layer begins with."""
    best: Interval
    """At the best constant ones, chosen with other draws."""
    setting: Setting
    """The best, with the rate as a share of the highest."""


def highest_rate(case: Case) -> float:
    """Of a layer, whose gate can be any share of it."""
    return float(GateMaps(case.rule, 1, 1, 1, 0.999).highest_rate(case.first_coefficients()))


def told(case: Case, pairs: int, draws: int, alike: bool, seed: int = 0) -> Told:
    """`alike`: keys through SiLU as in a layer, which makes most of their numbers positive."""
    drawn = random_pairs(pairs, 2 * draws, case.d_k, D_V, seed)
    if alike:
        drawn = Pairs(unit(silu(drawn.keys * case.d_k**0.5)), drawn.values)
    momenta = MOMENTA if case.rule.uses_momentum else (0.5,)
    grid = [START] + [Setting(rate, theta) for rate in MULTIPLES for theta in momenta]
    weights = initial_memory(case.rule, 2 * draws, case.d_k, D_V, seed + 1)
    real = [_in_full(case, setting) for setting in grid]
    with torch.no_grad():
        state = write(drawn, case.rule, constant_gates(case.rule, real, pairs, drawn.keys), weights)
        right = accuracy(read(drawn.keys, case.rule, weights, state), drawn.values)
    best = int(right[:, :draws].mean(1).argmax())
    return Told(
        case=case.name,
        pairs=pairs,
        keys="alike" if alike else "random",
        start=interval(right[0, draws:], 0, 1),
        best=interval(right[best, draws:], 0, 1),
        setting=grid[best],
    )


def _in_full(case: Case, setting: Setting) -> Setting:
    """As the operation takes it."""
    rate = setting.rate * highest_rate(case)
    if case.rule.optimizer == "momentum":
        rate *= 1 - setting.momentum
    return replace(setting, rate=rate)


# Learned


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How gates and a start are learned."""

    pairs: int = 64
    batch: int = 4
    steps: int = 100
    lr: float = 1e-2
    tests: tuple[int, ...] = (64, 128, 256)
    """Pairs of the rows that are asked in the end."""
    rows: int = 32
    """Of a test."""
    noise: bool = True
    """Whether tokens of keys write something themselves."""
    seeds: int = 2


@dataclass(frozen=True)
class Learned:
    """One memory and one seed."""

    case: str
    noise: bool
    seed: int
    before: float
    """Share recalled with the gates and the start of a layer."""
    half: int | None
    """Steps until half was recalled in five steps running, on average."""
    after: dict[int, float]
    oldest: dict[int, float]
    """Of the quarter of the pairs that was told first."""
    newest: dict[int, float]
    gates: dict[str, list[float]]
    """By kind of token, mean of the heads; rates as shares of the highest."""
    gradient: float
    """Median norm, before it is clipped at 1."""
    seconds: float


@dataclass(frozen=True)
class Rows:
    """What a memory is given, and which of the pairs `[b n]` is asked for, at the end of a row."""

    q: Tensor
    k: Tensor
    v: Tensor
    kinds: Tensor
    values: Tensor
    asked: Tensor


def rows_of(
    pairs: int, rows: int, d_k: int, generator: torch.Generator, noise: bool = True
) -> Rows:
    def drawn(count: int, width: int) -> Tensor:
        return unit(torch.randn(rows, count, HEADS, width, generator=generator))

    keys, values = drawn(pairs, d_k), drawn(pairs, D_V)
    asked = torch.rand(rows, pairs, generator=generator).argsort(1)
    queries = keys.gather(1, asked[..., None, None].expand(-1, -1, HEADS, d_k))
    if noise:
        keys = torch.stack([drawn(pairs, d_k), keys], 2).flatten(1, 2)
        told = torch.stack([drawn(pairs, D_V), values], 2).flatten(1, 2)
    else:
        told = values
    kinds = torch.tensor(([0, 1] if noise else [1]) * pairs + [2] * pairs)
    return Rows(
        q=torch.cat([keys, queries], 1),
        k=torch.cat([keys, drawn(pairs, d_k)], 1),
        v=torch.cat([told, drawn(pairs, D_V)], 1),
        kinds=one_hot(kinds, KINDS).float().expand(rows, -1, -1),
        values=values,
        asked=asked,
    )


class Learner(nn.Module):
    """A memory with the gates of a layer, which know the kind of a token and nothing else."""

    def __init__(self, case: Case):
        super().__init__()
        self.rule, self.weighed = case.rule, case.weighed
        self.gates = GateMaps(case.rule, KINDS, HEADS, 8, START.retention, case.newest)
        initialise(self)
        made = init_memory(case.rule, HEADS, case.d_k, D_V)
        self.memory = nn.ParameterDict(made)
        first = case.first_coefficients()
        self.log_coefficients = None
        if first is not None:
            self.log_coefficients = nn.Parameter(first.log().repeat(HEADS, 1))
        self.read = nn.Parameter(torch.eye(D_V).repeat(HEADS, 1, 1))
        self.scale = nn.Parameter(torch.tensor(log(8 / D_V**0.5)))

    @property
    def coefficients(self) -> Tensor | None:
        return None if self.log_coefficients is None else self.log_coefficients.exp()

    def forward(self, rows: Rows) -> Tensor:
        """How near what is read lies to every value of the row, `[b asked pairs]`."""
        a = self.coefficients
        gates = self.gates(rows.kinds, a)
        if self.weighed:
            share = (gates.rate / self.gates.highest_rate(a)).unsqueeze(-1)
            gates = gates._replace(importance=gates.importance * share)
        y, _ = memorize(
            rows.q, rows.k, rows.v, gates, dict(self.memory.items()), self.rule, coefficients=a
        )
        y = y[:, -rows.asked.shape[1] :]
        y = torch.einsum("bthv,hvw->bthw", rms_norm(y, y.shape[-1:]), self.read)
        return torch.einsum("bthv,bnhv->btn", y, rows.values) * self.scale.exp()

    @torch.no_grad()
    def gates_by_kind(self) -> dict[str, list[float]]:
        a = self.coefficients
        gates = self.gates(torch.eye(KINDS)[None], a)
        rate = gates.rate / self.gates.highest_rate(a)
        if self.rule.optimizer == "momentum":
            assert gates.momentum is not None
            rate = rate / (1 - gates.momentum)
        said = {"rate": rate, "retention": gates.retention, "momentum": gates.momentum}
        return {n: g[0].mean(-1).tolist() for n, g in said.items() if g is not None}


@torch.no_grad()
def asked(learner: Learner, case: Case, pairs: int, told_by: Learning) -> tuple[float, ...]:
    """Share recalled: of all pairs, of the quarter told first, of the quarter told last."""
    generator = torch.Generator().manual_seed(10_000)
    rows = rows_of(pairs, told_by.rows, case.d_k, generator, told_by.noise)
    right = (learner(rows).argmax(-1) == rows.asked).double()
    first, last = rows.asked < pairs // 4, rows.asked >= pairs - pairs // 4
    return tuple(float(x) for x in (right.mean(), right[first].mean(), right[last].mean()))


def learned(case: Case, how: Learning, seed: int) -> Learned:
    """Adam on rows that are new at every step."""
    begun = process_time()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    learner = Learner(case)
    optimizer = torch.optim.Adam(learner.parameters(), lr=how.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, how.lr, total_steps=how.steps + 1, pct_start=0.1
    )
    before = asked(learner, case, how.pairs, how)[0]
    curve, norms = [], []
    for _ in range(how.steps):
        rows = rows_of(how.pairs, how.batch, case.d_k, generator, how.noise)
        scores = learner(rows)
        optimizer.zero_grad()
        cross_entropy(scores.flatten(0, 1), rows.asked.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(learner.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        curve.append(float((scores.argmax(-1) == rows.asked).double().mean()))
    found = {pairs: asked(learner, case, pairs, how) for pairs in how.tests}
    return Learned(
        case=case.name,
        noise=how.noise,
        seed=seed,
        before=before,
        half=steps_to_half(curve),
        after={n: shares[0] for n, shares in found.items()},
        oldest={n: shares[1] for n, shares in found.items()},
        newest={n: shares[2] for n, shares in found.items()},
        gates=learner.gates_by_kind(),
        gradient=float(torch.tensor(norms).median()),
        seconds=process_time() - begun,
    )


def steps_to_half(curve: Sequence[float], running: int = 5) -> int | None:
    for end in range(running, len(curve) + 1):
        if sum(curve[end - running : end]) >= 0.5 * running:
            return end
    return None


# The command


def measure_told(counts: Sequence[int], draws: int) -> Result:
    names = ("linear_attention", "gated_delta_net", "dla", "titans", "omeganet", "atlas")
    found = []
    for name in names:
        for pairs in counts:
            found += [told(of_table(name), pairs, draws, alike) for alike in (False, True)]
            print(found[-2], found[-1], sep="\n", flush=True)
    return Result("told", {"pairs": tuple(counts), "draws": draws}, tuple(found))


def measure_learned(chosen: Sequence[Case], how: Learning) -> Result:
    found = []
    for case in chosen:
        for seed in range(how.seeds):
            found.append(learned(case, how, seed))
            print(found[-1], flush=True)
    return Result("learned", asdict(how), tuple(found))


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.binding")
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("results/binding"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="+", help="names of those to learn; all if none is named")
    parser.add_argument("--pairs", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--steps", type=int, default=Learning.steps)
    parser.add_argument("--seeds", type=int, default=Learning.seeds)
    said = parser.parse_args(args)
    named = {case.name: case for case in cases()}
    unknown = [name for name in said.cases or () if name not in named]
    if unknown:
        raise ValueError(f"cases: {', '.join(unknown)}: not among {'; '.join(named)}")
    torch.set_num_threads(1)
    chosen = [named[name] for name in said.cases or named]
    how = Learning(steps=said.steps, seeds=said.seeds)
    said.out.mkdir(parents=True, exist_ok=True)
    quiet = [case for case in chosen if case.name in WITHOUT_NOISE]
    measured = {
        "told": lambda: measure_told(said.pairs, said.draws),
        "without_noise": lambda: measure_learned(quiet, replace(how, noise=False)),
        "learned": lambda: measure_learned(chosen, how),
    }
    for part in said.parts:
        text = json.dumps(measured[part]().to_dict(), indent=1)
        write_whole(said.out / f"{part}.json", (text + "\n").encode())


if __name__ == "__main__":
    run(main, "evidence")

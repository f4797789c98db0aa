"""How fast a layer is on a GPU, beside its targets and its peers: `make bench-gpu`.

One layer with its projections, width 1024, 16 heads, 32,768 tokens in all, everything in bfloat16
(parameters too; the memory keeps its state in float32). Medians of 10 calls after 4 warm-ups.

No speed without numbers: y and every gradient of the operation are first compared with float64
(`atlas_lm.testing.kernels`). A rule that fails shows the errors instead, and the exit code is 1.
Times are comparable only within one run on one machine, which is why the peers run here too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from atlas_lm import init_memory
from atlas_lm.nn.gates import GateMaps
from atlas_lm.nn.memory import MemoryConfig, MemoryLayer
from atlas_lm.ops.features import feature_width
from atlas_lm.ops.kernels import why_not_rule, why_not_sizes
from atlas_lm.rules import RULES, Rule
from atlas_lm.testing.kernels import Comparison, check_kernels, failures
from benchmarks import gpu, peers

RESULTS = Path(__file__).parent.parent / "results" / "speed.json"
WIDTH, HEADS, D_V = 1024, 16, 64
SHAPES = ((8, 4096), (1, 32768))
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
ATLAS = replace(RULES["atlas"], features="identity")


@dataclass(frozen=True)
class Row:
    """A layer to time, and what `anchors.md` wants of it at 8 x 4,096, forward and backward."""

    rule: Rule
    d_k: int = 64
    expansion: int = 4
    first_target: float | None = None
    goal: float | None = None
    """ms"""

    def config(self, impl: str = "auto") -> MemoryConfig:
        return MemoryConfig(
            dim=WIDTH, rule=self.rule, heads=HEADS, d_k=self.d_k, d_v=D_V,
            expansion=self.expansion, impl=impl,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    def runs_as(self, impl: str) -> str:
        """What "auto" comes to on a GPU in bfloat16."""
        if impl != "auto":
            return impl
        weights = init_memory(self.rule, 1, self.d_k, D_V, self.config().hidden)
        reason = why_not_rule(self.rule) or why_not_sizes(self.rule, self.d_k, D_V, weights)
        return "triton" if reason is None else "chunked"


ROWS: dict[str, Row] = {
    "titans": Row(RULES["titans"], 64, 4, 12, 6),
    "omeganet_linear": Row(replace(RULES["omeganet"], network="linear", norm=False), 16, 4, 10, 6),
    "omeganet": Row(RULES["omeganet"], 16, 4, 14, 7),
    "atlas_r64": Row(replace(ATLAS, stride=64), 64, 4, 15, 7),
    "atlas_r16": Row(replace(ATLAS, stride=16), 64, 4, 25, 12),
    "atlas_degree2_r16": Row(replace(RULES["atlas"], stride=16), 16, 4, 20, 9),
    "atlas_r1": Row(ATLAS, 64, 1, 110, 65),
    "atlas_pp_r16": Row(replace(RULES["atlas_pp"], stride=16), 16, 4),
    "gated_delta_net": Row(RULES["gated_delta_net"]),
    "delta_net": Row(RULES["delta_net"]),
    "linear_attention": Row(RULES["linear_attention"]),
}
"""r: stride. Deep memories have expansion * d_k hidden units: 256 at d_k = 64 but for atlas_r1, 64
at d_k = 16; keys of 16 are seen in 153 polynomial features."""
KINDS: dict[str, dict] = {
    "fresh": {"before": 0},
    "carried": {"before": 77},
    "packed": {"before": 77, "packed": True},
}
"""Calls that are compared: a new memory, one in the middle of a chunk, with padding and resets."""
NO_TIME = "no time left (--budget)"
EXCUSES = (NO_TIME, "out of memory")
"""What a row of ours may be without a time for."""
REPLAY_ERROR = 0.01
"""Sums in another order may round otherwise in bfloat16."""
OVER_LENGTH = ("titans", "omeganet", "atlas_r16", "gated_delta_net")


def main() -> None:
    options = parse(sys.argv[1:])
    gpu.require_cuda()
    deadline = gpu.Deadline(options.budget)
    report: dict = {
        "machine": gpu.machine(),
        "shape": f"width {WIDTH}, {HEADS} heads, bfloat16, parameters too",
        "impl": options.impl,
    }
    names, compared = select(options.rules), {}
    timed = names if options.layers else [n for n in names if n in over_length(options, names)]
    for name in tqdm(timed, "numbers", file=sys.stderr):
        compared[name] = numbers(ROWS[name], options.impl)
    report["numbers"] = [summed_up(name, found) for name, found in compared.items()]
    wrong = {name for name, found in compared.items() if isinstance(found, str) or failures(found)}
    sound = [name for name in timed if name not in wrong]
    makers = makers_of(sound, options.impl) | {n: peers.PEERS[n] for n in options.peers}
    # after every row: a run that is stopped keeps what it has
    save = partial(gpu.write, report, options.out)
    if options.layers:
        layers(report.setdefault("layers", []), makers, options, deadline, save)
    if options.lengths:
        long = [n for n in makers if n in (*over_length(options, names), "attention")]
        makers = {n: makers[n] for n in long}
        lengths(report.setdefault("lengths", []), makers, options, deadline, save)
    save()
    show(report, compared)
    rows = [*report.get("layers", []), *report.get("lengths", [])]
    broken = [r for r in rows if not r["peer"] and r.get("skipped", NO_TIME) not in EXCUSES]
    raise SystemExit(1 if wrong or broken else 0)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 repetitions, to see that it runs")
    parser.add_argument("--rules", default="*", help=f"names, * allowed: {', '.join(ROWS)}")
    parser.add_argument(
        "--peers", type=peers.chosen, default="all", help=f"none, all or {', '.join(peers.PEERS)}"
    )
    parser.add_argument(
        "--lengths", nargs="?", type=whole_numbers, const=LENGTHS, help="time over length too"
    )
    parser.add_argument("--no-layers", dest="layers", action="store_false", help="lengths alone")
    parser.add_argument("--impl", choices=("auto", "triton", "chunked"), default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    return parser.parse_args(arguments)


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def select(patterns: str) -> list[str]:
    """Rows by name, `*` allowed."""
    wanted = patterns.split(",")
    unknown = [p for p in wanted if not any(fnmatch(name, p) for name in ROWS)]
    if unknown:
        raise SystemExit(f"--rules: unknown {', '.join(unknown)}; known are {', '.join(ROWS)}")
    return [name for name in ROWS if any(fnmatch(name, p) for p in wanted)]


def over_length(options: argparse.Namespace, names: list[str]) -> tuple[str, ...]:
    """The rules named, or a few."""
    if not options.lengths:
        return ()
    return OVER_LENGTH if options.rules == "*" else tuple(names)


def numbers(row: Row, impl: str) -> list[Comparison] | str:
    """Errors of the operation by `KINDS` of calls, or why there are none."""
    impl = row.runs_as(impl)
    if impl == "chunked":
        return []  # it is the yardstick
    hidden, found = row.config().hidden, []
    compare = partial(
        check_kernels, row.rule, row.d_k, D_V, hidden, heads=4, device=gpu.DEVICE, impl=impl
    )
    try:
        for kind, settings in KINDS.items():
            compared = compare(**settings)
            if failures(compared):  # a tensor of a few numbers may have had bad luck
                compared = compare(**settings, seeds=12)
            found += [replace(c, name=f"{kind} {c.name}") for c in compared]
    except Exception as error:
        return gpu.why(error)
    return found


def summed_up(name: str, found: list[Comparison] | str) -> dict:
    if isinstance(found, str):
        return {"rule": name, "holds": False, "error": found}
    worst = max(found, key=lambda c: c.error / c.allowed, default=None)
    named = (
        {} if worst is None else {"closest": worst.name, "errors": [worst.error, worst.yardstick]}
    )
    wrong = [str(c) for c in failures(found)]
    return {"rule": name, "compared": len(found), "holds": not wrong, "wrong": wrong} | named


def makers_of(names: list[str], impl: str) -> dict[str, Callable[[], nn.Module]]:
    return {name: partial(layer_of, ROWS[name], impl) for name in names}


def layer_of(row: Row, impl: str) -> nn.Module:
    torch.manual_seed(0)
    return peers.Peer(MemoryLayer(row.config(impl))).to(gpu.DEVICE, torch.bfloat16)


def layers(
    rows: list[dict], makers: dict, options: argparse.Namespace, deadline: gpu.Deadline, save
) -> None:
    """Every layer at every shape."""
    todo = [(name, *shape) for name in makers for shape in SHAPES]
    for name, batch, tokens in tqdm(todo, "layers", file=sys.stderr):
        row = {"layer": name, "peer": name in peers.PEERS, "batch": batch, "tokens": tokens}
        row |= measured(makers[name], batch, tokens, options.quick, deadline)
        if name in ROWS:
            row |= {"impl": ROWS[name].runs_as(options.impl)}
            row |= against(ROWS[name], row, batch, tokens)
            row |= replayed(makers[name], batch, tokens, options.quick, deadline)
        rows.append(row)
        save()


def lengths(
    rows: list[dict], makers: dict, options: argparse.Namespace, deadline: gpu.Deadline, save
) -> None:
    """One sequence of every length: what a token costs must not depend on it."""
    todo = [(name, tokens) for name in makers for tokens in options.lengths]
    for name, tokens in tqdm(todo, "lengths", file=sys.stderr):
        make = partial(forgetting_nothing, makers[name])
        row = measured(make, 1, tokens, options.quick, deadline)
        if name in ROWS and "skipped" not in row:
            row |= replayed(make, 1, tokens, options.quick, deadline)
        for what in ("forward", "forward_backward", "replayed"):
            if f"{what}_ms" in row:
                row[f"{what}_us_a_token"] = row[f"{what}_ms"] * 1e3 / tokens
        rows.append({"layer": name, "peer": name in peers.PEERS, "tokens": tokens} | row)
        save()


def forgetting_nothing(make: Callable[[], nn.Module]) -> nn.Module:
    """A layer whose memory keeps all it has: where it forgets, as a new one does, its weights get
    shorter behind their norm, and gradients through hundreds of thousands of tokens not finite."""
    layer = make()
    for maps in layer.modules():
        if isinstance(maps, GateMaps) and maps.rule.retention == "learned":
            rows = slice(maps.heads, 2 * maps.heads)
            with torch.no_grad():
                maps.up.weight[rows], maps.up.bias[rows] = 0, -1
    return layer


def measured(
    make: Callable[[], nn.Module], batch: int, tokens: int, quick: bool, deadline: gpu.Deadline
) -> dict:
    """Times and peaks, or the reason why there are none."""
    if deadline.passed():
        return {"skipped": NO_TIME}
    repeats, warm_ups = (3, 2) if quick else (10, 4)
    found: dict = {}
    try:
        layer = make()
        like = next(layer.parameters())
        x = torch.randn(batch, tokens, WIDTH, device=like.device, dtype=like.dtype)
        for what, call in (("forward", forward), ("forward_backward", forward_backward)):
            run, clear = call(layer, x)
            taken = gpu.cost(run, clear, repeats, warm_ups)
            found |= {f"{what}_ms": taken.ms, f"{what}_gib": taken.gib}
        found["tokens_s"] = batch * tokens / found["forward_backward_ms"] * 1e3
        if not all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None):
            found = {"skipped": "a gradient is not finite"}
    except Exception as error:
        found["skipped"] = gpu.why(error)
    finally:
        layer = x = run = clear = None
        torch.cuda.empty_cache()
    return found


def replayed(
    make: Callable[[], nn.Module], batch: int, tokens: int, quick: bool, deadline: gpu.Deadline
) -> dict:
    """Forward and backward recorded as a CUDA graph: what is left where the host launches nothing.
    A graph whose numbers are not those of its calls gets no time."""
    if deadline.passed():
        return {}
    try:
        call = gradients(make(), batch, tokens)
        expected = [x.clone() for x in call()]
        graph = gpu.Recorded(call)
        off = max(map(gpu.difference, graph(), expected), key=lambda e: (e != e, e))  # NaN is most
        if not off <= REPLAY_ERROR:
            return {"not_replayed": f"off by {off:.2g}"}
        taken = gpu.cost(graph, lambda: None, *((3, 2) if quick else (10, 4)))
        return {"replayed_ms": taken.ms}
    except Exception as error:
        return {"not_replayed": gpu.why(error)}
    finally:
        call = expected = graph = None
        torch.cuda.empty_cache()


def gradients(layer: nn.Module, batch: int, tokens: int) -> Callable[[], list[Tensor]]:
    """y, and the gradients of all that goes in."""
    like = next(layer.parameters())
    x, pull = torch.randn(2, batch, tokens, WIDTH, device=like.device, dtype=like.dtype)
    inputs = [x.requires_grad_(), *layer.parameters()]

    def call() -> list[Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, inputs, pull.to(y.dtype))]

    return call


def forward(layer: nn.Module, x: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    def call() -> object:
        with torch.no_grad():
            return layer(x)

    return call, lambda: None


def forward_backward(
    layer: nn.Module, x: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    x = x.clone().requires_grad_()
    pull = torch.randn_like(x)

    def call() -> None:
        y = layer(x)
        y.backward(pull.to(y.dtype))

    def clear() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)

    return call, clear


def against(row: Row, found: dict, batch: int, tokens: int) -> dict:
    """Targets, and the share of the GPU's peak that useful operations reach."""
    if "forward_backward_ms" not in found:
        return {}
    ms = found["forward_backward_ms"]
    share = 3 * flops(row) * batch * tokens / (ms / 1e3) / gpu.PEAK_FLOPS
    out: dict = {"share_of_peak": share}
    if row.goal is not None and row.first_target is not None:
        out |= {
            "first_target_ms": row.first_target,
            "goal_ms": row.goal,
            "times_goal": ms / row.goal,
        }
    return out


def flops(row: Row) -> float:
    """Useful operations of one token forward; a backward is twice that, recomputing is not counted.

    projections     2 (dim * channels + 2 dim * heads d_v + dim * rank + rank * gates)
    each fast weight matrix [o i] of a head: 2 o i for its keys, its reads and its writes, once more
    for the error passing back through it (none for the first map), and twice more with a momentum
    (its own sum, its own read); b (o + i) for the pairs inside a chunk of b, half of which are past
    Newton-Schulz   steps (4 m^2 n + 2 m^3) on [m n], m <= n, at every stride-th token
    """
    rule, config = row.rule, row.config()
    gates = HEADS * (3 + rule.window)
    channels = HEADS * (2 * row.d_k + D_V)
    total = 2.0 * WIDTH * (channels + 2 * HEADS * D_V + config.gate_rank)
    total += 2 * config.gate_rank * gates
    width = feature_width(rule, row.d_k)
    hidden = config.hidden
    if hidden is None:
        matrices = {"w": (D_V, width)}
    else:
        matrices = {"w1": (D_V, hidden), "w2": (hidden, width)}
        if rule.network == "gated_mlp":
            matrices["w3"] = (hidden, width)
    for name, (o, i) in matrices.items():
        passes = 3 + (name == "w1") + 2 * rule.uses_momentum
        total += HEADS * (2 * o * i * passes + max(rule.chunk, 64) * (o + i))
        if rule.optimizer == "muon":
            m, n = min(o, i), max(o, i)
            total += HEADS * rule.ns_steps * (4 * m * m * n + 2 * m**3) / rule.stride
    return total


def show(report: dict, compared: dict) -> None:
    """Tables on stdout, what failed last."""
    gpu.table("numbers: the tensor closest to twice the error of chunked", shown_numbers(report))
    gpu.table("layers: ms, forward + backward and forward", shown_layers(report))
    gpu.table("one sequence: microseconds a token", shown_lengths(report))
    for name, found in compared.items():
        lines = [found] if isinstance(found, str) else map(str, failures(found))
        for line in lines:
            print(f"WRONG {name}: {line}")


def shown_numbers(report: dict) -> list[dict]:
    return [
        {
            "rule": row["rule"],
            "holds": "yes" if row["holds"] else "NO",
            "compared": row.get("compared"),
            "closest": row.get("closest", row.get("error")),
            "error": row.get("errors", [None])[0],
            "of chunked": row.get("errors", [None, None])[1],
        }
        for row in report["numbers"]
    ]


def shown_layers(report: dict) -> list[dict]:
    return [
        {
            "layer": row["layer"],
            "shape": f"{row['batch']}x{row['tokens']}",
            "impl": "peer" if row["peer"] else row["impl"],
            "ms": row.get("forward_backward_ms"),
            "forward ms": row.get("forward_ms"),
            "replayed ms": row.get("replayed_ms", row.get("not_replayed")),
            "GiB": row.get("forward_backward_gib"),
            "tokens/s": row.get("tokens_s"),
            "% of peak": 100 * row["share_of_peak"] if "share_of_peak" in row else None,
            "first": row.get("first_target_ms"),
            "goal": row.get("goal_ms"),
            "x goal": row.get("times_goal"),
            "note": row.get("skipped"),
        }
        for row in report.get("layers", [])
    ]


def shown_lengths(report: dict) -> list[dict]:
    rows: dict[tuple[str, str], dict] = {}
    for row in report.get("lengths", []):
        for what in ("forward", "forward_backward", "replayed"):
            if what == "replayed" and row["peer"]:
                continue
            line = rows.setdefault((row["layer"], what), {"layer": row["layer"], "what": what})
            line[f"{row['tokens']:,}"] = row.get(f"{what}_us_a_token", row.get("skipped"))
    return list(rows.values())


if __name__ == "__main__":
    main()

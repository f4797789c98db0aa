"""What a token costs after how many others: time and bytes of state, next to softmax attention.

Every mixer is a layer as models have it, at the same width, and reads one sequence in segments with
its state carried on. Time is that of the segment that ends at a length, over its tokens: the price
of a token there, not the mean so far. It is the processor's time, of all threads together, so that
waiting for other programs does not count; rounds go through all mixers in turn, and the fastest
counts. Compare within a run only; the ratio to attention is made for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import process_time

import torch

from atlas_lm.eval.mechanism.measured import Result, Watch
from atlas_lm.nn.attention import Attention, AttentionConfig
from atlas_lm.nn.memory import MemoryConfig, MemoryLayer
from atlas_lm.rules import RULES


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """Layers of which width, and how far they read."""

    mixers: tuple[str, ...] = (
        "attention",
        "swa",
        "linear_attention",
        "delta_net",
        "gated_delta_net",
        "swla",
        "dla",
        "titans",
        "omeganet",
        "atlas",
    )
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    segment: int = 1024
    dim: int = 64
    heads: int = 2
    window: int = 512
    """Of `swa`."""
    stride: int = 64
    """Of `atlas`: a step a chunk; one a token costs tens of times more."""
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        odd = [n for n in self.lengths if n % self.segment]
        if odd:
            raise ValueError(f"lengths: {odd[0]} is no multiple of segment={self.segment}")


QUICK = CostSettings(
    mixers=("attention", "delta_net", "titans"), lengths=(256, 512), segment=256, rounds=2
)


@dataclass(frozen=True)
class Cost:
    """One mixer at one length."""

    mixer: str
    tokens: int
    microseconds: float
    """Of the processor, a token, forward: the fastest round."""
    slowest: float
    """The slowest."""
    beside_attention: float | None
    """Time over that of softmax attention at this length; None where that was not run."""
    state_bytes: int
    state_bytes_a_token: float
    """State over all tokens read: what remembering one costs."""


def measure_cost(
    settings: CostSettings | None = None, watch: Watch[tuple[int, str]] = iter
) -> Result:
    """Time and state of every mixer at every length."""
    settings = settings or CostSettings()
    times: dict[tuple[str, int], list[float]] = {}
    sizes: dict[tuple[str, int], int] = {}
    cases = [(turn, mixer) for turn in range(settings.rounds) for mixer in settings.mixers]
    for _, mixer in watch(cases):
        for tokens, seconds, nbytes in read_through(mixer, settings):
            times.setdefault((mixer, tokens), []).append(1e6 * seconds)
            sizes[mixer, tokens] = nbytes
    fastest = {where: min(t) for where, t in times.items()}
    rows = [
        Cost(
            mixer=mixer,
            tokens=n,
            microseconds=fastest[mixer, n],
            slowest=max(t),
            beside_attention=fastest[mixer, n] / fastest["attention", n]
            if "attention" in settings.mixers
            else None,
            state_bytes=sizes[mixer, n],
            state_bytes_a_token=sizes[mixer, n] / n,
        )
        for (mixer, n), t in times.items()
    ]
    return Result("cost", settings, tuple(rows))


@torch.no_grad()
def read_through(mixer: str, settings: CostSettings) -> list[tuple[int, float, int]]:
    """(tokens read, seconds a token there, bytes of state) at every length."""
    layer = layer_of(mixer, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    x = torch.randn(1, settings.segment, settings.dim, generator=generator)
    layer(x)  # whatever is made once is made now
    state, found = layer.begin(1), []
    for stop in range(settings.segment, max(settings.lengths) + 1, settings.segment):
        start = process_time()
        _, state = layer(x, state)
        seconds = (process_time() - start) / settings.segment
        if stop in settings.lengths:
            found.append((stop, seconds, state.nbytes))
    return found


def layer_of(mixer: str, settings: CostSettings) -> Attention | MemoryLayer:
    """A layer at its initial values; its weights do not change what it costs."""
    if mixer in ("attention", "swa"):
        window = settings.window if mixer == "swa" else None
        return Attention(AttentionConfig(dim=settings.dim, heads=settings.heads, window=window))
    if mixer not in RULES:
        raise ValueError(f"mixers: {mixer!r} is not attention, swa or one of {', '.join(RULES)}")
    rule = RULES[mixer]
    if rule.optimizer == "muon":
        rule = replace(rule, stride=settings.stride)
    return MemoryLayer(MemoryConfig(dim=settings.dim, heads=settings.heads, rule=rule))

"""What a model costs: parameters, bytes of state, floating-point operations of a token.

Operations are those of matrix products and triangular systems, two for every multiplication with
its addition, in a forward pass of the chunked form: what stands between them (gates, norms,
convolutions, features) is left out, as is the custom. They are counted while one block of each kind
reads a few tokens on the CPU; blocks of a kind cost the same, and so does every chunk of tokens.

Softmax attention is not counted but computed, 4 dim operations for every token that a token sees: a
causal kernel does that much, and what a CPU does instead is nobody's measure. What grows with the
text costs as much as on average over `length` tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from atlas_lm.models.block import BLOCKS, Block
from atlas_lm.models.config import ModelConfig
from atlas_lm.models.lm import LanguageModel
from atlas_lm.models.summary import grows
from atlas_lm.nn.attention import Attention
from atlas_lm.nn.fla import FlaMixer
from atlas_lm.rules import Rule, rule_of

SHORTEST = 128
"""Tokens that a block reads to be counted, at least."""
LONGEST = 1024
"""At most, where the text has as many."""
STATE_PASSES = 4
"""Operations for a number of the recurrent state of a `fla` layer: it is written and read."""


@dataclass(frozen=True)
class Costs:
    """What a model costs, in numbers that can be compared."""

    parameters: int
    non_embedding: int
    """Without the embedding and the head."""
    state_bytes: int
    """Of one sequence in float32, after `length` tokens."""
    state_grows: bool
    """With every token; otherwise it is the same after any number of them."""
    flops_per_token: float
    """Of a forward pass, on average over `length` tokens."""


class _Read(NamedTuple):
    """What a block took to read some tokens."""

    flops: float
    """Of one of them."""
    state_bytes: float


@lru_cache(maxsize=256)
def costs(config: ModelConfig, length: int = 2048) -> Costs:
    """Of a model that reads `length` tokens."""
    if length < 1:
        raise ValueError(f"length: {length}; expected a number of tokens, 1 or more")
    with torch.device("meta"):
        model = LanguageModel(config)
    parameters = sum(p.numel() for p in model.parameters())
    ends = model.embedding.weight.numel() + (0 if config.tied else model.head_weight.numel())
    blocks = Counter(config.rule_of(layer) for layer in range(config.depth))
    reads = [(count, _block(config, rule, length)) for rule, count in blocks.items()]
    position = torch.zeros(1, dtype=torch.int64).nbytes
    return Costs(
        parameters=parameters,
        non_embedding=parameters - ends,
        state_bytes=round(sum(n * read.state_bytes for n, read in reads)) + position,
        state_grows=any(grows(rule) for rule in blocks),
        flops_per_token=sum(n * read.flops for n, read in reads) + 2 * config.dim * config.vocab,
    )


def _block(config: ModelConfig, rule: str | Rule, length: int) -> _Read:
    """One block over `length` tokens; from two shorter texts where its cost grows evenly."""
    enough = _enough(config, rule)
    if length <= enough:
        return _counted(config, rule, length, length)
    if not grows(rule):
        return _counted(config, rule, enough, length)
    short, long = (_counted(config, rule, n, length) for n in (enough, 2 * enough))
    further = (length - enough) / enough
    return _Read(*(a + (b - a) * further for a, b in zip(short, long, strict=True)))


def _enough(config: ModelConfig, rule: str | Rule) -> int:
    """Tokens after which everything has happened as often as it does on average."""
    known = rule_of(rule)
    periods = [] if known is None else [known.chunk, known.stride]
    if config.block == "mac":
        periods.append(config.segment)
    period = lcm(*periods)
    return min(period * -(-SHORTEST // period), max(LONGEST, *periods, 1))


def _counted(config: ModelConfig, rule: str | Rule, tokens: int, length: int) -> _Read:
    """Read `tokens` tokens and count; attention as over `length` of them."""
    block = _made(config, rule)
    device = next(block.parameters()).device
    x = torch.arange(tokens * config.dim, device=device).sin().view(1, tokens, config.dim)
    begun = block.begin(1)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=_COUNTS) as counter:
        _, state = block(x, begun)
    counted = float(counter.get_total_flops())
    by_module = counter.get_flop_counts()
    for name, part in block.named_modules():
        if isinstance(part, Attention):
            found = by_module.get(f"{type(block).__name__}.{name}", {})
            counted -= sum(n for op, n in found.items() if op not in _MAPS)
    extra_flops = _attended(config, block, length) + _elsewhere(block, state)
    return _Read(counted / tokens + extra_flops, state.nbytes)


_MAPS = (torch.ops.aten.mm, torch.ops.aten.addmm)
"""The linear maps of attention; its other products are those that `_attended` computes."""


def _made(config: ModelConfig, rule: str | Rule) -> Block:
    """A block of the model; random numbers go on elsewhere as if it had not been made."""
    on_gpu = isinstance(rule, str) and rule.startswith("fla:") and torch.cuda.is_available()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = BLOCKS[config.block](replace(config, impl="chunked"), rule).float().eval()
    return block.cuda() if on_gpu else block


def _triangular(system: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    """Forward substitution: n^2 / 2 multiplications with their additions for each column."""
    columns = right.numel() // right[-2]
    return system[-1] ** 2 * columns


def _by_channel(*_: object, **__: object) -> int:
    """What works on each channel by itself is not counted, in whatever call it is done."""
    return 0


_COUNTS = {
    torch.ops.aten.linalg_solve_triangular: _triangular,
    torch.ops.aten.convolution: _by_channel,
}
"""What a counter does not know, or otherwise."""


def _attended(config: ModelConfig, block: nn.Module, length: int) -> float:
    """Scores and sums of softmax attention, for a token on average."""
    total = 0.0
    for part in block.modules():
        if isinstance(part, Attention):
            if config.block == "mac":
                # a token and what the memory says of it, 2 segments' worth of them in a segment
                seen = 2 * min(config.segment, length) + 1 + 2 * config.persistent
            else:
                seen = _seen(part.config.window, length) + config.persistent
            total += 4 * config.dim * seen
    return total


def _seen(window: int | None, length: int) -> float:
    """Tokens that a token sees, itself included, on average."""
    widest = length if window is None else min(window, length)
    return (widest * (widest + 1) / 2 + (length - widest) * widest) / length


def _elsewhere(block: nn.Module, state: object) -> float:
    """What a counter does not see of kernels of others."""
    mixer = getattr(block, "mixer", None)
    if not isinstance(mixer, FlaMixer):
        return 0.0
    return STATE_PASSES * mixer.recurrent_numbers(state)

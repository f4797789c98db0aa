"""One token a row on a GPU: `ops/step.py` in one launch, in float32, outside of any graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import empty_like

from atlas_lm.ops.networks import init_memory
from atlas_lm.ops.pieces import Flags
from atlas_lm.ops.segments import Outer
from atlas_lm.ops.state import Gates, MemoryState
from atlas_lm.ops.triton.launch import launch
from atlas_lm.ops.triton.layout import sizes_of
from atlas_lm.ops.triton.memorize import slow_of
from atlas_lm.ops.triton.reads import Tables, either
from atlas_lm.ops.triton.sizes import LINEAR, Sizes, block
from atlas_lm.ops.triton.step_kernels import (
    GD,
    MOMENTUM,
    MOVES,
    SOME_MOVE,
    STAYS,
    STILL,
    step_kernel,
)
from atlas_lm.rules import RULES, Rule
from atlas_lm.shapes import Keys, Values, Weights

VALUES = 16
"""Of a linear memory, in one program: values do not see each other."""
MOVED_BY = {"gd": GD.value, "momentum": MOMENTUM.value, "muon": STILL.value}
MATRICES = ("w1", "w2", "w3")


class Stepped(NamedTuple):
    y: Values
    weights: Weights
    anchor: Weights
    momentum: Weights


def step(
    q: Keys, k: Keys, v: Values, gates: Gates, outer: Outer, state: MemoryState, ends: Flags,
    *, in_place: bool,
) -> Stepped:  # fmt: skip
    """q `[b 1 h k]`; k, v `[b c h .]` with the window before, the newest last; all in float32.

    Of muon only what happens between its steps. `ends`: rows that end a chunk. in_place: the state
    is moved where it is, and what is returned are its tensors.
    """
    rule, c, heads = state.rule, k.shape[1], q.shape[2]
    sizes = step_sizes(rule, outer.initial, q.shape[-1], v.shape[-1])
    moves = anchors_move(ends, in_place=in_place)
    # at a chunk of one token the weights are the anchor
    anchor = state.weights if rule.chunk == 1 else state.anchor
    parts = state.weights, anchor, state.momentum
    before = [{n: t.contiguous() for n, t in part.items()} for part in parts]
    after = [state.weights, state.anchor, state.momentum]
    if not in_place:
        after = [{n: empty_like(t) for n, t in part.items()} for part in before]
    names = [n for n in MATRICES if n in state.weights] or ["w"]
    names += names[-1:] * (len(MATRICES) - len(names))
    nothing = state.weights[names[0]]
    matrices = (part.get(n, nothing) for part in (*before, *after) for n in names)
    tables, y = Tables.of(slow_of(outer, sizes), sizes, q), v.new_empty(*q.shape[:3], sizes.d_v)
    blocks = triton.cdiv(sizes.d_v, sizes.block_share) if sizes.network == LINEAR else 1
    by_head = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    made = gates.retention, gates.rate, either(gates.momentum, gates.rate), gates.importance
    launch(
        step_kernel, (q.shape[0] * heads, blocks),
        *by_head, *(x.contiguous() for x in made), state.position, *matrices,
        tables.gain, tables.residual, tables.left, tables.right, tables.scale, y, heads, rule.chunk,
        warps=warps_of(sizes), **constants_of(rule, sizes, c, moves),
    )  # fmt: skip
    weights, anchor, momentum = after
    if moves == STAYS.value:
        anchor = weights if ends.all else state.anchor
    return Stepped(y, weights, anchor, momentum)


def anchors_move(ends: Flags, *, in_place: bool) -> int:
    """What the kernel does with the anchors: nothing where they are other tensors afterwards."""
    if ends.none or (ends.all and not in_place):
        return STAYS.value
    return MOVES.value if ends.all else SOME_MOVE.value


def step_sizes(rule: Rule, initial: Weights, d_k: int, d_v: int) -> Sizes:
    """Matrices lie as they are, one by one and not filled up; a tile is at most 64 wide."""
    sizes = sizes_of(rule, initial, d_k, d_v, 1, 0)
    width = 32 if sizes.block_v > 64 else 64
    return sizes._replace(
        pitch=sizes.features,
        block_f=min(width, sizes.block_f),
        block_d=min(64, sizes.block_d),
        block_share=VALUES,
    )


def warps_of(sizes: Sizes) -> int:
    """A program has some values of a linear memory, or all of a deep one."""
    return 4 if sizes.network == LINEAR else 8


def constants_of(rule: Rule, sizes: Sizes, pairs: int, moves: int) -> dict[str, Any]:
    return {
        "C": pairs,
        "ROWS": 1 if pairs == 1 else block(pairs),
        "BY": MOVED_BY[rule.optimizer],
        "RATED": rule.optimizer != "muon" or rule.eta_inside,
        "ANCHOR": moves,
        "DECAY_FIRST": rule.decay_first,
        "S": sizes._replace(heads=0),
    }


def _compilation(name: str, rule: Rule, d_k: int, hidden: int | None) -> dict[str, Any]:
    weights = init_memory(rule, 16, d_k, 64, hidden, device="meta")
    sizes = step_sizes(rule, weights, d_k, 64)
    constants = constants_of(rule, sizes, rule.window, SOME_MOVE.value)
    tables = {"left": "*i32", "right": "*i32", "position": "*i64", "heads": "i32", "chunk": "i32"}
    kinds = tables | dict.fromkeys(constants, "constexpr")
    return {
        "name": f"{step_kernel.fn.__name__} of {name}",
        "fn": step_kernel,
        "signature": {n: kinds.get(n, "*fp32") for n in step_kernel.arg_names},
        "constexprs": constants,
        "num_warps": warps_of(sizes),
        "num_stages": 1,
    }


KERNELS = [
    _compilation("titans", RULES["titans"], 64, 256),
    _compilation("omeganet", RULES["omeganet"], 16, 64),
    _compilation("atlas_pp", RULES["atlas_pp"], 16, 64),
    _compilation("gated_delta_net", RULES["gated_delta_net"], 64, None),
]
"""What is compiled at the sizes that matter, without a GPU."""

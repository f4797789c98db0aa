"""`memorize` by kernels: cut the tokens, mix the gates, run the pieces, put the state together."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.host import to_device
from atlas_lm.ops.pieces import Flags, Pieces, cut_into_pieces
from atlas_lm.ops.segments import Inputs, Outer, finish, prepare
from atlas_lm.ops.state import MemoryState, Tokens
from atlas_lm.ops.triton.additive import ADDITIVE
from atlas_lm.ops.triton.launch import processors
from atlas_lm.ops.triton.layout import flatten, sizes_of, unflatten
from atlas_lm.ops.triton.mixing import additive, stepping
from atlas_lm.ops.triton.muon import MUON
from atlas_lm.ops.triton.reads import Mixed, Plan, Run, Slow
from atlas_lm.ops.triton.sizes import Sizes, block, linear_team, team_for
from atlas_lm.rules import Rule
from atlas_lm.shapes import Values, Weights


def memorize_triton(tokens: Tokens, outer: Outer, state: MemoryState) -> tuple[Values, MemoryState]:
    """q, k, v in the dtype whose products are asked for; gates, weights and state in float32."""
    rule, q = state.rule, tokens.q
    pieces = cut_into_pieces(
        state.position, q.shape[1], tokens.mask, tokens.reset, rule.chunk, rule.window, rule.chunk
    )  # slots for a whole chunk: another length would be another compilation
    window = replace(state, keys=state.keys.to(q.dtype), values=state.values.to(q.dtype))
    inputs = prepare(pieces, window, tokens)
    muon = rule.optimizer == "muon"
    mixed = stepping_of(inputs, pieces, rule) if muon else additive_of(inputs)
    terms = 0 if mixed.steps is None else mixed.steps.shape[-1]
    team = team_of(rule, state.weights, q, tokens.v.shape[-1])
    widths = q.shape[-1], tokens.v.shape[-1], pieces.width
    sizes = sizes_of(rule, state.weights, *widths, terms, team)
    begun = Begun.of(pieces, state, outer, sizes)
    marks, marked = pieces.once(
        ("marks", q.shape[0], sizes.heads), lambda: marks_of(pieces, q.shape[0], sizes.heads)
    )
    newton_schulz = rule.ns_steps, rule.ns_coefficients
    graded = torch.is_grad_enabled()
    plan = Plan(sizes, marks, marked, begun.own, graded, *newton_schulz)
    flat = [x.flatten(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    y, weights, momentum, kept = Run.apply(
        MUON if muon else ADDITIVE, plan, *flat, *mixed, *slow_of(outer, sizes),
        begun.weights, begun.momentum, begun.anchor if begun.own else None, begun.initial,
    )  # fmt: skip
    anchor = last_anchor(pieces, begun, weights, kept, sizes)
    y = pieces.join(y.unflatten(1, (-1, sizes.heads)))

    def named(flat: Tensor | None, like: Weights) -> Weights:
        parts = {} if flat is None else unflatten(flat.unflatten(0, (-1, sizes.heads)), sizes)
        return {n: parts[n] for n in like}

    return y, finish(
        pieces,
        state,
        tokens,
        weights=named(weights, state.weights),
        anchor=named(anchor, state.anchor),
        momentum=named(momentum, state.momentum),
    )


def team_of(rule: Rule, weights: Weights, q: Tensor, d_v: int) -> int:
    """Linear memories need not meet. Triton's interpreter runs one program after the other, where
    those that meet would wait forever."""
    memories, widths = q.shape[0] * q.shape[2], (q.shape[-1], d_v, rule.chunk)
    here = processors(q.device)
    if rule.network == "linear":
        team = linear_team(d_v, memories, here)
        stays = stays_resident(rule, weights, widths, team)
        return team if stays else team_for(d_v, 16, memories, here)
    if q.device.type != "cuda":
        return 1
    return team_in_registers(
        rule, weights, widths, team_for(hidden_of(weights), 32, memories, here)
    )


def hidden_of(weights: Weights) -> int:
    return weights["w2"].shape[-2]


def stays_resident(rule: Rule, weights: Weights, widths: tuple[int, int, int], team: int) -> bool:
    """Whether the members of a team keep their state in registers."""
    terms = int(rule.optimizer == "momentum")
    return sizes_of(rule, weights, *widths, terms, team).resident


def team_in_registers(rule: Rule, weights: Weights, widths: tuple[int, int, int], team: int) -> int:
    """The smallest team, no smaller than this one, whose members keep their state in registers,
    though not all of them may find room on the GPU at once; this one, if there is none."""
    hidden = hidden_of(weights)
    for more in (team, 2, 4):
        whole = more >= team and block(hidden // more) * more == hidden
        if whole and stays_resident(rule, weights, widths, more):
            return more
    return team


def additive_of(inputs: Inputs) -> Mixed:
    """The gates of gd and momentum as mixing matrices."""
    made, count = additive(*Flat.of(inputs)), inputs.alpha.shape[0]
    kept, carried, share, push_kept, push = (
        None if x is None else x.unflatten(0, (count, -1)) for x in made
    )
    assert kept is not None
    if carried is None or push_kept is None or push is None:
        return Mixed(kept, None, share, None, None)
    return Mixed(kept, carried.unsqueeze(-1), share, push_kept.unsqueeze(-1), push.unsqueeze(-2))


def stepping_of(inputs: Inputs, pieces: Pieces, rule: Rule) -> Mixed:
    """The gates of muon as mixing matrices."""
    alpha, eta, theta, gamma, filled = Flat.of(inputs)
    assert theta is not None
    batch, heads = inputs.alpha.shape[1:3]
    points, live = pieces.once(
        ("strides", rule.stride, batch, heads),
        lambda: stride_points(pieces, rule.stride, batch, heads),
    )
    made = stepping(alpha, eta, theta, gamma, filled, points, live, rule.eta_inside)
    kept, steps, push_kept, push = (x.unflatten(0, (inputs.alpha.shape[0], -1)) for x in made)
    return Mixed(kept, steps, None, push_kept, push)


class Flat(NamedTuple):
    """Gates with pieces, rows and heads in one axis, `[n*z ...]`."""

    alpha: Tensor
    eta: Tensor
    theta: Tensor | None
    gamma: Tensor
    filled: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs) -> Flat:
        theta, filled = inputs.theta, inputs.filled
        if filled is not None:
            filled = filled.float().expand_as(inputs.alpha).contiguous()
        return cls(
            inputs.alpha.flatten(0, 2),
            inputs.eta.flatten(0, 2),
            None if theta is None else theta.flatten(0, 2),
            inputs.gamma.flatten(0, 2),
            None if filled is None else filled.flatten(0, 2),
        )


def stride_points(pieces: Pieces, stride: int, batch: int, heads: int) -> tuple[Tensor, Tensor]:
    """`[n*b*h m]`: the slots at which muon steps, and whether there are that many."""
    first = (-pieces.start - 1) % stride
    most = (pieces.length - first + stride - 1).clamp(min=0) // stride
    slots = first[..., None] + stride * torch.arange(int(most.max()))
    live = slots < pieces.length[..., None]

    def flat(x: Tensor) -> Tensor:
        x = x.expand(batch, -1, -1).permute(1, 0, 2).repeat_interleave(heads, 1)
        return to_device(x.flatten(0, 1), pieces.device)

    return flat(torch.where(live, slots, 0)), flat(live)


def slow_of(outer: Outer, sizes: Sizes) -> Slow:
    coefficients = outer.coefficients
    if coefficients is not None:
        coefficients = coefficients.expand(sizes.heads, -1)
    return Slow(outer.slow.get("gain"), outer.slow.get("residual"), coefficients)


class Begun(NamedTuple):
    """The state as the first piece finds it, flat, `[z size]`."""

    weights: Tensor
    momentum: Tensor | None
    anchor: Tensor
    own: bool
    """Some row is in the middle of a chunk: its anchor is not its weights."""
    initial: Tensor
    """`[h size]`"""

    @classmethod
    def of(cls, pieces: Pieces, state: MemoryState, outer: Outer, sizes: Sizes) -> Begun:
        initial = flatten(outer.initial, sizes)
        first = pieces.begins[0]

        def rows(x: Tensor, fresh: Tensor) -> Tensor:
            return first.select(fresh.expand_as(x), x).flatten(0, 1).contiguous()

        weights = rows(flatten(state.weights, sizes), initial)
        momentum = None
        if state.momentum:
            momentum = rows(flatten(state.momentum, sizes), torch.zeros_like(initial))
        own = pieces.once("own", lambda: begins_inside(pieces))
        anchor = rows(flatten(state.anchor, sizes), initial) if own else weights
        return cls(weights, momentum, anchor, own, initial)


def begins_inside(pieces: Pieces) -> bool:
    """Some row begins in the middle of a chunk."""
    inside = pieces.start[:, 0] % pieces.chunk != 0
    return bool((inside & (pieces.length[:, 0] > 0)).any())


def marks_of(pieces: Pieces, batch: int, heads: int) -> tuple[Tensor, tuple[bool, ...]]:
    """`[n b*h]`: what is done before each piece: 1, begin a document; 2, keep the weights as
    anchor; and whether any row has a mark. The first piece needs neither: its state is made before.
    """
    begins = pieces.fresh.clone()
    begins[:, 0] = False
    number, open_ = open_chunks(pieces)
    keeps = torch.zeros_like(begins)
    keeps[torch.arange(len(number)), number] = open_ & (number > 0)
    marks = begins.int() + 2 * keeps.int()
    by_head = marks.expand(batch, -1).t().repeat_interleave(heads, 1).contiguous()
    return to_device(by_head, pieces.device), tuple(marks.any(0).tolist())


def open_chunks(pieces: Pieces) -> tuple[Tensor, Tensor]:
    """`[r]`: the last piece with a token, and whether its chunk goes on after it."""
    filled = pieces.length > 0
    number = (filled * torch.arange(pieces.number)).amax(1)
    end = (pieces.start + pieces.length).gather(1, number[:, None])[:, 0]
    return number, (end % pieces.chunk != 0) & filled.any(1)


def last_anchor(pieces: Pieces, begun: Begun, weights, kept, sizes: Sizes) -> Tensor:
    """Where the gradients of the next token are taken."""
    from_kept, from_begun = pieces.once("last_anchor", lambda: anchors_from(pieces))
    for rows, chosen in ((from_kept, kept), (from_begun, begun.anchor)):
        if rows.all:
            return chosen
        if not rows.none:
            flags = rows.rows.expand(weights.shape[0] // sizes.heads)
            flags = flags.repeat_interleave(sizes.heads)[:, None]
            weights = torch.where(flags, chosen, weights)
    return weights


def anchors_from(pieces: Pieces) -> tuple[Flags, Flags]:
    """Rows whose last anchor is the one kept on the way, and the one they came with."""
    number, open_ = open_chunks(pieces)
    unread = ~(pieces.length > 0).any(1)
    rows = torch.stack([open_ & (number > 0), (open_ & (number == 0)) | unread], 1)
    kept, begun = Flags.by_piece(rows, pieces.device)
    return kept, begun

"""Memories in kernels, in float32, against the chunked form in float64: values and gradients.

Without a GPU they run in Triton's interpreter, where a step costs the same at any size: the
shapes are as small as they can be and still fill one block, several, or none.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from atlas_lm import RULES, MemoryState, Rule
from atlas_lm.testing import Example, example
from atlas_lm.testing.kernels import check_kernels

pytest.importorskip("triton")

from atlas_lm.ops.networks import init_memory
from atlas_lm.ops.triton import additive, layout, memorize, muon, reads
from atlas_lm.ops.triton.layout import sizes_of
from atlas_lm.ops.triton.sizes import linear_team, team_for

CLOSE, FAR = 2e-4, 2e-3
"""Errors, of the norm: what is allowed, and the most where plain float32 has lost digits already:
Newton-Schulz makes singular values from rounding errors, chunked itself is off by up to 2e-4."""

LINEAR = Rule(chunk=16, window=5, optimizer="momentum")
TITANS = replace(RULES["titans"], chunk=16)
OMEGANET = replace(RULES["omeganet"], chunk=16, window=5)
ATLAS = replace(RULES["atlas"], chunk=16, window=5, stride=5)
GATED = Rule(network="gated_mlp", chunk=16)

ADDITIVE = {
    "linear_dot": (Rule(objective="dot", chunk=16), {"d_k": 8, "d_v": 8, "tokens": 16}),
    "linear_dot_polynomial_momentum": (
        Rule(features="polynomial", objective="dot", optimizer="momentum", chunk=16, window=3),
        {"d_k": 4, "d_v": 6, "before": 9},
    ),
    "linear_l2": (Rule(chunk=16), {"d_k": 4, "d_v": 16, "before": 5}),
    "linear_l2_polynomial_beyond_the_chunk": (
        Rule(features="polynomial", chunk=16, window=19),
        {"d_k": 5, "d_v": 6, "before": 21},
    ),
    "linear_momentum": (LINEAR, {"d_k": 16, "d_v": 5, "before": 7}),
    "linear_narrow_keys_chunk_10": (replace(LINEAR, chunk=10), {"d_k": 1, "d_v": 3, "before": 3}),
    "linear_two_blocks_of_features": (
        Rule(features="polynomial", chunk=16, window=2),
        {"d_k": 8, "d_v": 17, "tokens": 18},
    ),
    "mlp_dot": (replace(RULES["dla"], chunk=16), {"d_k": 8, "d_v": 6, "hidden": 20}),
    "mlp_hidden_in_two_blocks": (replace(TITANS, window=2), {"d_k": 4, "d_v": 6, "hidden": 70}),
    "mlp_momentum": (TITANS, {"d_k": 8, "d_v": 8, "hidden": 16, "before": 22}),
    "mlp_momentum_without_norm": (
        replace(TITANS, norm=False, window=19),
        {"d_k": 8, "d_v": 8, "hidden": 12, "before": 6, "tokens": 15},
    ),
    "mlp_polynomial": (OMEGANET, {"d_k": 4, "d_v": 4, "hidden": 16}),
    "mlp_polynomial_beyond_the_chunk": (
        replace(OMEGANET, window=19),
        {"d_k": 4, "d_v": 6, "hidden": 16, "before": 20},
    ),
    "mlp_chunk_24": (replace(TITANS, chunk=24), {"d_k": 4, "d_v": 6, "hidden": 5, "before": 4}),
    "gated": (GATED, {"d_k": 8, "d_v": 8, "hidden": 18, "before": 3}),
    "gated_dot_without_norm": (
        replace(GATED, norm=False, objective="dot", window=4),
        {"d_k": 6, "d_v": 3, "hidden": 16, "tokens": 17},
    ),
    "gated_polynomial_momentum": (
        replace(GATED, features="polynomial", optimizer="momentum", window=3),
        {"d_k": 4, "d_v": 6, "hidden": 16, "before": 10},
    ),
}
MUON = {
    "stride_1": (
        replace(ATLAS, stride=1),
        {"d_k": 4, "d_v": 6, "hidden": 8, "before": 12, "tokens": 7},
    ),
    "no_step_in_the_call": (
        ATLAS,
        {"d_k": 4, "d_v": 6, "hidden": 8, "before": 20, "tokens": 4},
    ),
    "one_token_one_step": (ATLAS, {"d_k": 4, "d_v": 6, "hidden": 8, "before": 24, "tokens": 1}),
    "stride_5": (ATLAS, {"d_k": 4, "d_v": 6, "hidden": 12, "before": 18}),
    "stride_of_a_chunk": (
        replace(ATLAS, stride=16, features="identity"),
        {"d_k": 8, "d_v": 8, "hidden": 20, "before": 7, "tokens": 37},
    ),
    "stride_longer_than_a_chunk": (
        replace(ATLAS, stride=23, objective="dot"),
        {"d_k": 4, "d_v": 4, "hidden": 16, "before": 12, "tokens": 37},
    ),
    "eta_inside": (
        replace(ATLAS, eta_inside=True, stride=4, window=1),
        {"d_k": 4, "d_v": 6, "hidden": 16, "before": 6},
    ),
    "beyond_the_chunk": (
        replace(ATLAS, window=19, stride=6),
        {"d_k": 4, "d_v": 6, "hidden": 16, "before": 20},
    ),
    "without_norm": (
        replace(ATLAS, norm=False, features="identity"),
        {"d_k": 6, "d_v": 6, "hidden": 12, "before": 5},
    ),
    "hidden_in_two_blocks": (
        replace(ATLAS, stride=8, features="identity", window=1),
        {"d_k": 4, "d_v": 6, "hidden": 70},
    ),
    "linear": (
        replace(LINEAR, optimizer="muon", features="polynomial", stride=3),
        {"d_k": 4, "d_v": 6, "before": 9},
    ),
    "gated": (
        replace(RULES["atlas_pp"], chunk=16, window=5, stride=6),
        {"d_k": 4, "d_v": 6, "hidden": 16, "before": 9},
    ),
    "polar_express": (
        replace(ATLAS, ns_coefficients="polar_express", stride=7),
        {"d_k": 4, "d_v": 4, "hidden": 16},
    ),
    "cubic_3_steps": (
        replace(ATLAS, ns_coefficients="cubic", ns_steps=3, stride=7),
        {"d_k": 4, "d_v": 4, "hidden": 16},
    ),
}
SHORTER: dict[str, Any] = {"tokens": 21, "before": 0, "batch": 1, "heads": 1}


def allowed(device: str, yardstick: float = 0.0) -> float:
    """The yardstick: the error of chunked in float32."""
    most = min(CLOSE + 10 * yardstick, FAR)
    # on a GPU a few sums of float32 are products in tf32
    return most if device == "cpu" else 10 * most


def assert_kernels_agree(rule: Rule, device: str, **shape) -> None:
    """With views as inputs, some gates shut, a state that comes in and gets its gradient."""
    found = check_kernels(rule, **(SHORTER | shape), device=device, dtype=torch.float32)
    most = {c.name: allowed(device, c.yardstick) for c in found}
    wrong = [
        f"{c.name}: {c.error:.2g}, allowed {most[c.name]:.2g}"
        for c in found
        if not c.error <= most[c.name]
    ]
    assert not wrong, ", ".join(wrong)


@pytest.mark.parametrize("name", ADDITIVE)
def test_gd_and_momentum(name, kernel_device):
    rule, shape = ADDITIVE[name]
    assert_kernels_agree(rule, kernel_device, **shape)


LINEAR_RULES = [name for name in ADDITIVE if name.startswith("linear")]


@pytest.mark.parametrize("name", LINEAR_RULES)
def test_linear_memories_too_large_for_registers(name, kernel_device, monkeypatch):
    monkeypatch.setattr(layout, "stays_in_registers", lambda *_: False)
    monkeypatch.setattr(layout, "_sizes", layout._sizes.__wrapped__)  # not what others left
    rule, shape = ADDITIVE[name]
    assert_kernels_agree(rule, kernel_device, **shape)


@pytest.mark.parametrize("name", MUON)
def test_muon(name, kernel_device):
    rule, shape = MUON[name]
    assert_kernels_agree(rule, kernel_device, **shape)


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net"])
@pytest.mark.parametrize("before", [0, 3])
def test_delta_rules(name, before, kernel_device):
    assert_kernels_agree(RULES[name], kernel_device, d_k=5, d_v=7, before=before)


@pytest.mark.parametrize("before", [0, 6])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 37])
def test_lengths(tokens, before, kernel_device):
    """None, some and all of the last chunk filled, from the beginning of one or from inside."""
    assert_kernels_agree(LINEAR, kernel_device, d_k=4, d_v=6, tokens=tokens, before=before)


@pytest.mark.parametrize("tokens", [1, 15, 16])
def test_lengths_of_a_deep_memory(tokens, kernel_device):
    shape = {"d_k": 4, "d_v": 6, "hidden": 16}
    assert_kernels_agree(OMEGANET, kernel_device, **shape, tokens=tokens, before=13)


def test_rows_and_heads_are_apart(kernel_device):
    rule, shape = replace(OMEGANET, optimizer="momentum"), {"d_k": 4, "d_v": 6, "hidden": 8}
    assert_kernels_agree(rule, kernel_device, **shape, tokens=18, batch=2, heads=2)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", [*ADDITIVE, *(f"muon_{name}" for name in MUON)])
def test_rows_at_different_places(name, packed, kernel_device):
    cases = ADDITIVE | {f"muon_{n}": case for n, case in MUON.items()}
    rule, shape = cases[name]
    shape = shape | {"tokens": 2 * rule.chunk + 5, "before": 19, "batch": 2, "heads": 2}
    assert_kernels_agree(rule, kernel_device, **shape, packed=packed)


# What `check_kernels` has no words for


def made_of(rule: Rule, tokens: int, device: str, **shape) -> Example:
    made = example(rule, tokens, **({"batch": 1, "heads": 1} | shape), dtype=torch.float32)
    return made.with_inputs({n: x.to(device) for n, x in made.inputs().items()})


def evaluate(
    made: Example, impl: str, state: MemoryState | None, pulled: tuple[str, ...], learned, cuts
) -> dict[str, Tensor]:
    """Outputs, final state, and gradients of what is learned; from those of what is pulled."""
    inputs = {n: x.detach().requires_grad_(learned(n)) for n, x in made.inputs().items()}
    leaves = {n: x for n, x in inputs.items() if x.requires_grad}
    if state is not None:
        state = state.map(
            lambda t: t.detach().requires_grad_(t.is_floating_point() and learned("state"))
        )
        carried = {f"state.{n}": t for n, t in state.tensors().items()}
        leaves |= {n: t for n, t in carried.items() if t.requires_grad}
    y, end = run_in_parts(made.with_inputs(inputs), impl, state, cuts)
    results = {"y": y} | {f"end.{n}": t for n, t in end.tensors().items()}
    random = torch.Generator().manual_seed(7)
    total = torch.zeros((), device=y.device, dtype=y.dtype)
    for name, x in sorted(results.items()):
        pull = torch.randn(x.shape, generator=random).to(y)
        if name.startswith(pulled) and x.requires_grad:
            total = total + (x * pull).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    named = {f"grad.{n}": g for n, g in zip(leaves, grads, strict=True)}
    return {n: x.detach() for n, x in (results | named).items()}


def run_in_parts(made: Example, impl: str, state: MemoryState | None, cuts: tuple[int, ...]):
    outputs = []
    for start, stop in pairwise((0, *cuts, made.tokens)):
        part, state = made.cut(start, stop).run(impl, state)
        outputs.append(part)
    assert state is not None
    return torch.cat(outputs, 1), state


def assert_agree(
    made: Example,
    state: MemoryState | None = None,
    pulled: tuple[str, ...] = ("y", "end"),
    learned=lambda name: True,
    cuts: tuple[int, ...] = (),
) -> None:
    double = made.with_inputs({n: x.double() for n, x in made.inputs().items()})
    start = None if state is None else state.to(torch.float64)
    exact = evaluate(double, "chunked", start, pulled, learned, cuts)
    found, plain = (
        evaluate(made, impl, state, pulled, learned, cuts) for impl in ("triton", "chunked")
    )
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        assert found[name].shape == x.shape, name
        # zeros must be zeros but for rounding
        size = max(float(x.double().norm()), 1e-3)
        error, yardstick = (float((y[name].double() - x).norm()) / size for y in (found, plain))
        most = allowed(x.device.type, yardstick)
        assert error <= most, f"{name}: {error:.2g}, allowed {most:.2g}"


@torch.no_grad()
def split(made: Example, at: int) -> tuple[Example, MemoryState]:
    """The rest of an example, and the state before it."""
    before = replace(made.cut(0, at), mask=None, reset=None)
    before = before.with_inputs({n: x.double() for n, x in before.inputs().items()})
    return made.cut(at, made.tokens), before.run("chunked")[1].to(torch.float32)


DEEP = {"d_k": 4, "d_v": 6, "hidden": 16}
PACKED = {
    "linear": (replace(LINEAR, features="polynomial"), {"d_k": 4, "d_v": 6}),
    "titans": (TITANS, DEEP),
    "omeganet": (OMEGANET, DEEP),
    "atlas": (replace(ATLAS, stride=7), DEEP),
    "delta_net": (RULES["delta_net"], {"d_k": 4, "d_v": 6}),
}


@pytest.mark.parametrize("name", PACKED)
def test_gradients_pass_through_a_carried_state(name, kernel_device):
    """Cut inside a chunk, at its end and after one token more, on the kernels' own states."""
    rule, shape = PACKED[name]
    assert_agree(made_of(rule, 24, kernel_device, **shape), cuts=(9, 16, 17))


def some(first: str, names, second) -> list:
    """All pairs of names; quickly only those with the first name or the last of the second."""
    pairs = [(a, b) for a in names for b in second]
    quick = [p for p in pairs if p[0] == first or p[1] == second[-1]]
    return [p if p in quick else pytest.param(*p, marks=pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize(("name", "which"), some("linear", PACKED, ["mask", "reset", "both"]))
def test_padding_and_documents(name, which, kernel_device):
    """Gaps and documents at different places of two rows, from a state inside a chunk."""
    rule, shape = PACKED[name]
    made, state = split(made_of(rule, 30, kernel_device, batch=2, **shape), 6)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :3], mask[0, 15], mask[1, 9:13], mask[1, -2:] = False, False, False, False
    reset = torch.zeros_like(mask)
    reset[0, 11], reset[1, 0], reset[1, 20], reset[1, 21] = True, True, True, True
    made = replace(made, reset=None if which == "mask" else reset.to(kernel_device))
    assert_agree(made if which == "reset" else with_gaps(made, mask.to(kernel_device)), state)


def with_gaps(made: Example, mask: Tensor) -> Example:
    """With numbers that would spoil everything where there is no token."""
    q, k, v = (
        x.masked_fill(~mask[..., None, None], float("nan")) for x in (made.q, made.k, made.v)
    )
    return replace(made, q=q, k=k, v=v, mask=mask)


@pytest.mark.parametrize("name", ["linear", "atlas", "delta_net"])
def test_a_row_without_tokens(name, kernel_device):
    rule, shape = PACKED[name]
    made, state = split(made_of(rule, 22, kernel_device, batch=2, **shape), 4)
    mask = torch.ones(2, 18, dtype=torch.bool, device=kernel_device)
    mask[1] = False
    assert_agree(with_gaps(made, mask), state)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PACKED)
def test_gaps_and_documents_anywhere(name, seed, kernel_device):
    rule, shape = PACKED[name]
    made, state = split(made_of(rule, 47, kernel_device, batch=2, heads=2, **shape), 9 + seed)
    random = torch.Generator().manual_seed(seed)
    mask, reset = torch.rand(2, 2, made.tokens, generator=random)
    made = replace(made, reset=(reset > 0.85).to(kernel_device))
    assert_agree(with_gaps(made, (mask > 0.3).to(kernel_device)), state)


PULLED = ["y", "end", "end.momentum", "end.anchor"]


@pytest.mark.parametrize(("name", "pulled"), some("linear", ["linear", "titans", "atlas"], PULLED))
def test_gradients_of_some_results(name, pulled, kernel_device):
    rule, shape = PACKED[name]
    made, state = split(made_of(rule, 26, kernel_device, **shape), 5)
    assert_agree(made, state, pulled=(pulled,))


LEARNED = {
    "weights_fixed": lambda name: not name.startswith("weights"),
    "gates_only": lambda name: name.startswith("gates"),
    "weights_only": lambda name: name.startswith("weights"),
    "queries_only": lambda name: name == "q",
    "state_only": lambda name: name == "state",
}


@pytest.mark.parametrize(("name", "learned"), some("linear", ["linear", "atlas"], [*LEARNED]))
def test_gradients_of_some_inputs(name, learned, kernel_device):
    rule, shape = PACKED[name]
    made, state = split(made_of(rule, 24, kernel_device, **shape), 5)
    # a state that goes on has no use for the weights a document begins with
    assert_agree(made, None if learned == "weights_only" else state, learned=LEARNED[learned])


@pytest.mark.parametrize("name", ["linear", "omeganet", "atlas", "delta_net"])
def test_without_gradients(name, kernel_device):
    rule, shape = PACKED[name]
    made, state = split(made_of(rule, 24, kernel_device, **shape), 5)
    given = {n: t.clone() for n, t in state.tensors().items()}
    y, end = made.run("triton", state)
    double = made.with_inputs({n: x.double() for n, x in made.inputs().items()})
    expected, last = double.run("chunked", state.to(torch.float64))
    found, exact = {"y": y} | end.tensors(), {"y": expected} | last.tensors()
    for tensor, x in ((found[n], x) for n, x in exact.items()):
        assert not tensor.requires_grad
        assert (tensor.double() - x).norm() <= allowed(kernel_device) * x.double().norm()
    for n, t in state.tensors().items():
        assert torch.equal(t, given[n]), f"{n} of the state that was passed in has changed"


@pytest.mark.parametrize("name", ["linear", "titans", "atlas", "delta_net"])
def test_gradients_are_the_same_when_asked_again(name, kernel_device):
    """What is kept for the way back is not used up."""
    rule, shape = PACKED[name]
    made = made_of(replace(rule, chunk=min(rule.chunk, 10)), 31, kernel_device, **shape)
    inputs = {n: x.detach().requires_grad_() for n, x in made.inputs().items()}
    y, end = made.with_inputs(inputs).run("triton", None)
    total = y.sum() + sum(t.sum() for t in end.tensors().values() if t.requires_grad)
    once, again = (
        torch.autograd.grad(total, list(inputs.values()), retain_graph=True, materialize_grads=True)
        for _ in range(2)
    )
    for which, a, b in zip(inputs, once, again, strict=True):
        assert torch.equal(a, b), which


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("name", ["linear", "titans", "atlas"])
def test_several_segments(name, most, kernel_device, monkeypatch):
    """As if there were no room for all pieces at once."""
    made_segments, whole = [], reads.Plan.segments

    def segments(plan, *args):
        room, parts = 1.0, []
        while not parts or (len(parts) > 1 and longest(parts) < most):
            monkeypatch.setattr(reads, "ROOM", int(room))
            parts, room = whole(plan, *args), 1.4 * room
        made_segments.append(parts)
        return parts

    monkeypatch.setattr(reads.Plan, "segments", segments)
    rule, shape = PACKED[name]
    rule = replace(rule, chunk=10)
    made, state = split(made_of(rule, 41, kernel_device, **shape), 6)
    assert_agree(made, state)
    # 4 tokens of the chunk in which the state was, three whole chunks and 1 token
    assert [longest(parts) for parts in made_segments] == [most] * len(made_segments)
    assert {len(parts) for parts in made_segments} == {5 if most == 1 else 3}


@pytest.mark.parametrize("pieces", [0, 2])
def test_some_steps_are_kept(pieces, kernel_device, monkeypatch):
    """Of segments of one piece each, the last for which there is room; others are made again."""
    rule, shape = PACKED["atlas"]
    made = made_of(replace(rule, chunk=8, stride=4), 32, kernel_device, **shape)
    size = 6 * 16 + 16 * 32  # w1, and w2 on 15 features in a block of 32
    monkeypatch.setattr(memorize, "MUON", muon.MUON._replace(most_kept=pieces * 2 * size * 4))
    monkeypatch.setattr(reads, "ROOM", 1)
    kept = []
    original = muon.written_segment

    def written(*args, keep, steps):
        if keep:
            kept.append(steps is not None)
        return original(*args, keep=keep, steps=steps)

    monkeypatch.setattr(muon, "written_segment", written)
    assert_agree(made)
    assert kept == [True] * pieces + [False] * (4 - pieces)


@pytest.mark.parametrize(
    "name",
    ["linear_momentum", "mlp_momentum", "mlp_polynomial", "gated", "gated_polynomial_momentum"],
)
def test_kept_segments_are_those_made_again(name, kernel_device, monkeypatch):
    """Two of four: y, states and gradients are the same numbers, those of a second backward too."""
    rule, shape = ADDITIVE[name]
    shape = {n: size for n, size in shape.items() if n != "before"}
    made = made_of(replace(rule, chunk=8), 32, kernel_device, **shape)
    monkeypatch.setattr(reads, "ROOM", 1)
    again, written = [], additive.AdditiveBackward._again

    def noted(self, *args):
        again.append((self.plan, written(self, *args)))
        return again[-1][1]

    monkeypatch.setattr(additive.AdditiveBackward, "_again", noted)
    found = []
    for pieces in (0, 2):
        by_piece = additive.ADDITIVE._replace(piece_bytes=lambda *_: 1, most_kept=pieces)
        monkeypatch.setattr(memorize, "ADDITIVE", by_piece)
        again.clear()
        y, state, grads = twice_back(made)
        assert len(again) == 4 - pieces + 4
        found.append([y, *state.weights.values(), *state.momentum.values(), *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for plan, segment in again:
        assert additive.piece_bytes(plan, 4) == bytes_before_the_last(segment)


def bytes_before_the_last(segment: additive.Segment) -> int:
    """What a segment of one piece takes, but for the state after it."""
    states = segment.weights[0], segment.states[0], segment.entered[0]
    tensors = {x.data_ptr(): x.nbytes for x in (*states, *segment.factors)}
    return sum(tensors.values())


def twice_back(made: Example) -> tuple[Tensor, MemoryState, list[Tensor]]:
    """Gradients of two backwards through one graph, the first and the second."""
    tracked = {n: x.detach().clone().requires_grad_() for n, x in made.inputs().items()}
    y, state = made.with_inputs(tracked).run("triton")
    wanted, pull = list(tracked.values()), torch.ones_like(y)
    first = torch.autograd.grad(y, wanted, pull, retain_graph=True)
    second = torch.autograd.grad(y, wanted, pull)
    return y.detach(), state, [*first, *second]


def longest(parts: list[slice]) -> int:
    return max(part.stop - part.start for part in parts)


@pytest.mark.parametrize("name", ["linear", "polynomial", "muon"])
def test_linear_memories_by_a_team(name, kernel_device, monkeypatch):
    """Each program has 16 of 32 values; those of deep memories meet, which takes a GPU."""
    rule = {
        "linear": LINEAR,
        "polynomial": Rule(features="polynomial", chunk=16, window=3),
        "muon": replace(ATLAS, network="linear", norm=False),
    }[name]
    monkeypatch.setattr(memorize, "team_of", lambda *_: 2)
    assert_kernels_agree(rule, kernel_device, d_k=4, d_v=32, before=7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs that meet need a GPU")
@pytest.mark.parametrize("team", [2, 4])
@pytest.mark.parametrize("name", ["mlp_momentum", "mlp_polynomial", "gated", "muon"])
def test_deep_memories_by_a_team(name, team, monkeypatch):
    rule, shape = (ATLAS, {"d_k": 8, "d_v": 8}) if name == "muon" else ADDITIVE[name]
    monkeypatch.setattr(memorize, "team_of", lambda *_: team)
    assert_kernels_agree(rule, "cuda", **(shape | {"hidden": 128, "before": 7}))


@pytest.mark.parametrize(
    ("outs", "least", "memories", "processors", "team"),
    [
        (256, 32, 16, 132, 8),
        (256, 32, 128, 132, 2),
        (256, 32, 256, 132, 1),
        (64, 32, 16, 132, 2),
        (64, 32, 128, 132, 1),
        (96, 32, 1, 132, 1),
        (64, 16, 16, 132, 4),
    ],
)
def test_how_large_a_team_is(outs, least, memories, processors, team):
    assert team_for(outs, least, memories, processors) == team


@pytest.mark.parametrize(
    ("outs", "memories", "team"),
    [(64, 1, 4), (64, 132, 4), (64, 256, 2), (64, 512, 1), (128, 64, 8), (48, 16, 1), (16, 1, 1)],
)
def test_how_large_a_team_of_a_linear_memory_is(outs, memories, team):
    """At most four programs a processor, with 16 values each at least."""
    assert linear_team(outs, memories, 132) == team


WIDE = {"d_k": 64, "d_v": 64, "hidden": 256}
NARROW = {"d_k": 16, "d_v": 64, "hidden": 64}


@pytest.mark.parametrize(
    ("rule", "shape", "team", "larger"),
    [
        (RULES["titans"], WIDE, 1, 4),
        (RULES["titans"], WIDE, 8, 8),
        (RULES["omeganet"], NARROW, 1, 2),
        (RULES["titans"], WIDE | {"hidden": 96}, 1, 1),
        (replace(RULES["titans"], network="gated_mlp"), WIDE | {"d_v": 128}, 2, 2),
        (replace(RULES["atlas"], features="identity"), WIDE, 2, 2),
    ],
)
def test_a_team_is_as_large_as_registers_ask(rule, shape, team, larger):
    weights = init_memory(rule, 2, **shape, device="meta")
    widths = shape["d_k"], shape["d_v"], rule.chunk
    assert memorize.team_in_registers(rule, weights, widths, team) == larger


@pytest.mark.parametrize(
    ("name", "resident"),
    [
        ("mlp_momentum", True),
        ("mlp_polynomial", True),
        ("gated", True),
        ("mlp_hidden_in_two_blocks", False),
        ("linear_momentum", True),
        ("linear_two_blocks_of_features", True),
    ],
)
def test_small_memories_stay_in_registers(name, resident):
    """So that both ways of writing deep memories are tested here."""
    rule, shape = ADDITIVE[name]
    widths = shape["d_k"], shape["d_v"]
    weights = init_memory(rule, 1, *widths, shape.get("hidden"), device="meta")
    terms = int(rule.optimizer == "momentum")
    assert sizes_of(rule, weights, *widths, rule.chunk, terms).resident == resident

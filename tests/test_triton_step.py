"""One token in one launch, against the same token without: values, states, rows apart, in place.

Without a GPU the kernel runs in Triton's interpreter.
"""

import copy
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from atlas_lm import RULES, LanguageModel, MemoryState, ModelConfig, Rule
from atlas_lm.decode import FixedStep
from atlas_lm.ops import step as step_module
from atlas_lm.ops.step import KnownPositions, in_place
from atlas_lm.testing import Example, example

CLOSE = 1e-4
"""Of the norm: what plain float32 is off by after a few steps of Newton-Schulz."""
TITANS = replace(RULES["titans"], chunk=4)
OMEGANET = replace(RULES["omeganet"], chunk=4, window=3)
ATLAS = replace(RULES["atlas"], chunk=4, window=3, stride=4)
CASES: dict[str, tuple[Rule, dict]] = {
    "titans": (TITANS, {"d_k": 8, "d_v": 8, "hidden": 16}),
    "two_blocks_and_a_rest": (TITANS, {"d_k": 6, "d_v": 5, "hidden": 70}),
    "wide_values": (TITANS, {"d_k": 4, "d_v": 66, "hidden": 40}),
    "window": (replace(TITANS, window=5, norm=False), {"d_k": 4, "d_v": 6, "hidden": 12}),
    "omeganet": (OMEGANET, {"d_k": 4, "d_v": 6, "hidden": 12}),
    "omeganet_wide": (replace(OMEGANET, window=1), {"d_k": 11, "d_v": 11, "hidden": 9}),
    "gated": (
        Rule(network="gated_mlp", chunk=4, optimizer="momentum"),
        {"d_k": 6, "d_v": 6, "hidden": 20},
    ),
    "dot": (replace(RULES["dla"], chunk=4), {"d_k": 8, "d_v": 6, "hidden": 20}),
    "online_decay_first": (
        Rule(network="mlp", norm=True, chunk=1, decay_first=True),
        {"d_k": 4, "d_v": 4, "hidden": 6},
    ),
    "linear_attention": (replace(RULES["linear_attention"], chunk=4), {"d_k": 8, "d_v": 20}),
    "delta_net": (RULES["delta_net"], {"d_k": 5, "d_v": 33}),
    "gated_delta_net": (RULES["gated_delta_net"], {"d_k": 70, "d_v": 4}),
    "linear_polynomial": (
        Rule(features="polynomial", window=2, chunk=4, optimizer="momentum"),
        {"d_k": 4, "d_v": 3},
    ),
    "atlas": (ATLAS, {"d_k": 4, "d_v": 4, "hidden": 8}),
    "atlas_eta_inside": (
        replace(ATLAS, eta_inside=True, features="identity", stride=3),
        {"d_k": 4, "d_v": 4, "hidden": 8},
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def steps(monkeypatch, kernel_device):
    """Steps are made by the kernel where they can be; how often that was."""
    from atlas_lm.ops.triton import step as by_kernel

    made, plain = [], by_kernel.step

    def counted(*args, **options):
        made.append(options)
        return plain(*args, **options)

    monkeypatch.setattr(by_kernel, "step", counted)
    # the function has the name of its module
    monkeypatch.setattr(sys.modules["atlas_lm.ops.memorize"], "why_not_step", lambda *_: None)
    monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)
    return made


def drawn(name: str, tokens: int, device: str, **changes) -> Example:
    rule, shape = CASES[name]
    settings: dict = {"batch": 2, "heads": 2} | shape | changes
    made = example(rule, tokens, **settings)
    kept = {n: x.to(device, torch.float32) for n, x in made.inputs().items()}
    return made.with_inputs(kept)


def doubled(made: Example) -> Example:
    return made.with_inputs({n: x.double().cpu() for n, x in made.inputs().items()})


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        error = (found[key].cpu().double() - value).norm() / value.double().norm().clamp(min=1e-30)
        assert float(error) <= CLOSE or not value.numel(), f"{key}: {float(error):.2g}"


@torch.no_grad()
def one_by_one(made: Example, state=None, places: KnownPositions | None = None):
    """Outputs and final state; `places`: the host knows where the rows are."""
    out = []
    for t in range(made.tokens):
        part = made.cut(t, t + 1)
        if places is None:
            y, state = part.run("auto", state)
        else:
            with places.answering():
                y, state = part.run("auto", state)
            places = places.moved_on()
        out.append(y)
    assert state is not None
    return {"y": torch.cat(out, 1)} | state.tensors()


@every_case
def test_it_is_the_step(name, steps, kernel_device):
    """Over borders of chunk and window; of muon, which steps at some of them, what is between."""
    made = drawn(name, 10, kernel_device)
    expected = doubled(made).results("reference")
    close(one_by_one(made, places=KnownPositions([0], set())), expected)
    rule = made.rule
    stepped = 10 // rule.stride if rule.optimizer == "muon" else 0
    assert len(steps) == 10 - stepped


@pytest.mark.parametrize("name", ["titans", "omeganet", "linear_attention", "delta_net"])
def test_where_the_host_knows_nothing(name, steps, kernel_device):
    made = drawn(name, 9, kernel_device)
    close(one_by_one(made), doubled(made).results("reference"))
    assert len(steps) == 9


@pytest.mark.parametrize("name", ["window", "omeganet", "linear_polynomial"])
def test_rows_at_different_places(name, steps, kernel_device):
    """Each ends its chunks, and sees of the window, where it is."""
    made, begun = drawn(name, 10, kernel_device, batch=2), (1, 6)
    rows = [made.rows(slice(i, i + 1)) for i in range(2)]
    states = [doubled(r).cut(0, n).run("reference")[1] for r, n in zip(rows, begun, strict=True)]
    state = MemoryState.stack([s.to(kernel_device, torch.float32) for s in states])
    rests = [r.cut(n, n + 4) for r, n in zip(rows, begun, strict=True)]
    both = {n: torch.cat([r.inputs()[n] for r in rests]) for n in ("q", "k", "v")}
    both |= {n: x if n.startswith("weights") or n == "coefficients" else
             torch.cat([r.inputs()[n] for r in rests])
             for n, x in rests[0].inputs().items() if n not in both}  # fmt: skip
    found = one_by_one(rests[0].with_inputs(both), state)
    for i, (rest, begin) in enumerate(zip(rests, states, strict=True)):
        expected = doubled(rest).results("reference", begin)
        close({n: x[i : i + 1] for n, x in found.items()}, expected)


@pytest.mark.parametrize("places", [True, False])
@pytest.mark.parametrize("name", ["titans", "omeganet", "delta_net", "linear_attention"])
@torch.no_grad()
def test_in_place_it_is_the_same_and_the_tensors_stay(
    name, places, steps, kernel_device, monkeypatch
):
    # on a CPU alone, tiny numbers are made 0 in a copy
    monkeypatch.setattr(MemoryState, "without_subnormals", lambda state: state)
    made = drawn(name, 9, kernel_device)
    expected = doubled(made).results("reference")
    _, state = made.cut(0, 1).run("auto", None)
    # anchors of their own, as a step that stays where it is holds them
    state = state.map(lambda t: t.clone(memory_format=torch.contiguous_format))
    known, out = KnownPositions([1], set()), []
    for t in range(1, 9):
        with known.answering() if places else nullcontext(), in_place():
            y, after = made.cut(t, t + 1).run("auto", state)
        for part in ("weights", "anchor", "momentum"):
            for n, x in getattr(after, part).items():
                assert x is getattr(state, part)[n], f"{part}.{n}"
        state, known = after, known.moved_on()
        out.append(y)
    close({"y": torch.cat(out, 1)} | state.tensors(), expected | {"y": expected["y"][:, 1:]})


@pytest.mark.parametrize("block", ["plain", "mac", "mal"])
@torch.no_grad()
def test_models_whose_state_is_moved_in_place(block, steps, kernel_device):
    """Token by token in one place, over borders of chunk and segment, as in one pass."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=31, dim=16, depth=2, heads=2, rule=TITANS, block=block, segment=3, window=4
    )
    model, ids = LanguageModel(config).eval(), torch.randint(31, (2, 10))
    expected, end = copy.deepcopy(model).double()(ids)
    model = model.to(kernel_device)
    step, ids = FixedStep(model, model.begin(2)), ids.to(kernel_device)
    found = torch.stack([step.step(ids[:, t]) for t in range(10)], 1)
    close({"y": found} | step.state.tensors(), {"y": expected} | end.tensors())
    assert steps
    assert all(options["in_place"] == (block != "mac") for options in steps[2:])


@torch.no_grad()
def test_what_was_passed_in_is_left_as_it_was(steps, kernel_device):
    made = drawn("titans", 5, kernel_device)
    _, state = made.cut(0, 3).run("chunked", None)
    kept = {n: t.clone() for n, t in state.tensors().items()}
    made.cut(3, 4).run("auto", state)
    for n, t in state.tensors().items():
        assert torch.equal(t, kept[n]), n
    assert len(steps) == 1


def test_with_gradients_it_is_left_to_autograd(steps, kernel_device):
    made = drawn("titans", 1, kernel_device)
    learned = {n: x.requires_grad_() for n, x in made.inputs().items()}
    y, _ = made.with_inputs(learned).run("auto", None)
    assert y.requires_grad
    assert not steps

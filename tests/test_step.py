"""One token at a time: the numbers of the definition, and no look at any of them."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atlas_lm import RULES, Gates, LanguageModel, MemoryState, ModelConfig, ModelState, Rule
from atlas_lm.ops import step as step_module
from atlas_lm.ops import validation
from atlas_lm.testing import assert_close, check_agreement, check_cuts, example

FINITE = {n: r for n, r in RULES.items() if r.features != "exponential"}
SMALL = {n: r if r.chunk == 1 else replace(r, chunk=4) for n, r in FINITE.items()}
SMALL |= {
    "stride_3": replace(RULES["atlas"], chunk=4, window=3, stride=3),
    "stride_longer_than_a_chunk": replace(RULES["atlas_pp"], chunk=3, window=2, stride=5),
    "eta_inside": replace(RULES["atlas"], chunk=8, window=3, stride=2, eta_inside=True),
    "window_longer_than_a_chunk": replace(RULES["omeganet"], chunk=4, window=7),
    "huber_in_a_window": replace(RULES["yaad"], chunk=4, window=3),
    "momentum_in_a_window": replace(RULES["titans"], chunk=4, window=5),
    "online_decay_first": Rule(network="mlp", chunk=1, decay_first=True),
    "online_muon": replace(RULES["atlas"], chunk=1, window=3, stride=3),
    "delta_polynomial": Rule(chunk=1, features="polynomial", decay_first=True),
    "own_functions": Rule(
        network=lambda lin, x, f: x + lin("w1", torch.tanh(lin("w2", f))),
        objective=lambda prediction, value: (prediction - value).square().sum(-1) / 2,
        features=lambda x: torch.cat([x, x.square()], -1),
        chunk=4,
        window=2,
    ),
}
every_rule = pytest.mark.parametrize("name", SMALL)


@pytest.fixture(params=["looks", "does not look"])
def looks(request, monkeypatch):
    """On a CPU rows are looked at; as on a GPU, they are not."""
    if request.param != "looks":
        monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)


@pytest.fixture
def steps(monkeypatch):
    """How often the one-token form was used."""
    called = []

    def counted(*args):
        called.append(1)
        return step_module.memorize_step(*args)

    # the function has the name of its module
    monkeypatch.setattr(sys.modules["atlas_lm.ops.memorize"], "memorize_step", counted)
    return called


def one_by_one(made, state: MemoryState | None = None, impl: str = "auto"):
    """Outputs and final state, token by token."""
    out = []
    for t in range(made.tokens):
        y, state = made.cut(t, t + 1).run(impl, state)
        out.append(y)
    assert state is not None
    return {"y": torch.cat(out, 1)} | state.tensors()


# Numbers


@every_rule
def test_it_is_the_definition_to_the_last_digits(name, looks, steps):
    made = example(SMALL[name], 23)
    expected = made.results("reference")
    found = one_by_one(made)
    assert len(steps) == 23
    for key, value in expected.items():
        error = (found[key] - value).abs().max() if value.numel() else 0.0
        assert found[key].shape == value.shape, key
        assert error <= 1e-12 * (1 + value.abs().max() if value.numel() else 1), f"{key}: {error}"


@every_rule
def test_rows_at_different_positions(name, looks):
    """Each row goes on as if it were alone, over its own borders of chunk, stride and window."""
    rule = SMALL[name]
    begun = [0, 2, 3, 8]
    made = example(rule, 17, batch=len(begun))
    rows = [made.rows(slice(i, i + 1)) for i in range(len(begun))]
    states = [row.cut(0, n).run("reference")[1] for row, n in zip(rows, begun, strict=True)]
    rests = [row.cut(n, n + 9) for row, n in zip(rows, begun, strict=True)]
    q, k, v = (torch.cat([getattr(rest, name) for rest in rests]) for name in "qkv")
    parts = zip(*(rest.gates for rest in rests), strict=True)
    gates = Gates(*(None if g[0] is None else torch.cat(g) for g in parts))  # pyright: ignore[reportArgumentType]
    found = one_by_one(replace(made, q=q, k=k, v=v, gates=gates), MemoryState.stack(states))
    alone = [rest.run("reference", s) for rest, s in zip(rests, states, strict=True)]
    expected = {"y": torch.cat([y for y, _ in alone])}
    expected |= MemoryState.stack([s for _, s in alone]).tensors()
    assert_close(found, expected, "rows together against rows alone")


@every_rule
def test_gradients_are_those_of_one_pass(name, looks):
    made = example(SMALL[name], 11)

    def gradients(run):
        inputs = {n: x.clone().requires_grad_() for n, x in made.inputs().items()}
        found = run(made.with_inputs(inputs))
        sums = [(x * x.detach().cos()).sum() for x in found.values() if x.is_floating_point()]
        total = torch.stack(sums).sum()
        grads = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
        return dict(zip(inputs, grads, strict=True))

    found = gradients(one_by_one)
    expected = gradients(lambda e: e.results("reference"))
    assert_close(found, expected, "gradients of single tokens against the reference")


@pytest.mark.parametrize("name", ["titans", "stride_3", "huber_in_a_window", "gated_delta_net"])
def test_the_contract_of_cuts(name):
    made = example(SMALL[name], 30)
    check_agreement(made.cut(0, 1))
    check_cuts(made, [1, 2, 3, 9, 10, 29])


def test_after_a_reset_nothing_older_counts(looks):
    """The window of the document before is still in the past when a row begins anew."""
    made = example(replace(RULES["omeganet"], chunk=4, window=5), 14)
    reset = torch.zeros(2, 14, dtype=torch.bool)
    reset[1, 6] = True
    expected = replace(made, reset=reset).results("reference")
    _, state = replace(made.cut(0, 7), reset=reset[:, :7]).run("chunked")
    found = one_by_one(made.cut(7, 14), state)
    expected["y"] = expected["y"][:, 7:]
    assert_close(found, expected, "after a reset")


def test_what_was_passed_in_stays_as_it_was():
    made = example(SMALL["stride_3"], 6)
    _, state = made.cut(0, 5).run()
    before = {n: t.clone() for n, t in state.tensors().items()}
    made.cut(5, 6).run(state=state)
    assert_close(state.tensors(), before, "the state that was passed in", exact=True)


@pytest.mark.parametrize("name", ["titans", "stride_3", "delta_net"])
def test_bfloat16_rounds_products_only(name, looks):
    """As far from float64 as the parallel form, and a state in float32."""
    made = example(SMALL[name], 9, d_k=8, d_v=8)
    rounded = made.with_inputs({n: x.bfloat16() for n, x in made.inputs().items()})
    exact = rounded.with_inputs({n: x.double() for n, x in rounded.inputs().items()})
    true = exact.results("reference")
    found, parallel = one_by_one(rounded), rounded.results("chunked")
    assert found["y"].dtype == torch.bfloat16
    for key, value in true.items():
        if value.numel() and value.is_floating_point():
            assert parallel[key].dtype == found[key].dtype, key
            error, usual = ((x[key].double() - value).norm() for x in (found, parallel))
            assert error <= 2 * usual + 1e-3 * value.norm(), key


def test_masks_resets_and_growing_states_go_the_other_way(steps):
    made = example(SMALL["titans"], 1)
    flags = torch.ones(2, 1, dtype=torch.bool)
    replace(made, mask=flags).run()
    replace(made, reset=flags).run()
    made.run("reference")
    example(RULES["dot"], 1).run()
    assert not steps
    made.run("chunked")
    assert len(steps) == 1


# No look at numbers

LOOKS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.lift_fresh.default,
}


class Unseen(TorchDispatchMode):
    """Raises where a GPU would be waited for, and where numbers would come from the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in LOOKS:
            raise AssertionError(f"{func} looks at numbers")
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor) and x.ndim]
        assert len({t.device.type for t in tensors}) <= 1, f"{func} moves between devices"
        return out


MODELS = {
    **{n: {"rule": r} for n, r in SMALL.items() if not r.custom},
    "swa": {"rule": "swa", "window": 5},
    "mac": {"rule": SMALL["titans"], "block": "mac", "segment": 3},
    "mag": {"rule": SMALL["atlas"], "block": "mag", "window": 4},
    "mal": {"rule": SMALL["delta_net"], "block": "mal", "window": 4},
}


def tiny(name: str) -> LanguageModel:
    torch.manual_seed(0)
    settings = {"vocab": 31, "dim": 8, "depth": 2, "heads": 2, "persistent": 2, **MODELS[name]}
    return LanguageModel(ModelConfig(**settings)).eval()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_reads_a_token_without_looking(name, monkeypatch):
    """On tensors without numbers, where every look at one is an error."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # knows no meta
    model = tiny(name).to("meta")
    tokens = torch.zeros(3, 1, dtype=torch.int64, device="meta")
    _, state = model(tokens)  # what is made once may be made on the CPU
    with Unseen():
        logits, after = model(tokens, state)
    assert logits.shape == (3, 1, 31)
    shapes = {n: t.shape for n, t in state.tensors().items()}
    assert {n: t.shape for n, t in after.tensors().items()} == shapes


@pytest.mark.parametrize("name", ["mac", "mag", "mal", "swa"])
@torch.no_grad()
def test_a_model_that_does_not_look_says_the_same(name, monkeypatch):
    """Rows at different positions, token by token, against whole rows one by one."""
    model = tiny(name).double()
    monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)
    ids = torch.randint(31, (3, 17), generator=torch.Generator().manual_seed(1))
    begun = [1, 2, 7]
    whole = [model(ids[i : i + 1, : n + 10]) for i, n in enumerate(begun)]
    states = [model(ids[i : i + 1, :n])[1] for i, n in enumerate(begun)]
    state, out = ModelState.stack(states), []
    monkeypatch.setattr(validation, "_value_checks", False)
    for t in range(10):
        token = torch.stack([ids[i, n + t] for i, n in enumerate(begun)])[:, None]
        with Unseen():
            logits, state = model(token, state)
        out.append(logits)
    found = {"logits": torch.cat(out, 1)} | state.tensors()
    expected = {"logits": torch.cat([y[:, -10:] for y, _ in whole])}
    expected |= ModelState.stack([s for _, s in whole]).tensors()
    assert_close(found, expected, "without looking")


def test_the_watch_sees_looks():
    x = torch.ones(3)
    for look in (x.any().__bool__, x.nonzero, x[0].__float__, partial(torch.tensor, [1.0])):
        with pytest.raises(AssertionError, match="looks at"), Unseen():
            look()
    unknown = x.to("meta")
    for look in (unknown.cpu, unknown.tolist, unknown.nonzero, unknown[0].item):
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), Unseen():
            look()

"""A step in fixed tensors, and the same as a CUDA graph."""

import copy
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atlas_lm import RULES, LanguageModel, MemoryState, ModelConfig, ModelState, Rule
from atlas_lm.decode import FixedStep, GraphedStep, answers_of, why_not_fixed, why_not_graphed
from atlas_lm.generate import WORTH_A_GRAPH, Sampling, generate, read
from atlas_lm.ops import step as step_module
from atlas_lm.ops import validation
from atlas_lm.testing import assert_close

# the package has a function of the module's name
GENERATE = sys.modules["atlas_lm.generate"]
MODELS: dict[str, dict[str, Any]] = {
    "titans": {"rule": replace(RULES["titans"], chunk=4)},
    "atlas": {"rule": replace(RULES["atlas"], chunk=4, window=3, stride=3)},
    "yaad": {"rule": replace(RULES["yaad"], chunk=4, window=2)},
    "delta_net": {"rule": "delta_net"},
    "swa": {"rule": "swa", "window": 5},
    "mac": {"rule": replace(RULES["titans"], chunk=4), "block": "mac", "segment": 3},
    "mal": {"rule": "gated_delta_net", "block": "mal", "window": 4},
    "mixed": {"rule": ("omeganet", "swa"), "window": 3},
}
every_model = pytest.mark.parametrize("name", MODELS)
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")


def tiny(name: str = "titans", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    settings = {"vocab": 31, "dim": 16, "depth": 2, "heads": 2, **MODELS[name], **changes}
    return LanguageModel(ModelConfig(**settings)).eval()


def ids_of(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(31, (rows, tokens), generator=torch.Generator().manual_seed(1))


def stepped(step: FixedStep, ids: torch.Tensor) -> torch.Tensor:
    """Logits after every token."""
    return torch.stack([step.step(ids[:, t]) for t in range(ids.shape[1])], 1)


def values(name: str, made: torch.Tensor, state) -> dict[str, torch.Tensor]:
    return {name: made} | state.tensors()


@every_model
@torch.no_grad()
def test_a_fixed_step_is_the_model(name):
    """Over borders of chunk, stride, window and segment, from a state in the middle of them."""
    model, ids = tiny(name).double(), ids_of(2, 19)
    expected, end = model(ids)
    _, state = model(ids[:, :5])
    step = FixedStep(model, state)
    found = stepped(step, ids[:, 5:])
    assert_close(values("y", found, step.state), values("y", expected[:, 5:], end), "fixed")


@every_model
@torch.no_grad()
def test_from_the_first_token_on(name):
    model, ids = tiny(name).double(), ids_of(3, 9)
    expected, end = model(ids)
    step = FixedStep(model, model.begin(3))
    assert_close(values("y", stepped(step, ids), step.state), values("y", expected, end), "fixed")


@torch.no_grad()
def test_states_are_given_out_and_taken_in_as_copies():
    model, ids = tiny("atlas").double(), ids_of(1, 12)
    step = FixedStep(model, model.begin(1))
    stepped(step, ids[:, :5])
    early = step.state
    kept = {n: t.clone() for n, t in early.tensors().items()}
    once = stepped(step, ids[:, 5:])
    assert_close(early.tensors(), kept, "a state given out before", exact=True)
    step.load(early)
    again = stepped(step, ids[:, 5:])
    assert torch.equal(again, once)
    assert_close(early.tensors(), kept, "a state that was loaded", exact=True)
    assert int(early.position) == 5


@torch.no_grad()
def test_tensors_stay_where_they_are():
    model = tiny("mac")
    step = FixedStep(model, model.begin(2))
    before = {n: t.data_ptr() for n, t in step._held.tensors().items()}
    stepped(step, ids_of(2, 7))
    assert {n: t.data_ptr() for n, t in step._held.tensors().items()} == before
    places = [p for p in before.values() if p]
    assert len(set(places)) == len(places), "two parts of the state share memory"


@torch.no_grad()
def test_logits_are_the_callers_own():
    model = tiny()
    step = FixedStep(model, model.begin(1))
    first = step.step(torch.tensor([3]))
    kept = first.clone()
    step.step(torch.tensor([[4]]))
    assert torch.equal(first, kept)


def test_it_may_be_made_in_inference_mode_and_used_outside():
    model, ids = tiny().double(), ids_of(1, 6)
    with torch.inference_mode():
        expected, _ = model(ids)
        step = FixedStep(model, model(ids[:, :2])[1])
        found = [stepped(step, ids[:, 2:4])]
    found.append(stepped(step, ids[:, 4:]))
    assert not found[1].requires_grad
    assert_close({"y": torch.cat(found, 1)}, {"y": expected[:, 2:]}, "in and outside")


class Kept(GraphedStep):
    """Instead of a graph, the step with what was known of the rows when it would be recorded."""

    why_not = staticmethod(why_not_fixed)

    def _recorded(self):
        places = self._places
        for _ in range(3):
            self._advance()

        def replay():
            with answers_of(places):
                return self._advance()

        return replay


@every_model
@torch.no_grad()
def test_a_graph_for_every_kind_of_step(name, monkeypatch):
    """Rows at one place, over borders of chunk, stride and segment; from each to the next model."""
    monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)
    model, ids = tiny(name).double(), ids_of(2, 25)
    expected, end = model(ids)
    _, state = model(ids[:, :5])
    step = Kept(model, state)
    found = stepped(step, ids[:, 5:])
    assert_close(
        values("y", found, step.state), values("y", expected[:, 5:], end), "kinds of steps"
    )
    kinds = {"titans": 2, "atlas": 4, "yaad": 2, "mac": 4}
    assert len(step._graphs) == kinds.get(name, 1)


@torch.no_grad()
def test_rows_at_different_places_have_kinds_of_their_own(monkeypatch):
    monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)
    model, ids = tiny("atlas").double(), ids_of(2, 25)
    rows = [model(ids[i : i + 1, :n]) for i, n in ((0, 5), (1, 7))]
    step = Kept(model, ModelState.stack([state for _, state in rows]))
    found = stepped(step, torch.stack([ids[0, 5:17], ids[1, 7:19]]))
    for i, n in ((0, 5), (1, 7)):
        alone, _ = model(ids[i : i + 1, : n + 12])
        assert_close({"y": found[i : i + 1]}, {"y": alone[:, n:]}, f"row {i}")
    assert (False, False) in {answer for kind in step._graphs for answer in kind}


@torch.no_grad()
def test_a_loaded_state_may_be_at_another_place(monkeypatch):
    monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)
    model, ids = tiny("titans").double(), ids_of(1, 12)
    step = Kept(model, model.begin(1))
    stepped(step, ids[:, :6])
    _, state = model(ids[:, :2])
    step.load(state)
    expected, _ = model(ids)
    assert_close({"y": stepped(step, ids[:, 2:])}, {"y": expected[:, 2:]}, "after a load")


@torch.no_grad()
def test_a_graph_that_cannot_be_recorded_loses_nothing(monkeypatch):
    """At the end of a chunk, where another one is wanted."""
    monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)
    model, ids = tiny("titans").double(), ids_of(1, 8)
    step, recorded = Kept(model, model.begin(1)), Kept._recorded
    found = [stepped(step, ids[:, :3])]

    def fails(self):
        recorded(self)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Kept, "_recorded", fails)
    with pytest.raises(torch.OutOfMemoryError):
        step.step(ids[:, 3])
    monkeypatch.setattr(Kept, "_recorded", recorded)
    found.append(stepped(step, ids[:, 3:]))
    assert_close({"y": torch.cat(found, 1)}, {"y": model(ids)[0]}, "as if nothing had been")


@torch.no_grad()
def test_layers_that_disagree_on_the_place_are_one_kind(monkeypatch):
    monkeypatch.setattr(step_module, "looking_is_free", lambda device: False)
    model, ids = tiny("titans").double(), ids_of(1, 12)
    expected, _ = model(ids)
    state = model(ids[:, :6])[1]
    step = Kept(model, replace(state, position=state.position + 1))
    assert_close({"y": stepped(step, ids[:, 6:])}, {"y": expected[:, 6:]}, "as they come")
    assert list(step._graphs) == [None]


@torch.no_grad()
def test_what_does_not_change_is_not_copied(monkeypatch):
    """Nothing of the anchor but at the end of a chunk."""
    # on a CPU alone, tiny numbers are made 0 in a copy
    monkeypatch.setattr(MemoryState, "without_subnormals", lambda state: state)
    model = tiny("titans")
    step = FixedStep(model, model.begin(1))
    before = {n: t._version for n, t in step._held.tensors().items() if "anchor" in n}
    stepped(step, ids_of(1, 3))
    assert {n: step._held.tensors()[n]._version for n in before} == before
    stepped(step, ids_of(1, 1))
    assert all(step._held.tensors()[n]._version > v for n, v in before.items())


class Swaps(LanguageModel):
    """Returns parts of its state in each other's place, as they are."""

    def encode(self, tokens, state=None, mask=None, reset=None):
        x, after = super().encode(tokens, state, mask, reset)
        if state is not None:
            after = replace(after, layers=state.layers[::-1])
        return x, after


@torch.no_grad()
def test_a_state_may_return_tensors_it_was_given():
    torch.manual_seed(0)
    model = Swaps(tiny().config)
    _, a = LanguageModel.encode(model, ids_of(1, 3))
    step = FixedStep(model, a)
    step.step(torch.tensor([1]))
    expected = replace(a, layers=a.layers[::-1], position=a.position + 1)
    assert_close(step.state.tensors(), expected.tensors(), "layers in turn", exact=True)


# What it refuses


def custom(lin, x, f):
    return lin("w", f)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rule": "attention"}, "blocks.0.mixer: full attention keeps every token"),
        ({"rule": ("titans", "dot")}, "blocks.1.mixer: exponential features keep every token"),
        ({"rule": Rule(network=custom)}, "a function given as network"),
    ],
)
def test_models_without_fixed_tensors_are_refused(settings, reason):
    model = tiny(**settings)
    assert reason in str(why_not_fixed(model))
    with pytest.raises(ValueError, match=reason):
        FixedStep(model, model.begin(1))


def test_other_implementations_are_refused():
    model = tiny()
    layer: Any = model.blocks[0].mixer
    layer.config = replace(layer.config, impl="reference")
    assert "impl='reference'" in str(why_not_fixed(model))


def test_a_graph_needs_a_gpu_and_nothing_that_waits_for_it(monkeypatch):
    model = tiny()
    with pytest.raises(ValueError, match="GraphedStep: it is on cpu, and a CUDA graph needs a GPU"):
        GraphedStep(model, model.begin(1))
    assert why_not_graphed(object()) is not None  # pyright: ignore[reportArgumentType]
    on_gpu: Any = torch.nn.Module()
    on_gpu.weight = SimpleNamespace(device=torch.device("cuda"))
    model.embedding = on_gpu
    assert why_not_graphed(model) is None
    monkeypatch.setattr(validation, "_value_checks", True)
    assert "checks of values are on" in str(why_not_graphed(model))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert "autocast" in str(why_not_graphed(model))


@torch.no_grad()
def test_states_that_do_not_fit_are_refused():
    model = tiny("swa")
    step = FixedStep(model, model.begin(2))
    with pytest.raises(ValueError, match=r"state: it does not fit this step: it has .*\(3,"):
        step.load(model.begin(3))
    with pytest.raises(ValueError, match="state: it does not fit"):
        step.load(tiny("titans").begin(2))
    other = replace(RULES["titans"], chunk=8)
    step = FixedStep(tiny(), tiny().begin(1))
    with pytest.raises(ValueError, match="it has other rules"):
        step.load(tiny(rule=other).begin(1))
    with pytest.raises(TypeError, match="expected a ModelState"):
        step.load(None)  # pyright: ignore[reportArgumentType]


def test_tokens_that_are_none_are_refused():
    step = FixedStep(tiny(), tiny().begin(2))
    with pytest.raises(ValueError, match=r"tokens: shape \(2, 2\); expected one a row"):
        step.step(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"tokens: torch.float32; expected whole numbers"):
        step.step(torch.zeros(2))


# Generation


@pytest.fixture
def recorded(monkeypatch):
    """Fixed steps in place of graphs: the steps that were made."""
    made = []

    def make(model, state):
        made.append(FixedStep(model, state))
        return made[-1]

    monkeypatch.setattr(GENERATE, "GraphedStep", make)
    monkeypatch.setattr(GENERATE, "why_not_graphed", why_not_fixed)
    return made


@every_model
def test_the_same_tokens_come_out(name, recorded):
    model, prompt = tiny(name).double(), ids_of(1, 7)[0].tolist()
    plain = generate(model, prompt, max_tokens=20, graph=False)
    expected = list(plain)
    assert not recorded
    drawn = generate(model, prompt, max_tokens=20)
    assert list(drawn) == expected
    assert len(recorded) == 1
    assert drawn.logprob == pytest.approx(plain.logprob, abs=1e-9)
    assert_close(drawn.state.tensors(), plain.state.tensors(), "after the tokens drawn")


def test_a_state_in_between_stays_and_can_be_gone_on_from(recorded):
    model, prompt = tiny().double(), [1, 2, 3]
    greedy = Sampling(temperature=0.0)
    drawn = generate(model, prompt, max_tokens=20, sampling=greedy, graph=True)
    ids = [next(drawn) for _ in range(6)]
    state = drawn.state
    rest = list(drawn)
    assert_close(state.tensors(), read(model, prompt + ids)[1].tensors(), "after six tokens")
    logits, _ = read(model, rest[:1], state)
    assert int(logits.argmax()) == rest[1]


def test_few_tokens_and_growing_states_need_no_graph(recorded):
    list(generate(tiny(), [1], max_tokens=WORTH_A_GRAPH - 1))
    list(generate(tiny(rule="attention"), [1], max_tokens=20))
    assert not recorded
    list(generate(tiny(), [1], max_tokens=3, graph=True))
    assert len(recorded) == 1


def test_a_graph_that_is_asked_for_and_impossible():
    with pytest.raises(ValueError, match="generate: graph=True, but it is on cpu"):
        generate(tiny(), [1], max_tokens=3, graph=True)


def test_damage_is_noticed_in_a_graph_too(recorded):
    model = tiny()
    drawn = generate(model, [1, 2], max_tokens=20)
    assert len([next(drawn), next(drawn)]) == 2
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits after token 4 are not all finite"):
        next(drawn)


# On a GPU


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """By norm, relative."""
    differing = {n: (found[n].cpu().double() - x).norm() for n, x in exact.items() if x.numel()}
    return {n: float(e / exact[n].double().norm().clamp(min=1e-9)) for n, e in differing.items()}


@on_a_gpu
@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_graph_is_the_model(name, dtype):
    """As near to float64 as token by token without it, but for its luck with a few numbers."""
    model, ids = tiny(name).to(dtype), ids_of(2, 19)
    exact = values("y", *copy.deepcopy(model).double()(ids))
    model, ids = model.cuda(), ids.cuda()
    _, state = model(ids[:, :5])
    step, out = GraphedStep(model, state), []
    found = values("y", stepped(step, ids[:, 5:]), step.state)
    for t in range(5, 19):
        logits, state = model(ids[:, t : t + 1], state)
        out.append(logits)
    plain = errors(values("y", torch.cat(out, 1), state), exact | {"y": exact["y"][:, 5:]})
    for key, error in errors(found, exact | {"y": exact["y"][:, 5:]}).items():
        least = 1e-4 if dtype == torch.float32 else 1e-2
        assert error <= max(2 * plain[key], least), f"{key}: {error:.2g}, {plain[key]:.2g} without"


@on_a_gpu
@every_model
def test_a_graph_draws_the_same_tokens(name):
    model, prompt = tiny(name).cuda(), ids_of(1, 7)[0].tolist()
    expected = list(generate(model, prompt, max_tokens=40, graph=False))
    assert list(generate(model, prompt, max_tokens=40, graph=True)) == expected


@on_a_gpu
@torch.no_grad()
def test_a_step_never_waits_for_the_gpu():
    for name in MODELS:
        model = tiny(name).cuda()
        tokens = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
        _, state = model(tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not notice everything
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(tokens, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")

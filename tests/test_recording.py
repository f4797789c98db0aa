"""Steps recorded as CUDA graphs: the same gradients, and who is told that it cannot be."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.rules import RULES, Rule
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import PythonText, RecallData, TextData
from atlas_lm.train.loop import train
from atlas_lm.train.objective import NextToken
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.recording import RecordedGradients, Sums, check_recording, room_for
from atlas_lm.train.sources import Work
from atlas_lm.train.step import Gradients

MODEL = ModelConfig(vocab=64, dim=64, depth=2, heads=2, rule="delta_net")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")


def config(**changes) -> TrainConfig:
    return TrainConfig(
        **{"model": MODEL, "data": RecallData(), "length": 96, "graph": True} | changes
    )


def rows(seed: int, batch: int = 4, length: int = 96) -> Work:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (batch, length), generator=draw)
    asked = torch.rand(batch, length, generator=draw) < 0.3
    return Work(tokens, torch.where(asked, tokens.roll(-1, 1), NO_TARGET), None)


def test_targets_whose_places_are_known_make_the_same_loss():
    torch.manual_seed(0)
    objective = NextToken(LanguageModel(MODEL))
    tokens, targets, *_ = rows(0)
    expected, count, _ = objective(tokens, targets)
    places = (targets.flatten() != NO_TARGET).nonzero()[:, 0]
    wanted = targets.flatten()[places]
    found, *_ = objective(tokens, wanted, places=places)
    assert torch.equal(found, expected)
    more = torch.zeros(7, dtype=torch.int64)
    found, *_ = objective(tokens, torch.cat([wanted, more - 100]), places=torch.cat([places, more]))
    torch.testing.assert_close(found, expected)
    assert count == len(places)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"compile": True}, "without compile; leave one"),
        ({"checkpointing": True}, "without checkpointing"),
        ({"accumulate": 2}, "without accumulate"),
        ({"data": PythonText()}, "documents of a text begin anywhere"),
        (
            {"model": replace(MODEL, rule=Rule(objective=lambda e: e.square().sum(-1)))},
            "a function given as objective may look at numbers",
        ),
    ],
)
def test_what_cannot_be_recorded(changes, told):
    with pytest.raises(ValueError, match=f"graph: .*{told}"):
        config(**changes)
    assert not config(**changes, graph=False).graph


TEXT = TextData(path="books", excerpts=True)
LONG = replace(MODEL, vocab=128)
"""For rows of 192 tokens."""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"segment": 32}, "segment: 32, and --graph: .* whole 64 tokens, or no --graph"),
        ({"segment": 64}, "segment: 64, and --graph: rows of 96 tokens; .* whole segments"),
        (
            {"segment": 64, "length": 192, "model": replace(LONG, rule="attention")},
            "expected rules whose state has one size",
        ),
        (
            {"segment": 64, "length": 192, "model": replace(LONG, rule="swa", window=128)},
            "whole 64 tokens, 127 or more",
        ),
        ({"data": TEXT, "carry": True, "graph": False}, "carry: the rows of excerpts do not go on"),
    ],
)
def test_segments_that_cannot_be_recorded(changes, told):
    with pytest.raises(ValueError, match=told):
        config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"segment": 64, "length": 192, "model": LONG},
        {"segment": 96},
        {"segment": 64, "length": 192, "model": replace(LONG, rule=("swa", "atlas"), window=65)},
        {
            "segment": 64,
            "length": 192,
            "model": replace(LONG, rule="atlas", block="mag", window=9),
        },
        {"data": TEXT},
    ],
)
def test_segments_and_excerpts_that_can_be_recorded(changes):
    assert config(**changes).graph


def test_gradients_of_recordings_add_up():
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    sums = Sums()
    for _ in range(2):
        sums.clear()
        one.grad = other.grad = None
        sums.add([one, other], [torch.ones(2), torch.ones(2)])
        one.grad, other.grad = torch.ones(2), None  # as a recording leaves them
        sums.add([one, other], [torch.ones(2), None])  # what memories begin with
        assert one.grad is not None
        assert one.grad.tolist() == [2, 2]
        assert other.grad is not None
        assert other.grad.tolist() == [1, 1]
    sums.clear()
    sums.add([one, other], [torch.ones(2), None])  # memories go on from the step before
    assert other.grad is None


@pytest.mark.parametrize(
    ("targets", "tokens", "room"),
    [(0, 96, 96), (7, 4096, 256), (257, 4096, 1024), (3000, 3000, 3000)],
)
def test_room_for_targets(targets, tokens, room):
    assert room_for(targets, tokens) == room


MIXERS = ["attention", "swa", *RULES]
IN_BLOCKS = [("atlas", block) for block in ("mac", "mag", "mag_sum", "mal")]


@pytest.mark.parametrize(("rule", "block"), [*((rule, "plain") for rule in MIXERS), *IN_BLOCKS])
def test_nothing_that_is_recorded_asks_for_a_value(rule, block, monkeypatch):
    """On the device "meta" there are none: what asks fails there as it fails in a graph."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it knows no "meta"
    with torch.device("meta"):
        model = LanguageModel(replace(MODEL, rule=rule, block=block, d_k=8))
        tokens, places = torch.zeros(4, 96).long(), torch.zeros(256).long()
    nats, *_ = NextToken(model)(tokens, places, places=places)
    nats.backward()
    grads = [p.grad for p in model.parameters()]
    assert sum(grad is not None for grad in grads) > len(grads) // 2


def test_a_cpu_has_no_graphs(tmp_path):
    told = "--graph: a CUDA graph of a step is for one GPU, not for the cpu"
    with pytest.raises(ValueError, match=told):
        train(config(), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="one GPU, not for 2 ranks"):
        check_recording(config(), Ranks(torch.device("cuda"), rank=0, ranks=2))
    check_recording(config(graph=False), Ranks(torch.device("cpu")))


@pytest.mark.parametrize("rule", ["delta_net", "titans", "atlas", "omeganet", "gated_delta_net"])
def test_after_whole_chunks_it_does_not_matter_how_many(rule):
    """What lets one graph serve every row of a text."""
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, rule=rule, d_k=8)).double()
    true, alike = None, None
    for seed in range(4):
        work = rows(seed, length=64)
        expected, true = model(work.tokens, true)
        if alike is not None:
            alike = alike.map(lambda t: t if t.is_floating_point() else torch.full_like(t, 64))
        found, alike = model(work.tokens, alike)
        torch.testing.assert_close(found, expected)
        for name, tensor in true.tensors().items():
            if tensor.is_floating_point():
                torch.testing.assert_close(alike.tensors()[name], tensor)


@pytest.mark.parametrize("begins", [True, False])
def test_what_is_read_before_is_in_memory_and_nothing_more(begins, monkeypatch):
    """In pieces, and the gradients are those of a memory that was given."""
    monkeypatch.setattr("atlas_lm.train.step.TOKENS_AT_ONCE", 4 * 64)
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    gradients = Gradients(config(graph=False), Ranks(torch.device("cpu")), NextToken(model))
    with torch.no_grad():
        _, earlier = model(rows(5).tokens)
    gradients.carried = [earlier]
    work = rows(0)._replace(begins=begins, before=rows(1, length=150).tokens)
    _, (after,) = gradients.add(work._replace(ends=False))
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        _, state = model(work.before, None if begins else earlier)
    gradients.carried = [state]
    model.zero_grad()
    _, (expected,) = gradients.add(work._replace(begins=False, ends=False, before=None))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(found, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert after is not None
    assert expected is not None
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(after.tensors()[name], tensor)


@on_a_gpu
@pytest.mark.parametrize("rule", ["delta_net", "gated_delta_net", "titans", "atlas", "omeganet"])
def test_recorded_memories_go_on(rule):
    """From row to row of a text, at every length in turn, and after plain text."""
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, rule=rule)).cuda()
    objective, ranks = NextToken(model), Ranks(torch.device("cuda"))
    plain, recorded = (kind(config(), ranks, objective) for kind in (Gradients, RecordedGradients))
    for seed, (length, row) in enumerate(product((128, 192, 128), range(3))):
        work = rows(seed, length=length)._replace(begins=row == 0, ends=row == 2)
        if seed in (1, 3, 5, 8):
            work = work._replace(before=rows(100 + seed, length=2 * length).tokens)
        found = []
        for gradients in (plain, recorded):
            for parameter in model.parameters():
                parameter.grad = None
            loss, gradients.carried = gradients.add(work)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            state = gradients.carried[0]
            memories = [] if state is None else list(state.tensors().values())
            kept = [t for t in memories if t.is_floating_point()]
            found.append([t.clone() for t in (loss, *grads, *kept)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@on_a_gpu
@pytest.mark.parametrize("rule", ["gated_delta_net", "titans", "atlas", "omeganet", "swa"])
def test_recorded_segments_are_the_same(rule):
    torch.manual_seed(0)
    model = LanguageModel(replace(LONG, rule=rule, window=64)).cuda()
    objective, ranks = NextToken(model), Ranks(torch.device("cuda"))
    wanted = config(model=model.config, length=192, segment=64)
    plain, recorded = (kind(wanted, ranks, objective) for kind in (Gradients, RecordedGradients))
    for seed in range(3):
        work, found = rows(seed, length=192), []
        for gradients in (plain, recorded):
            for parameter in model.parameters():
                parameter.grad = None
            loss, _ = gradients.add(work)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([t.clone() for t in (loss, *grads)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


RECORDED = ["delta_net", "titans", "atlas", "omeganet", "swa", "attention"]
MORE_RECORDED = ["linear_attention", "gated_delta_net", "dla", "atlas_pp", "dot"]


@on_a_gpu
@pytest.mark.parametrize("rule", RECORDED + MORE_RECORDED)
def test_recorded_gradients_are_the_same(rule):
    """At every shape, and again after others."""
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, rule=RULES.get(rule, rule))).cuda()
    objective, ranks = NextToken(model), Ranks(torch.device("cuda"))
    plain, recorded = (kind(config(), ranks, objective) for kind in (Gradients, RecordedGradients))
    for seed, length in enumerate((96, 96, 100, 96, 100)):
        work, found = rows(seed, length=length), []
        for gradients in (plain, recorded):
            for parameter in model.parameters():
                parameter.grad = None
            loss, _ = gradients.add(work)
            found.append(
                [loss.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            )
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@on_a_gpu
def test_a_recorded_run_learns_as_the_other_does(tmp_path):
    from atlas_lm.train.run_folder import METRICS

    losses = []
    for graph in (False, True):
        folder = tmp_path / str(graph)
        train(config(graph=graph, steps=40, batch=8), folder, device="cuda")
        text = (folder / METRICS).read_text()
        losses.append([float(part.split(",")[0]) for part in text.split('"loss": ')[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)

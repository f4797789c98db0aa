"""Training: gradients, resuming bit for bit, what is told, and what stops a run."""

import ctypes
import errno
import json
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from math import cos, exp, pi
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from watchers import At

from atlas_lm import RULES, LanguageModel, ModelConfig, load_model, save_model
from atlas_lm.cli import main
from atlas_lm.data.prepare import Options, prepare
from atlas_lm.models.folder import model_folder
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.ops.validation import BadNumbers
from atlas_lm.recipes import RECIPES
from atlas_lm.tasks.rows import EVALUATE, TRAIN, rows
from atlas_lm.text import ByteTokenizer
from atlas_lm.trace import trace
from atlas_lm.train import loop
from atlas_lm.train.ahead import OneAhead
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import PythonText, RecallData, StoryData, TaskData, TextData
from atlas_lm.train.evaluate import evaluate
from atlas_lm.train.guard import check_compiler, explained_memory, first_not_finite, what_helps
from atlas_lm.train.loop import train
from atlas_lm.train.objective import NextToken
from atlas_lm.train.optimizers import OptimizerConfig, Optimizers, grouped
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.samples import keep_samples
from atlas_lm.train.schedules import Schedule
from atlas_lm.train.signals import signals
from atlas_lm.train.sources import (
    BLOCK,
    Recall,
    Tasks,
    Text,
    Work,
    epoch_order,
    open_material,
)
from atlas_lm.train.start import first_model
from atlas_lm.train.step import Gradients
from atlas_lm.train.watch import Board, Journal, Screen, read_lines

ALONE = Ranks(torch.device("cpu"))
TITANS = replace(RULES["titans"], chunk=8)
MODEL = ModelConfig(vocab=32, dim=16, depth=2, heads=2, rule=TITANS, gate_rank=4)
TIMES = ("seconds", "tokens_per_second")


def recall(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": MODEL,
        "data": RecallData(longer=(24,)),
        "optimizer": OptimizerConfig(lr=3e-3),
        "schedule": Schedule(warmup=2),
        "steps": 8,
        "batch": 4,
        "length": 12,
        "log_every": 1,
        "evaluate_every": 4,
        "evaluate_batches": 1,
        "checkpoint_every": 2,
    }
    return TrainConfig(**values | changes)


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    """Prepared text: 40 short documents, some of them kept for evaluation."""
    folder = tmp_path_factory.mktemp("books")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for i in range(40):
        text = " ".join(words[(i * k) % 10] for k in range(1, 20 + i))
        (folder / f"{i:02}.txt").write_text(text)
    prepare(Options(sources=(str(folder),), out=folder / "data", valid=0.2))
    return folder / "data"


def of_text(books: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "data": TextData(path=str(books)),
        "length": 32,
        "segment": 16,
        "accumulate": 2,
        "carry": True,
        "samples": 2,
        "sample_tokens": 5,
    }
    return recall(**values | changes)


SMALL, LARGE = "mqar/64-4:vocab=32:pairs=2", "mqar/64-8:vocab=64:pairs=3"


def of_task(**changes: Any) -> TrainConfig:
    data: dict[str, Any] = {
        n: changes.pop(n) for n in ("task", "mix", "tests", "longer", "examples") if n in changes
    }
    data = {"task": SMALL} | data
    return recall(**{"length": 16, "data": TaskData(**data)} | changes)


def tasks_of(config: TrainConfig) -> Tasks:
    assert isinstance(config.data, TaskData)
    return Tasks(config.data)


def recall_of(config: TrainConfig) -> Recall:
    assert isinstance(config.data, RecallData)
    return Recall(config.data)


def text_of(config: TrainConfig) -> Text:
    assert isinstance(config.data, TextData)
    return Text(config.data)


class Killed(BaseException):
    """Nothing catches it but us."""


def kill() -> None:
    """Ends a run before it writes anything of a step."""
    raise Killed


def lines(out: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = read_lines(out / "metrics.jsonl")
    return [line for line in found if kind in (None, line["kind"])]


def timeless(out: Path) -> list[dict[str, Any]]:
    """All metrics but what depends on the clock, and on being stopped."""
    kept = [line for line in lines(out) if line["kind"] != "note"]
    return [{n: v for n, v in line.items() if n not in TIMES} for line in kept]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_model(out / "model").state_dict()


def assert_same(one: Path, other: Path) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert timeless(one) == timeless(other)


# Schedules and optimisers


def test_schedules_are_functions_of_the_step():
    cosine = Schedule(warmup=10, floor=0.1)
    assert [cosine.factor(n, 110) for n in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert cosine.factor(60, 110) == pytest.approx(0.1 + 0.9 * (1 + cos(pi / 2)) / 2)
    assert cosine.factor(110, 110) == pytest.approx(0.1)
    wsd = Schedule(name="wsd", warmup=10, decay=0.2, floor=0.0)
    assert [wsd.factor(n, 100) for n in (10, 50, 80)] == [1.0, 1.0, 1.0]
    assert wsd.factor(90, 100) == pytest.approx(0.5)
    assert wsd.factor(100, 100) == 0.0
    constant = Schedule(name="constant", warmup=0)
    assert {constant.factor(n, 5) for n in range(9)} == {1.0}


def test_every_parameter_has_one_group():
    model = LanguageModel(replace(MODEL, rule="atlas", block="mag", persistent=2))
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in ("adamw", "muon"):
        found = [(group, names[id(p)]) for group, p in grouped(model, optimizer)]
        assert sorted(name for _, name in found) == sorted(names.values())
        of = {name: group for group, name in found}
        hidden = "hidden" if optimizer == "muon" else "matrices"
        assert of["blocks.0.mixer.project.weight"] == of["blocks.1.mlp.out.weight"] == hidden
        assert of["blocks.0.mixer.gates.up.weight"] == of["head.weight"] == "matrices"
        assert of["embedding.weight"] == "embedding"
        assert of["blocks.0.mixer.memory.w1"] == "memory"
        vectors = ("gates.up.bias", "log_coefficients", "memory.gain", "norm.weight", "conv.weight")
        assert {of[f"blocks.0.mixer.{name}"] for name in vectors} == {"vectors"}


def test_only_matrices_decay_and_every_group_has_its_rate():
    model = LanguageModel(MODEL)
    config = OptimizerConfig(name="muon", lr=1.0, lr_muon=2.0, lr_memory=3.0, lr_embedding=4.0)
    optimizers = Optimizers(config, model)
    assert optimizers.set_rate(0.5) == 0.5
    names = {id(p): name for name, p in model.named_parameters()}
    of = {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for optimizer in optimizers.all
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert len(of) == len(names)
    assert of["blocks.0.mlp.out.weight"] == (1.0, 0.1)
    assert of["head.weight"] == (0.5, 0.1)
    assert of["blocks.0.mixer.memory.w1"] == (1.5, 0.0)
    assert of["embedding.weight"] == (2.0, 0.0)
    assert of["norm.weight"] == (0.5, 0.0)


# Gradients


def gradients_of(config: TrainConfig, work: Work, carried=None) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = LanguageModel(config.model)
    made = Gradients(config, ALONE, NextToken(model))
    if carried is not None:
        made.carried = carried
    loss, _ = made.add(work)
    return float(loss), [p.grad for p in model.parameters() if p.grad is not None]


def text_work(rows: int, length: int, resets: bool = False) -> Work:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 32, (rows, length + 1), generator=generator)
    reset = torch.rand(rows, length, generator=generator) < 0.1 if resets else None
    return Work(tokens[:, :-1], tokens[:, 1:], reset)


def test_rows_in_parts_make_the_same_gradient(float64):
    config = recall(batch=6)
    work = text_work(6, 20, resets=True)
    loss, whole = gradients_of(config, work)
    parted, parts = gradients_of(replace(config, accumulate=3), work)
    assert parted == pytest.approx(loss)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_the_loss_is_the_mean_over_all_targets(float64):
    work = text_work(2, 20)
    targets = work.targets.clone()
    targets[0, 5:] = NO_TARGET
    torch.manual_seed(0)
    expected, _ = LanguageModel(MODEL).loss(work.tokens, targets)
    for changes in ({}, {"accumulate": 2}, {"segment": 7}):
        loss, _ = gradients_of(recall(batch=2, **changes), Work(work.tokens, targets, None))
        assert loss == pytest.approx(expected.item(), rel=1e-9)


def test_segments_are_the_truncated_losses_of_the_model(float64):
    work = text_work(2, 20)
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    for loss, _ in model.losses(work.tokens, work.targets, 8):
        loss.backward()
    _, found = gradients_of(recall(batch=2, segment=8), work)
    expected = [p.grad for p in model.parameters()]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_memories_go_on_from_batch_to_batch(float64):
    """Two batches with memory carried are one with the rows of both, cut in the middle."""
    config = replace(recall(), data=TextData(path="x"), carry=True, batch=2, length=8)
    both = text_work(2, 16, resets=True)
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    made = Gradients(config, ALONE, NextToken(model))
    total = 0.0
    for work in both.segments(8):
        loss, made.carried = made.add(work._replace(begins=False, ends=False))
        total += float(loss) / 2
    expected, _ = gradients_of(replace(config, length=16, segment=8), both)
    assert total == pytest.approx(expected, rel=1e-9)
    again = Gradients(replace(config, accumulate=2), ALONE, NextToken(model))
    saved = made.state_dict()
    again.load_state_dict(saved)
    assert len(saved["tensors"]) > 5
    for name, tensor in again.state_dict()["tensors"].items():
        assert torch.equal(tensor, saved["tensors"][name]), name


def test_what_is_carried_does_not_move_with_the_weights():
    """Documents begin in every row, so that the memory is the initial one."""
    config = replace(recall(), data=TextData(path="x"), carry=True, batch=2, length=8)
    work = text_work(2, 8)
    reset = torch.zeros(2, 8, dtype=torch.bool)
    reset[:, 0] = True
    model = LanguageModel(MODEL)
    _, (state,) = Gradients(config, ALONE, NextToken(model)).add(
        work._replace(reset=reset, ends=False)
    )
    assert state is not None
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


def test_a_long_gradient_is_made_as_short_as_allowed():
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    made = Gradients(recall(clip=0.01), ALONE, NextToken(model))
    made.add(text_work(4, 12))
    length = float(made.clip())
    assert length > 0.01
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert float(torch.stack([g.norm() for g in grads]).norm()) == pytest.approx(0.01, rel=1e-3)
    anything = Gradients(recall(clip=0.0), ALONE, NextToken(model))
    assert float(anything.clip()) == pytest.approx(0.01, rel=1e-3)


# Where batches come from


def test_recall_is_the_same_on_any_number_of_ranks_and_from_any_step():
    config = recall(data=RecallData(shortest=3, growth=4, vary=True), length=24)
    material = recall_of(config)
    alone = material.source(config, ALONE)
    parts = [material.source(config, replace(ALONE, rank=r, ranks=2)) for r in (0, 1)]
    works = [alone.next() for _ in range(6)]
    for work in works:
        tokens = torch.cat([part.next().tokens for part in parts])
        assert torch.equal(tokens, work.tokens)
    again = material.source(config, ALONE)
    again.load_state_dict({"step": 4})
    assert torch.equal(again.next().tokens, works[4].tokens)
    assert not torch.equal(works[4].tokens[:, :3], works[5].tokens[:, :3])


def test_a_batch_that_was_made_ahead_is_not_lost():
    config = recall()
    plain, source = (recall_of(config).source(config, ALONE) for _ in range(2))
    source = OneAhead(source)
    source.next()
    source.make()
    saved = source.state_dict()
    expected = [plain.next() for _ in range(3)]
    assert torch.equal(source.next().tokens, expected[1].tokens)
    source.make()
    source.load_state_dict(saved)
    for work in expected[1:]:
        assert torch.equal(source.next().tokens, work.tokens)


def test_rows_of_recall_grow():
    config = recall(data=RecallData(shortest=6, growth=10), length=26)
    source = recall_of(config).source(config, ALONE)
    assert [source.length(step) for step in (0, 5, 10, 99)] == [6, 16, 26, 26]
    assert source.next().tokens.shape == (4, 6)
    varied = replace(config, data=replace(config.data, vary=True))
    drawn = recall_of(varied).source(varied, ALONE)
    found = [drawn.length(step) for step in range(200)]
    assert all(6 <= n <= source.length(step) for step, n in enumerate(found))
    assert (min(found), max(found)) == (6, 26)


@pytest.mark.parametrize("examples", [0, 10])
def test_tasks_are_the_same_on_any_number_of_ranks_and_from_any_step(examples):
    config = of_task(mix=(SMALL, SMALL, LARGE), examples=examples)
    material = tasks_of(config)
    alone = material.source(config, ALONE)
    parts = [material.source(config, replace(ALONE, rank=r, ranks=2)) for r in (0, 1)]
    works = [alone.next() for _ in range(8)]
    for work in works:
        both = [part.next() for part in parts]
        assert torch.equal(torch.cat([part.tokens for part in both]), work.tokens)
        assert torch.equal(torch.cat([part.targets for part in both]), work.targets)
    assert [int((work.targets != NO_TARGET).sum()) for work in works] == [8, 8, 12, 8, 8, 12, 8, 8]
    for step in range(8):
        again = material.source(config, ALONE)
        again.load_state_dict({"step": step})
        assert torch.equal(again.next().tokens, works[step].tokens)
        assert again.state_dict() == {"step": step + 1}
    other = material.source(replace(config, seed=1), ALONE).next()
    assert not torch.equal(other.tokens, works[0].tokens)


def test_a_task_gives_new_rows_at_every_step():
    config = of_task()
    source = tasks_of(config).source(config, ALONE)
    for step in range(3):
        assert torch.equal(source.next().tokens, rows(SMALL, 4, 16, 0, TRAIN, step).tokens)


def test_a_fixed_set_is_seen_whole_in_every_epoch_and_each_time_in_another_order():
    size = BLOCK + 6
    drawn = [rows(SMALL, BLOCK, 16, 0, TRAIN, i) for i in (0, 1)]
    answers = {
        tuple(row): wanted
        for block in drawn
        for row, wanted in zip(block.tokens.tolist(), block.targets.tolist(), strict=True)
    }
    wanted = [tuple(row) for block in drawn for row in block.tokens.tolist()][:size]
    config = of_task(examples=size, batch=4)
    source = tasks_of(config).source(config, ALONE)
    works = [source.next() for _ in range(size // 2)]  # two epochs
    seen = [tuple(row) for work in works for row in work.tokens.tolist()]
    targets = [row for work in works for row in work.targets.tolist()]
    assert [answers[row] for row in seen] == targets
    assert sorted(seen[:size]) == sorted(seen[size:]) == sorted(wanted)
    assert seen[:size] != seen[size:]
    assert seen[:size] != wanted


def test_epochs_follow_each_other_within_a_batch():
    whole = epoch_order(3, 5, 0, 20).tolist()
    assert [sorted(whole[i : i + 5]) for i in range(0, 20, 5)] == [[0, 1, 2, 3, 4]] * 4
    for begin in range(14):
        assert epoch_order(3, 5, begin, 6).tolist() == whole[begin : begin + 6]
    assert epoch_order(3, 2, 1, 5).tolist() == epoch_order(3, 2, 0, 6).tolist()[1:]


def test_a_task_of_a_mix_goes_through_its_own_set():
    config = of_task(mix=(SMALL, LARGE, SMALL), examples=8)
    source = tasks_of(config).source(config, ALONE)
    works = [source.next() for _ in range(6)]
    for turns in ((0, 2), (3, 5), (1, 4)):  # two steps of 4 rows are an epoch
        seen = [tuple(row) for turn in turns for row in works[turn].tokens.tolist()]
        assert len(set(seen)) == 8
    assert [work.tokens.shape[1] for work in works] == [64] * 6


def test_vocabulary_and_length_are_those_of_the_task(tmp_path):
    config = of_task(task="mad/compression", tests=("mad/memorisation",), length=0, steps=1)
    assert (config.length, config.sized().length) == (0, 63)
    assert of_task(length=8).sized().length == 8
    train(config, tmp_path / "run")
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert (written["model"]["vocab"], written["length"]) == (256, 63)
    (line,) = lines(tmp_path / "run", "eval")
    assert {n for n in line if "@" in n} == {"accuracy@compression", "accuracy@memorisation"}
    assert line["accuracy"] == line["accuracy@compression"]
    train(replace(config, steps=2), tmp_path / "run", resume=True)


def test_what_a_task_cannot_make_is_told_before_anything_is_written(tmp_path):
    for changes in ({"longer": (7,)}, {"length": 7}, {"tests": ("mad/compression:vocab=17",)}):
        with pytest.raises(ValueError, match=r"mqar: .* pairs in 7 tokens|compression: 63 tokens"):
            train(of_task(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_of_text_go_on_and_begin_where_documents_do(books):
    config = of_text(books)
    source = text_of(config).source(config, ALONE)
    first, second = source.next(), source.next()
    assert torch.equal(first.tokens[:, 1:], first.targets[:, :-1])
    assert torch.equal(first.targets[:, -1], second.tokens[:, 0])
    assert first.reset is not None
    assert first.reset[:, 0].all()
    end = ByteTokenizer.end
    assert torch.equal(first.reset[:, 1:], first.tokens[:, :-1] == end)
    afresh = text_of(config).source(replace(config, carry=False), ALONE).next()
    assert afresh.reset is not None
    assert not afresh.reset[:, 0].any()


def test_the_vocabulary_is_that_of_the_data(books, tmp_path):
    train(of_text(books, steps=1), tmp_path / "run")
    assert json.loads((tmp_path / "run/config.json").read_text())["model"]["vocab"] == 257
    assert load_model(tmp_path / "run/model").config.vocab == 257


# Runs


def test_a_run_leaves_a_model_and_all_that_was_told(tmp_path):
    out = tmp_path / "run"
    assert train(recall(), out, recipe="mine") == out / "model"
    told = lines(out, "train")
    assert [line["step"] for line in told] == list(range(1, 9))
    assert [line["tokens"] for line in told] == [48 * n for n in range(1, 9)]
    schedule = Schedule(warmup=2)
    assert [line["lr"] for line in told] == [3e-3 * schedule.factor(n, 8) for n in range(8)]
    expected = {
        f"{name}/{layer}" for name in ("retention", "rate", "inner_loss") for layer in (0, 1)
    }
    assert all(line["signals"].keys() == expected for line in told)
    assert all(line["tokens_per_second"] > 0 and line["grad_norm"] > 0 for line in told)
    evaluations = lines(out, "eval")
    assert [line["step"] for line in evaluations] == [4, 8]
    assert evaluations[0]["perplexity"] == pytest.approx(exp(evaluations[0]["loss"]))
    assert evaluations[0]["accuracy"] == evaluations[0]["accuracy@12"]
    assert "accuracy@24" in evaluations[0]
    config = json.loads((out / "config.json").read_text())
    assert (config["recipe"], config["steps"], config["model"]["dim"]) == ("mine", 8, 16)
    environment = json.loads((out / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["device"].startswith("cpu: ")
    assert load_model(out / "model").config == MODEL


def test_the_first_loss_is_that_of_the_model_and_the_first_step_that_of_adamw(tmp_path):
    """The loop adds nothing of its own."""
    config = recall(steps=1, schedule=Schedule(name="constant", warmup=0), clip=0.0)
    train(config, tmp_path / "run")
    torch.manual_seed(config.seed)
    model = LanguageModel(MODEL)
    work = Recall(RecallData()).source(config, ALONE).next()
    loss, _ = model.loss(work.tokens, work.targets)
    loss.backward()
    assert lines(tmp_path / "run", "train")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    Optimizers(config.optimizer, model).step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], expected)


def test_a_run_starts_with_the_weights_of_a_model(tmp_path):
    """And not with those that its seed would make; resumed, it goes on with its own."""
    torch.manual_seed(7)
    model = LanguageModel(MODEL)
    save_model(model, tmp_path / "old")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = recall(start=str(tmp_path / "old"), clip=0.0)
    train(replace(config, steps=1, schedule=Schedule(warmup=0)), tmp_path / "one")
    work = Recall(RecallData()).source(config, ALONE).next()
    loss, _ = model.loss(work.tokens, work.targets)
    assert lines(tmp_path / "one", "train")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    after = weights(tmp_path / "one")
    assert all(not torch.equal(after[name], before[name]) for name in before)
    train(config, tmp_path / "whole")
    with pytest.raises(Killed):
        train(config, tmp_path / "cut", watch=[At(5, kill)])
    train(config, tmp_path / "cut", resume=True)
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_further_blocks_change_nothing_until_they_have_learned(tmp_path):
    torch.manual_seed(7)
    model = LanguageModel(MODEL)
    save_model(model, tmp_path / "old")
    deeper = replace(MODEL, depth=MODEL.depth + 2, rule=(*rules_of(MODEL), "delta_net", "swa"))
    config = recall(start=str(tmp_path / "old"), model=deeper)
    begun = first_model(config)
    tokens = torch.randint(0, MODEL.vocab, (2, 40))
    torch.testing.assert_close(begun(tokens)[0], model(tokens)[0], rtol=0, atol=0)
    train(replace(config, steps=3, schedule=Schedule(warmup=0)), tmp_path / "run")
    before, after = begun.state_dict(), weights(tmp_path / "run")
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert not unmoved
    other = replace(deeper, rule=("delta_net", *deeper.rules[1:]))
    with pytest.raises(ValueError, match=r"has depth .* more blocks after the same ones"):
        first_model(replace(config, model=other))
    with pytest.raises(ValueError, match="has depth"):
        first_model(replace(config, model=replace(MODEL, depth=4, block="mag")))


def rules_of(config: ModelConfig) -> list:
    return [config.rule_of(i) for i in range(config.depth)]


def test_a_run_that_starts_with_a_model_takes_its_tokenizer(tmp_path, capsys):
    """The model of the package knows words by other numbers than those of their bytes."""
    told = "train babilong --start demo --data.tasks babilong/qa1 --data.lengths 128 --length 128"
    told += " --data.rows 1 --data.pauses 0 --steps 1 --batch 2 --evaluate-batches 1"
    assert main(f"{told} --precision fp32 --out {tmp_path}/run".split()) == 0, capsys.readouterr()
    for part in ("tokenizer.json", "model.safetensors"):
        assert (tmp_path / "run/model" / part).exists()
    assert (tmp_path / "run/model/tokenizer.json").read_bytes() == (
        model_folder("demo") / "tokenizer.json"
    ).read_bytes()
    assert main(f"{told} --resume --out {tmp_path}/run".split()) == 0
    own = tmp_path / "bytes"
    save_model(LanguageModel(MODEL), own)
    config = recall(start=str(own), data=StoryData(lengths=(64,)), length=64)
    assert open_material(config, tmp_path).vocab == ByteTokenizer().vocab


def test_who_starts_with_a_model_pays_all_of_the_price_at_once(tmp_path):
    save_model(LanguageModel(MODEL), tmp_path / "old")
    found = [
        lines(tmp_path / name, "train")[0]["loss"]
        for name, price in (("free", 0.0), ("dear", 5.0))
        if train(recall(start=str(tmp_path / "old"), steps=1, price=price), tmp_path / name)
    ]
    assert found[1] > found[0] + 0.1


def test_a_model_that_a_run_cannot_start_with(tmp_path, capsys):
    save_model(LanguageModel(replace(MODEL, dim=32)), tmp_path / "old")
    begin = f"train recall --out {tmp_path}/run --start {tmp_path}/"
    assert main(f"{begin}none".split()) == 2
    assert "none: no such model folder" in capsys.readouterr().err
    assert main(f"{begin}old".split()) == 2
    told = r"start: the model in .*old has vocab \d+, that of this run"
    assert re.search(told, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nobody stops."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(recall(), out)
    return out


@pytest.mark.slow
def test_a_small_delta_net_learns_mqar(tmp_path):
    config = TrainConfig(
        model=ModelConfig(dim=64, depth=2, heads=2, rule="delta_net"),
        data=TaskData(task="mqar/64-4:vocab=32", longer=(32,)),
        optimizer=OptimizerConfig(lr=5e-3, weight_decay=0.0),
        schedule=Schedule(warmup=50),
        steps=300,
        batch=64,
        length=16,
        threads=1,
    )
    train(config, tmp_path / "run")
    (line,) = lines(tmp_path / "run", "eval")
    assert line["accuracy"] > 0.9  # of 16 values, 4 are told
    assert line["accuracy@32"] > 0.5


def goes_on_bit_for_bit(config: TrainConfig, folder: Path) -> None:
    train(config, folder / "whole")
    with pytest.raises(Killed):
        train(config, folder / "killed", watch=[At(5, kill)])
    train(config, folder / "killed", resume=True)
    for name, expected in weights(folder / "whole").items():
        assert torch.equal(weights(folder / "killed")[name], expected), name


def test_a_killed_run_of_a_mix_goes_on_bit_for_bit(tmp_path):
    config = of_task(mix=(SMALL, LARGE), examples=6, longer=(24,), steps=6, evaluate_every=0)
    goes_on_bit_for_bit(config, tmp_path)
    last = [lines(tmp_path / run, "eval")[-1] for run in ("whole", "killed")]
    assert last[0] == last[1]


@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, whole, at):
    with pytest.raises(Killed):
        train(recall(), tmp_path / "killed", watch=[At(at, kill)])
    train(recall(), tmp_path / "killed", resume=True)
    assert_same(tmp_path / "killed", whole)
    notes = [line["text"] for line in lines(tmp_path / "killed", "note")]
    assert notes == ([f"resumed from step-{(at - 1) // 2 * 2:08}"] if at > 2 else [])


def test_text_with_carried_memories_goes_on_bit_for_bit(books, tmp_path):
    """Killed within an interval of lines, with Muon and bfloat16."""
    config = of_text(
        books,
        log_every=3,
        precision="bf16",
        optimizer=OptimizerConfig(name="muon", lr=3e-3),
        sample_at="evaluations",
    )
    train(config, tmp_path / "whole")
    for at in (2, 6):
        with pytest.raises(Killed):
            train(config, tmp_path / "killed", resume=True, watch=[At(at, kill)])
    train(config, tmp_path / "killed", resume=True)
    assert_same(tmp_path / "killed", tmp_path / "whole")
    assert all(w.dtype == torch.float32 for w in weights(tmp_path / "whole").values())
    samples = [read_lines(tmp_path / name / "samples.jsonl") for name in ("whole", "killed")]
    assert samples[0] == samples[1]
    assert [line["step"] for line in samples[0]] == [4, 4, 8, 8]
    assert samples[0][0]["prompt"] == samples[0][2]["prompt"] != samples[0][1]["prompt"] != ""


def test_excerpts_of_texts_go_on_bit_for_bit(books, tmp_path):
    data = TextData(path=str(books), excerpts=True)
    config = of_text(books, data=data, carry=False, batch=2, length=24, samples=0)
    goes_on_bit_for_bit(config, tmp_path)
    work = text_of(config).source(config, ALONE).next()
    assert work.reset is None
    assert torch.equal(work.tokens[:, 1:], work.targets[:, :-1])


def test_a_finished_run_goes_on_when_it_gets_more_steps(tmp_path):
    config = recall(schedule=Schedule(name="constant", warmup=2), checkpoint_every=0)
    train(config, tmp_path / "whole")
    train(replace(config, steps=4), tmp_path / "parts")
    train(replace(config, steps=4), tmp_path / "parts", resume=True)  # nothing left to do
    train(replace(config, keep=1), tmp_path / "parts", resume=True)
    assert_same(tmp_path / "parts", tmp_path / "whole")
    assert json.loads((tmp_path / "parts/config.json").read_text())["steps"] == 8
    seconds = [line["seconds"] for line in lines(tmp_path / "parts", "train")]
    assert seconds == sorted(seconds)
    assert len(json.loads((tmp_path / "parts/environment.json").read_text())["resumed"]) == 2


def ask_to_stop() -> None:
    """Twice, as `timeout` does, each handled before the next is sent: two that wait are one."""
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
        # beside other threads Python may overlook for some ms that there is one
        ctypes.pythonapi.PyErr_CheckSignals()


def test_a_run_that_is_asked_to_stop_once_more_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("atlas_lm.train.loop.AT_ONCE", -1.0)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        train(recall(checkpoint_every=0), tmp_path / "stopped", watch=[At(3, ask_to_stop)])
    assert not list((tmp_path / "stopped").glob("checkpoints/*"))


def test_a_run_that_is_asked_to_stop_saves_the_step(tmp_path, whole):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4, which is saved"):
        train(recall(checkpoint_every=0), tmp_path / "stopped", watch=[At(3, ask_to_stop)])
    assert signal.getsignal(signal.SIGINT) == before
    train(recall(checkpoint_every=0), tmp_path / "stopped", resume=True)
    assert_same(tmp_path / "stopped", whole)


def test_another_run_is_left_alone(tmp_path):
    out = tmp_path / "run"
    train(recall(steps=2), out)
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="a run is here already; go on with it by --resume"):
        train(recall(steps=2), out)
    for changes, told in (
        ({"seed": 1}, "seed was 0, now 1"),
        ({"steps": 1}, "steps was 2, now 1"),
        ({"model": replace(MODEL, dim=32)}, "model.dim was 16, now 32"),
    ):
        with pytest.raises(ValueError, match=f"another configuration: {told}; leave out"):
            train(recall(**{"steps": 2} | changes), out, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="a file; expected a folder for the run"):
        train(recall(), tmp_path / "file")
    (out / "config.json").write_text("{}}")
    with pytest.raises(ValueError, match=r"config\.json: not the configuration of a run"):
        train(recall(steps=2), out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before


# Evaluation, signals, samples


def test_evaluation_counts_what_is_right(tmp_path):
    config = recall(evaluate_batches=3)
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    material = Recall(RecallData(longer=(24,)))
    figures = evaluate(config, ALONE, NextToken(model), material)
    for length, works in material.tests(config, ALONE).items():
        right = count = 0
        nats = 0.0
        for work in works:
            assert work.tokens.shape == (4, length)
            logits, asked = model(work.tokens)[0], work.targets != NO_TARGET
            right += int((logits.argmax(-1) == work.targets)[asked].sum())
            count += int(asked.sum())
            nats += model.loss(work.tokens, work.targets)[0].item() * int(asked.sum())
        assert figures[f"accuracy@{length}"] == pytest.approx(right / count)
        if length == 12:
            assert figures["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert evaluate(config, ALONE, NextToken(model), material) == figures


def test_evaluation_of_tasks_counts_what_is_right_by_length_and_test():
    config = of_task(longer=(40,), tests=(LARGE, SMALL), evaluate_batches=2)
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, vocab=64))
    objective = NextToken(model)
    figures = evaluate(config, ALONE, objective, tasks_of(config))
    tests = {
        "64-4:vocab=32:pairs=2": (SMALL, 16),
        "40": (SMALL, 40),
        "64-8:vocab=64:pairs=3": (LARGE, 64),
    }
    assert [n.partition("@")[2] for n in figures if "@" in n] == list(tests)
    for name, (task, length) in tests.items():
        made = [rows(task, 4, length, 0, EVALUATE, i) for i in (0, 1)]
        tokens, targets = (torch.cat(part) for part in zip(*made, strict=True))
        asked = targets != NO_TARGET
        right = (model(tokens)[0].argmax(-1) == targets)[asked].double().mean()
        assert figures[f"accuracy@{name}"] == pytest.approx(float(right))
        if length == 16:
            assert figures["accuracy"] == figures[f"accuracy@{name}"]
            assert figures["loss"] == pytest.approx(model.loss(tokens, targets)[0].item(), rel=1e-5)
    # other seeds and ranks are tested on the same; long rows come in parts
    assert evaluate(replace(config, seed=5), ALONE, objective, tasks_of(config)) == figures
    works = list(tasks_of(config).tests(config, ALONE)[40])
    assert [len(work.tokens) for work in works] == [1] * 8
    for rank in (0, 1):
        half = tasks_of(config).tests(config, replace(ALONE, rank=rank, ranks=2))[40]
        tokens = torch.cat([work.tokens for work in half])
        expected = [rows(SMALL, 4, 40, 0, EVALUATE, i).tokens[2 * rank :][:2] for i in (0, 1)]
        assert torch.equal(tokens, torch.cat(expected))


def test_evaluation_of_text_is_of_documents_that_were_kept(books):
    config = of_text(books, carry=False, segment=None, batch=64)
    material = text_of(config)
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, vocab=257))
    figures = evaluate(config, ALONE, NextToken(model, dense=True), material)
    assert figures.keys() == {"loss", "perplexity"}
    (work,) = next(iter(material.tests(config, ALONE).values()))
    assert material.valid is not None
    kept = (material.valid.document(i) for i in range(material.valid.documents))
    valid = b"".join(bytes(tokens[:-1].tolist()) for tokens in kept)
    assert all(bytes(row[row < 256][:20].tolist()) in valid for row in work.tokens)
    loss, _ = model.loss(work.tokens, work.targets, reset=work.reset)
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-5)
    bare = Text(TextData(path=str(books), valid=None))
    bare.valid = None
    assert evaluate(config, ALONE, NextToken(model, dense=True), bare) == {}


def test_signals_are_those_of_a_trace():
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    work = text_work(3, 40)
    found = signals(recall(), ALONE, NextToken(model), model, work)
    traced, _ = trace(model, work.tokens[:1])
    for layer in (0, 1):
        assert found[f"retention/{layer}"] == pytest.approx(float(traced.retention[layer].mean()))
        assert found[f"inner_loss/{layer}"] == pytest.approx(float(traced.surprise[layer].mean()))
        assert 0 < found[f"rate/{layer}"] <= 0.5
    assert all(not m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("block", ["mag", "mag_sum", "mal", "mac"])
def test_signals_tell_the_share_of_the_memory_beside_attention(block):
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, block=block, segment=8))
    if block != "mal":
        with torch.no_grad():
            for part in model.blocks:
                part.norms[1].weight.mul_(3)  # pyright: ignore
    found = signals(recall(), ALONE, NextToken(model), model, text_work(2, 20))
    shares = [found[f"memory_share/{layer}"] for layer in (0, 1)]
    if block == "mal":
        assert all(0 < share < 1 for share in shares)
    else:
        assert shares == pytest.approx([0.75, 0.75], abs=1e-3)
    assert found.keys() >= {"retention/0", "rate/1", "inner_loss/1"}
    plain = LanguageModel(replace(MODEL, rule="swa"))
    assert signals(recall(), ALONE, NextToken(plain), plain, text_work(2, 20)) == {}


def test_samples_of_a_step_are_kept_once(tmp_path):
    path = tmp_path / "samples.jsonl"
    for step in (2, 4, 4, 3):
        keep_samples(path, [{"step": step, "prompt": "", "text": str(step)}])
    assert [line["step"] for line in read_lines(path)] == [2, 3]
    keep_samples(path, [])
    assert len(read_lines(path)) == 2


# What is told


def test_lines_of_steps_that_are_taken_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = [{"kind": "train", "step": step} for step in range(1, 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole) + '{"kind": "tr')
    journal = Journal(path)
    journal.begin(3, 9)
    journal.record({"kind": "train", "step": 4, "again": True})
    journal.close()
    assert read_lines(path) == [*whole[:3], {"kind": "train", "step": 4, "again": True}]
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is no line of metrics"):
        read_lines(path)


def test_a_line_at_every_interval(capsys):
    screen = Screen("run")
    screen.begin(0, 200)
    screen.record({"kind": "eval", "step": 0, "loss": 4.0, "accuracy": 0.25, "accuracy@12": 0.25})
    numbers = {"loss": 2.31234, "tokens_per_second": 12345.6}
    screen.record({"kind": "train", "step": 20, **numbers})
    screen.record({"kind": "note", "step": 20, "text": "resumed"})
    screen.close()
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "step 0/200  evaluation  loss 4.0000  accuracy@12 0.250"
    assert second.startswith("step 20/200  loss 2.3123  accuracy 0.250  12,346 tokens/s  ")
    assert second.endswith(" left")
    assert third == "step 20/200  resumed"


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    screen = Screen("run")
    screen.begin(2, 4)
    screen.stepped(3)
    screen.record({"kind": "train", "step": 3, "loss": 1.5, "tokens_per_second": 10.0})
    screen.stepped(4)
    screen.close()
    said = capsys.readouterr().err
    assert "4/4" in said
    assert "step 3/4  loss 1.5000" in said


def test_tensorboard_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'atlas-lm\[tensorboard\]'"):
        Board(tmp_path)


def test_tensorboard_gets_the_same_numbers(tmp_path, monkeypatch):
    told: list[tuple] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int):
            told.append((folder, purge_step))

        def add_scalar(self, *said: Any) -> None:
            told.append(said)

        def close(self) -> None:
            told.append(("closed",))

    fake = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    board = Board(tmp_path)
    board.begin(4, 9)
    board.record({"kind": "train", "step": 5, "loss": 2.0, "signals": {"rate/0": 0.5}})
    board.record({"kind": "note", "step": 5, "text": "resumed"})
    board.close()
    expected = [(str(tmp_path), 5), ("train/loss", 2.0, 5), ("rate/0", 0.5, 5), ("closed",)]
    assert told == expected


# What stops a run


def test_numbers_that_are_none_stop_a_run_and_name_the_layer(tmp_path, capsys):
    out = tmp_path / "run"
    args = "--model.dim 16 --steps 9 --batch 2 --length 6 --data.longer --log-every 1"
    more = "--checkpoint-every 1 --schedule.warmup 0 --optimizer.lr 1e20"
    assert main(f"train recall --out {out} {args} {more}".split()) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("atlas-lm: step 2: ")
    assert "first in the output of blocks.0." in told
    assert f"the last good checkpoint is {out / 'checkpoints/step-00000001'}." in told
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
    assert [line["step"] for line in lines(out, "note")] == [2]
    assert not (out / "model").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BadNumbers("v: holds nan"), "step 4: evaluation: v: holds nan; there is no"),
        (ValueError("books: there is no such test"), "books: there is no such test"),
    ],
)
def test_an_evaluation_is_broken_by_numbers_alone(error, told, tmp_path, monkeypatch, capsys):
    """What else is wrong with it is told as it is, and not to be mended by a lower rate."""

    def fails(*_):
        raise error

    monkeypatch.setattr("atlas_lm.train.loop.evaluate", fails)
    args = "--model.dim 16 --steps 4 --batch 2 --length 6 --data.longer --log-every 4"
    assert main(f"train recall --out {tmp_path / 'run'} {args} --evaluate-every 4".split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"atlas-lm: {told}")
    assert ("--optimizer.lr" in said) == isinstance(error, BadNumbers)


def test_a_gradient_that_is_none_is_found_where_it_begins():
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    made = Gradients(recall(), ALONE, NextToken(model))

    def poisoned(_module, _inputs, output):
        output.register_hook(lambda grad: grad * float("nan"))

    def found_in(gradients: Gradients) -> str:
        again = partial(gradients.add, text_work(4, 12))
        return first_not_finite(gradients.objective, model, again)

    hook = model.blocks[1].mlp_norm.register_forward_hook(poisoned)
    assert found_in(made) == ("the gradient of blocks.1.mlp_norm.weight")
    hook.remove()
    assert found_in(made) in ("", GRADIENTS_STAY)
    with torch.no_grad():
        model.blocks[1].norm.weight[3] = float("inf")
    model.zero_grad()
    assert found_in(made) == ("the output of blocks.1.norm")


@pytest.mark.parametrize(
    ("rule", "segment", "told"),
    [
        ("titans", None, "through 2,048 tokens of a deep memory .* --segment 1024, or"),
        (("delta_net", "atlas"), None, "retention=none"),
        ("titans", 1024, "a lower --optimizer.lr"),
        (replace(RULES["titans"], retention="none"), None, "a lower --optimizer.lr"),
        ("gated_delta_net", None, "a lower --optimizer.lr"),
        ("attention", None, "a lower --optimizer.lr"),
    ],
)
def test_what_helps_depends_on_what_gradients_go_through(rule, segment, told):
    model = replace(MODEL, rule=rule, vocab=8192)
    assert re.search(told, what_helps(recall(model=model, length=2048, segment=segment)))


GRADIENTS_STAY = "the gradient of blocks.1.mlp_norm.weight"
"""Gradients are added to those there are."""


def test_too_little_memory_says_what_to_lower(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(NextToken, "forward", full)
    assert main(f"train recall --out {tmp_path / 'run'} --batch 8".split()) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "out of memory on cpu: 8 rows x 96 tokens at once are too many; try " in told
    assert "--accumulate 2 (the same gradient, in more parts) or --segment 48 or --batch 4" in told
    with (
        pytest.raises(ValueError, match="out of memory on cpu"),
        explained_memory(recall(), ALONE),
    ):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="something else"), explained_memory(recall(), ALONE):
        raise RuntimeError("something else")


@pytest.fixture
def full_disk(monkeypatch) -> list[int]:
    """A disk that has no space from the third checkpoint on, or once told so."""
    room = [2]
    save = loop.Checkpoints.save

    def limited(self, step: int, state, *, best=None) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "no space for it; earlier ones are as they were", "there")
        save(self, step, state, best=best)

    monkeypatch.setattr(loop.Checkpoints, "save", limited)
    return room


def test_a_full_disk_stops_a_run_that_goes_on_later(tmp_path, full_disk, capsys):
    args = "--model.dim 16 --steps 6 --batch 2 --length 6 --data.longer --checkpoint-every 2"
    assert main(f"train recall --out {tmp_path / 'full'} {args}".split()) == 2
    assert "there: no space for it" in capsys.readouterr().err
    full_disk[0] = 10
    assert main(["train", "recall", "--out", str(tmp_path / "full"), "--resume"]) == 0
    assert main(f"train recall --out {tmp_path / 'whole'} {args}".split()) == 0
    assert_same(tmp_path / "full", tmp_path / "whole")


def test_metrics_that_cannot_be_written_stop_a_run(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.begin(0, 9)

    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    journal.close()
    monkeypatch.setattr(journal, "_file", Full())
    with pytest.raises(OSError, match=r"make room and go on by --resume") as caught:
        journal.record({"kind": "note", "step": 1})
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")


def test_data_that_is_not_there_is_a_clear_message(tmp_path, books, capsys):
    def told(args: str) -> str:
        assert main(f"train books --out {tmp_path / 'run'} {args}".split()) == 2
        return capsys.readouterr().err

    assert "data.path: not given; make texts into data with `atlas-lm data prepare" in told("")
    assert "no such folder of prepared data" in told("--data.path nowhere")
    assert "too few for batches of 32 rows x 4096 tokens" in told(f"--data.path {books}")
    assert not (tmp_path / "run").exists()


def test_resuming_needs_no_options_again(tmp_path, capsys):
    run = f"--out {tmp_path / 'run'}"
    args = "--model.dim 16 --batch 2 --length 6 --data.longer --steps 2"
    assert main(f"train recall {run} {args}".split()) == 0
    assert main(f"train recall {run.replace(' ', '=')} --resume --steps 3".split()) == 0
    assert "step 3/3" in capsys.readouterr().err
    assert load_model(tmp_path / "run/model").config.dim == 16
    assert '"steps":3' in (tmp_path / "run/report.html").read_text()
    assert main(f"train recall {run} --resume --batch 4".split()) == 2
    assert "batch was 2, now 4" in capsys.readouterr().err
    assert main(f"train quickstart {run} --resume".split()) == 2
    assert "begun by the recipe recall, not quickstart" in capsys.readouterr().err


# Compiling, and real text


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError, match="--compile: there is no C\\+\\+ compiler no-such-compiler"
    ):
        check_compiler(recall(compile=True), torch.device("cpu"))
    check_compiler(recall(), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_run_has_the_same_losses(tmp_path):
    config = recall(steps=4, evaluate_every=2)
    train(config, tmp_path / "plain")
    train(replace(config, compile=True), tmp_path / "compiled")
    for one, other in zip(lines(tmp_path / "plain"), lines(tmp_path / "compiled"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)


@pytest.mark.slow
def test_python_s_own_text_is_learned(tmp_path):
    config = replace(RECIPES["python_text"](), steps=40, schedule=Schedule(warmup=10), samples=1)
    assert isinstance(config.data, PythonText)
    train(config, tmp_path / "run")
    told = lines(tmp_path / "run", "train")
    assert told[-1]["loss"] < told[0]["loss"] - 1
    assert lines(tmp_path / "run", "eval")[-1]["loss"] < 4


def test_threads_are_given_back(tmp_path):
    before, seen = torch.get_num_threads(), []

    counted = At(1, lambda: seen.append(torch.get_num_threads()))
    train(recall(steps=1, threads=before + 1), tmp_path / "run", watch=[counted])
    assert seen == [before + 1]
    assert torch.get_num_threads() == before

"""Training on texts with questions: what is learned, by whom, and what never is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_lm import ModelConfig, load_model
from atlas_lm.eval.run import Plan, evaluate
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.tasks.table import Folders
from atlas_lm.text import ByteTokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import QuestionData
from atlas_lm.train.evaluate import evaluate as judged
from atlas_lm.train.loop import train
from atlas_lm.train.questions import QuestionMaterial
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.run_folder import METRICS

CPU = torch.device("cpu")
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    (folder / "a.txt").write_text("Rain fell on the old roofs of the town by the sea. " * 200)
    return folder


def config(books: Path, **changes) -> TrainConfig:
    data = QuestionData(tasks=("babilong/qa1", "niah/number"), lengths=(500, 700), books=str(books))
    shape = ModelConfig(dim=16, depth=1, heads=1, rule="delta_net")
    values: dict[str, Any] = {
        "model": shape,
        "data": data,
        "batch": 4,
        "length": 700,
        "steps": 2,
        "samples": 0,
    }
    return TrainConfig(**values | changes)


@pytest.fixture(scope="module")
def material(books, tmp_path_factory) -> QuestionMaterial:
    data = config(books).data
    assert isinstance(data, QuestionData)
    return QuestionMaterial(data, tmp_path_factory.mktemp("cache"))


def answers(work) -> list[str]:
    return [BYTES.decode(row[row != NO_TARGET].tolist()) for row in work.targets]


def texts(work) -> list[str]:
    return [BYTES.decode(row.tolist()) for row in work.tokens]


def test_the_answer_is_learned_and_nothing_else(books, material):
    source = material.source(config(books), Ranks(CPU))
    lengths = set()
    for step in range(8):
        work = source.next()
        lengths.add(work.tokens.shape[1])
        for text, answer, tokens, targets in zip(
            texts(work), answers(work), work.tokens, work.targets, strict=True
        ):
            assert answer.startswith(" ")
            assert answer.endswith(".")
            asked = (targets != NO_TARGET).nonzero().flatten()
            assert asked.tolist() == list(range(int(asked[0]), int(asked[0]) + len(answer)))
            # what is said is what is read next
            assert tokens[asked[1:]].tolist() == targets[asked[:-1]].tolist()
            before = BYTES.decode(tokens[: int(asked[0]) + 1].tolist())
            assert before.endswith("Answer:" if step % 2 == 0 else "provided text is")
            if step % 2:
                assert f"is: {answer.strip()}" in text
    assert lengths == {500, 700}


def test_ranks_share_the_rows_of_one(books, material):
    whole, second = (material.source(config(books), Ranks(CPU)) for _ in range(2))
    halves = [material.source(config(books), Ranks(CPU, rank, 2)) for rank in range(2)]
    for step in range(3):
        together = whole.next()
        parts = [half.next() for half in halves]
        assert torch.equal(together.tokens, torch.cat([part.tokens for part in parts]))
        assert torch.equal(together.targets, torch.cat([part.targets for part in parts]))
        second.load_state_dict({"step": step})
        assert torch.equal(second.next().tokens, together.tokens)


def test_evaluation_asks_what_training_does_not(books, material):
    source = material.source(config(books), Ranks(CPU))
    learned = {text for _ in range(20) for text in texts(source.next())}
    tests = material.tests(config(books), Ranks(CPU))
    assert list(tests) == ["qa1-700", "number-700"]
    asked = {text for works in tests.values() for work in works for text in texts(work)}
    assert asked
    told = [set(re.findall(r"for (\S+ is: \d+)", " ".join(each))) for each in (learned, asked)]
    assert all(told)
    assert not told[0] & told[1]


def test_a_run_is_trained_and_asked_by_the_same_tokenizer(books, tmp_path):
    run = tmp_path / "run"
    made = train(config(books, evaluate_batches=1), run, device="cpu")
    assert made is not None
    said = (run / METRICS).read_text()
    assert '"accuracy@qa1-700": 0.0' in said
    assert load_model(made).config.vocab == BYTES.vocab
    plan = Plan(tasks=("babilong/qa1",), lengths=(600,), samples=2, folders=Folders(books=books))
    assert evaluate(made, plan, tmp_path / "eval", "cpu").recall[0].done == 2


def test_whole_answers_count(books, tmp_path):
    """A model that says every letter but the last is never right."""
    data = QuestionData(tasks=("babilong/qa1",), books=str(books))
    settings = config(books, data=data, evaluate_batches=1)

    class Almost(torch.nn.Module):
        """Wrong at one token of each row but the first."""

        def forward(self, tokens, targets, state=None, reset=None, judge=False):
            asked = targets != NO_TARGET
            last = asked & (asked.cumsum(1) == asked.sum(1, keepdim=True))
            last[0] = False
            return torch.zeros(()), asked.sum(), state, last

    material = QuestionMaterial(data, tmp_path)
    found = judged(settings, Ranks(CPU), Almost(), material)
    assert found["accuracy"] == found["accuracy@700"] == 0.25


BAD = {
    "a task that is none": (
        lambda: QuestionData(tasks=("babilong/qa21",)),
        "data.tasks: 'babilong/qa21' \\(did you mean",
    ),
    "no task": (lambda: QuestionData(tasks=()), "data.tasks: none"),
    "longer than the run": (
        lambda: TrainConfig(data=QuestionData(lengths=(512,)), length=256),
        "data.lengths: up to 512; expected at most the length, 256",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told(name):
    make, expected = BAD[name]
    with pytest.raises(ValueError, match=expected):
        make()


def test_what_does_not_fit_is_told_before_anything_is_written(books, tmp_path):
    data = QuestionData(tasks=("niah/uuid",), books=str(books))
    with pytest.raises(ValueError, match="40 of them for the answer"):
        train(config(books, data=data, length=30), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / "config.json").exists()

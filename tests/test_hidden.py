"""Texts with questions all along: answered by reading, in rows that go on."""

import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_lm.models.config import ModelConfig
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.tasks.babi import read_babi, solve
from atlas_lm.tasks.babi_world import (
    ACTORS,
    MAKERS,
    QUESTIONS_A_STORY,
    generated_questions,
    made_story,
)
from atlas_lm.tasks.samples import part_of
from atlas_lm.tasks.table import TEXT_TASKS
from atlas_lm.text import ByteTokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import HiddenData
from atlas_lm.train.hidden import HiddenMaterial, stories
from atlas_lm.train.loop import train
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.story_source import Texts

ALONE = Ranks(torch.device("cpu"))
TASKS = ("babilong/qa1", "babilong/qa2", "niah/number", "niah/pass-key")
ROOM = "bathroom|bedroom|garden|hallway|kitchen|office"
WHERE = r"Question: Where is (\w+)\?\nAnswer:"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("haystacks")


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("books")
    lines = [f"Line {i} of a book tells of nobody who is anywhere at all.\n" for i in range(2000)]
    (folder / "a.txt").write_text("".join(lines))
    return str(folder)


@pytest.fixture(scope="module")
def material(cache, books):
    return HiddenMaterial(HiddenData(tasks=TASKS, needles=4, books=books), cache)


def text(tokens: np.ndarray) -> str:
    return ByteTokenizer().decode(tokens.tolist())


def answers(tokens: np.ndarray, targets: np.ndarray) -> list[tuple[str, str]]:
    """What was read before each answer, and the answer."""
    asked = targets != NO_TARGET
    begins = np.flatnonzero(asked & ~np.roll(asked, 1))
    found = []
    for begin in begins:
        end = begin + int(np.argmin(asked[begin:])) if not asked[begin:].all() else len(asked)
        found.append((text(tokens[: begin + 1]), text(targets[begin:end])))
    return found


def test_stories_are_put_together_again():
    questions = generated_questions("qa1", "train", 0)
    found = stories(questions.shuffled(3).items)
    assert sum(map(len, found)) == len(questions)
    assert max(map(len, found)) > 1
    for story in found:
        for one, two in pairwise(story):
            assert two.facts[: len(one.facts)] == one.facts


def test_stories_are_made_for_every_text(cache, books):
    """Those of the files come round again, made ones do not."""

    def told(made: float) -> set[str]:
        data = HiddenData(tasks=("babilong/qa3",), books=books, made=made)
        material, task = HiddenMaterial(data, cache), TEXT_TASKS["babilong/qa3"]
        material._stories["qa3"] = [list(generated_questions("qa3", "train", count=1).items)]
        draws = (np.random.default_rng(seed) for seed in range(8))
        return {str(next(material._tellings(task, draw))[1]) for draw in draws}

    assert [len(told(made)) for made in (0.0, 1.0)] == [1, 8]
    assert 1 < len(told(0.5)) < 8
    with pytest.raises(ValueError, match="qa7, for which no stories are made"):
        HiddenData(tasks=("babilong/qa7",), made=0.5)


def test_made_stories_are_true_however_many_questions_they_have():
    draw = np.random.default_rng(0)
    for qa, times in product(MAKERS, (1, 3)):
        every = [made_story(qa, draw, lambda _: True, times) for _ in range(10)]
        usual = 1 if qa == "qa4" else QUESTIONS_A_STORY
        assert {len(story) for story in every} == {times * usual}
        for story in every:
            assert len({question.content for question in story}) == len(story)
            for question in story:
                said = solve(qa, question.facts, question.text)
                assert said == question.answer


def test_made_stories_never_ask_what_evaluation_asks(cache, books, tmp_path):
    """There are few stories of qa4, so that it does come up."""

    def learned(babi: Path | None) -> set[tuple[str, ...]]:
        where = None if babi is None else str(babi)
        data = HiddenData(tasks=("babilong/qa4",), books=books, babi=where, made=1.0, times=8)
        wanted = HiddenMaterial(data, cache)._may_learn("qa4")
        draw = np.random.default_rng(0)
        stories = (made_story("qa4", draw, wanted, data.times) for _ in range(4000))
        return {question.content for story in stories for question in story}

    by_content = learned(None)
    assert {part_of(content) for content in by_content} == {"train"}
    for part, seed in (("test", 1), ("train", 2)):
        lines = []
        for question in generated_questions("qa4", "eval", seed, 20).items:
            lines += [f"{i} {fact}" for i, fact in enumerate(question.facts, 1)]
            lines += [f"3 {question.text}\t{question.answer}\t{question.supporting[0] + 1}"]
        (tmp_path / f"qa4_{part}.txt").write_text("\n".join(lines))
    evaluated = {question.content for question in read_babi(tmp_path / "qa4_test.txt")}
    from_files = learned(tmp_path)
    assert not from_files & evaluated
    told = {content[:-1] for content in evaluated}
    assert told & {content[:-1] for content in from_files}  # other questions of the same stories
    assert {part_of(content) for content in from_files} == {"train", "eval"}


def test_decoys_are_no_facts_and_have_their_price(cache, books):
    """They begin or end as a fact does, and nobody asks about them."""

    def row(decoys: float) -> tuple[str, str, list]:
        data = HiddenData(tasks=("babilong/qa1",), books=books, decoys=decoys)
        tokens, targets, plain = HiddenMaterial(data, cache).row(4096, 0, 0, 5)
        return text(tokens[plain]), text(tokens[~plain]), answers(tokens, targets)

    without, (plain, told, asked) = row(0.0), row(2.0)
    assert told.split() == without[1].split()
    assert [answer for _, answer in asked] == [answer for _, answer in without[2]]
    facts = re.findall(r"(\w+) (?:moved|went|journeyed|travelled)", told)
    assert not any(name in without[0] for name in facts)
    assert any(name in plain for name in facts)
    assert not re.search(rf"(?:{'|'.join(ACTORS)}) \w+ (?:back )?to the (?:{ROOM})", plain)


def test_every_answer_follows_from_what_was_read(material):
    asked = 0
    for number in range(12):
        tokens, targets, plain = material.row(2048, 0, 0, 4 * number)  # qa1
        assert len(tokens) == len(targets) == len(plain) == 2048
        for before, answer in answers(tokens, targets):
            (who,) = re.findall(WHERE, before)[-1:]
            moves = re.findall(rf" {who} [\w ]+ to the (\w+)\.", before)
            assert answer == f" {moves[-1]}."
            asked += 1
    assert asked > 24


@pytest.mark.parametrize("number", [2, 3])
def test_needles_are_asked_for_after_they_were_told(material, number):
    for step in range(0, 40, 4):
        tokens, targets, _ = material.row(4096, 0, step, number)
        found = answers(tokens, targets)
        assert 1 <= len(found) <= 4
        for before, answer in found:
            (key,) = re.findall(r"number for (\S+) mentioned", before)[-1:]
            assert re.findall(rf"numbers for {key} is: (\d+)\.", before) == [answer[1:-1]]


def test_plain_is_what_nobody_asks_about(material):
    tokens, targets, plain = material.row(2048, 0, 0, 0)
    told = text(tokens[~plain])
    assert not (plain & (targets != NO_TARGET)).any()
    assert "Question" in told
    assert "Question" not in text(tokens[plain])
    assert plain.mean() > 0.2


def config(**changes) -> TrainConfig:
    data = {
        "tasks": TASKS,
        "lengths": (1024, 2048),
        "growing": 0.5,
        "rows": 2,
        "pauses": 2,
    } | changes.pop("data", {})
    given = {
        "model": ModelConfig(vocab=257, dim=16, depth=1, heads=1, rule="delta_net"),
        "data": HiddenData(**data),
        "steps": 8,
        "batch": 1,
        "length": 2048,
        "price": 0.1,
        "evaluate_batches": 1,
        "log_every": 4,
        "checkpoint_every": 2,
    }
    return TrainConfig(**given | changes)


def test_rows_go_on_from_one_another(material):
    whole = material.row(1024, 0, 5, 1)
    first, second = material.works(Texts(512, 0, 5, range(1, 2)), [None, torch.zeros(1, 7).long()])
    assert (first.begins, first.ends, second.begins, second.ends) == (True, False, False, True)
    assert second.before is not None
    for mine, side in ((0, "tokens"), (1, "targets"), (2, "plain")):
        both = torch.cat([getattr(first, side), getattr(second, side)], 1)[0]
        assert torch.equal(both, torch.from_numpy(whole[mine]))


def test_a_step_has_as_many_tokens_at_every_length(cache, books):
    wanted = config(data={"books": books})
    assert isinstance(wanted.data, HiddenData)
    source = HiddenMaterial(replace(wanted.data, workers=1), cache).source(wanted, ALONE)
    works = [source.next() for _ in range(8)]
    assert {work.tokens.numel() for work in works} == {2048}
    assert [work.begins for work in works[4:]] == [True, False, True, False]
    source.load_state_dict({"step": 6})
    assert torch.equal(source.next().tokens, works[6].tokens)
    source.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_it_trains_is_tested_and_is_kept(tmp_path, books, workers):
    wanted = config(data={"books": books, "workers": workers})
    made = train(wanted, tmp_path / "run", device="cpu")
    assert made is not None
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "accuracy@qa1-2048" in metrics
    assert "accuracy@pass-key-2048" in metrics
    said = config().to_dict()
    assert said["data"]["kind"] == "hidden"
    assert TrainConfig.from_dict(said) == config()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"growing": 2.0}, r"data\.growing: 2\.0; expected a part"),
        ({"needles": 0}, r"data\.needles: 0; expected"),
        ({"times": 0}, r"data\.times: 0; expected"),
        ({"decoys": -1.0}, r"data\.decoys: -1\.0; expected 0 or more"),
        ({"tasks": ("babilong/qa3",), "lengths": (64,)}, "do not fit 64 tokens"),
        (
            {"longer": (44,)},
            r"fits 4 tokens; .* \(in a test of 44 tokens, 40 of them for its answer",
        ),
    ],
)
def test_what_cannot_be(changes, told, tmp_path, books):
    with pytest.raises(ValueError, match=told):
        train(config(data=changes | {"books": books}), tmp_path / "run", device="cpu")

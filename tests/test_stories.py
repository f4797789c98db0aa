"""Facts of the demo, rows that hide them in books, and what is learned and tested with them."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import groupby, product
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from watchers import At

from atlas_lm.ask import Task, ask
from atlas_lm.cli.recipe import rule_from
from atlas_lm.demo.facts import (
    NOT_TOLD,
    TASK,
    Fact,
    Part,
    code_question,
    parse,
    place_question,
    story,
    without_opening,
)
from atlas_lm.demo.forms import FACTS, QUESTIONS, TOLD, form_words
from atlas_lm.demo.tokenizer import main as make_tokenizer
from atlas_lm.demo.words import LONGEST, SHORTEST, TEST, TRAIN, WORDS, decoy
from atlas_lm.models import LanguageModel, ModelConfig
from atlas_lm.models.folder import load_model
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.recipes import RECIPES
from atlas_lm.text import ByteTokenizer, FileTokenizer, load_tokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import StoryData
from atlas_lm.train.evaluate import evaluate, right_answers
from atlas_lm.train.loop import train
from atlas_lm.train.objective import NextToken
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.run_folder import METRICS
from atlas_lm.train.step import Gradients
from atlas_lm.train.stories import StoryMaterial, piece_words
from atlas_lm.train.story_rows import AFTER, BEFORE
from benchmarks.demo_models import named

CPU = torch.device("cpu")
BYTES = ByteTokenizer()
ANSWER = r"\nQuestion: .*?[.?]( [^.]*\.)"
MODEL = ModelConfig(vocab=BYTES.vocab, dim=16, depth=1, heads=1, rule="delta_net")


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Two folders of texts that say nothing of codes and people."""
    root = tmp_path_factory.mktemp("books")
    for part, what in (("train", "rain"), ("test", "snow")):
        (root / part).mkdir()
        lines = [f"It was the {what} of day {i} that clouds had promised us." for i in range(300)]
        (root / part / "a.txt").write_text("\n".join(lines))
    return root


def data(books, **changes) -> StoryData:
    given: dict[str, Any] = {"facts": (2, 12), "between": 2, "at_end": 3, "loose": 0.0}
    given |= {"books": str(books / "train"), "test_books": str(books / "test")}
    return StoryData(**given | changes)


def config(books, **changes) -> TrainConfig:
    given: dict[str, Any] = {
        "data": data(books, lengths=(500, 1000)),
        "length": 1000,
        "batch": 2,
        "steps": 2,
    }
    return TrainConfig(**{"model": MODEL, "evaluate_batches": 2} | given | changes)


@pytest.fixture(scope="module")
def material(books, tmp_path_factory):
    return StoryMaterial(data(books), tmp_path_factory.mktemp("cache"))


# Words and sentences


def test_training_and_test_have_no_word_and_no_form_in_common():
    assert not TRAIN.all & TEST.all
    for forms in (FACTS, QUESTIONS):
        for kind in ("code", "place"):
            assert not set(forms["train"][kind]) & set(forms["test"][kind])
            assert len(forms["test"][kind]) >= 3
    assert min(len(FACTS["train"][kind]) for kind in ("code", "place")) >= 8
    for words in (TRAIN, TEST):
        lists = (words.adjectives, words.nouns, words.names, words.places)
        assert all(len(set(each)) == len(each) for each in lists)
        assert len(words.all) == sum(map(len, lists))


def test_words_learned_with_are_never_tested_with(material):
    words = material.books["train"].words
    assert {"rain", "clouds", "promised"} <= set(words.strange)
    assert "snow" not in words.strange
    assert not words.all & TEST.all
    assert not words.all & {"the", "that", "was"}  # said around what is told
    assert not (TRAIN.all | TEST.all) & form_words()
    assert material.books["test"].words is TEST


def test_invented_words_are_many_and_never_those_of_the_test():
    tested = ("rapid", "raft", "ruby")
    words = replace(TRAIN, strange=("rather", "craft", "drift", "rapids", "rub", "by"), share=1.0)
    draw = np.random.default_rng(0)
    assert {words.strange_word(draw) for _ in range(99)} <= set(words.strange)
    made = replace(words.without(frozenset(tested)), invented=1.0)
    found = {made.strange_word(draw) for _ in range(2000)}
    assert len(found) > 60
    assert not found & set(tested)
    assert "raft" in {replace(words, invented=1.0).strange_word(draw) for _ in range(2000)}


def test_what_says_what_a_sentence_is_about_is_never_replaced():
    words = replace(TRAIN, around=("clouds",), loose=0.5)
    draw = np.random.default_rng(0)
    said = [words.sentence("Courier {subject} has the code {value}.", draw) for _ in range(200)]
    assert {len(text.split()) for text in said} == {6}
    assert all(re.match(r"Courier \{subject\} \w+ the code ", text) for text in said)
    for forms in (FACTS, QUESTIONS):
        for kind, mark in (("code", "code"), ("place", "courier")):
            told = [form for part in ("train", "test") for form in forms[part][kind]]
            assert all(re.search(rf"\b{mark}\b", form.lower()) for form in told)


def test_words_of_the_tests_sentences_may_stand_in_others(material):
    """What novels have and no fact ever has would be learned to be no fact."""
    words = material.books["train"].words
    assert {"rain", "was"} <= set(words.around)
    assert not set(words.around) & (TEST.all | {"the", "code", "courier"})


def test_every_piece_of_a_tokenizer_stands_in_some_words(books, tmp_path, capsys):
    out = str(tmp_path / "tokenizer.json")
    assert make_tokenizer([str(books / "train"), "--out", out, "--size", "600"]) == 0
    capsys.readouterr()
    tokenizer = FileTokenizer(out)
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab)]
    made = piece_words(tokenizer)
    assert made == piece_words(tokenizer)
    assert all(SHORTEST <= len(word) <= LONGEST for word in made)
    for piece in pieces:
        if re.fullmatch(" [a-z]{1,4}", piece):
            assert any(word.startswith(piece[1:]) for word in made), piece
        elif re.fullmatch("[a-z]{2,4}", piece):
            assert any(word.endswith(piece) for word in made), piece
    assert piece_words(ByteTokenizer()) == ()


def test_too_few_words_for_things_that_were_not_told():
    words = replace(TRAIN, strange=("one", "two"), share=1.0)
    with pytest.raises(ValueError, match="no other was found in 1,000 tries"):
        story("train", 0, 0, codes=3, movers=0, moves=1, unknown=16, words=words)


def test_loose_sentences_keep_their_subject_and_value():
    words = replace(TRAIN, around=("clouds", "promised"), loose=0.5)
    made = story("train", 0, 0, codes=8, movers=4, moves=1, unknown=0, words=words)
    for fact in made.facts:
        assert fact.subject in fact.text
        assert fact.text.endswith(f"{fact.value}.")
    said = [fact.text for fact in made.facts] + [asked.question for asked in made.asked]
    assert sum("clouds" in text.lower() for text in said) > 8
    assert not any("{" in text for text in said)
    assert parse(story("train", 0, 0, codes=1, movers=0, moves=1, unknown=0).facts[0].text)


def test_a_loose_word_is_often_one_with_the_same_ending():
    words = replace(TRAIN, around=("clouds", "promised", "wanted", "so"), loose=0.5)
    draw = np.random.default_rng(0)
    said = [words.sentence("{subject} walked the {value}.", draw) for _ in range(800)]
    assert all(re.fullmatch(r"\{subject\} \w+ the \{value\}\.", text) for text in said)
    others = [verb for text in said if (verb := text.split()[1]) != "walked"]
    assert 0.4 < len(others) / len(said) < 0.6
    alike = sum(verb.endswith("ed") for verb in others)
    assert 0.65 < alike / len(others) < 0.85  # half of them, and half of the others


def test_some_sentences_have_only_loose_words_and_others_none():
    words = replace(TRAIN, around=("clouds",), loose=0.25)
    draw = np.random.default_rng(0)
    form = "at noon {subject} walked slowly back to the {value}."
    counts = [words.sentence(form, draw).count("clouds") for _ in range(1000)]
    assert counts.count(0) > 500
    assert counts.count(6) > 30
    assert np.mean(counts) == pytest.approx(0.25 * 6, rel=0.1)


def test_lists_of_others_are_added_but_for_what_is_tested(books, tmp_path):
    (tmp_path / "adjectivelist.txt").write_text("zany\nbitter\n")
    (tmp_path / "nounlist.txt").write_text("zebra\ncellar\n")
    with_more = StoryMaterial(data(books, words=str(tmp_path)), tmp_path / "cache")
    words = with_more.books["train"].words
    assert words.adjectives == (*TRAIN.adjectives, "zany")
    assert words.nouns == (*TRAIN.nouns, "zebra")


def test_the_plain_sentence_and_question_are_learned():
    assert code_question("blue door") == "What is the code of the blue door?"
    assert place_question("Zoe") == "Where is courier Zoe?"
    assert "The code of the {subject} is {value}." in FACTS["train"]["code"]
    assert "Courier {subject} is in the {value}." in FACTS["train"]["place"]


@pytest.mark.parametrize("part", ["train", "test"])
def test_every_sentence_is_understood(part):
    """All of them alone, and some after every opening."""
    for kind, value in (("code", "0042"), ("place", "hen house")):
        alone = len(TOLD[kind][1])
        forms = [*FACTS[part][kind][:alone], *FACTS[part][kind][alone::97]]
        for form, subject in product(forms, ("Ann Lee", "red zeppelin")):
            text = form.format(subject=subject, value=value)
            assert parse(text) == Fact(kind, subject, value, text)


def test_sentences_of_a_visitor():
    said = "the code  of the blue door\nis 1234"
    assert parse(said) == Fact("code", "blue door", "1234", "the code of the blue door is 1234.")
    said = "courier Jörg is in the hay loft!"
    assert parse(said) == Fact("place", "Jörg", "hay loft", "courier Jörg is in the hay loft.")
    nothing = ("", "Hello.", "My cat is in the attic.")
    for other in (*nothing, "The code of the door is 123.", "The code of the door is 12345."):
        assert parse(other) is None


# Stories


@pytest.mark.parametrize("part", ["train", "test"])
def test_the_last_place_counts_and_every_subject_is_asked_for(part):
    near = 0
    for number in range(20):
        made = story(part, 3, number, codes=6, movers=3, moves=3, unknown=8)
        assert len(made.facts) == 6 + 3 * 3
        last = {fact.subject: fact.value for fact in made.facts}
        known = [asked for asked in made.asked if asked.kind != "unknown"]
        that_count = [made.facts[asked.fact] for asked in known if asked.fact is not None]
        assert sorted(fact.subject for fact in that_count) == sorted(last)
        for asked, fact in zip(known, that_count, strict=True):
            assert (asked.kind, asked.answer) == (fact.kind, last[fact.subject])
            assert fact.subject in asked.question
            assert re.fullmatch(r"\d{4}", fact.value) or fact.kind == "place"
        never = [asked for asked in made.asked if asked.kind == "unknown"]
        assert [(asked.answer, asked.fact) for asked in never] == [(NOT_TOLD, None)] * 8
        assert len({asked.question for asked in never}) == 8
        adjectives = set(WORDS[part].adjectives)
        codes = [a for a in never if adjectives & set(re.findall(r"\w+", a.question))]
        assert len(codes) == 4
        for asked in never:
            assert not any(re.search(rf"\b{s}\b", asked.question) for s in last)
        things = [s.split() for s in last if " " in s]
        near += sum(
            any(
                re.search(rf"\b{a} {n}\b", asked.question)
                for (a, _), (_, n) in product(things, things)
            )
            for asked in codes
        )
    assert near >= 30


def test_a_story_is_always_the_same_and_another_number_another_story():
    sizes: dict[str, Any] = {"codes": 3, "movers": 2, "moves": 2, "unknown": 2}
    assert story("test", 1, 5, **sizes) == story("test", 1, 5, **sizes)
    stories = [story("test", seed, n, **sizes) for seed, n in product((0, 1), range(5))]
    assert len({made.facts for made in stories}) == 10


def test_all_codes_are_possible():
    made = [story("test", 0, n, codes=40, movers=0, moves=1, unknown=0) for n in range(50)]
    first = [int(fact.value[0]) for each in made for fact in each.facts]
    assert np.bincount(first).min() > 150


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"codes": -1}, "story: -1 codes"),
        ({"moves": 0}, "0 moves"),
        ({"movers": 41}, "41 movers and half the unknown; expected 40 at most"),
        ({"moves": 41}, "41 moves; expected 40 at most"),
    ],
)
def test_stories_that_cannot_be(changes, told):
    with pytest.raises(ValueError, match=told):
        story("test", 0, 0, **{"codes": 1, "movers": 1, "moves": 1, "unknown": 0} | changes)


# Rows, by a reader who knows nothing of how they are made

WORD = r"[A-Za-z]+"


def pattern(form: str, kind: str) -> str:
    subject = rf"(?P<subject>{WORD} {WORD})" if kind == "code" else rf"(?P<subject>{WORD})"
    value = r"(?P<value>\d{4})" if kind == "code" else rf"(?P<value>{WORD})"
    return re.escape(form).replace(r"\{subject\}", subject).replace(r"\{value\}", value)


@cache
def by_words(part: Part, kind: str, told: bool) -> dict[str, list[tuple[str, list[str]]]]:
    """Forms, with their own words, by the longest run of these, which many forms share."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for form in (FACTS if told else QUESTIONS)[part][kind]:
        own = re.split(r"{\w+}", form)
        found.setdefault(max(own, key=len), []).append((form, own))
    return found


def occurring(part: Part, kind: str, told: bool, text: str) -> list[str]:
    """Those whose own words the text has, of some ten thousand."""
    forms = (f for words, f in by_words(part, kind, told).items() if words in text)
    return [form for some in forms for form, own in some if all(said in text for said in own)]


def events(text: str, part: Part) -> list[tuple[int, str, str, str]]:
    """(place, told or asked, subject, value or answer) in the order of the text."""
    found = {}
    for kind in ("code", "place"):
        for form in occurring(part, kind, True, text):
            for m in re.finditer(" " + pattern(form, kind), text):
                found[m.start(), m.end()] = (m.start(), "told", m["subject"], m["value"])
        for form in occurring(part, kind, False, text):
            asked = rf"\nQuestion: {pattern(form, kind)} (?P<answer>[^.]*)\."
            for m in re.finditer(asked, text):
                found[m.start(), m.end()] = (m.start(), "asked", m["subject"], m["answer"])
    inner = {
        one
        for one, other in product(found, found)
        if one != other and other[0] <= one[0] and one[1] <= other[1]
    }
    return sorted(event for span, event in found.items() if span not in inner)


def whole(row) -> str:
    """The text of a row with its last target."""
    return BYTES.decode([*row.tokens.tolist(), int(row.targets[-1])])


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("length", [700, 3000])
def test_answers_are_what_the_text_told_last(material, part, length):
    counts = {"told": 0, "asked": 0, NOT_TOLD: 0, "between": 0, "near": 0}
    for number in range(24):
        row = material.books[part].row(length, 7, 1, number)
        assert len(row.tokens) == len(row.targets) == length
        text = whole(row)
        known: dict[str, str] = {}
        happened = events(text, part)
        assert sum(kind == "asked" for _, kind, _, _ in happened) == text.count("\nQuestion: ")
        for at, kind, subject, value in happened:
            counts[kind] += 1
            if kind == "told":
                known[subject] = value
                continue
            assert value == known.get(subject, NOT_TOLD), (subject, text)
            counts["between"] += " It was the" in text[at:]
            if value == NOT_TOLD:
                counts[NOT_TOLD] += 1
                every = [s for _, k, s, _ in happened if k == "told"]
                assert subject not in every
                words = {word for told in every for word in told.split()}
                counts["near"] += " " in subject and set(subject.split()) <= words
    assert counts["told"] > 24 * 2
    assert counts["asked"] > 24 * 2
    assert counts["between"] > 12
    assert 0.1 < counts[NOT_TOLD] / counts["asked"] < 0.45
    assert counts["near"] > 0 or length < 3000


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_text_of_several_rows_asks_what_earlier_ones_told(material, part):
    counts = {"told": [0] * 4, "moved": [0] * 4, "asked": [0] * 4, "older": [0] * 4}
    for number in range(12):
        known: dict[str, str] = {}
        for at, row in enumerate(material.books[part].rows(1500, 3, 8, number, 4)):
            assert len(row.tokens) == 1500
            before = set(known)
            for _, kind, subject, value in events(whole(row), part):
                counts[kind][at] += 1
                if kind == "told":
                    counts["moved"][at] += subject in before
                    known[subject] = value
                    before.discard(subject)
                    continue
                assert value == known.get(subject, NOT_TOLD), (number, at, subject)
                counts["older"][at] += subject in before
    assert counts["older"][0] == 0
    assert sum(counts["moved"]) > 0
    for at in (1, 2, 3):
        assert 0 < counts["told"][at] < counts["told"][0] / 2
        assert counts["asked"][at] > 24
        assert 0.2 < counts["older"][at] / counts["asked"][at] < 0.8


@pytest.mark.parametrize("rows", [1, 5])
def test_a_text_has_as_many_facts_however_many_rows_it_has(material, books, rows):
    book = replace(material.books["train"], data=data(books, facts=(3, 12)))
    counts = [
        sum(
            kind == "told"
            for row in book.rows(3000, 0, 0, number, rows)
            for _, kind, *_ in events(whole(row), "train")
        )
        for number in range(16)
    ]
    assert 2 <= min(counts) <= 4
    assert 9 <= max(counts) <= 12


def test_answers_alone_are_targets(material):
    kinds = ["code", "place", "unknown"]
    seen = set()
    for number in range(12):
        row = material.books["test"].row(1500, 0, 0, number)
        text = whole(row)
        asked = row.targets != NO_TARGET
        assert (asked == (row.kinds >= 0)).all()
        assert (row.targets[:-1] == row.tokens[1:])[asked[:-1]].all()
        expected = np.zeros(len(text), bool)
        for found in re.finditer(ANSWER, text):
            expected[found.start(1) : found.end(1)] = True
            kind = kinds[row.kinds[found.start(1) - 1]]
            assert (row.kinds[found.start(1) - 1 : found.end(1) - 1] == kinds.index(kind)).all()
            shape = {"code": r" \d{4}\.", "unknown": r" not told\.", "place": r" [a-z]+\."}[kind]
            assert re.fullmatch(shape, found[1])
            seen.add(kind)
        assert (expected[1:] == asked).all()
    assert seen == set(kinds)


def test_what_is_asked_is_what_a_model_is_asked(material):
    """Prompt and completion of the task, token by token."""
    text = whole(material.books["train"].row(900, 0, 0, 0))
    for found in re.finditer(r"\nQuestion: (.*?[.?])( [^.]*\.)", text):
        assert found[0] == TASK.prompt(found[1]) + TASK.completion(found[2][1:-1])


def test_facts_told_again_have_a_value_to_be_known(books, tmp_path):
    """Told for the second time, and in training only."""
    made = StoryMaterial(data(books, again=1.0, unknown=0.0, moves=1), tmp_path)
    for number in range(8):
        row = made.books["train"].row(1500, 0, 0, number)
        text, told, again = whole(row), set(), 0
        asked = np.append(row.targets != NO_TARGET, False)
        assert "Question" not in text
        for at, _, subject, value in events(text, "train"):
            begin = text.index(value, at)
            learned = asked[begin - 1 : begin + len(value)]
            assert learned.all() if subject in told else not learned.any()
            again += subject in told
            told.add(subject)
        assert 1 <= again <= 5
    assert "Question" in whole(made.books["test"].row(1500, 0, 0, 0))


def test_facts_are_near_and_far(material):
    """Distances to the end of a row, as parts of it."""
    parts = []
    for number in range(96):
        text = whole(material.books["train"].row(3000, 1, 0, number))
        parts += [1 - at / 3000 for at, kind, _, _ in events(text, "train") if kind == "told"]
    assert np.histogram(parts, [0, 0.25, 0.5, 0.75, 1])[0].min() > 0.08 * len(parts)


def test_it_is_known_which_tokens_are_those_of_the_books(material):
    """What is left where these are taken out is told or asked, and nothing else is."""
    row = material.books["train"].row(1500, 0, 0, 3)
    text = BYTES.decode(row.tokens.tolist())
    for fact in re.finditer(r"It was the rain of day \d+ that clouds had promised us\.", text):
        assert row.plain[fact.start() : fact.end()].all()
    said = "".join(c for c, plain in zip(text, row.plain, strict=True) if not plain)
    assert "clouds had promised" not in said
    assert said.count("Question:") == text.count("Question:") > 2
    assert not row.plain[row.kinds >= 0].any()


def test_decoys_have_a_word_of_facts_and_tell_nothing(books, tmp_path):
    """In training alone; they are of the books, so that writing them has its price."""
    made = StoryMaterial(data(books, decoys=3.0), tmp_path)

    def codes(part: Part, number: int) -> list[str]:
        row = made.books[part].row(2500, 0, 0, number)
        text = "".join(c for c, p in zip(whole(row), row.plain, strict=False) if p)
        assert not re.search(r"\b\d{4}\b", text)
        return re.findall("code", text, re.IGNORECASE)

    found = [codes("train", number) for number in range(8)]
    assert all(found)
    assert {code for each in found for code in each} == {"code", "Code"}
    assert not codes("test", 0)
    made_up = {decoy("No word of it.", np.random.default_rng(i)) for i in range(99)}
    assert {"Code word of it.", "No code of it."} <= made_up
    numbers = {n for line in made_up for n in re.findall(r"\d+", line)}
    assert {len(number) for number in numbers} == {1, 2, 3, 5, 6}
    assert all("code" in line.lower() for line in made_up)
    assert decoy("...", np.random.default_rng(0)) == "..."


def test_facts_may_be_told_as_in_notes(books, tmp_path):
    """In training alone; else a space stands before one, and a full stop after it."""

    def facts(part: Part, notes: float) -> list[tuple[str, str]]:
        made, found = StoryMaterial(data(books, notes=notes), tmp_path), []
        for number in range(16):
            row = made.books[part].row(2500, 0, 0, number)
            parts = groupby(zip(whole(row), row.plain, strict=False), key=lambda each: each[1])
            told = ["".join(c for c, _ in some) for is_plain, some in parts if not is_plain]
            starts = [
                re.match(r'([\s*"-]*)(.*)', each, re.S) for each in told if "Question" not in each
            ]
            found += [each.groups() for each in starts if each]
        return found

    def begun(part: Part, notes: float) -> set[str]:
        return {before for before, _ in facts(part, notes)}

    assert begun("train", 0.0) == {" "}
    assert begun("test", 1.0) == {" "}
    assert begun("train", 1.0) == set(BEFORE)
    assert begun("train", 0.5) == {" ", *BEFORE}
    noted = [text for before, text in facts("train", 0.5) if before != " "]
    openings = tuple(f"{opening} " for before, _ in TOLD.values() for opening in before)
    assert len(noted) > 30
    assert not any(text.startswith(openings) for text in noted)
    assert {re.sub(r".*\w", "", text, flags=re.S) for text in noted} == set(AFTER)
    assert 0 < sum(text[0].islower() for text in noted) < len(noted) / 2
    assert any(text.startswith(openings) for before, text in facts("train", 0.5) if before == " ")


def test_a_fact_without_its_opening_says_the_same():
    text = "Word came that the courier Zoe drove to the cellar."
    fact = Fact("place", "Zoe", "cellar", text)
    alone = without_opening(fact)
    assert alone == replace(fact, text="The courier Zoe drove to the cellar.")
    assert without_opening(alone) == alone
    for told in story("train", 0, 0, codes=40, movers=40, moves=2, unknown=2).facts:
        said = parse(without_opening(told).text)
        assert said is not None
        assert (said.kind, said.subject.lower()) == (told.kind, told.subject.lower())
        assert said.value == told.value


def test_part_of_the_text_is_learned_too(books, tmp_path):
    made = StoryMaterial(data(books, text=0.5), tmp_path)
    train_, test = (made.books[part].row(2000, 0, 0, 0) for part in ("train", "test"))
    assert 0.4 < ((train_.targets != NO_TARGET) & (train_.kinds < 0)).mean() < 0.6
    assert ((test.targets != NO_TARGET) == (test.kinds >= 0)).all()


@pytest.mark.parametrize(("people", "kinds"), [(0.0, {0}), (1.0, {1}), (0.5, {0, 1})])
def test_codes_and_people_in_the_parts_that_are_wished(books, tmp_path, people, kinds):
    made = StoryMaterial(data(books, people=people, unknown=0.0), tmp_path)
    found = [made.books["test"].row(1500, 0, 0, n).kinds for n in range(8)]
    assert set(np.unique(np.concatenate(found))) - {-1} == kinds


def test_fewer_facts_where_they_would_take_most_of_it(books, tmp_path):
    made = StoryMaterial(data(books, facts=(64, 64)), tmp_path)
    for length, most in ((1000, 16), (6000, 64)):
        text = whole(made.books["train"].row(length, 0, 0, 0))
        assert most / 4 <= sum(e[1] == "told" for e in events(text, "train")) <= most
        assert text.count("It was the") > length / 4 / 70
    with pytest.raises(ValueError, match="length: 40 tokens; one fact and a question have"):
        made.books["train"].row(40, 0, 0, 0)


# Batches


def test_batches_have_the_tokens_of_a_step_at_every_length(books, material):
    source = replaced(material, books, lengths=(500, 1000)).source(config(books), Ranks(CPU))
    shapes = {tuple(source.next().tokens.shape) for _ in range(8)}
    assert shapes == {(2, 1000), (4, 500)}


def replaced(material, books, **changes):
    """The same books with other settings."""
    made = object.__new__(StoryMaterial)
    made.__dict__ |= material.__dict__ | {"data": data(books, **changes)}
    return made


def test_longer_texts_come_in_later(books, tmp_path):
    stories = data(books, lengths=(500, 1000, 250), growing=0.6)
    settings = config(books, data=stories, steps=50)
    source = StoryMaterial(stories, tmp_path).source(settings, Ranks(CPU))
    drawn = [source.works(step)[0].tokens.shape[1] for step in range(50)]
    assert set(drawn[:10]) == {250}
    assert set(drawn[10:20]) == {250, 500}
    assert set(drawn[20:]) == {250, 500, 1000}


def test_texts_go_on_over_steps_of_one_length(books, material):
    stories = data(books, lengths=(500, 1000), rows=3, workers=1)
    settings = config(books, data=stories, steps=24)
    source = replaced(material, books, lengths=(500, 1000), rows=3).source(settings, Ranks(CPU))
    works = [source.next() for _ in range(12)]
    assert [(work.begins, work.ends) for work in works] == [
        *((True, False), (False, False), (False, True))
    ] * 4
    shapes = [tuple(work.tokens.shape) for work in works]
    assert shapes[::3] == shapes[1::3] == shapes[2::3]
    assert set(shapes) == {(2, 1000), (4, 500)}
    book = material.books["train"]
    first = next(i for i in range(0, 12, 3) if shapes[i] == (2, 1000))
    rows = list(book.rows(1000, settings.seed, first, 1, 3))
    for work, row in zip(works[first:], rows, strict=False):
        assert torch.equal(work.tokens[1], torch.from_numpy(row.tokens))
    ahead = replaced(material, books, lengths=(500, 1000), rows=3, workers=1)
    ahead = ahead.source(settings, Ranks(CPU))
    ahead.load_state_dict({"step": 4})
    for work in works[4:8]:
        assert torch.equal(ahead.next().tokens, work.tokens)
    ahead.close()


def test_texts_go_on_once_all_lengths_are_there(books, material):
    changes: dict[str, Any] = {"lengths": (500, 1000), "rows": 3, "growing": 0.4}
    settings = config(books, data=data(books, **changes), steps=10)
    source = replaced(material, books, **changes).source(settings, Ranks(CPU))
    works = [source.next() for _ in range(10)]
    assert [work.begins for work in works] == [True] * 4 + [True, False, False] * 2
    assert [work.ends for work in works] == [True] * 4 + [False, False, True] * 2
    assert {work.tokens.shape[1] for work in works[:2]} == {500}
    for step in range(10):
        source.load_state_dict({"step": step})
        assert torch.equal(source.next().tokens, works[step].tokens)


def test_gradients_of_a_later_row_are_those_with_the_memory_of_earlier_ones(books, material):
    settings = config(books, data=data(books, rows=3), steps=6)
    torch.manual_seed(0)
    model = LanguageModel(MODEL)
    source = replaced(material, books, rows=3).source(settings, Ranks(CPU))
    gradients, state = Gradients(settings, Ranks(CPU), NextToken(model)), None
    for _ in range(4):
        work = source.next()
        model.zero_grad()
        loss, gradients.carried = gradients.add(work)
        found = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        state = None if work.begins else state
        expected, state = model.loss(work.tokens, work.targets, state)
        expected.backward()
        state = state.detach()
        torch.testing.assert_close(loss, expected.detach())
        for name, parameter in model.named_parameters():
            assert (found[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad)
        assert (gradients.carried[0] is None) == work.ends


def test_a_run_is_saved_and_stopped_where_texts_end(books, tmp_path):
    settings = config(
        books, data=data(books, rows=3), steps=9, checkpoint_every=2, evaluate_batches=1
    )

    stop = At(4, lambda: signal.raise_signal(signal.SIGINT))
    whole_ = train(settings, tmp_path / "whole", device="cpu")
    with pytest.raises(KeyboardInterrupt, match="stopped after step 6, which is saved"):
        train(settings, tmp_path / "run", watch=[stop], device="cpu")
    saved = sorted(int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved
    assert all(step % 3 == 0 for step in saved)
    folder = train(settings, tmp_path / "run", resume=True, device="cpu")
    assert folder is not None
    assert whole_ is not None
    weights, expected = (load_model(path).state_dict() for path in (folder, whole_))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_ranks_and_resumed_runs_get_the_same_rows(books, material):
    whole_ = material.source(config(books), Ranks(CPU))
    works = [whole_.next() for _ in range(4)]
    assert not torch.equal(works[0].tokens, works[1].tokens)
    halves = [material.source(config(books), Ranks(CPU, rank=r, ranks=2)) for r in (0, 1)]
    for work in works[:2]:
        parts = [half.next() for half in halves]
        assert torch.equal(torch.cat([part.tokens for part in parts]), work.tokens)
        assert torch.equal(torch.cat([part.targets for part in parts]), work.targets)
    again = material.source(config(books), Ranks(CPU))
    again.next()
    again.load_state_dict({"step": 2})
    assert torch.equal(again.next().tokens, works[2].tokens)
    assert again.state_dict() == {"step": 3}
    other = material.source(config(books, seed=1), Ranks(CPU)).next()
    assert not torch.equal(other.tokens, works[0].tokens)


def test_batches_that_others_make_ahead_are_the_same(books, material):
    plain = material.source(config(books), Ranks(CPU))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ahead = replaced(material, books, workers=1).source(config(books), Ranks(CPU))
    for _ in range(3):
        assert torch.equal(plain.next().targets, ahead.next().targets)
    assert torch.equal(torch.get_rng_state(), before)
    ahead.load_state_dict({"step": 1})
    plain.load_state_dict({"step": 1})
    assert torch.equal(plain.next().targets, ahead.next().targets)
    ahead.load_state_dict({"step": 0})  # ends the process


def test_plain_text_is_read_before_some_rows(material, books):
    """Once texts go on, and the same whoever makes them."""
    given = config(books, data=data(books, rows=2, pauses=4, growing=0.5), steps=400)
    paused = replaced(material, books, rows=2, pauses=4, growing=0.5)
    source = paused.source(given, Ranks(CPU))
    works = [source.next() for _ in range(400)]
    assert all(work.before is None for work in works[:200])
    before = {i: work.before for i, work in enumerate(works) if work.before is not None}
    assert 10 < len(before) < 45
    lengths = {x.shape[1] / works[i].tokens.shape[1] for i, x in before.items()}
    assert lengths == {1, 2, 3, 4}
    for i, tokens in before.items():
        assert len(tokens) == len(works[i].tokens)
        assert "promised" in BYTES.decode(tokens[0].tolist())
        assert "Question" not in BYTES.decode(tokens[0].tolist())
    first = next(iter(before))
    again = replaced(material, books, rows=2, pauses=4, growing=0.5, workers=1)
    ahead = again.source(given, Ranks(CPU))
    ahead.load_state_dict({"step": first})
    made = ahead.next()
    for one, other in ((made.before, before[first]), (made.plain, works[first].plain)):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    ahead.close()


def test_whole_answers_count():
    asked = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 1]], dtype=torch.bool)
    wrong = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    assert [int(n) for n in right_answers(asked, wrong, whole=True)] == [2, 4]
    assert [int(n) for n in right_answers(asked, wrong, whole=False)] == [4, 6]
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert [int(n) for n in right_answers(nothing, nothing, whole=True)] == [0, 0]


@pytest.mark.parametrize("segment", [None, 97])
def test_answers_count_by_kind(books, material, segment):
    """A model that knows all but the last digit of codes that end in 0 to 4."""
    settings = config(books, segment=segment)

    class Almost(torch.nn.Module):
        def forward(self, tokens, targets, state=None, reset=None, judge=False):
            digit = (targets >= ord("0")) & (targets <= ord("4"))
            return torch.zeros(()), (targets != NO_TARGET).sum(), state, digit

    found = evaluate(settings, Ranks(CPU), Almost(), material)
    codes = []
    for step, number in product(range(2), range(2)):
        text = whole(material.books["test"].row(1000, 0, step, number))
        codes += re.findall(r"\nQuestion: .*?[.?] (\d{4})\.", text)
    right = sum(min(code) >= "5" for code in codes) / len(codes)
    assert found["accuracy@codes-1000"] == pytest.approx(right)
    assert found["accuracy@places-1000"] == found["accuracy@unknown-1000"] == 1.0
    assert right < found["accuracy@1000"] == found["accuracy"] < 1.0


def test_a_run_leaves_a_model_that_can_be_asked(books, tmp_path):
    folder = train(config(books, evaluate_batches=1), tmp_path / "run", device="cpu")
    assert folder is not None
    assert Task.load(folder) == TASK
    answer = ask(load_model(folder), load_tokenizer(folder), TASK, "Where is Ada?", None)
    assert 0 < answer.probability <= 1
    lines = (tmp_path / "run" / METRICS).read_text().splitlines()
    last = [json.loads(line) for line in lines if '"eval"' in line][-1]
    assert {"accuracy@codes-1000", "accuracy@places-1000", "accuracy@unknown-1000"} <= last.keys()


def test_ctrl_c_is_a_line_and_not_the_end_of_processes_that_make_rows(books, tmp_path):
    """As a terminal sends it, to all of them."""
    options = {"--data.books": books / "train", "--data.workers": 2, "--steps": 10_000}
    options |= {"--length": 512, "--data.lengths": 512, "--model.dim": 16, "--model.heads": 1}
    options |= {"--data.rows": 1}
    options |= {"--log-every": 1, "--out": tmp_path / "run", "--device": "cpu", "--batch": 1}
    words = [str(word) for option in options.items() for word in option]
    metrics = tmp_path / "run" / METRICS
    with subprocess.Popen(
        [sys.executable, "-m", "atlas_lm", "train", "demo", *words, "--precision", "fp32"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as run:
        while run.poll() is None and not (metrics.exists() and metrics.read_text()):
            sleep(0.1)
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
        said = run.communicate()[1]
    assert run.returncode == 130, said
    assert "which is saved; the same command with --resume goes on" in said.splitlines()[-1]
    assert "Traceback" not in said


BAD = {
    "facts": ({"facts": (0, 4)}, r"data.facts: \(0, 4\)"),
    "order": ({"facts": (4, 2)}, r"data.facts: \(4, 2\)"),
    "share": ({"unknown": 1.5}, "data.unknown: 1.5; expected a part"),
    "questions": ({"at_end": 0}, "data.at_end: 0"),
    "loose": ({"loose": 0.6}, "data.loose: 0.6; expected 0.5 at most"),
    "decoys": ({"decoys": -1.0}, r"data.decoys: -1.0; expected 0 or more"),
    "pauses": ({"pauses": -1}, "data.pauses: -1"),
    "lengths": ({"lengths": (0,)}, "data.lengths and data.longer: 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_that_cannot_be(name):
    changes, told = BAD[name]
    with pytest.raises(ValueError, match=told):
        StoryData(**changes)


def test_texts_of_several_rows_that_cannot_be():
    with pytest.raises(ValueError, match=r"data\.rows: 0; expected a whole number"):
        StoryData(rows=0)
    with pytest.raises(ValueError, match="steps: 10, 7 of them in texts of 4 rows"):
        TrainConfig(data=StoryData(rows=4, growing=0.3), steps=10)
    stories = StoryData(rows=4)
    told = "data.rows: 4, .* and --graph: .* state has one size and lengths of whole 64 tokens"
    given: dict[str, Any] = {"model": MODEL, "data": stories, "steps": 8}
    wrong: list[dict[str, Any]] = [
        {"length": 100},
        {"model": replace(MODEL, rule="attention")},
        {"model": replace(MODEL, rule="swa")},  # whose window would not be full
        {"model": replace(MODEL, rule="atlas", block="mac")},
    ]
    for changes in wrong:
        with pytest.raises(ValueError, match=told):
            TrainConfig(**given | changes, graph=True)
        assert not TrainConfig(**given | changes).graph
    assert TrainConfig(**given, graph=True).graph
    given["model"] = replace(MODEL, rule=("swa", "delta_net"), window=257)
    assert TrainConfig(**given, graph=True).graph


def test_lengths_are_at_most_that_of_the_run():
    with pytest.raises(ValueError, match="lengths: up to 512; expected at most the length"):
        TrainConfig(data=StoryData(lengths=(512,)), length=256)


# The recipe and the tokenizer


def models_of_the_demo() -> list[dict[str, Any]]:
    """What the recipe itself says to compare with."""
    options = [re.findall(r"--model\.(\S+) (\S+)", " ".join(words)) for words in named().values()]
    kinds: dict[str, Callable] = {"rule": rule_from} | dict.fromkeys(
        ("heads", "d-k", "d-v", "mlp"), int
    )
    return [{n.replace("-", "_"): kinds[n](v) for n, v in line} for line in options]


@pytest.mark.parametrize("changes", models_of_the_demo(), ids=list(named()))
def test_the_model_of_the_demo_is_small_and_so_is_its_memory(changes, tmp_path):
    made = RECIPES["demo"]().model
    model = LanguageModel(replace(made, vocab=4096, **changes))
    assert 2e6 <= sum(p.numel() for p in model.parameters()) <= 3e6
    with torch.no_grad():
        _, state = model(torch.arange(100)[None])
    state.save(tmp_path / "memory")
    assert (tmp_path / "memory").stat().st_size <= 1e6 or changes.get("rule") == "swa"


def test_a_tokenizer_with_single_digits(books, tmp_path, capsys):
    one, other = (tmp_path / name for name in ("one.json", "other.json"))
    for out in (one, other):
        assert make_tokenizer([str(books / "train"), "--out", str(out), "--size", "400"]) == 0
    assert one.read_bytes() == other.read_bytes()
    tokenizer = FileTokenizer(one)
    assert tokenizer.vocab <= 400
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" The code of it is 4071.")]
    assert pieces[-5:] == [" 4", "0", "7", "1", "."]
    assert " code" in pieces
    row = StoryMaterial(data(books, tokenizer=str(one)), tmp_path / "cache").books["test"]
    made = row.row(600, 0, 0, 0)
    said = tokenizer.decode(made.targets[made.targets != NO_TARGET].tolist())
    text = tokenizer.decode([*made.tokens.tolist(), int(made.targets[-1])])
    assert said == "".join(re.findall(ANSWER, text))
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "nowhere: no such folder of books"),
        ([".", "--size", "10"], "size: 10; expected 257 ids or more"),
        ([".", "--out", "nowhere/t.json"], "nowhere: no such folder to put the tokenizer in"),
    ],
)
def test_tokenizers_that_cannot_be(arguments, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert make_tokenizer(arguments) == 2
    assert told in capsys.readouterr().err

"""bAbI: files read exactly, questions answered by thinking, stories of our own by its rules."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atlas_lm.tasks.babi import (
    ANSWERS,
    GIVE,
    LEAVE,
    MOVE,
    RELATION,
    SOLVERS,
    TAKE,
    Question,
    Questions,
    babi_files,
    read_babi,
    read_questions,
    solve,
)
from atlas_lm.tasks.babi_world import MAKERS, RECENT, generated_questions
from atlas_lm.tasks.babilong import (
    exact,
    open_questions,
    published_numbers,
    published_prompt,
    score,
)
from atlas_lm.tasks.samples import STOP
from atlas_lm.text import ByteTokenizer

DATA = Path(os.environ.get("ATLAS_LM_DATA", Path(__file__).parents[2] / "shared" / "data"))
BABI = DATA / "babi"
needs_babi = pytest.mark.skipif(
    not BABI.is_dir(), reason="needs bAbI's files in babi/; set ATLAS_LM_DATA"
)
needs_babilong = pytest.mark.skipif(
    not (BABI.is_dir() and (DATA / "babilong").is_dir()),
    reason="needs bAbI's and BABILong's files in babi/ and babilong/; set ATLAS_LM_DATA",
)
STORY = """\
1 Ann moved to the cellar.
2 Bob took the ladder there.
3 Where is Ann? \tcellar\t1
4 Bob went back to the roof.
5 Where is the ladder?\troof\t2 4
1 Bob moved to the roof.
2 Where is Bob?\troof\t1
"""


def written(folder: Path, text: str, name: str = "qa2_two_test.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


# Files


def test_every_question_has_the_facts_before_it(tmp_path):
    ann, bob, roof = (line[2:] for line in (STORY.splitlines()[i] for i in (0, 1, 3)))
    expected = [
        Question((ann, bob), "Where is Ann?", "cellar", (0,)),
        Question((ann, bob, roof), "Where is the ladder?", "roof", (1, 2)),
        Question(("Bob moved to the roof.",), "Where is Bob?", "roof", (0,)),
    ]
    assert read_babi(written(tmp_path, STORY)) == expected
    assert read_babi(written(tmp_path, STORY.replace("\n", "\r\n"))) == expected


BAD = {
    "no_number": ("Ann moved.\n", r"line 1: 'Ann moved\.'; expected a number, a space"),
    "no_sentence": ("1 Ann moved.\n2 \n", r"line 2: '2 '; expected a number, a space"),
    "order": ("1 Ann moved.\n1 Bob moved.\n3 A.\n2 B.\n", r"line 4: number 2 does not follow"),
    "begins_late": ("2 Ann moved.\n", r"line 1: number 2 does not follow; expected 1"),
    "no_support": ("1 A.\n2 Where?\troof\n", r"line 2: .*expected question, tab, answer, tab"),
    "no_answer": ("1 A.\n2 Where?\t\t1\n", r"line 2: .*expected question, tab, answer, tab"),
    "later_fact": ("1 A.\n2 Where?\troof\t3\n", r"line 2: supported by '3'; expected numbers of"),
    "no_digit": ("1 A.\n2 Where?\troof\tx\n", r"line 2: supported by 'x'; expected numbers of"),
    "no_question": ("1 A.\n", r"no question in it; expected question, tab"),
    "empty": ("", r"no question in it"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_none_are_refused_with_their_line(name, tmp_path):
    text, message = BAD[name]
    with pytest.raises(ValueError, match=rf"{tmp_path}/qa2_two_test\.txt: {message}"):
        read_babi(written(tmp_path, text))


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder of bAbI files"):
        babi_files(tmp_path / "nowhere", "qa1", "eval")
    with pytest.raises(ValueError, match=r"no file of qa1 for eval; expected qa1_NAME_test\.txt"):
        babi_files(tmp_path, "qa1", "eval")
    with pytest.raises(ValueError, match=r"qa21: no task of bAbI; expected qa1 to qa20"):
        babi_files(tmp_path, "qa21", "eval")
    with pytest.raises(ValueError, match=r"part: 'test'; expected train or eval"):
        babi_files(tmp_path, "qa1", "test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match=r"x\.txt: no such file of bAbI"):
        read_babi(tmp_path / "x.txt")
    (tmp_path / "qa1_x_test.txt").write_bytes(b"1 \xff\n")
    with pytest.raises(ValueError, match=r"qa1_x_test\.txt: not UTF-8"):
        read_babi(tmp_path / "qa1_x_test.txt")


def test_training_leaves_out_what_evaluation_asks(tmp_path):
    written(tmp_path / "en", STORY)
    written(
        tmp_path / "en", STORY + "1 Ann moved to the roof.\n2 Where?\troof\t1\n", "qa2_x_train.txt"
    )
    train, asked = (read_questions(tmp_path, "qa2", part) for part in ("train", "eval"))
    assert [question.text for question in train.items] == ["Where?"]
    assert train.source == "bAbI: qa2_x_train.txt, without 3 that evaluation asks"
    assert (len(asked), asked.source) == (3, "bAbI: qa2_two_test.txt")
    # of other names only where there is no file of the plain one, and never for evaluation
    written(tmp_path / "extra", STORY, "en_qa12_train.txt")
    written(tmp_path / "extra", STORY, "en_qa12_test.txt")
    assert [p.name for p in babi_files(tmp_path, "qa12", "train")] == ["en_qa12_train.txt"]
    with pytest.raises(ValueError, match="no file of qa12 for eval"):
        babi_files(tmp_path, "qa12", "eval")
    assert [p.name for p in babi_files(tmp_path, "qa2", "train")] == ["qa2_x_train.txt"]


def test_questions_in_another_order_and_a_choice_of_them(tmp_path):
    asked = Questions("qa2", "eval", tuple(read_babi(written(tmp_path, STORY))), "three")
    order = {asked.shuffled(seed).items for seed in range(20)}
    assert len(order) > 3
    assert all(
        sorted(q.text for q in items) == sorted(q.text for q in asked.items) for items in order
    )
    assert asked.shuffled(7).items == asked.shuffled(7).items
    chosen = asked.only([2, 0, 99])
    assert chosen.items == (asked.items[2], asked.items[0])
    assert chosen.source == "2 chosen of three"
    sizes = asked.sizes(ByteTokenizer(), " ", ("", "Q: {question}"))
    told = [sum(len(fact) + 1 for fact in q.facts) + 3 + len(q.text) for q in asked.items]
    assert sizes.tolist() == [[2, told[0]], [3, told[1]], [1, told[2]]]


# Answers by thinking


BY_HAND = [
    ("qa1", "Mary moved to the garden. Mary went back to the office.", "Where is Mary?", "office"),
    ("qa2", "Mary got the milk there. Mary moved to the garden.", "Where is the milk?", "garden"),
    (
        "qa2",
        "John moved to the office. John took the milk. John left the milk there. "
        "John went to the kitchen. Mary got the milk there.",
        "Where is the milk?",
        "office",
    ),
    (
        "qa3",
        "Mary moved to the garden. Mary took the apple. Mary went to the office. "
        "Mary dropped the apple. Mary moved to the kitchen.",
        "Where was the apple before the office?",
        "garden",
    ),
    (
        "qa3",
        "Mary took the apple. Mary moved to the garden. Mary went to the office. "
        "Mary went to the garden. Mary went to the hallway.",
        "Where was the apple before the garden?",
        "office",
    ),
    ("qa4", "The office is north of the garden.", "What is the garden south of?", "office"),
    ("qa4", "The office is north of the garden.", "What is south of the office?", "garden"),
    (
        "qa5",
        "Bill gave the milk to Fred. Fred passed the milk to Jeff.",
        "Who gave the milk?",
        "Fred",
    ),
    (
        "qa5",
        "Bill gave the milk to Fred. Fred passed the milk to Jeff.",
        "Who received the milk?",
        "Jeff",
    ),
    ("qa5", "Bill gave the milk to Fred.", "What did Bill give to Fred?", "milk"),
    ("qa5", "Bill gave the milk to Fred.", "Who did Bill give the milk to?", "Fred"),
    ("qa5", "Bill gave the milk to Fred.", "Who gave the milk to Fred?", "Bill"),
]


@pytest.mark.parametrize(("qa", "story", "question", "answer"), BY_HAND)
def test_the_solver_by_hand(qa, story, question, answer):
    facts = [fact + "." for fact in story.rstrip(".").split(". ")]
    assert solve(qa, facts, question) == answer


def test_the_solver_says_what_it_cannot_answer():
    unknown = (
        "Where is Mary?",
        "Where is the milk?",
        "Where was it?",
        "What?",
        "Who gave the milk?",
    )
    for qa, question in zip(SOLVERS, unknown, strict=True):
        with pytest.raises(ValueError, match=f"solve: {qa}: .* does not follow from its facts"):
            solve(qa, ["John moved to the office."], question)
    with pytest.raises(ValueError, match="solve: qa6; expected one of qa1, qa2, qa3, qa4, qa5"):
        solve("qa6", [], "?")


def given(question: Question) -> set[str]:
    """All that the one gave to the other whom "What did A give to B?" names."""
    named = re.fullmatch(r"What did (\w+) give to (\w+)\?", question.text)
    gifts = [found for fact in question.facts if (found := GIVE.fullmatch(fact))]
    return {g["thing"] for g in gifts if named and (g["giver"], g["taker"]) == named.groups()}


@needs_babi
@pytest.mark.parametrize("qa", SOLVERS)
def test_the_solver_answers_all_of_babi(qa):
    """Training and test; 21 questions of qa5 have two true answers, one of them in the test."""
    wrong = Counter()
    for part in ("eval", "train"):
        for file in babi_files(BABI, qa, part):
            for question in read_babi(file):
                answer = solve(qa, question.facts, question.text)
                if answer != question.answer:
                    wrong[part] += 1
                    assert {answer, question.answer} <= given(question)
    assert wrong == ({"eval": 1, "train": 20} if qa == "qa5" else {})


@needs_babi
@pytest.mark.parametrize("qa", ANSWERS)
def test_all_twenty_tasks_are_read(qa):
    train, asked = (read_questions(BABI, qa, part) for part in ("train", "eval"))
    assert len(asked) >= 496
    assert len(train) >= 8_900
    assert not {q.content for q in train.items} & {q.content for q in asked.items}
    answers = {label for q in (*train.items, *asked.items) for label in _labels(qa, q.answer)}
    assert answers == set(ANSWERS[qa])
    for question in asked.items:
        assert question.supporting
        assert max(question.supporting) < len(question.facts)
        # whoever knows the answer is right, whoever says all labels is not
        assert score(
            f" {question.answer}{STOP} Because.", question.answer, ANSWERS[qa], question.text
        )
        assert not score(", ".join(ANSWERS[qa]), question.answer, ANSWERS[qa], question.text)
        assert exact(f" {question.answer}{STOP} Because.", question.answer)


def _labels(qa: str, answer: str) -> list[str]:
    return answer.split(",") if qa == "qa8" else [answer]


@needs_babilong
def test_published_samples_ask_our_test_questions():
    """Of the 1,000 test questions the first 500 are here, in the published order."""
    counts = {}
    for qa in SOLVERS:
        numbers = published_numbers(DATA / "babilong" / "test_100_idxs.json", qa)
        assert len(set(numbers)) == 100
        assert max(numbers) < 1000
        asked = open_questions(BABI, qa, "eval")
        chosen = asked.only(numbers)
        counts[qa] = len(chosen)
        assert chosen.items == tuple(asked.items[n] for n in numbers if n < 500)
    assert counts == {"qa1": 55, "qa2": 58, "qa3": 47, "qa4": 52, "qa5": 55}


@needs_babilong
@pytest.mark.parametrize("qa", ["qa1", "qa20"])
def test_published_prompts(qa):
    prompt = published_prompt(DATA / "babilong" / "babilong_prompts.json", qa)
    assert prompt.before.endswith("\n\n<context>\n")
    assert prompt.before.count("<example>") >= 2
    assert not re.search(r"\{\w+\}", prompt.before)
    assert prompt.after == "\n</context>\n\nQuestion: {question}"


def test_files_that_are_not_published_ones(tmp_path):
    (tmp_path / "x.json").write_text('{"qa1": 3}')
    with pytest.raises(ValueError, match=r"x\.json: no numbers of BABILong's samples for qa1"):
        published_numbers(tmp_path / "x.json", "qa1")
    with pytest.raises(ValueError, match=r"x\.json: no prompts of BABILong for qa1"):
        published_prompt(tmp_path / "x.json", "qa1")


# Stories of our own


@pytest.mark.parametrize("qa", MAKERS)
def test_our_stories_can_be_solved(qa):
    forms = (MOVE, TAKE, LEAVE, GIVE, RELATION)
    for part in ("train", "eval"):
        questions = generated_questions(qa, part, seed=3, count=400)
        assert len(questions) == 400
        assert questions.source == "stories of our own by bAbI's rules, seed 3"
        for question in questions.items:
            assert solve(qa, question.facts, question.text) == question.answer
            assert all(any(form.fullmatch(fact) for form in forms) for fact in question.facts)
            assert len(given(question)) <= 1
            assert len(question.facts) - RECENT <= max(question.supporting) < len(question.facts)


@pytest.mark.parametrize("qa", ["qa1", "qa4", "qa5"])
def test_supporting_facts_alone_tell_the_answer(qa):
    for question in generated_questions(qa, "eval", count=300).items:
        facts = [question.facts[i] for i in question.supporting]
        assert solve(qa, facts, question.text) == question.answer


@pytest.mark.parametrize("qa", MAKERS)
def test_our_training_and_evaluation_share_nothing_whatever_the_seeds(qa):
    train = {q.content for s in (0, 1) for q in generated_questions(qa, "train", s, 400).items}
    asked = {q.content for s in (0, 1) for q in generated_questions(qa, "eval", s, 400).items}
    assert len(train) > 300
    assert not train & asked


def test_our_stories_depend_on_the_seed_alone():
    made = [generated_questions("qa2", "eval", seed, 50).items for seed in (0, 0, 1)]
    assert made[0] == made[1]
    assert not set(made[0]) & set(made[2])
    assert (len(generated_questions("qa1", "train")), len(open_questions(None, "qa1", "eval"))) == (
        10_000,
        1_000,
    )
    with pytest.raises(
        ValueError, match=r"qa6: no stories of our own; expected qa1, .* or a folder"
    ):
        open_questions(None, "qa6", "eval")


def shares(items: tuple[Question, ...]) -> np.ndarray:
    """Of every answer that its task may have."""
    counts = Counter(question.answer for question in items)
    return np.array([counts[label] for label in sorted(counts)]) / len(items)


def test_our_labels_are_as_frequent_as_each_other():
    for qa in ("qa1", "qa2", "qa3", "qa4"):
        found = shares(generated_questions(qa, "train", count=2000).items)
        assert len(found) == 6
        assert np.abs(found - 1 / 6).max() < 0.04


@needs_babi
@pytest.mark.parametrize("qa", MAKERS)
def test_our_stories_are_much_like_babi(qa):
    ours = generated_questions(qa, "train", count=2000).items
    real = read_questions(BABI, qa, "eval" if qa == "qa3" else "train").items
    assert np.abs(shares(ours) - shares(real)).max() < 0.06
    lengths = [np.mean([len(question.facts) for question in items]) for items in (ours, real)]
    assert 0.6 < lengths[0] / lengths[1] < 1.5
    forms = [
        {re.sub(r"\b(Mary|John|Sandra|Daniel|Fred|Bill|Jeff)\b", "X", q.text) for q in items}
        for items in (ours, real)
    ]
    assert forms[0] == forms[1]
    lasts = [Counter(len(q.facts) - 1 - max(q.supporting) for q in items) for items in (ours, real)]
    assert max(lasts[0]) == max(lasts[1])

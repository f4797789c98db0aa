"""BABILong: a question of bAbI whose facts are hidden in books, at any length.

    text      ... book ... Mary moved to the bathroom. ... book ... John went to the hallway. ...
    question  Question: Where is Mary? Answer:
    answer    bathroom.

As its authors define it: all facts that stand before the question, in their order, in gaps between
the book's sentences chosen uniformly; questions with more than length/8 facts, themselves included,
are left out. Where we differ: `length` is exact and counts the question and the prompt too (theirs
leaves 300 tokens for them); sentences have a space between them (theirs have none); from a random
sentence the haystack is read on into the next book, and cycled, where they draw another book.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atlas_lm.tasks.babi import ANSWERS, Questions, check_qa, read_questions
from atlas_lm.tasks.babi_world import generated_questions
from atlas_lm.tasks.haystack import Haystack, hide
from atlas_lm.tasks.samples import STOP, Part, Sample, generator_of
from atlas_lm.text import Tokenizer

TOKENS_A_FACT = 8
"""A text has at least so many tokens for each of its facts and its question."""


class Prompt(NamedTuple):
    """What stands before and after the text; `{question}` is replaced in both."""

    before: str = ""
    after: str = "\nQuestion: {question}\nAnswer:"


QUESTION_LAST = Prompt()
QUESTION_FIRST = Prompt(before="Question: {question}\n")


def open_questions(
    folder: str | os.PathLike | None, qa: str, part: Part, seed: int = 0
) -> Questions:
    """bAbI's own from a folder; stories that we make by its rules where none is named."""
    return (
        generated_questions(qa, part, seed) if folder is None else read_questions(folder, qa, part)
    )


def babilong(
    qa: str,
    length: int,
    number: int,
    seed: int,
    questions: Questions,
    haystack: Haystack,
    tokenizer: Tokenizer,
    prompt: Prompt = QUESTION_LAST,
) -> Sample:
    """Sample `number`: of the questions that fit, the one of this number, and round again.

    Its place in the haystack and the gaps depend on task, part, length, seed and number alone.
    """
    if qa != questions.qa:
        raise ValueError(f"babilong: {qa}, but the questions are of {questions.qa}")
    if number < 0:
        raise ValueError(f"babilong: number {number}; expected 0 or more")
    fitting = fitting_questions(length, questions, haystack, tokenizer, prompt)
    index = int(fitting[number % len(fitting)])
    item = questions.items[index]
    before, after = (text.replace("{question}", item.text) for text in prompt)
    return hide(
        item.facts,
        haystack,
        tokenizer,
        generator_of("babilong", qa, questions.part, length, seed, number),
        length=length,
        prompt=(before, after),
        answers=(item.answer,),
        choices=ANSWERS[qa],
        about={
            "task": f"babilong/{qa}",
            "part": questions.part,
            "seed": seed,
            "number": number,
            "questions": questions.source,
            "question": index,
            "asked": item.text,
            "supporting": item.supporting,
        },
    )


def fitting_questions(
    length: int,
    questions: Questions,
    haystack: Haystack,
    tokenizer: Tokenizer,
    prompt: Prompt = QUESTION_LAST,
) -> np.ndarray:
    """Numbers of the questions that a text of this length may hold."""
    facts, tokens = questions.sizes(tokenizer, haystack.separator, prompt).T
    fitting = np.flatnonzero(((facts + 1) <= length // TOKENS_A_FACT) & (tokens <= length))
    if not len(fitting):
        needed = np.maximum((facts + 1) * TOKENS_A_FACT, tokens)
        shortest = f"the shortest needs {needed.min():,}" if len(needed) else "there is none"
        raise ValueError(
            f"babilong/{questions.qa}: none of its {len(questions):,} questions fits "
            f"{length:,} tokens; {shortest}"
        )
    return fitting


# Scores


def score(output: str, target: str, labels: tuple[str, ...], question: str) -> bool:
    """The authors' rule for models that were not trained on the task.

    Of the labels in the output's first sentence, less those that the question names, the target
    must be the only one; targets with commas (qa8) must all be there. One difference: a label
    inside a longer one is not seen, for "one" in "none" would make every true "none" wrong.
    """
    said = output.lower().split(STOP)[0].split("<context>")[0].split("<example>")[0]
    known = [label.lower() for label in labels]
    wanted = {target.lower()} if target.lower() in known else set(target.lower().split(","))
    return _named(said, known) - _named(question.lower(), known) == wanted


def _named(text: str, labels: list[str]) -> set[str]:
    found = set()
    for label in labels:
        rest = text
        for longer in labels:
            if label in longer and label != longer:
                rest = rest.replace(longer, " ")
        if label in rest:
            found.add(label)
    return found


def exact(output: str, target: str) -> bool:
    """For models that were trained on the answers: the target, `STOP`, and nothing before it."""
    said, stop, _ = output.partition(STOP)
    return stop == STOP and said.strip() == target


# The authors' files


def published_prompt(path: str | os.PathLike, qa: str) -> Prompt:
    """The authors' prompt with instructions and examples, from `babilong_prompts.json`."""
    check_qa(qa)
    try:
        values = json.loads(Path(path).read_bytes())
        before, _, after = values["DEFAULT_TEMPLATE"].partition("{context}")
        for name, text in values["prompts"][qa].items():
            before = before.replace(f"{{{name}}}", text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no prompts of BABILong for {qa} ({error!r})") from error
    return Prompt(before, after)


def published_numbers(path: str | os.PathLike, qa: str) -> tuple[int, ...]:
    """Which questions of bAbI's test file the published long samples ask, in their order, from
    `test_100_idxs.json`; for `Questions.only`."""
    try:
        return tuple(int(number) for number in json.loads(Path(path).read_bytes())[qa])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: no numbers of BABILong's samples for {qa} ({error!r})"
        ) from error

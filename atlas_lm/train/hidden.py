"""Batches of texts with questions wherever they can be answered: stories of bAbI, and needles.

    book ... Mary moved to the bathroom. ... book ... Question: Where is Mary? Answer: bathroom. ...
    book ... Mary went to the kitchen. ... book ... Question: Where is Mary? Answer: kitchen. ...

A text with one question at its end, as it is tested with, teaches one answer in thousands of
tokens; all questions of its story teach several, of facts near and far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from atlas_lm.ask import Task
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.tasks.babi import Question
from atlas_lm.tasks.babi_world import made_story
from atlas_lm.tasks.babilong import QUESTION_LAST
from atlas_lm.tasks.haystack import Haystack
from atlas_lm.tasks.niah import NOISE, told_and_asked
from atlas_lm.tasks.samples import answer_ids, generator_of, ids, part_of
from atlas_lm.tasks.table import TextTask
from atlas_lm.text import Tokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import HiddenData
from atlas_lm.train.questions import QuestionMaterial
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.sources import Tests, Work
from atlas_lm.train.story_source import StorySource, Texts, pause_before

FULL = 0.75
"""Part of a text that facts and questions take, at most."""
TRIES = 100
"""Stories that are looked at for one that fits."""
DECOY = 12
"""Words of a book in a decoy, at most."""


class Piece(NamedTuple):
    """What stands between sentences of a book."""

    tokens: np.ndarray
    answer: int = 0
    """Tokens at its end that are to be known; 0: it is no question."""
    plain: bool = False
    """Nobody asks about it."""


class HiddenMaterial:
    """Rows to learn from; tests are those of `QuestionMaterial`."""

    task: Task | None = None

    def __init__(self, data: HiddenData, folder: Path):
        self.data = data
        self._asked = QuestionMaterial(data, folder)
        assert self._asked.tokenizer is not None
        self._tokenizer = self._asked.tokenizer
        self.tokenizer: Tokenizer | None = self._tokenizer
        self.vocab: int | None = self._tokenizer.vocab
        self._train = self._asked.texts["train"]
        self._stories: dict[str, list[list[Question]]] = {}
        self._evaluated: dict[str, set[tuple[str, ...]]] = {}
        self._noise = Haystack.of_text(NOISE, self._tokenizer)

    def source(self, config: TrainConfig, ranks: Ranks) -> StorySource:
        return StorySource(self, config, ranks)

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        return self._asked.tests(config, ranks)

    def prompts(self, count: int) -> list[str]:
        return []

    def works(self, texts: Texts, pauses: Sequence[torch.Tensor | None]) -> list[Work]:
        """One text a number, cut into rows."""
        count, (length, seed, step, numbers) = len(pauses), texts
        made = [self.row(length * count, seed, step, number) for number in numbers]
        sides = (torch.from_numpy(np.stack(side)) for side in zip(*made, strict=True))
        rows = zip(*(side.split(length, 1) for side in sides), pauses, strict=True)
        return [
            Work(tokens, targets, None, None, i == 0, i == count - 1, before, plain)
            for i, (tokens, targets, plain, before) in enumerate(rows)
        ]

    def pause(self, length: int, seed: int, step: int, numbers: range) -> torch.Tensor | None:
        count = pause_before(self.data.pauses, length, seed, step)
        if not count:
            return None
        haystack, rows = self._train.haystack, []
        for number in numbers:
            draw = generator_of("hidden pause", seed, step, number)
            rows.append(_taken(haystack.fill((), count, draw).pieces))
        return torch.from_numpy(np.stack(rows))

    def check(self, length: int, seed: int) -> None:
        for number in range(len(self._asked.tasks)):
            self.row(length, seed, 0, number)

    # A text

    def row(
        self, length: int, seed: int, step: int, number: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets and which tokens are plain `[length]`; tasks take turns."""
        draw = generator_of("hidden", length, seed, step, number)
        task = self._asked.tasks[(step + number) % len(self._asked.tasks)]
        haystack = self._noise if task.kind == "pass-key" else self._train.haystack
        head, pieces = self._pieces(task, length, haystack, draw)
        told = [piece.tokens for piece in pieces]
        filled = haystack.fill(told, length + 1 - len(head), draw)
        tokens = np.concatenate([head, _taken(filled.pieces)])
        targets = np.full(length + 1, NO_TARGET, np.int64)
        plain = np.ones(length + 1, bool)
        plain[: len(head)] = False
        for piece, position in zip(pieces, filled.positions, strict=True):
            begin = len(head) + position
            end = begin + len(piece.tokens)
            plain[begin:end] = piece.plain
            targets[end - piece.answer - 1 : end - 1] = tokens[end - piece.answer : end]
        return tokens[:-1], targets[:-1], plain[:-1]

    def _pieces(
        self, task: TextTask, length: int, haystack: Haystack, draw: np.random.Generator
    ) -> tuple[np.ndarray, list[Piece]]:
        """What stands at the beginning, and what is hidden, in its order."""
        for head, told in self._tellings(task, draw):
            begun = ids(head, self._tokenizer)
            room = FULL * length - len(begun)
            pieces = [self._piece(*each, haystack.separator) for each in told]
            if fitting := _fitting(pieces, room):
                facts = [text for text, answer in told[: len(fitting)] if answer is None]
                return begun, self._with_decoys(fitting, facts, room, haystack, draw)
        raise ValueError(
            f"{task.name}: its facts and a question do not fit {length:,} tokens; expected longer "
            "--data.lengths"
        )

    def _tellings(
        self, task: TextTask, draw: np.random.Generator
    ) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
        """What may be hidden, until something fits: fewer and fewer needles, one story after the
        other."""
        if task.family == "niah":
            for count in range(int(draw.integers(1, self.data.needles + 1)), 0, -1):
                yield told_and_asked(task.kind, count, self._train.words, draw)
            return
        stories, made = self._stories_of(task.kind), self.data.made
        first = int(draw.integers(len(stories)))
        for other in range(TRIES):
            if made and draw.random() < made:
                wanted, times = self._may_learn(task.kind), self.data.times
                yield "", _told(made_story(task.kind, draw, wanted, times))
            else:
                yield "", _told(stories[(first + other) % len(stories)])

    def _with_decoys(
        self,
        pieces: list[Piece],
        facts: Sequence[str],
        room: float,
        haystack: Haystack,
        draw: np.random.Generator,
    ) -> list[Piece]:
        """Anywhere between the others, as many as have room."""
        count = int(draw.poisson(self.data.decoys * len(facts))) if self.data.decoys else 0
        for _ in range(count):
            fact = facts[int(draw.integers(len(facts)))].split()
            text = haystack.separator + decoy(fact, self._sentence(haystack, draw), draw)
            piece = Piece(ids(text, self._tokenizer), plain=True)
            if sum(len(each.tokens) for each in (*pieces, piece)) > room:
                break
            pieces.insert(int(draw.integers(len(pieces) + 1)), piece)
        return pieces

    def _sentence(self, haystack: Haystack, draw: np.random.Generator) -> list[str]:
        at = int(draw.integers(haystack.sentences))
        begin, end = haystack.bounds[at : at + 2].tolist()
        return self._tokenizer.decode(haystack.tokens[begin:end].tolist()).split()

    def _piece(self, text: str, answer: str | None, separator: str) -> Piece:
        if answer is None:
            return Piece(ids(separator + text, self._tokenizer))
        said = answer_ids(answer, self._tokenizer)
        return Piece(np.concatenate([ids(text, self._tokenizer), said]), len(said))

    def _may_learn(self, qa: str) -> Callable[[Question], bool]:
        """Whether evaluation does not ask it."""
        if self.data.babi is None:
            return lambda question: part_of(question.content) == "train"
        if qa not in self._evaluated:
            questions = self._asked.texts["eval"].questions(qa).items
            self._evaluated[qa] = {question.content for question in questions}
        return lambda question: question.content not in self._evaluated[qa]

    def _stories_of(self, qa: str) -> list[list[Question]]:
        if qa not in self._stories:
            self._stories[qa] = stories(self._train.questions(qa).items)
        return self._stories[qa]


def stories(questions: Sequence[Question]) -> list[list[Question]]:
    """Questions of one story together, in the order in which they are asked; a story goes on as
    long as what was told before is a beginning of what was told."""
    found: list[list[Question]] = []
    for question in sorted(questions, key=lambda each: each.facts):
        last = found[-1][-1].facts if found else None
        if last is not None and question.facts[: len(last)] == last:
            found[-1].append(question)
        else:
            found.append([question])
    return found


def decoy(fact: Sequence[str], sentence: Sequence[str], draw: np.random.Generator) -> str:
    """The words of a fact up to one of them and then those of a book's sentence, or the other way
    round: whoever takes a part of a fact for all of it is wrong."""
    cut, begin = int(draw.integers(1, len(fact))), int(draw.integers(len(sentence)))
    if draw.random() < 0.5:
        return " ".join([*fact[:cut], *sentence[begin:][-DECOY:]])
    return " ".join([*sentence[: begin + 1][:DECOY], *fact[cut:]])


def _told(story: Sequence[Question]) -> list[tuple[str, str | None]]:
    """Facts, and questions with their answers, in order."""
    found: list[tuple[str, str | None]] = []
    done = 0
    for question in story:
        found += [(fact, None) for fact in question.facts[done:]]
        done = len(question.facts)
        asked = QUESTION_LAST.after.replace("{question}", question.text)
        found.append((asked, question.answer))
    return found


def _fitting(pieces: list[Piece], room: float) -> list[Piece]:
    """As many as have room, up to a question; none where not even the first question has."""
    sizes = np.cumsum([len(piece.tokens) for piece in pieces])
    last = [i for i, piece in enumerate(pieces) if piece.answer and sizes[i] <= room]
    return pieces[: last[-1] + 1] if last else []


def _taken(pieces: Sequence) -> np.ndarray:
    """The tokens of pieces of a haystack."""
    found = [
        piece if isinstance(piece, np.ndarray) else piece.range(0, len(piece)) for piece in pieces
    ]
    return np.concatenate(found).astype(np.int64)

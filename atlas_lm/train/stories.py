"""Batches of texts with facts hidden in them: what words and sentences are learned with is never
tested with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from atlas_lm.ask import Task
from atlas_lm.demo.facts import TASK, Part
from atlas_lm.demo.forms import MARKS, form_words
from atlas_lm.demo.words import LONGEST, SHORTEST, WORDS, Words, words_in
from atlas_lm.tasks.haystack import Haystack
from atlas_lm.tasks.niah import read_words
from atlas_lm.tasks.samples import generator_of
from atlas_lm.tasks.table import Folders, Materials
from atlas_lm.text import ByteTokenizer, FileTokenizer, Tokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import StoryData
from atlas_lm.train.ranks import Ranks, agreed
from atlas_lm.train.sources import EVALUATION_SEED, Tests, Work
from atlas_lm.train.story_rows import KINDS, Book, Row
from atlas_lm.train.story_source import StorySource, Texts, pause_before

STRANGE_TOKENS, STRANGE_PLACES = 1_000_000, 16
"""Tokens of the books whose words may stand in facts, and in how many places they lie."""
PIECE_WORDS = 4
"""Words of every piece of a tokenizer that may stand in facts."""


# Batches


class StoryMaterial:
    """Rows made as it goes, from books that are tokenised once."""

    task: Task | None = TASK

    def __init__(self, data: StoryData, folder: Path):
        self.data = data
        tokenizer = ByteTokenizer() if data.tokenizer is None else FileTokenizer(data.tokenizer)
        self.tokenizer: Tokenizer | None = tokenizer
        self.vocab: int | None = tokenizer.vocab
        test_books = data.test_books or data.books
        train = Materials(_folders(data.books), tokenizer, folder, "train")
        test = Materials(_folders(test_books), tokenizer, folder, "eval")
        for texts in (train, test):
            agreed(lambda texts=texts: texts.haystack.source)  # one rank makes it, all open it
        words = training_words(data, train.haystack, tokenizer)
        self.books: dict[Part, Book] = {
            "train": Book("train", data, words, train.haystack, tokenizer),
            "test": Book("test", data, WORDS["test"], test.haystack, tokenizer),
        }

    def source(self, config: TrainConfig, ranks: Ranks) -> StorySource:
        return StorySource(self, config, ranks)

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        """Every length, all questions together and those of each kind."""
        found: dict[int | str, Iterator[Work]] = {}
        for length in (config.length, *self.data.longer):
            self.books["test"].row(length, EVALUATION_SEED, 0, 0)  # what cannot be made is told now
            found[length] = self._test(config, ranks, length)
        return found

    def _test(self, config: TrainConfig, ranks: Ranks, length: int) -> Iterator[Work]:
        """The batches of a test; of long texts in parts, with no more tokens than training has."""
        size = max(config.batch // ranks.ranks * config.length // length, 1)
        for step in range(config.evaluate_batches):
            mine = ranks.mine(range(config.batch))
            for begin in range(0, len(mine), size):
                yield self.asked("test", length, step, mine[begin : begin + size])

    def asked(self, part: Part, length: int, step: int, numbers: range) -> Work:
        """Rows to evaluate, with the kinds of their questions."""
        book = self.books[part]
        work, kinds = _stacked([book.row(length, EVALUATION_SEED, step, n) for n in numbers])
        return work._replace(kinds={name: kinds == i for i, name in enumerate(KINDS)})

    def works(self, texts: Texts, pauses: Sequence[torch.Tensor | None]) -> list[Work]:
        """Each row after its pause."""
        book, count, (length, seed, step, numbers) = self.books["train"], len(pauses), texts
        told = [book.rows(length, seed, step, number, count) for number in numbers]
        return [
            _stacked([next(text) for text in told])[0]._replace(
                begins=i == 0, ends=i == count - 1, before=before
            )
            for i, before in enumerate(pauses)
        ]

    def pause(self, length: int, seed: int, step: int, numbers: range) -> torch.Tensor | None:
        """Plain text before the rows of a step, at times; few lengths of it as often as many."""
        count = pause_before(self.data.pauses, length, seed, step)
        if not count:
            return None
        book = self.books["train"]
        return torch.from_numpy(np.stack([book.plain(count, seed, step, n) for n in numbers]))

    def check(self, length: int, seed: int) -> None:
        """Refuse lengths of which no text can be made."""
        self.books["train"].row(length, seed, 0, 0)

    def prompts(self, count: int) -> list[str]:
        return []


def _stacked(rows: list[Row]) -> tuple[Work, torch.Tensor]:
    """Rows side by side, and the kind of every target."""
    sides = zip(*rows, strict=True)
    tokens, targets, kinds, plain = (torch.from_numpy(np.stack(side)) for side in sides)
    return Work(tokens, targets, None, plain=plain), kinds


# Words


def training_words(data: StoryData, haystack: Haystack, tokenizer: Tokenizer) -> Words:
    """Ours, RULER's if they are named, and any of the books; none with which it is tested, except
    for those that sentences of the test are made of, which may stand in other sentences."""
    words, tested = WORDS["train"], WORDS["test"].all
    if data.words is not None:
        more = read_words(data.words)
        words = replace(
            words,
            adjectives=_both(words.adjectives, more.adjectives),
            nouns=_both(words.nouns, more.nouns),
        )
    if data.strange:
        parts = np.array_split(haystack.tokens, STRANGE_PLACES)
        some = np.concatenate([part[: STRANGE_TOKENS // STRANGE_PLACES] for part in parts])
        books = tuple(sorted(words_in(tokenizer.decode(some.tolist()))))
        words = replace(
            words,
            strange=(*books, *piece_words(tokenizer)),
            around=tuple(word for word in books if word not in tested and word not in MARKS),
            share=data.strange,
            invented=data.invented,
            loose=data.loose,
        )
    return words.without(tested | form_words())


def piece_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Words of two pieces each, every piece in some: nobody gives an answer of pieces that never
    stood in one, and words that it is tested with have some of those."""
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab)]
    first = [piece[1:] for piece in pieces if re.fullmatch(" [a-z]+", piece)]
    last = [piece for piece in pieces if re.fullmatch("[a-z]+", piece)]
    if not (first and last):
        return ()
    draw = generator_of("piece words")
    found = set[str]()
    for _ in range(PIECE_WORDS):
        ends, begins = draw.choice(last, len(first)), draw.choice(first, len(last))
        found |= {a + b for a, b in zip((*first, *begins), (*ends, *last), strict=True)}
    return tuple(sorted(word for word in found if SHORTEST <= len(word) <= LONGEST))


def _both(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ours, *theirs)))


def _folders(books: str | None) -> Folders:
    return Folders(books=None if books is None else Path(books))

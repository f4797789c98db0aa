"""Batches of texts with facts hidden in them: what words and sentences are learned with is never
tested with."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

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
from atlas_lm.train.sources import EVALUATION_SEED, Tests, Work, drawn_at
from atlas_lm.train.story_rows import KINDS, Book, Row

STRANGE_TOKENS, STRANGE_PLACES = 1_000_000, 16
"""Tokens of the books whose words may stand in facts, and in how many places they lie."""
PIECE_WORDS = 4
"""Words of every piece of a tokenizer that may stand in facts."""
PAUSING = 0.125
"""Part of the rows before which there is plain text."""


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

    def works(
        self,
        length: int,
        seed: int,
        step: int,
        numbers: range,
        pauses: Sequence[torch.Tensor | None],
    ) -> list[Work]:
        """The rows of these numbers, at this step and those that go on from it, each after its
        pause."""
        book, count = self.books["train"], len(pauses)
        texts = [book.rows(length, seed, step, number, count) for number in numbers]
        return [
            _stacked([next(text) for text in texts])[0]._replace(
                begins=i == 0, ends=i == count - 1, before=before
            )
            for i, before in enumerate(pauses)
        ]

    def pause(self, length: int, seed: int, step: int, numbers: range) -> torch.Tensor | None:
        """Plain text before the rows of a step, at times; few lengths of it as often as many."""
        draw = generator_of("story pause", seed, step)
        if not self.data.pauses or draw.random() >= PAUSING:
            return None
        count = length * int((self.data.pauses + 1) ** draw.random())
        book = self.books["train"]
        return torch.from_numpy(np.stack([book.plain(count, seed, step, n) for n in numbers]))

    def prompts(self, count: int) -> list[str]:
        return []


def _stacked(rows: list[Row]) -> tuple[Work, torch.Tensor]:
    """Rows side by side, and the kind of every target."""
    sides = zip(*rows, strict=True)
    tokens, targets, kinds, plain = (torch.from_numpy(np.stack(side)) for side in sides)
    return Work(tokens, targets, None, plain=plain), kinds


class StorySource:
    """At every step one of the lengths, and as many rows as make the tokens of a step; the same
    one, and the texts going on, for as many steps as a text has rows."""

    def __init__(self, material: StoryMaterial, config: TrainConfig, ranks: Ranks):
        self.material, self.config, self.ranks = material, config, ranks
        self.step = 0
        self._ahead: Iterator[Work] | None = None
        self.lengths = material.data.lengths or (config.length,)
        self.growing = material.data.growing_steps(config.steps)
        """Steps, each with texts of its own; those of the others go on."""
        for length in self.lengths:  # what cannot be made is told now
            material.books["train"].row(length, config.seed, 0, 0)

    def next(self) -> Work:
        if self._ahead is None:
            self._ahead = _ahead(self, self.material.data.workers)
        work = next(self._ahead)
        self.step += 1
        return work

    def works(self, number: int) -> list[Work]:
        """The steps of texts that begin together."""
        config, more = self.config, max(number - self.growing, 0)
        rows = self.material.data.rows if number >= self.growing else 1
        step = number + more * (rows - 1)
        length = self.length_of(step)
        mine = self.ranks.mine(range(config.length // length * config.batch))
        pauses: list[torch.Tensor | None] = [None]
        if number >= self.growing:
            pause = partial(self.material.pause, length, config.seed, numbers=mine)
            pauses = [pause(step=step + i) for i in range(rows)]
        return self.material.works(length, config.seed, step, mine, pauses)

    def texts_at(self, step: int) -> tuple[int, int]:
        """The number of the texts of a step, and which of its steps it is."""
        more, row = divmod(max(step - self.growing, 0), self.material.data.rows)
        return min(step, self.growing) + more, row

    def length_of(self, step: int) -> int:
        """Of texts that begin then: one of those that have come in."""
        lengths = sorted(self.lengths)
        come = len(lengths)
        if step < self.growing:
            come = 1 + int(step / self.growing * len(lengths))
        return lengths[drawn_at(self.config.seed, step) % come]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self._ahead = int(state["step"]), None

    def close(self) -> None:
        """Let the processes end now, and not when Python does, which would be told as an error."""
        self._ahead = None
        gc.collect()  # they know this source, and it them


def _ahead(source: StorySource, workers: int) -> Iterator[Work]:
    """Batches from the source's step on, made by processes of their own if there are any."""
    first, skipped = source.texts_at(source.step)
    made = _together(source, workers, itertools.count(first))
    return itertools.islice(itertools.chain.from_iterable(made), skipped, None)


def _together(source: StorySource, workers: int, numbers: Iterator[int]) -> Iterator[list[Work]]:
    if not workers:
        return map(source.works, numbers)
    loader = DataLoader(
        _Texts(source),
        batch_size=None,
        sampler=numbers,
        num_workers=min(workers, os.cpu_count() or 1),
        generator=torch.Generator(),  # not that of the run, which it would move
        collate_fn=_packed,
        worker_init_fn=_deaf,
    )
    return map(_unpacked, loader)


Packed = list[tuple[np.ndarray, bool, bool, np.ndarray | None]]
"""Tokens, targets and which are plain `[3 b t]`, whether memories begin and end, and what is read
before."""


def _packed(works: list[Work]) -> Packed:
    """Through a pipe: tensors would all lie in shared memory, of which there is little at times."""
    found: Packed = []
    for work in works:
        assert work.plain is not None
        sides = torch.stack([work.tokens, work.targets, work.plain.long()]).int().numpy()
        before = None if work.before is None else work.before.int().numpy()
        found.append((sides, work.begins, work.ends, before))
    return found


def _unpacked(packed: Packed) -> list[Work]:
    found = []
    for sides, begins, ends, earlier in packed:
        tokens, targets, plain = torch.from_numpy(sides).long()
        before = None if earlier is None else torch.from_numpy(earlier).long()
        found.append(Work(tokens, targets, None, None, begins, ends, before, plain.bool()))
    return found


def _deaf(_: int) -> None:
    """Ctrl-C is for the run, which ends its step and lets go of its processes in good order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Texts(Dataset[list[Work]]):
    """Batches by the number of their texts, for processes that make them."""

    def __init__(self, source: StorySource):
        self.works = source.works

    def __getitem__(self, number: int) -> list[Work]:
        return self.works(number)


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

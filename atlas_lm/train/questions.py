"""Batches of texts with questions: needles and BABILong, for training and for evaluation.

A row is a text, its question and the answer, which is all that is learned. What is asked in
training is never asked in evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from atlas_lm.ask import Task
from atlas_lm.tasks.samples import Part
from atlas_lm.tasks.table import TEXT_TASKS, Folders, Materials, TextTask
from atlas_lm.text import ByteTokenizer, FileTokenizer, Tokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import QuestionData
from atlas_lm.train.ranks import Ranks, agreed
from atlas_lm.train.sources import EVALUATION_SEED, Tests, Work, drawn_at

ANSWER = 40
"""Tokens of a row that are left for the answer; the longest is a UUID by bytes."""


class QuestionMaterial:
    """Texts of tasks, made as it goes from books that are tokenised once."""

    task: Task | None = None

    def __init__(self, data: QuestionData, folder: Path):
        self.data = data
        self.tokenizer: Tokenizer | None = (
            ByteTokenizer() if data.tokenizer is None else FileTokenizer(data.tokenizer)
        )
        self.vocab: int | None = self.tokenizer.vocab
        self.texts: dict[Part, Materials] = {
            part: Materials(self._folders(part), self.tokenizer, folder, part)
            for part in ("train", "eval")
        }
        self.tasks = tuple(TEXT_TASKS[name] for name in data.tasks)
        if any(task.name != "niah/pass-key" for task in self.tasks):
            for texts in self.texts.values():
                agreed(lambda texts=texts: texts.haystack.source)

    def _folders(self, part: Part) -> Folders:
        data = self.data
        books = (data.test_books or data.books) if part == "eval" else data.books
        return Folders(books=_path(books), babi=_path(data.babi), words=_path(data.words))

    def source(self, config: TrainConfig, ranks: Ranks) -> QuestionSource:
        return QuestionSource(self, config, ranks)

    def tests(self, config: TrainConfig, ranks: Ranks) -> Tests:
        """Every task at the length of the run and at longer ones."""
        found: dict[int | str, Iterator[Work]] = {}
        for length in (config.length, *self.data.longer):
            for task in self.tasks:
                self._check_test(task, length)  # what cannot be made is told now
                name = length if len(self.tasks) == 1 else f"{task.kind}-{length}"
                found[name] = self._test(config, ranks, task, length)
        return found

    def _check_test(self, task: TextTask, length: int) -> None:
        try:
            self.rows("eval", task, length, EVALUATION_SEED, range(1))
        except ValueError as error:
            raise ValueError(
                f"{error} (in a test of {length:,} tokens, {ANSWER} of them for its answer; "
                "expected a longer --length or --data.longer)"
            ) from error

    def _test(
        self, config: TrainConfig, ranks: Ranks, task: TextTask, length: int
    ) -> Iterator[Work]:
        """The batches of a test; of long texts in parts, with no more tokens than training has."""
        size = max(config.batch // ranks.ranks * config.length // length, 1)
        for number in range(config.evaluate_batches):
            first = number * config.batch
            mine = ranks.mine(range(first, first + config.batch))
            for begin in range(0, len(mine), size):
                some = mine[begin : begin + size]
                yield self.rows("eval", task, length, EVALUATION_SEED, some)

    def rows(self, part: Part, task: TextTask, length: int, seed: int, numbers: range) -> Work:
        """Samples of these numbers."""
        if length <= ANSWER:
            raise ValueError(
                f"{task.name}: {length} tokens, {ANSWER} of them for the answer; expected more"
            )
        texts = self.texts[part]
        samples = [texts.sample(task, length - ANSWER, number, seed) for number in numbers]
        made = [sample.row(length) for sample in samples]
        tokens, targets = (torch.from_numpy(np.stack(side)) for side in zip(*made, strict=True))
        return Work(tokens, targets, None)

    def prompts(self, count: int) -> list[str]:
        return []


class QuestionSource:
    """At every step the next task in turn, at one of the lengths; no question twice in an epoch."""

    def __init__(self, material: QuestionMaterial, config: TrainConfig, ranks: Ranks):
        self.material, self.config, self.ranks = material, config, ranks
        self.step = 0
        for task in material.tasks:  # what cannot be made is told now
            for length in material.data.lengths or (config.length,):
                material.rows("train", task, length, config.seed, range(1))

    def next(self) -> Work:
        config, tasks = self.config, self.material.tasks
        lengths = self.material.data.lengths or (config.length,)
        first = self.step // len(tasks) * config.batch
        numbers = self.ranks.mine(range(first, first + config.batch))
        work = self.material.rows(
            "train",
            tasks[self.step % len(tasks)],
            lengths[drawn_at(config.seed, self.step) % len(lengths)],
            config.seed,
            numbers,
        )
        self.step += 1
        return work

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = int(state["step"])


def _path(said: str | None) -> Path | None:
    return Path(said) if said else None

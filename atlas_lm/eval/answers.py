"""Answers of a model: texts of any length read side by side, then a few tokens written.

Memory is that of one segment and of the state, whatever the length of the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas_lm.eval.readers import Reader, segment_of
from atlas_lm.eval.score import Share
from atlas_lm.models.lm import NO_TARGET, LanguageModel
from atlas_lm.tasks.babilong import exact, score
from atlas_lm.tasks.niah import contains
from atlas_lm.tasks.rows import EVALUATE, RowTask, rows
from atlas_lm.tasks.samples import STOP, Sample
from atlas_lm.tasks.table import TextTask

LOGITS = 2**25
"""Numbers of logits that are made at once, at most, of tasks with many answers a row."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Answer:
    """What was said to one question, and how right it is."""

    number: int
    said: str
    wanted: str
    exact: float
    """1 if it is the answer and nothing else, up to the full stop."""
    named: float
    """By the rule for models that were not trained on the task: of BABILong, 1 if of all possible
    answers it names the right one alone; of S-NIAH, the share of the values that it contains."""
    depth: float
    """Where in the text the fact stands that it rests on, from 0 to 1: the last, if several."""


# Texts with a question


def answers(
    reader: Reader,
    task: TextTask,
    samples: Sequence[Sample],
    progress: Progress | None = None,
) -> list[Answer]:
    """Read samples of one length side by side, then let the model answer each."""
    length = samples[0].length
    if any(sample.length != length for sample in samples):
        raise ValueError("answers: samples of several lengths; expected one")
    state, logits = reader.begin(len(samples)), None
    size = segment_of(reader.device, len(samples))
    for begin in range(0, length, size):
        end = min(begin + size, length)
        tokens = torch.from_numpy(np.stack([sample.tokens(begin, end) for sample in samples]))
        logits, state = reader.read(tokens, state)
        if progress is not None:
            progress(tokens.numel())
    assert logits is not None
    enough = [_enough(task, sample) for sample in samples]
    said = _written(reader, logits, state, task.answer_tokens, enough)
    return [_judged(task, *pair) for pair in zip(samples, said, strict=True)]


def _enough(task: TextTask, sample: Sample) -> Callable[[str], bool]:
    """Whether nothing that is said after this text can change what it is worth."""
    if task.family == "babilong":
        return lambda said: STOP in said
    return lambda said: STOP in said and contains(sample.references, said) == 1


def _written(
    reader: Reader, logits: Tensor, state, most: int, enough: list[Callable[[str], bool]]
) -> list[str]:
    """The likeliest tokens of every row, until all have said enough or ended the document."""
    rows: list[list[int]] = [[] for _ in range(len(logits))]
    ended = [False] * len(rows)
    for n in range(most):
        chosen = logits.argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if not ended[row]:
                rows[row].append(token)
                said = reader.tokenizer.decode(rows[row])
                ended[row] = token == reader.tokenizer.end or enough[row](said)
        if all(ended) or n + 1 == most:
            break
        logits, state = reader.read(chosen[:, None], state)
    return [reader.tokenizer.decode(row) for row in rows]


def _judged(task: TextTask, sample: Sample, said: str) -> Answer:
    about = sample.about
    supporting = about["supporting"] or range(len(about["depths"]))
    if task.family == "babilong":
        named = float(score(said, sample.answer_text, sample.choices, about["asked"]))
    else:
        named = contains(sample.references, said)
    return Answer(
        number=about["number"],
        said=said,
        wanted=sample.answer_text,
        exact=float(exact(said, sample.answer_text)),
        named=named,
        depth=max((about["depths"][i] for i in supporting), default=0.0),
    )


# Rows with labels


@torch.no_grad()
def row_share(
    model: LanguageModel,
    task: RowTask,
    count: int,
    length: int,
    seed: int,
    number: int,
) -> Share:
    """Labels that the model says first, of one batch of rows.

    Labels of one row are not independent, so that for the interval a row counts once. Chance is to
    remember which values were told, but not whose.
    """
    device = model.embedding.weight.device
    made = rows(task, count, length, seed, EVALUATE, number)
    tokens, targets = made.tokens.to(device), made.targets.to(device)
    x, _ = model.encode(tokens)
    wanted = targets != NO_TARGET
    right = 0
    size = max(LOGITS // model.config.vocab, 1)
    for part, target in zip(x[wanted].split(size), targets[wanted].split(size), strict=True):
        right += int((model.logits(part).argmax(-1) == target).sum())
    return Share(right / int(wanted.sum()) * count, count, task.chance_among_told(length))

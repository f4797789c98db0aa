"""How good a model is: its loss on text it never saw, what it recalls at lengths it never saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp

import torch
from torch import Tensor, nn

from atlas_lm.models.lm import NO_TARGET, ModelState
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import QuestionData, StoryData
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.sources import Material, Work
from atlas_lm.train.step import precision

MOST_NATS = 700.0
"""exp of more is infinite, which JSON does not know."""


@torch.no_grad()
def evaluate(
    config: TrainConfig, ranks: Ranks, objective: nn.Module, material: Material
) -> dict[str, float]:
    """`loss` and `perplexity`; of recall and tasks, `accuracy` (the share of all questions that are
    answered right) at the length of training, `accuracy@LENGTH` or `accuracy@TEST` of each, and
    `accuracy@KIND-LENGTH` where questions are of several kinds. Nothing where there is nothing to
    evaluate on."""
    found: dict[str, float] = {}
    for name, works in material.tests(config, ranks).items():
        sums, state, kinds = torch.zeros((), device=ranks.device), None, ()
        for work in works:
            state = None if work.begins else state
            of_work, state = _sums(config, ranks, objective, work, state)
            sums, kinds = sums + of_work, tuple(work.kinds or ())
        nats, count, *answers = ranks.sum(sums).tolist()
        if not found:
            loss = nats / count
            found |= {"loss": loss, "perplexity": exp(min(loss, MOST_NATS))}
        if not config.of_text:
            names = (f"{name}", *(f"{kind}-{name}" for kind in kinds))
            found |= _accuracies(found, names, answers)
    return found


def _accuracies(
    earlier: Mapping[str, float], names: Sequence[str], answers: Sequence[float]
) -> dict[str, float]:
    """Of tests of these names, from how many answers are right and how many there are, in turn."""
    shares = {
        f"accuracy@{name}": right / asked
        for name, right, asked in zip(names, answers[::2], answers[1::2], strict=True)
        if asked
    }
    if "accuracy" in earlier or not shares:
        return shares
    return {"accuracy": next(iter(shares.values()))} | shares


def _sums(
    config: TrainConfig,
    ranks: Ranks,
    objective: nn.Module,
    work: Work,
    state: ModelState | None,
) -> tuple[Tensor, ModelState | None]:
    """Nats, targets, then right answers and answers, of all and of each kind: where a text is asked
    about, an answer is a run of targets, every one of which has to be right, elsewhere every target
    is one."""
    judge = not config.of_text
    nats = torch.zeros((), dtype=torch.float64, device=ranks.device)
    count = torch.zeros((), dtype=torch.int64, device=ranks.device)
    asked, wrong = [], []
    for segment in work.segments(config.segment):
        with precision(config, ranks):
            tokens, targets, reset = segment.to(ranks.device)
            made = objective(tokens, targets, state, reset, judge)
        state = made[2]
        nats, count = nats + made[0], count + made[1]
        if judge:
            asked.append(targets != NO_TARGET)
            wrong.append(made[3])
    counts = [count]
    if judge:
        whole = isinstance(config.data, QuestionData | StoryData)
        asked, wrong = torch.cat(asked, 1), torch.cat(wrong, 1)
        counts += right_answers(asked, wrong, whole)
        for kind in (work.kinds or {}).values():
            of_kind = kind.to(asked.device)
            counts += right_answers(asked & of_kind, wrong & of_kind, whole)
    return torch.stack([nats, *(n.double() for n in counts)]), state


def right_answers(asked: Tensor, wrong: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """How many answers are right, and how many there are; both arguments are `[b t]`.

    whole    targets side by side are one answer, which one wrong target spoils
    """
    if not whole:
        return (asked & ~wrong).sum(), asked.sum()
    begins = asked.clone()
    begins[:, 1:] &= ~asked[:, :-1]
    number = begins.flatten().cumsum(0) - 1
    answers = begins.sum()
    spoilt = torch.zeros(int(answers), dtype=torch.bool, device=asked.device)
    spoilt[number[wrong.flatten()]] = True
    return answers - spoilt.sum(), answers

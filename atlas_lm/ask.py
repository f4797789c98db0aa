"""Answers from a memory, with no text at hand.

A model that can be asked has `task.json` in its folder: how it was trained to be asked. What it
reads then, and what it was trained on, is the text

    template with the question in it + answer + first stop

in two parts that are tokenised one after the other: `task.prompt` and `task.completion`. Spaces at
the end of a template belong to the answer, as most tokenizers have them: "Answer: " makes the
prompt "Answer:" and the completion " Paris" and the stop.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlas_lm.generate import LIKELIEST, check_vocab, ends, generate, read
from atlas_lm.models.lm import LanguageModel, ModelState
from atlas_lm.text import StreamingDecoder, Tokenizer
from atlas_lm.whole_files import write_whole

TASK = "task.json"
FIELD = "{question}"
VERSION = 1
ROWS = 16
"""Answers that are scored at once, at most: each takes a copy of the memory."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """How a model was trained to be asked."""

    templates: dict[str, str]
    """Prompts by name, each with the field {question} once; the first is the default."""
    stop: tuple[str, ...]
    """Texts that end an answer; those of a closed set are scored with the first."""
    max_tokens: int
    """Tokens of a free answer, at most."""
    answers: tuple[str, ...] | None = None
    """All answers there are; None: any text."""
    not_told: str | None = None
    """The answer that means that the text did not say."""
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("stop", "answers"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.version != VERSION:
            raise ValueError(f"version: {self.version!r}; this atlas-lm knows {VERSION}: update it")
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens!r}; expected a number, 1 or more")
        _check_templates(self.templates)
        if not _are_texts(self.stop) or not all(self.stop):
            raise ValueError(
                f"stop: {self.stop!r}; expected a list of one text or more, none empty"
            )
        self._check_answers()

    def _check_answers(self) -> None:
        told = self.not_told
        if self.answers is not None and not (_are_texts(self.answers) and _plain(*self.answers)):
            raise ValueError(
                f"answers: {self.answers!r}; expected a list of different texts without white "
                "space around them, or null if any text may be an answer"
            )
        if told is not None and not (isinstance(told, str) and _plain(told)):
            raise ValueError(
                f"not_told: {told!r}; expected a text without white space around it, or null"
            )
        if told is not None and self.answers is not None and told not in self.answers:
            raise ValueError(f"not_told: {told!r} is not one of the answers; add it to them")
        if told is not None and self.answers is None and any(s in told for s in self.stop):
            raise ValueError(
                f"not_told: {told!r} is never the answer: a stop within it would end it before; "
                "leave that out"
            )

    def prompt(self, question: str, template: str | None = None) -> str:
        """What is read before the answer; braces in a question are letters like any other."""
        question = question.strip()
        if not question:
            raise ValueError("question: empty; ask something")
        return self._template(template).rstrip(" ").replace(FIELD, question)

    def completion(self, answer: str, template: str | None = None) -> str:
        """What comes after the prompt if this is the answer."""
        template = self._template(template)
        return template[len(template.rstrip(" ")) :] + answer + self.stop[0]

    def answer_in(self, written: str) -> tuple[str, bool]:
        """The answer in what was written after a prompt, without spaces around it, and whether a
        stop has ended it; spaces in front do not count as one."""
        text = written.lstrip(" ")
        stops = [text.index(stop) for stop in self.stop if stop in text]
        return text[: min(stops, default=len(text))].strip(), bool(stops)

    def _template(self, name: str | None) -> str:
        if name is None:
            return next(iter(self.templates.values()))
        if name not in self.templates:
            raise ValueError(f"template: {name!r} is not one of {', '.join(self.templates)}")
        return self.templates[name]

    def save(self, folder: str | os.PathLike) -> None:
        """Write `task.json`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        said = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        write_whole(folder / TASK, (said + "\n").encode())

    @staticmethod
    def load(folder: str | os.PathLike) -> Task:
        """Read `task.json`."""
        path = Path(folder) / TASK
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{folder}: no such model folder")
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: missing: this model was not trained to be asked; "
                "`atlas-lm generate` continues text instead"
            )
        try:
            said = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not a JSON file ({error})") from error
        try:
            return Task(**_known(said))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Answer:
    """What a memory answers."""

    text: str
    probability: float
    """Among the answers of a closed set; of a free answer, that of all its tokens together."""
    told: bool
    """False: the text did not say."""


def ask(
    model: LanguageModel,
    tokenizer: Tokenizer,
    task: Task,
    question: str,
    state: ModelState | None,
    template: str | None = None,
) -> Answer:
    """The answer of this memory, which stays as it was; None: of one that has read nothing."""
    if task.answers is None:
        text, probability = _free(model, tokenizer, task, task.prompt(question, template), state)
    else:
        weighed = weigh(model, tokenizer, task, question, state, template)
        text, probability = max(weighed.items(), key=lambda pair: pair[1])
    return Answer(text, probability, told=text != task.not_told)


def ask_both(
    model: LanguageModel,
    tokenizer: Tokenizer,
    task: Task,
    question: str,
    state: ModelState,
    template: str | None = None,
) -> tuple[Answer, Answer]:
    """The answer of this memory, and that of one that has read nothing: what would be guessed."""
    told = ask(model, tokenizer, task, question, state, template)
    return told, ask(model, tokenizer, task, question, None, template)


def weigh(
    model: LanguageModel,
    tokenizer: Tokenizer,
    task: Task,
    question: str,
    state: ModelState | None,
    template: str | None = None,
) -> dict[str, float]:
    """The probability of each answer of a closed set, in its order; together they are 1."""
    if task.answers is None:
        raise ValueError("weigh: any text may be an answer of this task; ask for one instead")
    check_vocab(model, tokenizer)
    prompt = task.prompt(question, template)
    logits, state = read(model, tokenizer.encode(prompt), state)
    completions = [
        continuation(tokenizer, prompt, task.completion(answer, template))
        for answer in task.answers
    ]
    scores = [
        _log_probabilities(model, completions[i : i + ROWS], logits, state)
        for i in range(0, len(completions), ROWS)
    ]
    return dict(zip(task.answers, torch.cat(scores).softmax(0).tolist(), strict=True))


def continuation(tokenizer: Tokenizer, prompt: str, text: str) -> list[int]:
    """Ids of the text as it stands after the prompt, of which the ids stay as they are.

    By itself a text may have other ids: some tokenizers put a space before whatever comes first.
    """
    return continued(tokenizer, prompt, text)[1]


def continued(tokenizer: Tokenizer, prompt: str, text: str) -> tuple[list[int], list[int]]:
    """Ids of the prompt, and of the text after it."""
    before, both = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    joined = both[: len(before)] == before
    ids = both[len(before) :] if joined else tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{text!r}: no token of this tokenizer is left of it")
    return before, ids


@torch.no_grad()
def _log_probabilities(
    model: LanguageModel, rows: Sequence[list[int]], logits: Tensor, state: ModelState
) -> Tensor:
    """Of each row of ids `[n]`, in float64, after the state and the logits that came with it."""
    device = logits.device
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    ids, counts = ids.to(device), (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)
    found = [logits.double().log_softmax(-1)[ids[:, :1]]]
    if ids.shape[1] > 1:
        # no mask: what fills a row comes after its last token, and so changes nothing before
        x, _ = model.encode(ids[:, :-1], state.expand(len(rows)))
        after = model.logits(x).double().log_softmax(-1)
        found.append(after.gather(-1, ids[:, 1:, None]).squeeze(-1))
    return torch.where(counts, torch.cat(found, 1), 0).sum(1)


def _free(
    model: LanguageModel, tokenizer: Tokenizer, task: Task, prompt: str, state: ModelState | None
) -> tuple[str, float]:
    """The likeliest token each time, until a stop."""
    check_vocab(model, tokenizer)
    drawn = generate(
        model,
        tokenizer.encode(prompt),
        state,
        max_tokens=task.max_tokens,
        sampling=LIKELIEST,
        stop=ends(tokenizer),
    )
    decoder, text = StreamingDecoder(tokenizer), ""
    for token in drawn:
        text += decoder.push(token)
        if task.answer_in(text)[1]:
            break
    else:
        text += decoder.finish()
    return task.answer_in(text)[0], math.exp(drawn.logprob)


# Checks


def _known(said: Any) -> dict[str, Any]:
    """The fields of a task, after a look at their names."""
    if not isinstance(said, dict):
        raise ValueError(f"a {type(said).__name__}; expected an object with the fields of a task")
    known = [f.name for f in fields(Task)]
    unknown = [name for name in said if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: unknown; known are {', '.join(known)}")
    needed = [f.name for f in fields(Task) if f.default is MISSING]
    missing = [name for name in needed if name not in said]
    if missing:
        raise ValueError(f"{', '.join(missing)}: missing; a task has {', '.join(needed)}")
    return said


def _check_templates(templates: Any) -> None:
    if not isinstance(templates, dict) or not templates:
        raise ValueError(f"templates: {templates!r}; expected prompts by name, one or more")
    for name, template in templates.items():
        if not isinstance(template, str) or template.count(FIELD) != 1:
            raise ValueError(
                f"templates: {name!r} is {template!r}; expected a text with {FIELD} in it once"
            )


def _are_texts(values: Any) -> bool:
    return isinstance(values, tuple) and bool(values) and all(isinstance(v, str) for v in values)


def _plain(*texts: str) -> bool:
    """All different, none empty, none with white space around it."""
    return len(set(texts)) == len(texts) and all(t and t == t.strip() for t in texts)

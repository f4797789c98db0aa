"""Many questions to one memory at once, and a transformer that has read as far as it can see."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from atlas_lm.ask import Task, ask
from atlas_lm.generate import check_vocab, ends
from atlas_lm.models import LanguageModel, ModelConfig, ModelState
from atlas_lm.text import TextFile, Tokenizer, token_segments

ROWS = 64
"""Questions asked at once, at most: each takes a copy of the memory."""
SEGMENT = 1024


@torch.no_grad()
def answers(
    model: LanguageModel,
    tokenizer: Tokenizer,
    task: Task,
    questions: Sequence[str],
    state: ModelState | None,
) -> list[str]:
    """What `atlas_lm.ask.ask` answers to each, the questions as rows of a batch; the state, None
    for one that has read nothing, stays as it was."""
    check_vocab(model, tokenizer)
    if task.answers is not None:
        return [ask(model, tokenizer, task, each, state).text for each in questions]
    state = model.begin(1) if state is None else state
    found = []
    for first in range(0, len(questions), ROWS):
        prompts = [tokenizer.encode(task.prompt(q)) for q in questions[first : first + ROWS]]
        drawn = _likeliest(model, tokenizer, task, prompts, state)
        found += [task.answer_in(tokenizer.decode(ids))[0] for ids in drawn]
    return found


def _likeliest(
    model: LanguageModel,
    tokenizer: Tokenizer,
    task: Task,
    prompts: list[list[int]],
    state: ModelState,
) -> list[list[int]]:
    """After each prompt the likeliest token each time, until an end or a stop."""
    ids, mask = _on_the_right(prompts, state.position.device)
    x, state = model.encode(ids, state.expand(len(prompts)), mask)
    drawn: list[list[int]] = [[] for _ in prompts]
    writing = set(range(len(prompts)))
    for left in range(task.max_tokens, 0, -1):
        tokens = model.logits(x[:, -1]).double().argmax(-1)
        for row in sorted(writing):
            token = int(tokens[row])
            if token in ends(tokenizer):
                writing.discard(row)
                continue
            drawn[row].append(token)
            if task.answer_in(tokenizer.decode(drawn[row]))[1]:
                writing.discard(row)
        if not writing or left == 1:
            break
        x, state = model.encode(tokens[:, None], state)
    return drawn


def _on_the_right(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[b t]` with the last of every row in the last column, and where there are any."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    first = torch.tensor([longest - len(row) for row in rows])
    mask = torch.arange(longest) >= first[:, None]
    return ids.to(device), mask.to(device)


# A window


def reach(config: ModelConfig) -> int | None:
    """How many tokens before a question can have any part in its answer; None: all of them."""
    windowed = config.block == "plain" and all(rule == "swa" for rule in config.rules)
    return config.depth * (config.window - 1) if windowed else None


@torch.no_grad()
def read_end(model: LanguageModel, tokenizer: Tokenizer, file: TextFile) -> ModelState:
    """A state that answers as one does that has read the whole text, from the tokens that count."""
    check_vocab(model, tokenizer)
    last: deque[int] = deque(maxlen=reach(model.config))
    for segment in token_segments(file, tokenizer, SEGMENT):
        last.extend(segment.tokens)
    state = model.begin(1)
    tokens = torch.tensor(list(last), dtype=torch.int64, device=state.position.device)
    for part in tokens.split(SEGMENT):
        _, state = model.encode(part[None], state)
    return state

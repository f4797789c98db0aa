"""Reading a prompt of any length, and writing on from it token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from atlas_lm.decode import GraphedStep, why_not_graphed
from atlas_lm.models.lm import LanguageModel, ModelState
from atlas_lm.ops.validation import BadNumbers
from atlas_lm.text import CONTEXT, StreamingDecoder, Tokenizer

READ = 1024
"""Tokens that are read at once, at most."""
WORTH_A_GRAPH = 16
"""Tokens still to be drawn from which on a CUDA graph pays: recording it costs a few of them."""


@torch.no_grad()
def read(
    model: LanguageModel,
    tokens: Sequence[int] | Tensor,
    state: ModelState | None = None,
    segment: int = READ,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, ModelState]:
    """The logits `[vocab]` after the last token, and the state of one row that has read them all.

    It takes no more memory for more tokens, unless the state itself grows. A segment ends where
    the row's position is a multiple of `segment`: on a CPU the last bits depend on the cuts, and
    so a reading that went on after one is the same as one without a pause. `progress` is told,
    after each, how many tokens were read.
    """
    ids = _whole_numbers(tokens)
    if segment < 1:
        raise ValueError(f"read: segment {segment}; expected 1 token or more")
    state = model.begin(1) if state is None else _one_row(state)
    x, device, done = None, state.position.device, 0
    position = int(state.position)
    while done < len(ids):
        part = ids[done : done + segment - (position + done) % segment]
        x, state = model.encode(part[None].to(device), state)
        done += len(part)
        if progress is not None:
            progress(done)
    if x is None:
        raise ValueError(
            "read: no tokens, and so none after which there are logits (a state keeps memories, "
            "not logits); give one token or more"
        )
    logits = model.logits(x[0, -1])
    _check_finite(logits, state)
    return logits, state


# Drawing


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: temperature first, then of the `top_k` likeliest, then of `top_p`."""

    temperature: float = 1.0
    """0 always takes the likeliest, 1 draws as the model says."""
    top_k: int | None = None
    """Only so many of the likeliest, of equals those with lower ids; None: all."""
    top_p: float = 1.0
    """Only the fewest of the likeliest that have this probability together."""
    seed: int = 0
    """The same seed draws the same tokens."""

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature: {self.temperature}; expected 0 (the likeliest) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: {self.top_k}; expected 1 or more, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p}; expected more than 0 and at most 1 (all)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: {self.seed}; expected a whole number from 0 to 2**63 - 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is drawn from: `[vocab] -> [vocab]`, in float64."""
        logits = logits.double()
        if self.temperature == 0:
            return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
        # less their maximum first: no temperature is so low that the quotient overflows upwards
        found = ((logits - logits.max()) / self.temperature).softmax(0)
        if self.top_k is None and self.top_p == 1:
            return found
        found, order = found.sort(descending=True, stable=True)
        if self.top_k is not None:
            found[self.top_k :] = 0
        if self.top_p < 1:
            before = pad(found.cumsum(0)[:-1], (1, 0))
            found[before >= self.top_p * found.sum()] = 0
        return torch.zeros_like(found).scatter_(0, order, found / found.sum())


AS_THE_MODEL_SAYS = Sampling()
LIKELIEST = Sampling(temperature=0.0)


class Generation(Iterator[int]):
    """Token ids as they are drawn; at any moment `state` is what the model has read and written."""

    logprob: float
    """Log-probability of all that was drawn, a stop too, as the model says: without temperature."""

    def __init__(
        self,
        model: LanguageModel,
        prompt: Sequence[int],
        state: ModelState | None,
        max_tokens: int,
        sampling: Sampling,
        stop: Collection[int],
        graph: bool | None = None,
    ):
        if max_tokens < 0:
            raise ValueError(f"generate: max_tokens {max_tokens}; expected 0 or more")
        if graph and (reason := why_not_graphed(model)):
            raise ValueError(f"generate: graph=True, but {reason}; leave graph out")
        self.logprob = 0.0
        self._graph = graph
        self._step: GraphedStep | None = None
        self._model, self._sampling, self._stop = model, sampling, frozenset(stop)
        self._left = max_tokens
        # drawn on the CPU in float64, so that a seed means the same on every device
        self._random = torch.Generator().manual_seed(sampling.seed)
        self._logits, self._state = read(model, prompt, state)
        self._unread: int | None = None

    def __next__(self) -> int:
        if self._left == 0:
            raise StopIteration
        self._catch_up()
        logits = self._logits.double().cpu()
        probabilities = self._sampling.probabilities(logits)
        token = int(torch.multinomial(probabilities, 1, generator=self._random))
        self.logprob += float(logits.log_softmax(0)[token])
        if token in self._stop:
            self._left = 0
            raise StopIteration
        self._left, self._unread = self._left - 1, token
        return token

    @property
    def state(self) -> ModelState:
        """After the prompt and every token that was given out."""
        self._catch_up()
        return self._state if self._step is None else self._step.state

    def _catch_up(self) -> None:
        """Read the last token only when something depends on it."""
        if self._unread is None:
            return
        if self._step is None and self._wants_graph():
            self._step = GraphedStep(self._model, self._state)
        if self._step is None:
            self._logits, self._state = read(self._model, [self._unread], self._state)
        else:
            self._logits = self._step.step(torch.tensor([self._unread]))[0].cpu()
            _check_finite(self._logits, self._step)
        self._unread = None

    def _wants_graph(self) -> bool:
        if self._graph is not None:
            return self._graph
        return self._left >= WORTH_A_GRAPH and why_not_graphed(self._model) is None


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    state: ModelState | None = None,
    *,
    max_tokens: int,
    sampling: Sampling = AS_THE_MODEL_SAYS,
    stop: Collection[int] = (),
    graph: bool | None = None,
) -> Generation:
    """Read the prompt now, then draw ids one at a time, until one of `stop`, which is kept back.

        for token in (drawn := generate(model, prompt, max_tokens=100)): ...
        more = generate(model, next_prompt, drawn.state, max_tokens=100)

    A stop is neither given out nor read. `graph`: whether a token is one replay of a CUDA graph
    (`decode.GraphedStep`); None: where that is possible and enough of them are to be drawn.
    """
    return Generation(model, prompt, state, max_tokens, sampling, stop, graph)


# Text


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: str,
    state: ModelState | None = None,
    *,
    max_tokens: int,
    sampling: Sampling = AS_THE_MODEL_SAYS,
) -> Iterator[str]:
    """What comes after the text, in pieces of whole characters, until the document ends.

    Without text and without a state, a new document begins: after the token that ends one.
    """
    check_vocab(model, tokenizer)
    prompt = tokenizer.encode(text)
    if not prompt and state is None and tokenizer.end is not None:
        prompt = [tokenizer.end]
    if not prompt:
        raise ValueError(
            f"text: {text!r} has no tokens to go on from; give a text (without one, only a new "
            "document can begin, with no state and a tokenizer that has a token to end one)"
        )
    drawn = generate(
        model, prompt, state, max_tokens=max_tokens, sampling=sampling, stop=ends(tokenizer)
    )
    return _pieces(drawn, tokenizer, prompt)


def _pieces(drawn: Generation, tokenizer: Tokenizer, prompt: list[int]) -> Iterator[str]:
    decoder = StreamingDecoder(tokenizer)
    for token in prompt[-CONTEXT:]:  # whether a space comes first depends on what was before
        decoder.push(token)
    for token in drawn:
        if piece := decoder.push(token):
            yield piece
    if rest := decoder.finish():
        yield rest


def ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids after which nothing of a text comes."""
    return frozenset() if tokenizer.end is None else frozenset({tokenizer.end})


def check_vocab(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the model's, as far as numbers tell."""
    if model.config.vocab != tokenizer.vocab:
        raise ValueError(
            f"tokenizer: it has {tokenizer.vocab} ids, the model {model.config.vocab}; "
            "use the tokenizer that the model was trained with"
        )


# Checks


def _whole_numbers(tokens: Sequence[int] | Tensor) -> Tensor:
    ids = torch.as_tensor(tokens)
    if ids.shape == (0,):
        return ids.long()
    if ids.ndim != 1:
        raise ValueError(f"read: tokens of shape {tuple(ids.shape)}; expected one row, [time]")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"read: tokens are {ids.dtype}; expected whole numbers")
    return ids.long()


def _check_finite(logits: Tensor, read: ModelState | GraphedStep) -> None:
    if not logits.isfinite().all():
        state = read if isinstance(read, ModelState) else read.state
        raise BadNumbers(
            f"read: the logits after token {int(state.position)} are not all finite; the model's "
            "weights or the memory are damaged"
        )


def _one_row(state: ModelState) -> ModelState:
    if not isinstance(state, ModelState):
        raise TypeError(
            f"state: {type(state).__name__}; expected the ModelState that this model returned"
        )
    if state.batch != 1:
        raise ValueError(f"state: {state.batch} rows; expected one: state[i] takes row i")
    return state

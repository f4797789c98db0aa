"""lm-evaluation-harness: its tasks and metrics, our models, from local files.

    evaluate("DIR", ["arc_easy", "lambada_openai"], "DATA", limit=100)["results"]

A model of ours is scored by an adapter that reads every context once and goes on from the state
it left: choices are rows of a batch, and what many contexts begin with is read once for all.
Any other folder is a model of Hugging Face and goes to lm-eval's own `hf`. Tokens are split between
context and continuation as that does it, so that both give the same score for the same model.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from atlas_lm.eval.language import nats_of, token_losses
from atlas_lm.eval.local_tasks import LOCAL_TASKS, about, load_tasks
from atlas_lm.eval.readers import SEGMENT, Reader, is_ours, open_reader, segment_of
from atlas_lm.generate import LIKELIEST, Sampling

Item = TypeVar("Item")
Pair = tuple[list[int], list[int]]
"""Ids of a context and of what is to come after it."""
NAME = "atlas-lm"
"""What the adapter is called in lm-eval's registry."""
ROWS = 16
"""Contexts, or continuations, that are read side by side."""
SHARED = 64
"""Tokens that contexts must begin with alike for these to be read once."""
MOST_NEW = 256
"""Tokens that are generated where a task says nothing, as in lm-eval."""
NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most tokens to generate; the first that is there counts."""
SETTINGS = (
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_EVALUATE_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "DISABLE_MULTIPROC",
)
"""Nothing is downloaded; and lm-eval resamples in this process, not in one for each processor."""


# Contexts and continuations


def encode_pair(reader: Reader, context: str, continuation: str) -> Pair:
    """Ids of both, split where lm-eval splits them.

    Spaces at the end of the context belong to the continuation, and the continuation's ids are
    those that the context's are followed by in the whole. After nothing, the prefix is read.
    """
    if context == "":
        ids = reader.tokenizer.encode(continuation)
        if ids and ids[0] == reader.prefix:
            return _whole(ids[:1], ids[1:], continuation)
        return _whole([_prefix(reader)], ids, continuation)
    kept = context.rstrip()
    before, both = reader.prompt(kept), reader.prompt(context + continuation)
    ids = both[len(before) :]
    return _whole(before or [_prefix(reader)], ids, continuation)


def score_pairs(
    reader: Reader, pairs: Sequence[Pair], rows: int = ROWS, bar: Any = None
) -> list[tuple[float, bool]]:
    """Log-probability of each continuation, and whether it is the likeliest token by token."""
    wanted: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(pairs):
        wanted.setdefault(_fitting(reader, context, continuation), []).append(number)
    found: dict[int, tuple[float, bool]] = {}
    for contexts, logits, state in _read_contexts(reader, list(wanted), rows):
        numbers = [(row, n) for row, context in enumerate(contexts) for n in wanted[context]]
        for part in _batches(numbers, rows):
            at = torch.tensor([row for row, _ in part], device=logits.device)
            ids = [torch.tensor(pairs[n][1]) for _, n in part]
            scores = _score_rows(reader, logits[at], reader.select(state, at), ids)
            found |= dict(zip([n for _, n in part], scores, strict=True))
            if bar is not None:
                bar.update(len(part))
    return [found[number] for number in range(len(pairs))]


def _score_rows(
    reader: Reader, after: Tensor, state: Any, rows: list[Tensor]
) -> list[tuple[float, bool]]:
    """Of each row of ids, after the state and the logits `[n vocab]` that came with it."""
    ids = pad_sequence(rows, batch_first=True)
    there = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    logits = after[:, None]
    if ids.shape[1] > 1:
        # no mask: what fills a row comes after its last token, and so changes nothing before
        more, _ = reader.read(ids[:, :-1], state, every=True)
        logits = torch.cat([logits, more], 1)
    nats = nats_of(logits.flatten(0, 1), ids.flatten()).view(ids.shape)
    likeliest = (logits.argmax(-1).cpu() == ids) | ~there
    totals = -torch.where(there, nats, 0).sum(1)
    return list(zip(totals.tolist(), likeliest.all(1).tolist(), strict=True))


def _read_contexts(
    reader: Reader, contexts: list[tuple[int, ...]], rows: int
) -> Iterator[tuple[list[tuple[int, ...]], Tensor, Any]]:
    """Some contexts at a time, the logits after each, and their states as one batch."""
    for group in _alike(contexts):
        shared = _beginning(group)
        state = reader.begin(1)
        for part in torch.tensor([shared]).split(SEGMENT, 1) if shared else ():
            _, state = reader.read(part, state)
        for batch in _batches(group, rows):
            rest = [context[len(shared) :] for context in batch]
            yield batch, *_read_padded(reader, rest, reader.expand(state, len(batch)))


def _alike(contexts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Those that begin alike together, then all others; by length, so that little is padded."""
    heads: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for context in sorted(contexts, key=len, reverse=True):
        heads.setdefault(context[:SHARED], []).append(context)
    yield from (group for group in heads.values() if len(group) > 1)
    others = [group[0] for group in heads.values() if len(group) == 1]
    if others:
        yield others


def _beginning(contexts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """What all of them begin with, if it is much, and something is left of each."""
    first, last = min(contexts), max(contexts)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    shared = tuple(token for token, _ in alike)[:-1]
    return shared if len(shared) >= SHARED - 1 else ()


def _read_padded(reader: Reader, rows: Sequence[Sequence[int]], state: Any) -> tuple[Tensor, Any]:
    """Rows of different length, padded on the left, so that all of them end together."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(longest) >= longest - lengths[:, None]
    logits = None
    size = segment_of(reader.device, len(rows), SEGMENT)
    for part, there in zip(ids.split(size, 1), mask.split(size, 1), strict=True):
        logits, state = reader.read(part, state, there)
    assert logits is not None  # every row has a token
    return logits, state


def _fitting(reader: Reader, context: list[int], continuation: list[int]) -> tuple[int, ...]:
    """The end of the context that the model can read before the continuation, as in lm-eval."""
    if reader.context is None:
        return tuple(context)
    if len(continuation) > reader.context:
        raise ValueError(
            f"a continuation of {len(continuation)} tokens; the model reads {reader.context}"
        )
    return tuple(context[-(reader.context + 1 - len(continuation)) :])


# Whole texts


def score_rolling(reader: Reader, text: str) -> float:
    """Log-probability of a whole text after the prefix.

    A model with a limited context reads it in windows: each token is predicted once, and the last
    window reaches back as far as it can.
    """
    ids = reader.prompt(text)
    if reader.context is not None:
        windows = list(rolling_windows(ids, _prefix(reader), reader.context))
        return sum(score for score, _ in score_pairs(reader, windows))
    pieces = torch.tensor([_prefix(reader), *ids]).split(SEGMENT)
    return -sum(float(nats.sum()) for _, nats in token_losses(reader, pieces, start=()))


def rolling_windows(ids: list[int], prefix: int, size: int) -> Iterator[Pair]:
    """What is read and what is predicted after it, window by window."""
    whole = [prefix, *ids]
    for begin in range(0, len(ids), size):
        end = min(begin + size, len(ids))
        # `whole` is one ahead: whole[end] is the last token that is predicted
        yield whole[max(end - size, 0) : begin + 1], whole[begin + 1 : end + 1]


# Generating


@dataclass(frozen=True)
class Wish:
    """What a task wants generated."""

    until: tuple[str, ...]
    most: int
    sampling: Sampling

    @classmethod
    def of(cls, options: dict[str, Any]) -> Wish:
        """Of the options that lm-eval gives; one that is not known is refused, not ignored."""
        left = dict(options)
        until = left.pop("until", None) or []
        most = [left.pop(name) for name in NEW_TOKENS if left.get(name) is not None]
        left = {name: value for name, value in left.items() if name not in NEW_TOKENS}
        temperature, drawn = left.pop("temperature", None), left.pop("do_sample", None)
        top = {name: left.pop(name) for name in ("top_k", "top_p") if name in left}
        if left:
            raise ValueError(
                f"{', '.join(left)}: not known to the adapter {NAME}; expected until, "
                "max_gen_toks, do_sample, temperature, top_k, top_p"
            )
        greedy = drawn is False or not (drawn or temperature)
        heat = 1.0 if temperature is None else temperature
        sampling = LIKELIEST if greedy else Sampling(temperature=heat, **top)
        texts = (until,) if isinstance(until, str) else tuple(until)
        return cls(tuple(filter(None, texts)), int(most[0]) if most else MOST_NEW, sampling)


def continue_texts(
    reader: Reader, prompts: Sequence[str], wish: Wish, rows: int = ROWS, bar: Any = None
) -> list[str]:
    """What comes after each prompt, up to a stop, the end of the document or the most tokens."""
    if reader.context is not None and wish.most >= reader.context:
        raise ValueError(
            f"max_gen_toks: {wish.most}; the model reads {reader.context} tokens in all"
        )
    room = None if reader.context is None else reader.context - wish.most
    encoded = [reader.prompt(prompt) or [_prefix(reader)] for prompt in prompts]
    fitting = [tuple(ids if room is None else ids[-room:]) for ids in encoded]
    texts: dict[tuple[int, ...], str] = {}
    for contexts, logits, state in _read_contexts(reader, list(dict.fromkeys(fitting)), rows):
        texts |= dict(zip(contexts, _continued(reader, logits, state, wish), strict=True))
        if bar is not None:
            bar.update(len(contexts))
    return [texts[ids] for ids in fitting]


def _continued(reader: Reader, logits: Tensor, state: Any, wish: Wish) -> list[str]:
    drawn: list[list[int]] = [[] for _ in logits]
    texts, active = [""] * len(drawn), list(range(len(drawn)))
    random = torch.Generator().manual_seed(wish.sampling.seed)
    for _ in range(wish.most):
        tokens = _draw(logits, wish.sampling, random)
        going = []
        for place, (row, token) in enumerate(zip(active, tokens, strict=True)):
            if token != reader.tokenizer.end:
                drawn[row].append(token)
                texts[row] = reader.tokenizer.decode(drawn[row])
                if not any(stop in texts[row] for stop in wish.until):
                    going.append(place)
        if not going:
            break
        if len(going) < len(active):
            state = reader.select(state, going)
        active = [active[place] for place in going]
        logits, state = reader.read(torch.tensor([[tokens[place]] for place in going]), state)
    return [_cut(text, wish.until) for text in texts]


def _draw(logits: Tensor, sampling: Sampling, random: torch.Generator) -> list[int]:
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    rows = [sampling.probabilities(row) for row in logits.double().cpu()]
    return torch.multinomial(torch.stack(rows), 1, generator=random)[:, 0].tolist()


def _cut(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


# The harness


class Adapter:
    """What lm-eval asks of a model, answered by a `Reader`, or by that of a folder, `pretrained`.

    A request has what it asks in `args`: a context and a continuation, a text, or a context and
    options.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike | None = None,
        reader: Reader | None = None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        if (reader is None) == (pretrained is None):
            raise ValueError(f"{NAME}: expected either a folder (pretrained) or a reader")
        self.reader = reader or open_reader(pretrained or "", device, dtype)
        self.rows = ROWS if batch_size is None or batch_size == "auto" else int(batch_size)
        self._device = self.reader.device

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = [encode_pair(self.reader, *request.args) for request in requests]
        with _bar(len(pairs), disable_tqdm) as bar:
            return score_pairs(self.reader, pairs, self.rows, bar)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [request.args[0] for request in requests]
        return [score_rolling(self.reader, text) for text in tqdm(texts, disable=disable_tqdm)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        wishes = [Wish.of(request.args[1]) for request in requests]
        texts: dict[int, str] = {}
        with _bar(len(wishes), disable_tqdm) as bar:
            for wish in dict.fromkeys(wishes):
                numbers = [i for i, w in enumerate(wishes) if w == wish]
                prompts = [requests[i].args[0] for i in numbers]
                found = continue_texts(self.reader, prompts, wish, self.rows, bar)
                texts |= dict(zip(numbers, found, strict=True))
        return [texts[i] for i in range(len(wishes))]


@cache
def adapter() -> Any:
    """The adapter as the model `atlas-lm` in lm-eval's registry; imports all of lm-eval."""
    _require()
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

    return register_model(NAME)(type("AtlasLM", (Adapter, LM), {"__doc__": Adapter.__doc__}))


def evaluate(
    folder: str | os.PathLike,
    tasks: Sequence[str],
    data: str | os.PathLike,
    *,
    limit: int | None = None,
    shots: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    rows: int = ROWS,
    new_tokens: int | None = None,
    resamples: int = 1000,
) -> dict[str, Any]:
    """Score the model in a folder, ours or one of Hugging Face, on tasks of lm-eval.

    data       the folder of the local files (`LOCAL_TASKS` names them)
    limit      questions of each task, at most: the first ones
    shots      examples before each question; None: as the task says
    rows       of a batch
    new_tokens tokens that are generated, at most; None: as the task says
    resamples  for errors of metrics that are no means; 0: no errors at all
    """
    _require()
    _check_tasks(tasks, shots)
    # before anything is imported that would look for a network
    with quiet_offline(), redirect_stdout(sys.stderr):
        from lm_eval import __version__, simple_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

        model = _model(folder, device, dtype, rows)
        found: Any = simple_evaluate(
            model=model,
            tasks=load_tasks(tasks, data),
            # else it looks through thousands of files for tasks that it was given
            task_manager=TaskManager(include_defaults=False),
            limit=limit,
            num_fewshot=shots,
            gen_kwargs=None if new_tokens is None else {"max_gen_toks": new_tokens},
            bootstrap_iters=resamples,
            log_samples=False,
        )
    kept = ("results", "versions", "n-shot", "n-samples", "higher_is_better")
    return {name: _plain(found[name]) for name in kept} | {
        "harness": {"lm_eval": __version__, "model": NAME if is_ours(folder) else "hf"},
        "data": {task: about(task, data) for task in tasks},
        "limit": limit,
    }


def _model(
    folder: str | os.PathLike, device: str | None, dtype: torch.dtype | None, rows: int
) -> Any:
    if is_ours(folder):
        return adapter()(folder, device=device, dtype=dtype, batch_size=rows)
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return HFLM(str(folder), device=place, dtype=dtype or "auto", batch_size=rows)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{folder}: lm-eval cannot read it ({reason}); expected a causal language model of "
            "transformers with its tokenizer"
        ) from error


@contextmanager
def quiet_offline() -> Iterator[None]:
    """Nothing looks for a network, and lm-eval says only what is wrong."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ |= dict.fromkeys(SETTINGS, "1")
    import datasets  # pyright: ignore[reportMissingImports]
    import huggingface_hub.constants as hub

    said = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = said
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


# Parts


def _require() -> None:
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "lm-evaluation-harness is not installed; pip install 'atlas-lm[eval]'"
        ) from error


def _check_tasks(tasks: Sequence[str], shots: int | None) -> None:
    unknown = [task for task in tasks if task not in LOCAL_TASKS]
    if unknown or not tasks:
        raise ValueError(
            f"tasks: {', '.join(unknown) or 'none'}: no local file is known for it, and nothing is "
            f"downloaded; expected some of {', '.join(LOCAL_TASKS)}"
        )
    if shots and "squad_completion" in tasks:
        raise ValueError(
            f"shots: {shots}; squad_completion takes no examples in lm-eval; run it without shots"
        )


def _whole(context: list[int], continuation: list[int], text: str) -> Pair:
    if not continuation:
        raise ValueError(f"{text!r}: no token of this tokenizer is left of it to be scored")
    return context, continuation


def _prefix(reader: Reader) -> int:
    if reader.prefix is None:
        raise ValueError(
            "a text with nothing before it: the tokenizer has no token that begins or ends a "
            "document, after which it could be scored; use one that has"
        )
    return reader.prefix


def _batches(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    for at in range(0, len(items), size):
        yield list(items[at : at + size])


def _bar(total: int, disable: bool) -> tqdm:
    return tqdm(total=total, disable=disable, desc=NAME)


def _plain(value: Any) -> Any:
    """Numbers that JSON knows; None for infinite ones."""
    if isinstance(value, dict):
        return {str(key): _plain(inside) for key, inside in value.items()}
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value

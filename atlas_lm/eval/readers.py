"""What reads tokens and says what comes next, our models and any of transformers; and texts for it.

    reader = open_reader("DIR")
    state = reader.begin(1)
    logits, state = reader.read(tokens, state)

What is scored is scored through a `Reader`, so that a peer is asked exactly what our models are. A
state goes in and comes out, and no call changes one: any number of texts may go on from it. That of
our models keeps its size, a cache of transformers grows with the tokens.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from atlas_lm.data.shards import MANIFEST, Shards
from atlas_lm.generate import check_vocab
from atlas_lm.models.folder import CONFIG, load_model
from atlas_lm.models.lm import LanguageModel, ModelState
from atlas_lm.text import (
    CONTEXT,
    TOKENIZER_FILE,
    ByteTokenizer,
    Tokenizer,
    check_text,
    load_tokenizer,
    token_segments,
)

FEWEST, SEGMENT, ON_A_GPU = 64, 1024, 4096
"""Tokens of a row that are read at once: the fewest and the most on a CPU; on a GPU, which
would wait for the next."""
AT_ONCE = 4096
"""Tokens of all rows together on a CPU: of more than its caches hold, memory comes fresh from the
system for every operation, and reading takes twice as long."""
CONTEXT_FIELDS = ("n_positions", "max_position_embeddings", "n_ctx")
"""What configs of transformers call the most tokens a model can read."""
UNKNOWN_LENGTH = 10**9
"""A tokenizer whose file says nothing claims to take more tokens than this."""
COPIED_ON_WRITE = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Layers of a cache that make new tensors for new tokens; others write into those they have."""


class Reader(Protocol):
    """A model with its tokenizer, read segment by segment."""

    vocab: int
    """Logits there are for each token."""
    prefix: int | None
    """Read where nothing comes before a text: the token that begins or ends documents."""
    context: int | None
    """Tokens it can read, at most; None: any number."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def device(self) -> torch.device: ...

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that begins a document, with what the tokenizer puts before it."""
        ...

    def begin(self, batch: int = 1) -> Any:
        """The state before the first token."""
        ...

    def read(
        self, tokens: Tensor, state: Any, mask: Tensor | None = None, *, every: bool = False
    ) -> tuple[Tensor, Any]:
        """Logits after each row's last token `[b vocab]`, or after every one `[b t vocab]`.

        tokens `[b t]` are moved to where the model is. mask False: there is no such token, and
        what stands there in `every` means nothing; nor does the last of a row without any.
        """
        ...

    def select(self, state: Any, rows: Sequence[int] | Tensor) -> Any:
        """These rows of a state, in this order, as often as they are named."""
        ...

    def expand(self, state: Any, n: int) -> Any:
        """Every row n times in succession."""
        ...


def segment_of(device: torch.device, rows: int, on_a_gpu: int = ON_A_GPU) -> int:
    """Tokens of each of so many rows to read at once."""
    if device.type != "cpu":
        return on_a_gpu
    return min(max(AT_ONCE // rows, FEWEST), SEGMENT)


class LanguageModelReader:
    """One of our models: a state of one size, any number of tokens."""

    context: int | None = None

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer):
        check_vocab(model, tokenizer)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.vocab = model.config.vocab
        self.prefix: int | None = tokenizer.end

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def begin(self, batch: int = 1) -> ModelState:
        return self.model.begin(batch)

    @torch.no_grad()
    def read(
        self, tokens: Tensor, state: ModelState, mask: Tensor | None = None, *, every: bool = False
    ) -> tuple[Tensor, ModelState]:
        mask = None if mask is None or bool(mask.all()) else mask.to(self.device)
        x, state = self.model.encode(tokens.to(self.device), state, mask)
        return self.model.logits(x if every else _last(x, mask)), state

    def select(self, state: ModelState, rows: Sequence[int] | Tensor) -> ModelState:
        return state[rows]

    def expand(self, state: ModelState, n: int) -> ModelState:
        return state.expand(n)


@dataclass(frozen=True)
class CacheState:
    """What a model of transformers has read."""

    cache: Any
    """Its `past_key_values`; None before the first token."""
    there: Tensor
    """Which of the columns read are tokens, bool `[b columns]`."""
    padded: bool
    """Whether some are not."""


class TransformersReader:
    """A causal language model of transformers and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any):
        """model, tokenizer: as `AutoModelForCausalLM` and `AutoTokenizer` give them."""
        self.model = model.eval()
        self.tokenizer = TransformersTokenizer(tokenizer)
        self.vocab = int(model.config.get_text_config().vocab_size)
        start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.prefix: int | None = end if start is None else start
        self.context = _context_of(model.config.get_text_config(), tokenizer)
        self._accepts = inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return self.model.device

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.prompt(text, self.prefix)

    def begin(self, batch: int = 1) -> CacheState:
        none = torch.ones(batch, 0, dtype=torch.bool, device=self.device)
        return CacheState(None, none, padded=False)

    @torch.no_grad()
    def read(
        self, tokens: Tensor, state: CacheState, mask: Tensor | None = None, *, every: bool = False
    ) -> tuple[Tensor, CacheState]:
        _check_rows(tokens, state)
        mask = None if mask is None or bool(mask.all()) else mask.to(self.device)
        new = torch.ones_like(tokens, dtype=torch.bool, device=self.device)
        there = torch.cat([state.there, new if mask is None else mask], 1)
        options: dict[str, Any] = {"use_cache": True}
        if state.cache is not None:
            options["past_key_values"] = _untouched(state.cache)
        if state.padded or mask is not None:
            options |= self._places(there, tokens.shape[1])
        if not every and mask is None and "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = 1
        output = self.model(input_ids=tokens.to(self.device), **options)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ValueError(
                f"{type(self.model).__name__}: gave no past_key_values to go on from; expected a "
                "causal model of transformers with a cache"
            )
        logits = output.logits if every else _last(output.logits, mask)
        return logits, CacheState(cache, there, state.padded or mask is not None)

    def select(self, state: CacheState, rows: Sequence[int] | Tensor) -> CacheState:
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        cache = None
        if state.cache is not None:
            cache = _untouched(state.cache)
            cache.batch_select_indices(index)
        return CacheState(cache, state.there[index], state.padded)

    def expand(self, state: CacheState, n: int) -> CacheState:
        rows = torch.arange(len(state.there), device=self.device).repeat_interleave(n)
        return self.select(state, rows)

    def _places(self, there: Tensor, new: int) -> dict[str, Tensor]:
        """The mask of all columns, and the number of each new token in its row."""
        places: dict[str, Tensor] = {"attention_mask": there.long()}
        if "position_ids" in self._accepts:
            counted = (there.cumsum(1) - 1).masked_fill(~there, 1)
            places["position_ids"] = counted[:, there.shape[1] - new :]
        return places


class TransformersTokenizer:
    """A tokenizer of transformers behind our interface; special tokens in a text are special."""

    def __init__(self, library: Any):
        self.library = library
        self.vocab: int = len(library)
        self.end: int | None = library.eos_token_id
        self.special: frozenset[int] = frozenset(library.all_special_ids)

    def encode(self, text: str) -> list[int]:
        return list(self.library.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        return self.library.decode(list(ids), skip_special_tokens=True)

    def prompt(self, text: str, prefix: int | None) -> list[int]:
        """As the library encodes a text by default, but never with two beginnings."""
        begun = prefix is not None and text.startswith(self.library.decode([prefix]))
        return self.encode(text) if begun else list(self.library.encode(text))

    @cached_property
    def json(self) -> bytes | None:
        """Its `tokenizer.json`, if it came from a folder with one."""
        path = Path(self.library.name_or_path) / TOKENIZER_FILE
        return path.read_bytes() if path.is_file() else None


# Opening


def open_reader(
    folder: str | os.PathLike,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Reader:
    """The model in a folder, ours or one of transformers, and its tokenizer.

    device None: a GPU if there is one. dtype None: as it was saved.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if is_ours(folder):
        reader = LanguageModelReader(load_model(folder), load_tokenizer(folder))
    else:
        reader = _transformers_reader(Path(folder))
    try:
        reader.model.to(device=place, dtype=dtype)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {place}: cannot be used here ({str(error).splitlines()[0]}); use another"
        ) from error
    return reader


def is_ours(folder: str | os.PathLike) -> bool:
    """Whether the model in this folder is one of atlas-lm; refuses a folder without a model."""
    path = Path(folder) / CONFIG
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: missing; expected the folder of a model of atlas-lm or of transformers"
        )
    try:
        said = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(said, dict) or "model_type" not in said:
        raise ValueError(f"{path}: no model_type in it; expected the config of a model")
    return said["model_type"] == "atlas_lm"


def _transformers_reader(folder: Path) -> TransformersReader:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"{folder}: a model of transformers, which is not installed; pip install 'atlas-lm[hf]'"
        ) from error
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{folder}: transformers cannot read it ({reason}); expected a causal language model "
            "with its tokenizer"
        ) from error
    return TransformersReader(model, tokenizer)


# Parts


def _last(x: Tensor, mask: Tensor | None) -> Tensor:
    """`[b t d] -> [b d]`: of each row's last token that is there."""
    if mask is None:
        return x[:, -1]
    places = torch.arange(mask.shape[1], device=x.device)
    last = torch.where(mask, places, 0).amax(1)
    return x[torch.arange(len(x), device=x.device), last]


def _context_of(config: Any, tokenizer: Any) -> int | None:
    for name in CONTEXT_FIELDS:
        if getattr(config, name, None):
            return int(getattr(config, name))
    longest = getattr(tokenizer, "model_max_length", UNKNOWN_LENGTH)
    return int(longest) if longest < UNKNOWN_LENGTH else None


def _untouched(cache: Any) -> Any:
    """A cache that may be written to while the one given stays as it was."""
    layers = getattr(cache, "layers", None)
    if type(cache).__name__ != "DynamicCache" or layers is None:
        return copy.deepcopy(cache)
    new = copy.copy(cache)
    new.layers = [
        copy.copy(layer) if type(layer).__name__ in COPIED_ON_WRITE else copy.deepcopy(layer)
        for layer in layers
    ]
    return new


def _check_rows(tokens: Tensor, state: CacheState) -> None:
    if tokens.ndim != 2 or tokens.shape[1] < 1 or tokens.shape[0] != len(state.there):
        raise ValueError(
            f"tokens: shape {tuple(tokens.shape)} beside a state of {len(state.there)} rows; "
            "expected [rows, one token or more]"
        )


# What is read


class Document:
    """The tokens of a text, piece by piece; once they were gone through, how many they were."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        pieces: Callable[[], Iterator[Tensor]],
        size: int | None,
        limit: int | None,
    ):
        self.name, self._tokenizer, self._pieces = name, tokenizer, pieces
        self._limit, self._size = limit, size
        self.tokens = self.first_bytes = self.bytes = 0

    def pieces(self) -> Iterator[Tensor]:
        count, whole = _ByteCount(self._tokenizer), True
        for piece in self._pieces():
            if self._limit is not None and self.tokens + len(piece) > self._limit:
                piece, whole = piece[: self._limit - self.tokens], False
            if len(piece) and not self.tokens:
                self.first_bytes = _bytes_of_first(self._tokenizer, int(piece[0]))
            if self._size is None or self._limit is not None:
                count.add(piece.tolist())
            self.tokens += len(piece)
            if len(piece):
                yield piece
            if not whole:
                break
        self.bytes = count.bytes if self._size is None or not whole else self._size


def documents(
    reader: Reader,
    source: str | os.PathLike | Sequence[str | os.PathLike],
    limit: int | None,
    size: int,
) -> Iterator[Document]:
    if limit is not None and limit < 2:
        raise ValueError(f"limit: {limit}; expected 2 tokens or more of each document")
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not paths:
        raise ValueError("source: no texts; expected files, folders or prepared shards")
    for path in map(Path, paths):
        if (path / MANIFEST).exists():
            yield from _of_shards(reader, path, limit, size)
        else:
            for file in _text_files(path):
                text = check_text(file)
                segments = partial(token_segments, text, reader.tokenizer, size)
                pieces = partial(_tensors, segments)
                yield Document(str(file), reader.tokenizer, pieces, text.size, limit)


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*.txt") if file.is_file())
    if not files:
        raise ValueError(f"{path}: a folder without *.txt; expected texts or prepared shards")
    return files


def _tensors(segments: Callable[[], Iterator[Any]]) -> Iterator[Tensor]:
    for segment in segments():
        yield torch.tensor(segment.tokens)


def _of_shards(reader: Reader, path: Path, limit: int | None, size: int) -> Iterator[Document]:
    shards = Shards.open(path)
    theirs, ours = shards.tokenizer(), reader.tokenizer
    as_bytes = isinstance(theirs, ByteTokenizer) and isinstance(ours, ByteTokenizer)
    file = getattr(theirs, "json", None)
    if not as_bytes and (file is None or file != getattr(ours, "json", None)):
        raise ValueError(
            f"{path}: prepared with another tokenizer than the model's; give the texts, or prepare "
            "them with the model's tokenizer.json"
        )

    def pieces(number: int) -> Iterator[Tensor]:
        ids = shards.document(number)
        length = len(ids) - (len(ids) > 0 and ids[-1] == shards.manifest.end)
        for at in range(0, length, size):
            yield torch.from_numpy(ids[at : min(at + size, length)].astype("int64"))

    for number in range(shards.documents):
        name = f"{path}, document {number}"
        yield Document(name, ours, partial(pieces, number), None, limit)


class _ByteCount:
    """Bytes of the text that tokens stand for, without the text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._context = tokenizer, []
        self.bytes = 0

    def add(self, ids: list[int]) -> None:
        if isinstance(self._tokenizer, ByteTokenizer):
            self.bytes += len(ids)
            return
        # what is unfinished at the end of one is unfinished at the beginning of the next
        both = self._context + ids
        self.bytes += self._size(both) - self._size(self._context)
        self._context = both[-CONTEXT:]

    def _size(self, ids: list[int]) -> int:
        return len(self._tokenizer.decode(ids).encode())


def _bytes_of_first(tokenizer: Tokenizer, token: int) -> int:
    """Of a token that ends within a character, that character counts as one byte."""
    if isinstance(tokenizer, ByteTokenizer):
        return 1
    text = tokenizer.decode([token])
    return len(text.rstrip("\ufffd").encode()) + (text[-1:] == "\ufffd")

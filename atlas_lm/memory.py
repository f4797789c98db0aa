"""Memory as a file that knows what it has read, and with which model.

memory = load_memory("book.safetensors", model)
memory.about.texts
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass

import torch

from atlas_lm.models import LanguageModel, ModelState, fingerprint_of
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.files import fingerprint, read_about, read_memory
from atlas_lm.text import ByteTokenizer, FileTokenizer, Tokenizer


@dataclass(frozen=True)
class TextRead:
    """A text that a memory has read."""

    name: str
    sha256: str
    bytes: int
    tokens: int
    path: str | None
    """Where it lies; None if that was not to be written down."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a memory file says about itself."""

    model: str
    """Fingerprint of the model, whose memory means nothing to another."""
    tokenizer: str
    depth: int
    dim: int
    number_bytes: int
    """Of a number of the model."""
    texts: tuple[TextRead, ...] = ()
    """In the order they were read."""
    half_lives: tuple[float | None, ...] = ()
    """Of each memory layer, over the last reading: tokens after which half of what was written is
    forgotten; None: nothing is."""
    reading: str = ""
    """What made it: the memory it began with, the texts, the segment."""
    version: str = ""

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    @property
    def text_bytes(self) -> int:
        return sum(text.bytes for text in self.texts)

    @property
    def kv_bytes(self) -> int:
        """What a transformer of the same depth and width keeps of every token."""
        return 2 * self.depth * self.dim * self.number_bytes

    def to_texts(self) -> dict[str, str]:
        """For a file: every value as a text."""
        plain = asdict(self) | {"tokens": self.tokens}
        return {name: v if isinstance(v, str) else json.dumps(v) for name, v in plain.items()}

    @classmethod
    def from_texts(cls, said: dict[str, str], path: str | os.PathLike) -> About:
        try:
            return cls(
                texts=tuple(TextRead(**text) for text in json.loads(said["texts"])),
                half_lives=tuple(json.loads(said["half_lives"])),
                model=said["model"],
                tokenizer=said["tokenizer"],
                reading=said["reading"],
                version=said["version"],
                depth=int(said["depth"]),
                dim=int(said["dim"]),
                number_bytes=int(said["number_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: does not say which model and texts it is of ({error!r}); expected a "
                "memory that `atlas-lm read` wrote"
            ) from error


@dataclass(frozen=True, eq=False)
class Memory:
    """What a model has read, and what there is to say about it."""

    state: ModelState
    about: About

    @staticmethod
    def begin(model: LanguageModel, tokenizer: Tokenizer) -> Memory:
        """One that has read nothing."""
        about = About(
            model=fingerprint_of(model),
            tokenizer=tokenizer_name(tokenizer),
            depth=model.config.depth,
            dim=model.config.dim,
            number_bytes=next(model.parameters()).element_size(),
        )
        return Memory(settled(model.begin(1)), about)

    @property
    def fingerprint(self) -> str:
        """Of all numbers and texts in it."""
        tensors = {n: t.detach().cpu() for n, t in self.state.tensors().items()}
        return fingerprint(tensors, self.about.to_texts())

    def save(self, path: str | os.PathLike) -> None:
        """Write the file; an old one stays until the new one is whole."""
        self.state.save(path, self.about.to_texts())


def load_memory(
    path: str | os.PathLike, model: LanguageModel, tokenizer: Tokenizer | None = None
) -> Memory:
    """Read a memory of this model, and of this tokenizer if one is given; refuse any other."""
    name = None if tokenizer is None else tokenizer_name(tokenizer)
    return load_of(path, fingerprint_of(model), name, next(model.parameters()).device)


def load_about(path: str | os.PathLike) -> About:
    """What a memory file says about itself, whatever model it is of."""
    return About.from_texts(read_about(path), path)


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """The same for the same tokenizer, in every process."""
    if isinstance(tokenizer, ByteTokenizer):
        return "bytes"
    if isinstance(tokenizer, FileTokenizer):
        return f"tokenizer.json {hashlib.sha256(tokenizer.json).hexdigest()}"
    return type(tokenizer).__name__


def load_of(
    path: str | os.PathLike, model: str, tokenizer: str | None, device: torch.device
) -> Memory:
    """Read a memory of the model and the tokenizer of these names."""
    file = read_memory(path)
    about, state = About.from_texts(file.about, path), Carried.restored(file, path)
    if not isinstance(state, ModelState) or state.batch != 1:
        raise ValueError(f"{path}: a {type(state).__name__}; expected the memory of one reader")
    if about.model != model:
        raise ValueError(
            f"{path}: a memory of another model: it is of {about.model[:12]}, this model is "
            f"{model[:12]}; `atlas-lm rebuild` reads its texts again with this one"
        )
    if tokenizer is not None and about.tokenizer != tokenizer:
        raise ValueError(
            f"{path}: a memory of another tokenizer: it is of {about.tokenizer}, the model has "
            f"{tokenizer}; put back the one that it was read with"
        )
    return Memory(state.to(device), about)


def settled(state: ModelState) -> ModelState:
    """Copies as a file would give them back: bits on a CPU depend on how numbers lie in memory."""
    return state.map(lambda t: t.detach().clone(memory_format=torch.contiguous_format))

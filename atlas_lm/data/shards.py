"""A prepared dataset: a folder of token shards and a manifest.

    manifest.json      what is in here; written last, so that without it nothing is finished
    shard-00000.bin    tokens, little-endian, memory-mapped when read
    shard-00000.idx    where each document begins among them, and the end; int64
    tokenizer.json     unless the tokens are bytes

Documents are whole: one that does not fit the shard begins the next, and one that is larger than a
shard may be is a shard of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from atlas_lm.text import (
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
)
from atlas_lm.whole_files import write_whole

FORMAT = "atlas-lm shards 1"
MANIFEST = "manifest.json"
UNFINISHED = "manifest.json.part"
"""Says that a folder without a manifest is one of ours, so that its files may be removed."""
BYTES = "bytes"
SHARD_TOKENS = 2**26
OWN = r"(shard-\d{5,}\.(bin|idx)|manifest\.json|tokenizer\.json)"
HALF_WRITTEN = rf"\.({OWN}|manifest\.json\.part)\.[0-9a-f]{{16}}"
INDEX = np.dtype("<i8")


# The manifest


@dataclass(frozen=True)
class Shard:
    """One of its files of tokens."""

    file: str
    tokens: int
    documents: int
    sha256: str
    index_sha256: str

    @property
    def index(self) -> str:
        return Path(self.file).with_suffix(".idx").name


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a prepared dataset consists of."""

    tokenizer: str
    """`bytes`, or the name of the tokenizer's file."""
    tokenizer_sha256: str | None
    vocab: int
    end: int | None
    """The token that closes every document."""
    dtype: str
    documents: int
    tokens: int
    shards: tuple[Shard, ...]
    command: str
    """What made it."""
    version: str

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT} | asdict(self), indent=2).encode() + b"\n"

    @classmethod
    def load(cls, path: Path) -> Manifest:
        try:
            values = json.loads(path.read_bytes())
            if values.pop("format", None) != FORMAT:
                raise ValueError("another format")
            shards = tuple(Shard(**shard) for shard in values.pop("shards"))
            return cls(shards=shards, **values)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{path}: no manifest of prepared data ({error}); expected {FORMAT!r}"
            ) from error

    def __post_init__(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype {self.dtype}; expected uint16 or uint32")
        if not self.shards or any(s.tokens < 1 or s.documents < 1 for s in self.shards):
            raise ValueError("no shards, or some without documents")
        for name in ("documents", "tokens"):
            found = sum(getattr(shard, name) for shard in self.shards)
            if found != getattr(self, name):
                raise ValueError(f"{getattr(self, name)} {name}, but {found} in its shards")


def token_dtype(vocab: int) -> np.dtype:
    """The smallest that holds every id."""
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


# Reading


class Shards:
    """The documents of a prepared dataset, mapped into memory, never read as a whole."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path = path
        self.manifest = manifest
        starts = accumulate((shard.documents for shard in manifest.shards), initial=0)
        self._first = np.fromiter(starts, np.int64)
        self._indices = [self._index(shard) for shard in manifest.shards]
        self._tokens: list[np.ndarray | None] = [None] * len(manifest.shards)

    @classmethod
    def open(cls, path: str | os.PathLike, verify: bool = False) -> Shards:
        """Sizes are compared with the manifest's; with `verify`, all contents too."""
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: no such folder of prepared data")
        if not (path / MANIFEST).exists():
            unfinished = (path / UNFINISHED).exists()
            what = "its preparation is not finished" if unfinished else "no prepared data"
            raise ValueError(f"{path}: {what}: it has no {MANIFEST}; run `atlas-lm data prepare`")
        manifest = Manifest.load(path / MANIFEST)
        width = np.dtype(manifest.dtype).itemsize
        for shard in manifest.shards:
            _check_size(path / shard.file, shard.tokens * width)
            _check_size(path / shard.index, (shard.documents + 1) * INDEX.itemsize)
            if verify:
                _check_sha256(path / shard.file, shard.sha256)
                _check_sha256(path / shard.index, shard.index_sha256)
        if manifest.tokenizer_sha256 is not None:
            _check_sha256(path / manifest.tokenizer, manifest.tokenizer_sha256)
        return cls(path, manifest)

    @property
    def documents(self) -> int:
        return self.manifest.documents

    @property
    def tokens(self) -> int:
        return self.manifest.tokens

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every document."""
        return np.concatenate([np.diff(index) for index in self._indices])

    def document(self, number: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Its tokens from `begin` to `end`; a view into the file."""
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number}; there are {self.documents}")
        shard = int(np.searchsorted(self._first, number, "right")) - 1
        index, at = self._indices[shard], number - self._first[shard]
        return self._mapped(shard)[index[at] : index[at + 1]][begin:end]

    def tokenizer(self) -> ByteTokenizer | FileTokenizer:
        return ByteTokenizer() if self.manifest.tokenizer == BYTES else load_tokenizer(self.path)

    def _mapped(self, shard: int) -> np.ndarray:
        tokens = self._tokens[shard]
        if tokens is None:
            dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
            tokens = np.memmap(self.path / self.manifest.shards[shard].file, dtype, "r")
            self._tokens[shard] = tokens
        return tokens

    def _index(self, shard: Shard) -> np.ndarray:
        index = np.fromfile(self.path / shard.index, INDEX)
        if index[0] != 0 or index[-1] != shard.tokens or (np.diff(index) < 1).any():
            raise ValueError(
                f"{self.path / shard.index}: no index of {shard.tokens} tokens; {_PREPARE_AGAIN}"
            )
        return index


_PREPARE_AGAIN = "the data was damaged, prepare it again"


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: missing; {_PREPARE_AGAIN}")
    if path.stat().st_size != size:
        raise ValueError(
            f"{path}: {path.stat().st_size:,} bytes; expected {size:,}; {_PREPARE_AGAIN}"
        )


def _check_sha256(path: Path, expected: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: missing; {_PREPARE_AGAIN}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path}: its sha256 is {found[:12]}; expected {expected[:12]}; {_PREPARE_AGAIN}"
        )


# Writing


def check_claim(path: Path, again: bool) -> bool:
    """Refuse a folder that is not to be written to; True if an earlier preparation was there."""
    finished = (path / MANIFEST).exists()
    if finished:
        Manifest.load(path / MANIFEST)
        if not again:
            raise FileExistsError(
                f"{path}: prepared data is here already; --again replaces it, or choose another"
            )
    if finished or (path / UNFINISHED).exists():
        return True
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if re.fullmatch(OWN, file.name):
                raise FileExistsError(
                    f"{file}: a file of something else is here; choose another folder"
                )
    return False


def claim_folder(path: Path) -> None:
    """Make a folder that was checked ours, and empty of what an earlier preparation left."""
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / UNFINISHED, json.dumps({"format": FORMAT}).encode())
    (path / MANIFEST).unlink(missing_ok=True)  # first: with it, the rest must be there too
    for file in sorted(path.iterdir()):
        if re.fullmatch(f"{OWN}|{HALF_WRITTEN}", file.name):
            file.unlink()


def remove_shards(path: Path) -> None:
    """What was prepared there; other files stay."""
    claim_folder(path)
    (path / UNFINISHED).unlink()
    if not any(path.iterdir()):
        path.rmdir()


class ShardWriter:
    """Documents into the shards of a claimed folder; `finish` makes them a dataset."""

    def __init__(self, path: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS):
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens: {shard_tokens}; expected 1 token or more")
        self.path = path
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(tokenizer.vocab)
        self.shards: list[Shard] = []
        self.documents = self.tokens = 0
        self._ends = [0]
        self._file: BinaryIO | None = None
        self._temporary = Path()
        self._digest: Any = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """What is not finished leaves no half-written file."""
        if self._file is not None:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray) -> None:
        """One document, of one token or more."""
        if self._file is not None and self._ends[-1] + len(tokens) > self.shard_tokens:
            self._close_shard()
        if self._file is None:
            self._temporary = self.path / f".{self._name}.{secrets.token_hex(8)}"
            self._file = self._temporary.open("xb")
            self._digest, self._ends = hashlib.sha256(), [0]
        data = np.ascontiguousarray(tokens, self.dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._ends.append(self._ends[-1] + len(tokens))
        self.documents += 1
        self.tokens += len(tokens)

    def finish(self, command: str) -> Manifest:
        """The tokenizer, the last shard, and then the manifest."""
        from atlas_lm import __version__

        self._close_shard()
        file = self.tokenizer.json if isinstance(self.tokenizer, FileTokenizer) else None
        save_tokenizer(self.tokenizer, self.path)
        manifest = Manifest(
            tokenizer=BYTES if file is None else TOKENIZER_FILE,
            tokenizer_sha256=None if file is None else hashlib.sha256(file).hexdigest(),
            vocab=self.tokenizer.vocab,
            end=self.tokenizer.end,
            dtype=self.dtype.name,
            documents=self.documents,
            tokens=self.tokens,
            shards=tuple(self.shards),
            command=command,
            version=__version__,
        )
        write_whole(self.path / MANIFEST, manifest.to_json())
        (self.path / UNFINISHED).unlink()
        return manifest

    @property
    def _name(self) -> str:
        return f"shard-{len(self.shards):05}.bin"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path / self._name)
        self._file = None
        index = np.asarray(self._ends, INDEX).tobytes()
        shard = Shard(
            self._name,
            tokens=self._ends[-1],
            documents=len(self._ends) - 1,
            sha256=self._digest.hexdigest(),
            index_sha256=hashlib.sha256(index).hexdigest(),
        )
        write_whole(self.path / shard.index, index)
        self.shards.append(shard)

"""Texts from files, folders, Hugging Face and Python itself, made into token shards.

    report = prepare(Options(sources=("books/", "more.jsonl.gz"), out="data", valid=0.01))

Documents are streamed: memory holds one of them at a time, however many there are. What is prepared
depends on the sources and the options alone.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import json
import os
import shlex
import sysconfig
import tokenize
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from atlas_lm.data.shards import (
    BYTES,
    MANIFEST,
    SHARD_TOKENS,
    UNFINISHED,
    Manifest,
    ShardWriter,
    check_claim,
    claim_folder,
    remove_shards,
)
from atlas_lm.text import (
    BLOCK,
    ENDS,
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    whole_part,
)
from atlas_lm.whole_files import write_whole

if TYPE_CHECKING:
    from atlas_lm.reading import Step

Progress: TypeAlias = "Callable[[Step], None]"
VALID = "valid"
"""Folder of the documents that are kept for validation, in that of the others."""
HUGGING_FACE, PYTHON = "hf:", "python:"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to prepare, from what, to where; the names are those of the command's options."""

    sources: tuple[str, ...]
    out: str | os.PathLike
    tokenizer: str = BYTES
    train_tokenizer: int | None = None
    field: str = "text"
    separator: str | None = None
    longest: int | None = None
    valid: float = 0.0
    shard_tokens: int = SHARD_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: none; expected files, folders, hf:NAME or python:manual")
        if not 0 <= self.valid < 1:
            raise ValueError(f"valid: {self.valid}; expected a part of all documents, 0 to 1")
        if self.shard_tokens < 1:
            raise ValueError(f"shard_tokens: {self.shard_tokens}; expected 1 token or more")
        if self.longest is not None and self.longest < 4:
            raise ValueError(f"longest: {self.longest}; expected 4 bytes or more, a character")
        if self.train_tokenizer is not None and self.train_tokenizer < 257:
            raise ValueError(
                f"train_tokenizer: {self.train_tokenizer}; expected 257 ids or more, the bytes "
                "and the end of a document"
            )
        if self.train_tokenizer is not None and self.tokenizer != BYTES:
            raise ValueError(f"tokenizer: {self.tokenizer}, and one is trained; expected one only")

    @property
    def command(self) -> str:
        """The command line that prepares the same."""
        words = ["atlas-lm", "data", "prepare", *self.sources]
        for option in fields(self)[1:]:
            value = getattr(self, option.name)
            if value != option.default:
                words += ["--" + option.name.replace("_", "-"), str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class PrepareReport:
    """What came of it."""

    train: Manifest
    valid: Manifest | None
    empty: int
    """Documents without a word, which were left out."""
    bytes: int
    """Of text, in UTF-8."""
    seconds: float


def prepare(
    options: Options, *, again: bool = False, progress: Progress | None = None
) -> PrepareReport:
    """Tokenise all documents into shards; every document is closed by the tokenizer's end.

    again    replace what was prepared there before; unfinished work is always begun anew
    """
    begun, out = monotonic(), Path(options.out)
    sources = [open_source(name, options) for name in options.sources]
    tokenizer: Tokenizer = (
        ByteTokenizer() if options.tokenizer == BYTES else FileTokenizer(options.tokenizer)
    )
    folders = _claimed(out, options.valid > 0, again)
    if options.train_tokenizer is not None:
        train_tokenizer(sources, options.train_tokenizer, out / TOKENIZER_FILE, progress)
        tokenizer = FileTokenizer(out / TOKENIZER_FILE)
    empty = size = 0
    with ExitStack() as stack:
        train, *valid = (
            stack.enter_context(ShardWriter(folder, tokenizer, options.shard_tokens))
            for folder in folders
        )
        tell(progress, sources, 0, 0)
        for text, done in documents_of(sources):
            tokens = _encoded(text, tokenizer) if text.strip() else None
            if tokens is None or not len(tokens):
                empty += 1
                continue
            writer = valid[0] if valid and _is_valid(text, options) else train
            writer.add(_closed(tokens, tokenizer))
            size += len(text.encode())
            tell(progress, sources, done, train.tokens + sum(w.tokens for w in valid))
        _check_not_empty(options, train, valid, empty)
        # The whole is finished when the first folder is.
        manifests = [writer.finish(options.command) for writer in (*valid, train)]
    kept = manifests[0] if valid else None
    return PrepareReport(manifests[-1], kept, empty, size, monotonic() - begun)


def _claimed(out: Path, valid: bool, again: bool) -> list[Path]:
    """The folders to write to; both are looked at before anything is removed."""
    ours = check_claim(out, again)
    if valid:
        check_claim(out / VALID, again or ours)
    had_valid = ours and any((out / VALID / name).exists() for name in (MANIFEST, UNFINISHED))
    claim_folder(out)
    if valid:
        claim_folder(out / VALID)
    elif had_valid:
        remove_shards(out / VALID)
    return [out, out / VALID] if valid else [out]


def tell(progress: Progress | None, sources: list[Source], done: int, tokens: int) -> None:
    if progress is None:
        return
    from atlas_lm.reading import Step

    sizes = [source.size for source in sources]
    total = done if None in sizes else sum(size or 0 for size in sizes)
    progress(Step(done, total, tokens))


def _check_not_empty(
    options: Options, train: ShardWriter, valid: list[ShardWriter], empty: int
) -> None:
    found = train.documents + sum(writer.documents for writer in valid)
    if not found:
        raise ValueError(
            f"{' '.join(options.sources)}: no document with a word in it, {empty} without; "
            "expected some text"
        )
    for writer in (train, *valid):
        if not writer.documents:
            raise ValueError(
                f"{writer.path}: --valid {options.valid} of {found} documents left none for it; "
                "choose another part or another --seed"
            )


# Tokens


def _encoded(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Tokenised in the blocks in which a text is read, so that a model meets the same tokens."""
    parts = [np.asarray(tokenizer.encode(block), np.uint32) for block in _blocks(text)]
    return np.concatenate(parts)


def _blocks(text: str) -> Iterator[str]:
    data, at = text.encode(), 0
    while len(data) - at > BLOCK:
        used = whole_part(data[at : at + BLOCK])
        yield data[at : at + used].decode()
        at += used
    yield data[at:].decode()


def _closed(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    return tokens if tokenizer.end is None else np.append(tokens, np.uint32(tokenizer.end))


def _is_valid(text: str, options: Options) -> bool:
    """By content, so that a document is on the same side in whatever company it comes."""
    digest = hashlib.sha256(f"{options.seed}\n".encode() + text.encode()).digest()
    return int.from_bytes(digest[:8]) < options.valid * 2**64


def train_tokenizer(
    sources: list[Source], size: int, path: Path, progress: Progress | None = None
) -> None:
    """Byte-level BPE of all documents, with every digit a token of its own, the first of a number
    together with its space, as words are."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Split(Regex(r" ?\p{N}"), "isolated"), byte_level]
    )
    library.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[ENDS[0]],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )

    def blocks() -> Iterator[str]:
        for text, done in documents_of(sources):
            yield from _blocks(text)
            tell(progress, sources, done, 0)

    library.train_from_iterator(blocks(), trainer)
    write_whole(path, library.to_str(pretty=True).encode())


# Sources


class Document(NamedTuple):
    text: str
    done: int
    """Bytes of its source up to its end, compressed where that is."""


@dataclass(frozen=True)
class Source:
    """Documents that can be gone through more than once."""

    size: int | None
    """Bytes; None where nobody knows."""
    documents: Callable[[], Iterator[Document]]


def documents_of(sources: list[Source]) -> Iterator[Document]:
    """Of all sources, with the bytes of all that came before."""
    before = 0
    for source in sources:
        done = 0
        for text, done in source.documents():
            yield Document(text, before + done)
        before += done if source.size is None else source.size


def open_source(name: str, options: Options) -> Source:
    """The source that is called so; it is looked for, not yet read."""
    if name.startswith(HUGGING_FACE):
        return _hugging_face(name, options)
    if name.startswith(PYTHON):
        texts = {"manual": _python_manual, "docstrings": _python_docstrings}
        if name.removeprefix(PYTHON) not in texts:
            raise ValueError(f"{name}: unknown; expected {PYTHON}manual or {PYTHON}docstrings")
        return texts[name.removeprefix(PYTHON)]()
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = _files_in(path, Path(options.out)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: a folder without files; expected texts")

    def documents() -> Iterator[Document]:
        before = 0
        for file in files:
            for text, done in _of_file(file, options):
                yield Document(text, before + done)
            before += file.stat().st_size

    return Source(sum(file.stat().st_size for file in files), documents)


def _files_in(folder: Path, out: Path) -> list[Path]:
    """All, in the order of their names; not hidden ones, and not what is being prepared."""
    out = out.resolve()
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not path.resolve().is_relative_to(out)
    ]


def _of_file(path: Path, options: Options) -> Iterator[Document]:
    """By the ends of its name: .jsonl and .jsonl.gz hold a document a line, others text."""
    name = path.name.lower()
    documents = _of_lines if name.removesuffix(".gz").endswith(".jsonl") else _of_text
    with path.open("rb") as raw:
        if not name.endswith(".gz"):
            yield from (Document(text, raw.tell()) for text in documents(path, raw, options))
            return
        try:
            with gzip.open(raw) as file:
                for text in documents(path, file, options):
                    yield Document(text, raw.tell())
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}); get it again") from error


def _of_text(path: Path, file: BinaryIO | gzip.GzipFile, options: Options) -> Iterator[str]:
    separator = None if options.separator is None else options.separator.encode()
    for begin, data in _pieces(file, separator, options.longest):
        yield _decoded(path, begin, data)


def _pieces(
    file: BinaryIO | gzip.GzipFile, separator: bytes | None, longest: int | None
) -> Iterator[tuple[int, bytes]]:
    """First byte and bytes of every document; cut at line ends where it must be."""
    begin, held, at_line_start = 0, bytearray(), True
    while line := file.readline(BLOCK):
        if at_line_start and line.rstrip(b"\r\n") == separator:
            yield begin, bytes(held)
            begin += len(held) + len(line)
            held.clear()
            continue
        at_line_start = line.endswith(b"\n")
        held += line
        while longest is not None and len(held) > longest:
            try:
                used = whole_part(bytes(held[:longest]))
            except UnicodeDecodeError:
                used = longest  # whoever decodes it says where
            yield begin, bytes(held[:used])
            begin += used
            del held[:used]
    if held or not begin:
        yield begin, bytes(held)


def _decoded(path: Path, begin: int, data: bytes) -> str:
    """Text, unless the bytes, which begin there in the file, are none."""
    null = data.find(b"\0")
    if null >= 0:
        raise ValueError(f"{path}: binary: a zero at byte {begin + null}; expected a text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 at byte {begin + error.start} ({error.reason}); "
            "convert the file to UTF-8"
        ) from error


def _of_lines(path: Path, file: BinaryIO | gzip.GzipFile, options: Options) -> Iterator[str]:
    begin = 0
    for number, line in enumerate(file, 1):
        where = f"{path}: line {number}"
        text = _decoded(path, begin, line)
        begin += len(line)
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); expected an object") from error
        yield _field(value, options.field, where)


def _field(value: Any, field: str, where: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a {type(value).__name__}; expected an object with {field!r}")
    if field not in value:
        raise ValueError(f"{where}: no {field!r}; it has {', '.join(value)}; choose with --field")
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {field!r} is a {type(text).__name__}; expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {field!r} has half of a surrogate pair; mend it") from error
    return text


def _hugging_face(name: str, options: Options) -> Source:
    """`hf:NAME[:CONFIG][:SPLIT]`, streamed; the split is train unless it is named."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{name}: reading it needs the package datasets; pip install 'atlas-lm[data]'"
        ) from error
    dataset, config, split, *more = (*name.removeprefix(HUGGING_FACE).split(":"), "", "")
    if not dataset or len(more) > 2 or any(more):
        raise ValueError(f"{name}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")

    def documents() -> Iterator[Document]:
        rows = load_dataset(dataset, config or None, split=split or "train", streaming=True)
        texts = (_field(row, options.field, f"{name}: row {i}") for i, row in enumerate(rows))
        return _counted(texts)

    return Source(None, documents)


def _counted(texts: Iterable[str]) -> Iterator[Document]:
    done = 0
    for text in texts:
        done += len(text.encode())
        yield Document(text, done)


def _python_manual() -> Source:
    """The topics of `help()`, a document each."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    return Source(sum(len(text.encode()) for text in texts), lambda: _counted(texts))


def _python_docstrings() -> Source:
    """The docstrings of the standard library, a document for each of its modules."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not others.intersection(path.relative_to(root).parts)
    ]

    def documents() -> Iterator[Document]:
        done = 0
        for path in files:
            done += path.stat().st_size
            parts = path.relative_to(root).with_suffix("").parts
            text = _docstrings(path, ".".join(parts).removesuffix(".__init__"))
            if text:
                yield Document(text, done)

    return Source(sum(path.stat().st_size for path in files), documents)


@cache
def _docstrings(path: Path, module: str) -> str:
    """Of the module and all that is in it, each under its name, in the order of the code. All of
    them are 2 MB, and to parse them again takes seconds."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read())
    except (SyntaxError, UnicodeDecodeError):  # files that are no Python, made for tests
        return ""
    found: list[str] = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                found.append(f"{name}\n\n{inspect.cleandoc(text)}\n")
        for child in ast.iter_child_nodes(node):
            inner = getattr(child, "name", None)
            visit(child, f"{name}.{inner}" if isinstance(inner, str) else name)

    visit(tree, module)
    return "\n".join(found)

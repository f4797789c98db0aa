"""Background text as sentences of tokens: made once, kept on a disk, mapped into memory.

    haystack = Haystack.of_books("books/", tokenizer, cache="cache/")
    filled = haystack.fill([fact, other_fact], tokens=10_000_000, generator=generator)

A sentence ends at one of . ! ? with the quotes and brackets that close after it, where white space
and then no lower-case letter follows; not after initials and a few abbreviations (Mr., Dr.); and at
an empty line. (BABILong's authors take Punkt's sentences, which are learned from the text.) Inside
a sentence the text stays as it is; one `separator` stands before each, as it should before facts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from atlas_lm.data.prepare import Options, Progress, Source, documents_of, open_source, tell
from atlas_lm.data.shards import INDEX, token_dtype
from atlas_lm.tasks.samples import Part, Piece, Sample, Slice, answer_ids, ids
from atlas_lm.text import Tokenizer
from atlas_lm.whole_files import write_whole

SHORTEST = 10
"""Tokens; shorter sentences are left out, as BABILong does."""
FORMAT = "atlas-lm haystack 1"
"""Also of the rule by which sentences are cut: another one makes another cache."""
TOKENS, BOUNDS, MANIFEST = "tokens.bin", "bounds.bin", "haystack.json"
TEXTS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")

SENTENCE_END = re.compile(r"[.!?]+[\"'\u201d\u2019)\]_]*(?=\s+[^\sa-z])|\n\s*\n")
NO_END = re.compile(
    r"(?:\b[A-Z]|\b(?:Mr|Mrs|Ms|Dr|St|Mt|Messrs|Prof|Rev|Hon|Capt|Col|Gen|Lieut|Lt|Sgt|Jr|Sr|"
    r"Esq|No|Nos|vol|Vol|ch|Ch|Fig|fig|pp?|etc|viz|vs|cf|i\.e|e\.g))\.$"
)


class Filled(NamedTuple):
    """Facts among sentences."""

    pieces: tuple[Piece, ...]
    positions: tuple[int, ...]
    """First token of every fact."""
    depths: tuple[float, ...]
    """Part of the background that stands before each fact."""

    @property
    def tokens(self) -> np.ndarray:
        """All pieces as one, int64."""
        whole = (p if isinstance(p, np.ndarray) else p.range(0, len(p)) for p in self.pieces)
        return np.concatenate(list(whole)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Haystack:
    """Sentences one after the other; after the last one, the first again."""

    tokens: np.ndarray
    bounds: np.ndarray
    """First token of every sentence, and the end of the last."""
    separator: str
    """What stands before every sentence, and should before a fact."""
    source: str
    """What it was made from, for reports."""

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or self.bounds[-1] != len(self.tokens):
            raise ValueError(f"{self.source}: no sentence of {SHORTEST} tokens; expected a text")

    @classmethod
    def of_books(
        cls,
        folder: str | os.PathLike,
        tokenizer: Tokenizer,
        cache: str | os.PathLike,
        *,
        field: str = "text",
        progress: Progress | None = None,
    ) -> Haystack:
        """All `.txt`, `.jsonl` and such `.gz` files of a folder, in the order of their names.

        field    which one of a `.jsonl` line is the text
        """
        files = book_files(folder)
        options = Options(sources=tuple(map(str, files)), out=cache, field=field)

        def sources() -> list[Source]:
            return [open_source(str(file), options) for file in files]

        name = f"{len(files)} files of {Path(folder).name}"
        return _cached(sources, _digests(files, field), name, tokenizer, Path(cache), progress)

    @classmethod
    def of_python(
        cls,
        tokenizer: Tokenizer,
        cache: str | os.PathLike,
        part: Part | None = None,
        *,
        progress: Progress | None = None,
    ) -> Haystack:
        """The text that every Python carries: docstrings for training, the topics of `help()` for
        evaluation, both where no part is named."""
        names = {"train": ["python:docstrings"], "eval": ["python:manual"]}
        chosen = names["eval"] + names["train"] if part is None else names[part]
        options = Options(sources=tuple(chosen), out=cache)
        what = " and ".join(name.removeprefix("python:") for name in chosen)
        title = f"Python {sys.version.split()[0]}'s own text: {what}"

        def sources() -> list[Source]:
            return [open_source(name, options) for name in chosen]

        return _cached(sources, [sys.version, *chosen], title, tokenizer, Path(cache), progress)

    @classmethod
    def of_text(cls, text: str, tokenizer: Tokenizer, separator: str = "\n") -> Haystack:
        """Every line a sentence, however short: RULER's noise is one line, again and again."""
        lines = [tokenizer.encode(separator + line) for line in text.splitlines() if line.strip()]
        tokens = np.asarray([i for line in lines for i in line], token_dtype(tokenizer.vocab))
        bounds = np.cumsum([0, *map(len, lines)])
        return cls(tokens, bounds, separator, f"{len(lines)} lines")

    @property
    def sentences(self) -> int:
        return len(self.bounds) - 1

    def fill(
        self,
        facts: Sequence[np.ndarray],
        tokens: int,
        generator: np.random.Generator,
        depths: Sequence[float] | None = None,
    ) -> Filled:
        """Exactly `tokens` of text with the facts in it, in order, between sentences.

        The background starts at a random sentence; its last one is cut. Every fact stands in a gap
        chosen uniformly, in front of the first sentence and behind the last included (as BABILong
        does), or after the part `depths` of the sentences (as RULER does).
        """
        room = tokens - sum(map(len, facts))
        if room < 0:
            raise ValueError(
                f"fill: {tokens} tokens; its {len(facts)} facts alone have {tokens - room}; "
                "expected a longer text"
            )
        first = int(generator.integers(self.sentences))
        count = self._sentences_in(first, room)
        if depths is None:
            gaps = np.sort(generator.integers(0, count + 1, len(facts)))
        else:
            gaps = (np.asarray(_checked(depths, len(facts))) * count).astype(np.int64)
        offsets = [min(self._offset(first, int(gap)), room) for gap in gaps]
        return self._pieces(int(self.bounds[first]), facts, offsets, room)

    def _sentences_in(self, first: int, room: int) -> int:
        """How many begin in `room` tokens from this one on."""
        turns, rest = divmod(int(self.bounds[first]) + room, len(self.tokens))
        return turns * self.sentences + int(np.searchsorted(self.bounds, rest)) - first

    def _offset(self, first: int, count: int) -> int:
        """Tokens of `count` sentences from this one on."""
        turns, rest = divmod(first + count, self.sentences)
        return turns * len(self.tokens) + int(self.bounds[rest]) - int(self.bounds[first])

    def _pieces(
        self, begin: int, facts: Sequence[np.ndarray], offsets: list[int], room: int
    ) -> Filled:
        pieces: list[Piece] = []
        positions, done, at = [], 0, 0
        for fact, offset in zip(facts, offsets, strict=True):
            if offset > done:
                pieces.append(Slice(self.tokens, begin + done, offset - done))
            at += offset - done
            done = offset
            positions.append(at)
            pieces.append(fact)
            at += len(fact)
        if room > done:
            pieces.append(Slice(self.tokens, begin + done, room - done))
        depths = tuple(offset / room if room else 0.0 for offset in offsets)
        return Filled(tuple(pieces), tuple(positions), depths)


def _checked(depths: Sequence[float], facts: int) -> Sequence[float]:
    ascending = list(depths) == sorted(depths)
    if len(depths) != facts or not ascending or any(not 0 <= depth <= 1 for depth in depths):
        raise ValueError(
            f"depths: {list(depths)} for {facts} facts; expected one each, from 0 to 1, ascending"
        )
    return depths


def hide(
    facts: Sequence[str],
    haystack: Haystack,
    tokenizer: Tokenizer,
    generator: np.random.Generator,
    *,
    length: int,
    prompt: tuple[str, str],
    answers: tuple[str, ...],
    about: dict[str, Any],
    choices: tuple[str, ...] = (),
    depths: Sequence[float] | None = None,
) -> Sample:
    """Facts in a haystack as a sample of exactly `length` tokens.

    prompt    what stands before the text, and the question after it
    answers   what is to be said, with commas between
    about     what is known of the sample so far, its `task` with it
    """
    head, question = (ids(text, tokenizer) for text in prompt)
    told = [ids(haystack.separator + fact, tokenizer) for fact in facts]
    alone = len(head) + len(question) + sum(map(len, told))
    if length < alone:
        raise ValueError(
            f"{about['task']}: {length} tokens; its facts and its question alone have {alone}"
        )
    filled = haystack.fill(told, length - len(head) - len(question), generator, depths)
    answer = ", ".join(answers)
    return Sample(
        pieces=(head, *filled.pieces) if len(head) else filled.pieces,
        question=question,
        answer=answer_ids(answer, tokenizer),
        question_text=prompt[1],
        answer_text=answer,
        references=answers,
        choices=choices,
        about=about
        | {
            "length": length,
            "haystack": haystack.source,
            "turns": length / len(haystack.tokens),
            "facts": tuple(facts),
            "positions": tuple(len(head) + position for position in filled.positions),
            "depths": filled.depths,
        },
    )


# Sentences


def sentences(text: str) -> Iterator[str]:
    """Cut by the rule that this module states, without the white space around them."""
    begin = 0
    for found in SENTENCE_END.finditer(text):
        is_mark = not found[0].startswith("\n")
        if is_mark and NO_END.search(text, max(begin, found.start() - 8), found.start() + 1):
            continue
        sentence = text[begin : found.end()].strip()
        begin = found.end()
        if sentence:
            yield sentence
    if rest := text[begin:].strip():
        yield rest


# On a disk


def book_files(folder: str | os.PathLike) -> list[Path]:
    """The texts of a folder; not what else lies there, such as an index or a licence."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of books")
    files = sorted(path for path in folder.rglob("*") if path.name.lower().endswith(TEXTS))
    files = [path for path in files if path.is_file() and not path.name.startswith(".")]
    if not files:
        raise ValueError(f"{folder}: no books in it; expected files ending in {', '.join(TEXTS)}")
    return files


def _digests(files: Iterable[Path], field: str) -> list[str]:
    return [field, *map(_sha256, files)]


def _cached(
    sources: Callable[[], list[Source]],
    digests: list[str],
    name: str,
    tokenizer: Tokenizer,
    cache: Path,
    progress: Progress | None,
) -> Haystack:
    """What lies in the folder of this text and this tokenizer; first put it there."""
    keys = [FORMAT, *digests, _tokenizer_digest(tokenizer)]
    fingerprint = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
    folder = cache / f"haystack-{fingerprint}"
    if not (folder / MANIFEST).exists():
        _build(sources(), name, tokenizer, folder, progress)
    return _opened(folder, name)


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    """By its file, or where it has none by what it makes of a text of some length."""
    file = getattr(tokenizer, "json", None)
    if file is None:
        from pydoc_data.topics import topics

        file = repr(tokenizer.encode(topics["strings"] + topics["typesseq"])).encode()
    kind = f"{type(tokenizer).__name__} {tokenizer.vocab} ".encode()
    return hashlib.sha256(kind + file).hexdigest()


def _build(
    sources: list[Source],
    name: str,
    tokenizer: Tokenizer,
    folder: Path,
    progress: Progress | None,
) -> None:
    """One document at a time, elsewhere; whoever is done first gives it the name."""
    elsewhere = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    elsewhere.mkdir(parents=True)
    try:
        dtype, bounds = token_dtype(tokenizer.vocab), array("q", [0])
        with (elsewhere / TOKENS).open("wb") as file:
            for text, done in documents_of(sources):
                for sentence in sentences(text):
                    tokens = tokenizer.encode(f" {sentence}")
                    if len(tokens) >= SHORTEST:
                        file.write(np.asarray(tokens, dtype).tobytes())
                        bounds.append(bounds[-1] + len(tokens))
                tell(progress, sources, done, bounds[-1])
            file.flush()
            os.fsync(file.fileno())
        if len(bounds) < 2:
            raise ValueError(f"{name}: no sentence of {SHORTEST} tokens; expected a text")
        write_whole(elsewhere / BOUNDS, np.asarray(bounds, INDEX).tobytes())
        manifest = {"format": FORMAT, "source": name, "dtype": dtype.str}
        manifest |= {file: _sha256(elsewhere / file) for file in (TOKENS, BOUNDS)}
        write_whole(elsewhere / MANIFEST, json.dumps(manifest, indent=2).encode())
        _give_name(elsewhere, folder)
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


def _give_name(elsewhere: Path, folder: Path) -> None:
    try:
        elsewhere.rename(folder)
    except OSError as error:
        if not (folder / MANIFEST).exists():
            raise OSError(f"{folder}: in the way of a haystack; remove it") from error


def _opened(folder: Path, name: str) -> Haystack:
    """Every byte is compared with what was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if any(manifest[file] != _sha256(folder / file) for file in (TOKENS, BOUNDS)):
            raise ValueError("other contents than were written")
        tokens = np.memmap(folder / TOKENS, np.dtype(manifest["dtype"]), "r")
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise ValueError(f"{folder}: damaged ({error}); remove it, it is made again") from error
    return Haystack(tokens, np.fromfile(folder / BOUNDS, INDEX), " ", name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

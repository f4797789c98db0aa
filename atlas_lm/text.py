"""Text in, text out: tokenizers, decoding as tokens come, files of any size as tokens."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from operator import index
from pathlib import Path
from typing import Protocol

from atlas_lm.whole_files import write_whole

BLOCK = 65_536
"""Bytes of text that are tokenised at once, at most."""
CONTEXT = 8
"""Tokens decoded again beside a new one: an unfinished character has three bytes at most, and how
a word is spaced depends on the token before it."""
TOKENIZER_FILE = "tokenizer.json"
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


# Tokenizers


class Tokenizer(Protocol):
    """What turns text into numbers and back."""

    vocab: int
    """Ids are below this."""
    end: int | None
    """Closes a document; None where no token does."""
    special: frozenset[int]
    """Ids that stand for no text, `end` among them."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: none is special, whatever the text spells."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text, with U+FFFD for bytes that are no UTF-8; special ids are left out."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as they are, and one id more that ends a document."""

    vocab: int = 257
    end: int | None = 256
    special: frozenset[int] = frozenset({256})

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(_meaningful(ids, self)).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    An end counts only if the file calls it special: the same letters may be an ordinary token.
    """

    vocab: int
    end: int | None
    special: frozenset[int]
    json: bytes
    """The file as it was read, to be saved beside a model."""

    def __init__(self, path: str | os.PathLike):
        from tokenizers import Tokenizer as Library

        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such tokenizer file")
        self.json = Path(path).read_bytes()
        try:
            library = Library.from_buffer(self.json)
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(
                f"{path}: not a tokenizer ({error}); expected a tokenizer.json of `tokenizers`"
            ) from error
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # as plain text: nobody ends a document by quoting it
        self._library = library
        self.vocab = max(library.get_vocab().values(), default=-1) + 1
        if self.vocab == 0:
            raise ValueError(f"{path}: a tokenizer without tokens; train it before saving it")
        added = library.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        ends = [i for i in map(library.token_to_id, ENDS) if i in self.special]
        self.end = ends[0] if ends else None
        self._id_of_byte = self._byte_fallback()
        self._byte_of_id = {i: byte for byte, i in enumerate(self._id_of_byte)}

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        mended = self._mended(_meaningful(ids, self))
        return self._library.decode(mended, skip_special_tokens=False)

    def _byte_fallback(self) -> list[int]:
        """Ids of the tokens <0x00> to <0xFF>, if the tokenizer spells rare characters with them."""
        decoder = self._library.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return []
        ids = [self._library.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        found = [i for i in ids if i is not None]
        return found if len(found) == 256 else []

    def _mended(self, ids: list[int]) -> list[int]:
        """Byte tokens with U+FFFD spelled out for invalid ones.

        The library gives up every character of a run for one invalid byte in it, so that nothing
        could be shown before the run ends.
        """
        mended = []
        for is_byte, run in groupby(ids, self._byte_of_id.__contains__):
            if is_byte:
                text = bytes(self._byte_of_id[i] for i in run).decode(errors="replace")
                mended += [self._id_of_byte[byte] for byte in text.encode()]
            else:
                mended += run
        return mended


def load_tokenizer(folder: str | os.PathLike) -> ByteTokenizer | FileTokenizer:
    """The folder's `tokenizer.json`; bytes if it has none."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder to load a tokenizer from")
    path = Path(folder) / TOKENIZER_FILE
    return FileTokenizer(path) if path.exists() else ByteTokenizer()


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike) -> None:
    """Put the file there that `load_tokenizer` finds: for bytes, none."""
    path = Path(folder) / TOKENIZER_FILE
    if isinstance(tokenizer, FileTokenizer):
        write_whole(path, tokenizer.json)
    elif not isinstance(tokenizer, ByteTokenizer):
        raise TypeError(
            f"save_tokenizer: {type(tokenizer).__name__} has no file; "
            "expected a FileTokenizer or a ByteTokenizer"
        )
    elif path.exists():
        raise FileExistsError(
            f"{path}: another tokenizer is here, and bytes have no file to replace it; "
            "remove it or save elsewhere"
        )


class StreamingDecoder:
    """Text as soon as its characters are whole; all of it together is `tokenizer.decode`'s."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._given = 0  # characters of the context that were given out

    def push(self, token: int) -> str:
        """What this token completes, often one word, sometimes nothing."""
        ids = [*self._context, token]
        new = self._whole(ids)[self._given :]
        if token not in self._tokenizer.special:
            self._context = ids[-CONTEXT:]
            self._given = len(self._whole(self._context))
        return new

    def finish(self) -> str:
        """The rest: U+FFFD if a character was never completed. Then another text may begin."""
        rest = self._tokenizer.decode(self._context)[self._given :]
        self._context, self._given = [], 0
        return rest

    def _whole(self, ids: list[int]) -> str:
        # The next token may complete the last character, and no other: the bytes of an unfinished
        # one make a single U+FFFD.
        return self._tokenizer.decode(ids).removesuffix("\ufffd")


# Files of text


@dataclass(frozen=True)
class TextFile:
    """A text that was checked."""

    path: Path
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Place:
    """Between two tokens of a text."""

    tokens: int
    """How many came before."""
    offset: int
    """First byte of the block that holds the next token."""
    skip: int
    """Tokens of that block that came before."""

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Place:
        names = [f.name for f in fields(cls)]
        numbers = [values.get(name) for name in names]
        if sorted(values) != sorted(names) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"Place: {values}; expected {', '.join(names)}, each 0 or more")
        return cls(**values)


BEGINNING = Place(0, 0, 0)


@dataclass(frozen=True)
class Segment:
    """Some tokens of a text, in order."""

    tokens: list[int]
    place: Place
    """Where the next segment begins."""
    bytes_done: int
    """Bytes of text up to there, within a block by proportion."""


def check_text(path: str | os.PathLike) -> TextFile:
    """Read a text once, in little memory; refuse one that is empty or not UTF-8."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: a directory; expected a text file")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such text file")
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file, and a text is read twice; copy it to one")
    digest, size, lines, blank, rest = hashlib.sha256(), 0, 0, True, b""
    with path.open("rb") as file:
        while True:
            chunk = file.read(BLOCK)
            digest.update(chunk)
            data = rest + chunk
            try:
                text, used = codecs.utf_8_decode(data, "strict", not chunk)
            except UnicodeDecodeError as error:
                line = lines + data.count(b"\n", 0, error.start) + 1
                raise ValueError(
                    f"{path}: not UTF-8 at byte {size + error.start}, line {line} "
                    f"({error.reason}); convert the file to UTF-8"
                ) from error
            blank = blank and not text.strip()
            size += used
            lines += data.count(b"\n", 0, used)
            rest = data[used:]
            if not chunk:
                break
    if blank:
        raise ValueError(f"{path}: {size} bytes without a word; expected a text")
    return TextFile(path, size, digest.hexdigest())


def token_segments(
    file: TextFile, tokenizer: Tokenizer, size: int, start: Place = BEGINNING
) -> Iterator[Segment]:
    """The tokens of a text, `size` at a time; the last segment may have fewer.

    What is tokenised at once depends on the text alone, so the tokens are the same whatever the
    size, and from any `segment.place` on exactly the rest comes.
    """
    if size < 1:
        raise ValueError(f"token_segments: size {size}; expected 1 token or more")
    if not 0 <= start.offset <= file.size or start.skip < 0:
        raise ValueError(
            f"{file.path}: {start} is not in this text of {file.size} bytes; "
            "start from a place that came from it"
        )
    return _segments(file, tokenizer, size, start)


def _segments(file: TextFile, tokenizer: Tokenizer, size: int, start: Place) -> Iterator[Segment]:
    held, count, skip = [], start.tokens, start.skip
    for begin, end, ids in _token_blocks(file, tokenizer, start.offset):
        if skip > len(ids):
            raise ValueError(
                f"{file.path}: {start} does not fit: {len(ids)} tokens in the block there; "
                "go on with the text and the tokenizer that the place came from"
            )
        while skip < len(ids):
            part = ids[skip : skip + size - len(held)]
            held += part
            count += len(part)
            skip += len(part)
            if len(held) == size:
                at_end = skip == len(ids)
                place = Place(count, end, 0) if at_end else Place(count, begin, skip)
                yield Segment(held, place, begin + (end - begin) * skip // len(ids))
                held = []
        skip = 0
    if held:
        yield Segment(held, Place(count, file.size, 0), file.size)


def _token_blocks(
    file: TextFile, tokenizer: Tokenizer, offset: int
) -> Iterator[tuple[int, int, list[int]]]:
    """First byte, end and tokens of every block; one without tokens belongs to that before it."""
    block = None
    for begin, end, text in _blocks(file, offset):
        ids = tokenizer.encode(text)
        if block is not None and not ids:
            block = (block[0], end, block[2])
            continue
        if block is not None:
            yield block
        block = (begin, end, ids)
    if block is not None:
        yield block


def _blocks(file: TextFile, offset: int) -> Iterator[tuple[int, int, str]]:
    """First byte, end and text of every block from this one on."""
    while offset < file.size:
        data = _read(file, offset)
        try:
            used = len(data) if offset + len(data) == file.size else whole_part(data)
            text = data[:used].decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file.path}: not UTF-8 at byte {offset + error.start}, though it was when "
                "checked: the text was changed, or the place is of another; check it again"
            ) from error
        yield offset, offset + used, text
        offset += used


def whole_part(data: bytes) -> int:
    """After the last line end; or the last white space; or else the last whole character."""
    line = data.rfind(b"\n") + 1
    if line:
        return line
    text, whole = codecs.utf_8_decode(data)  # leaves out an unfinished character
    if text[-1].isspace():
        return whole
    word = text.rsplit(None, 1)[-1]
    return whole - len(word.encode()) or whole


def _read(file: TextFile, offset: int) -> bytes:
    """The bytes of the next block, perhaps more; opened anew, so that nothing is left open."""
    try:
        with file.path.open("rb") as opened:
            opened.seek(offset)
            data = opened.read(BLOCK)
            size = os.fstat(opened.fileno()).st_size
    except FileNotFoundError as error:
        raise ValueError(
            f"{file.path}: vanished while it was read, at byte {offset} of {file.size}; "
            "put it back and go on from the last place"
        ) from error
    if size != file.size:
        raise ValueError(
            f"{file.path}: changed while it was read: {file.size} bytes when checked, {size} now; "
            "check it again and read it from the beginning"
        )
    return data


# Checks and files


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"encode: {text[error.start]!r} at position {error.start} of the text is half of a "
            "surrogate pair, which has no UTF-8; read the text as UTF-8"
        ) from error


def _meaningful(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    """The ids that stand for text, after a look at all of them."""
    numbers = [index(i) for i in ids]
    for i in numbers:
        if not 0 <= i < tokenizer.vocab:
            raise ValueError(
                f"decode: id {i} is none of the tokenizer's; expected 0 to {tokenizer.vocab - 1}"
            )
    return [i for i in numbers if i not in tokenizer.special]

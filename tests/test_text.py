"""Text in, text out: tokenizers, decoding as tokens come, files as segments."""

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from atlas_lm import text as module
from atlas_lm.text import (
    BEGINNING,
    ByteTokenizer,
    FileTokenizer,
    Place,
    StreamingDecoder,
    TextFile,
    _blocks,
    check_text,
    load_tokenizer,
    save_tokenizer,
    token_segments,
)

CORPUS = [topics[name] for name in sorted(topics)[:8]]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# 1 to 4 bytes a character, one written as several, text that looks like tokens, every white space
STRANGE = "a  é漢字😀👩‍👩‍👧e\u0301क्षि\ufeff\ufffd</s><|endoftext|><0x41>\r\n\t\x00\u2028\u3000 z"
texts = st.text(st.sampled_from(STRANGE) | st.characters(codec="utf-8"), max_size=60)


def byte_level() -> Tokenizer:
    """As GPT-2 and its family: every byte is a token, and merges cross characters' bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*CORPUS, *["漢字 漢字かな é è"] * 99], trainer)
    return made


def sentencepiece(*, metaspace: bool) -> Tokenizer:
    """As Llama's and Mistral's, old and new: spaces as letters, rare characters as byte tokens."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    if metaspace:
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        made.pre_tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 1), ("</s>", 2)]
    )
    return changed(made, lambda said: said["added_tokens"].__delitem__(slice(3, None)))


def words() -> Tokenizer:
    """White space makes no token."""
    names = ["?", "one", "two", "</s>"]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def changed(tokenizer: Tokenizer, change) -> Tokenizer:
    said = json.loads(tokenizer.to_str())
    change(said)
    return Tokenizer.from_str(json.dumps(said))


def saved(tokenizer: Tokenizer, folder: Path) -> FileTokenizer:
    tokenizer.save(str(folder / "some.json"))
    return FileTokenizer(folder / "some.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def tokenizers(folder) -> dict[str, ByteTokenizer | FileTokenizer]:
    return {
        "bytes": ByteTokenizer(),
        "byte_level": saved(byte_level(), folder),
        "metaspace": saved(sentencepiece(metaspace=True), folder),
        "replace": saved(sentencepiece(metaspace=False), folder),
        "words": saved(words(), folder),
    }


every_tokenizer = pytest.mark.parametrize(
    "name", ["bytes", "byte_level", "metaspace", "replace", "words"]
)


# Tokenizers


def test_bytes_are_themselves():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé\ufeff") == [97, 0xC3, 0xA9, 0xEF, 0xBB, 0xBF]
    assert (tokenizer.vocab, tokenizer.end, tokenizer.special) == (257, 256, {256})
    assert tokenizer.decode([97, 0xC3, 256, 0xA9, 256]) == "aé"
    assert tokenizer.decode([0xC3, 97, 0xFF, 0xF0, 0x9F, 0x98]) == "\ufffda\ufffd\ufffd"


@pytest.mark.parametrize("name", ["bytes", "byte_level", "metaspace", "replace"])
@settings(max_examples=60, deadline=None)
@given(text=texts)
@example(text=STRANGE)
def test_text_comes_back_and_never_as_a_special_token(name, text, tokenizers):
    tokenizer = tokenizers[name]
    if name == "metaspace":
        text = text.replace("▁", "_").lstrip(" ")  # its own sign for a space, and one in front
    if name == "replace":
        text = text.replace("▁", "_")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.special.isdisjoint(ids)


def test_a_file_is_read_as_the_library_reads_it(tokenizers):
    text = "The quick brown def __init__(self): 漢字"
    library = byte_level()
    assert tokenizers["byte_level"].encode(text) == library.encode(text).ids
    assert tokenizers["byte_level"].vocab == library.get_vocab_size() == 400
    library = sentencepiece(metaspace=True)
    assert [1, *tokenizers["metaspace"].encode(text), 2] == library.encode(text).ids


def test_special_ids_are_not_text(tokenizers):
    tokenizer = tokenizers["metaspace"]
    assert (tokenizer.end, tokenizer.special) == (2, {0, 1, 2})
    hello, you = tokenizer.encode("hello"), tokenizer.encode("you")
    assert tokenizer.decode([1, *hello, 2, 0, *you, 2]) == "hello you"
    assert tokenizer.decode([1, 2]) == tokenizer.decode([]) == ""


def test_one_invalid_byte_costs_one_character(tokenizers):
    """The library alone loses all three."""
    tokenizer = tokenizers["metaspace"]
    byte = [tokenizer.encode("\x00")[-1] + i for i in range(256)]
    assert tokenizer.decode([byte[b] for b in b"\xc3\xa9\xff\xc3\xa9"]) == "é\ufffdé"


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"])
def test_the_end_has_one_of_the_usual_names(name, tmp_path):
    made = words()
    made.add_special_tokens([name, "[SEP]"])
    assert saved(made, tmp_path).end == made.token_to_id(name)


def test_an_ordinary_token_is_no_end(tmp_path):
    made = words()
    made.add_special_tokens(["[SEP]"])
    tokenizer = saved(made, tmp_path)
    assert tokenizer.end is None
    assert tokenizer.decode([1, 3, 4]) == "one </s>"


def test_a_file_that_cuts_and_pads_does_neither_here(tmp_path):
    made = words()
    made.enable_truncation(3)
    made.enable_padding(length=9)
    assert saved(made, tmp_path).encode("one two one two") == [1, 2, 1, 2]


def test_ids_with_gaps_are_all_below_vocab(tmp_path):
    made = changed(words(), lambda said: said["model"]["vocab"].update({"three": 9}))
    tokenizer = saved(made, tmp_path)
    assert (tokenizer.vocab, made.get_vocab_size()) == (10, 5)
    assert tokenizer.decode([9, 7, 1]) == "three one"


@pytest.mark.parametrize("bad", [-1, 400, 10**30])
def test_an_id_that_is_none_is_named(bad, tokenizers):
    match = f"^decode: id {bad} is none of the tokenizer's; expected 0 to 399$"
    with pytest.raises(ValueError, match=match):
        tokenizers["byte_level"].decode([0, bad])
    with pytest.raises(ValueError, match=match):
        StreamingDecoder(tokenizers["byte_level"]).push(bad)
    with pytest.raises(ValueError, match=r"^decode: id 257 is .*expected 0 to 256$"):
        ByteTokenizer().decode([1, 257])


@every_tokenizer
def test_half_a_surrogate_pair_is_refused(name, tokenizers):
    match = r"^encode: '\\ud83d' at position 2 of the text is half of .*read the text as UTF-8$"
    with pytest.raises(ValueError, match=match):
        tokenizers[name].encode("ab\ud83d")


# Tokenizer files


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "?"}}'])
def test_a_broken_file_is_named(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path}: not a tokenizer \(.+\); expected a tokenizer"):
        load_tokenizer(tmp_path)


def test_an_untrained_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"some.json: a tokenizer without tokens; train it"):
        saved(Tokenizer(models.BPE()), tmp_path)


def test_what_is_missing_is_named(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"^{path}: no such tokenizer file$"):
            FileTokenizer(path)
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder to load a tokenizer from"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_saved_tokenizer_is_the_same_file(tokenizers, tmp_path):
    save_tokenizer(tokenizers["replace"], tmp_path)
    save_tokenizer(tokenizers["byte_level"], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, FileTokenizer)
    assert (
        loaded.json == tokenizers["byte_level"].json == (tmp_path / "tokenizer.json").read_bytes()
    )
    assert loaded.encode(STRANGE) == tokenizers["byte_level"].encode(STRANGE)
    assert loaded.end == 0


def test_what_is_saved_is_what_was_read_though_its_file_is_gone(tmp_path):
    tokenizer = saved(words(), tmp_path)
    (tmp_path / "some.json").unlink()
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).encode("two one") == [2, 1]


def test_bytes_write_nothing_and_hide_behind_nothing(tokenizers, tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    save_tokenizer(tokenizers["words"], tmp_path)
    with pytest.raises(FileExistsError, match=r"tokenizer.json: another tokenizer is here.*remove"):
        save_tokenizer(ByteTokenizer(), tmp_path)


def test_a_tokenizer_of_your_own_has_no_file(tmp_path):
    with pytest.raises(TypeError, match=r"^save_tokenizer: Mock has no file; expected a FileToken"):
        save_tokenizer(mock.Mock(), tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file(at, error, tokenizers, tmp_path):
    save_tokenizer(tokenizers["words"], tmp_path)
    with mock.patch.object(os, at, side_effect=error), pytest.raises(type(error)):
        save_tokenizer(tokenizers["byte_level"], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizers["words"].json


# Streaming decoding


def pushed(tokenizer, ids) -> list[str]:
    decoder = StreamingDecoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


def test_a_character_comes_when_its_last_byte_does():
    tokenizer = ByteTokenizer()
    assert pushed(tokenizer, "aé😀".encode()) == ["a", "", "é", "", "", "", "😀", ""]
    assert pushed(tokenizer, "漢e\u0301".encode()) == ["", "", "漢", "e", "", "\u0301", ""]
    assert pushed(tokenizer, b"a\xf0\x9f") == ["a", "", "", "\ufffd"]
    assert pushed(tokenizer, b"\xf0\x9fb\xffc") == ["", "", "\ufffdb", "", "\ufffdc", ""]
    assert pushed(tokenizer, [0xC3, 256, 256, 0xA9, 256]) == ["", "", "", "é", "", ""]


def test_byte_tokens_do_not_wait_for_the_word_to_end(tokenizers):
    ids = tokenizers["metaspace"].encode("😀😀 a")
    assert pushed(tokenizers["metaspace"], ids) == ["", *["", "", "", "😀"] * 2, " a", ""]


@every_tokenizer
@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧 😀🏳️‍🌈",
        "漢字かな交じり文 한국어",
        "e\u0301 क्षि ไทย",
        "  two  spaces\n\n  x ",
        CORPUS[0][:3000],
    ],
    ids=["emoji", "cjk", "combining", "spaces", "english"],
)
def test_streamed_text_is_the_text(name, text, tokenizers):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text)
    pieces = pushed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@every_tokenizer
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_stream_as_they_decode(name, data, tokenizers):
    """After every token all that is certain was given, and in the end everything."""
    tokenizer = tokenizers[name]
    spelled = tokenizer.encode("é漢😀 \ufffd  a 漢字")
    some = st.sampled_from([*spelled, *tokenizer.special]) | st.integers(0, tokenizer.vocab - 1)
    ids = data.draw(st.lists(some, max_size=40))
    decoder, given_out = StreamingDecoder(tokenizer), ""
    for count, i in enumerate(ids, 1):
        given_out += decoder.push(i)
        assert given_out == tokenizer.decode(ids[:count]).removesuffix("\ufffd")
    assert given_out + decoder.finish() == tokenizer.decode(ids)


def test_special_tokens_do_not_make_it_forget(tokenizers):
    """As many as it remembers of others, in a word and in a character."""
    tokenizer = tokenizers["replace"]
    (*first, last), ends = tokenizer.encode("a 😀"), [tokenizer.end] * 20
    ids = [*first, *ends, last, *ends, *tokenizer.encode("b")]
    assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids) == "a 😀 b"


def test_a_finished_decoder_begins_anew(tokenizers):
    decoder = StreamingDecoder(tokenizers["metaspace"])
    (hello,) = tokenizers["metaspace"].encode("a")
    assert [decoder.push(hello), decoder.push(hello)] == ["a", " a"]
    assert [decoder.finish(), decoder.finish(), decoder.push(hello)] == ["", "", "a"]


# Checking a text


def written(path: Path, content: str | bytes) -> TextFile:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return check_text(path)


def test_a_checked_text_is_known_by_its_bytes(tmp_path):
    content = "\ufeffAll was well.\r\n漢字\x00".encode() * 9999
    found = written(tmp_path / "book", content)
    assert found == TextFile(tmp_path / "book", 249975, hashlib.sha256(content).hexdigest())
    assert check_text(str(tmp_path / "book")) == found


BAD = {
    "latin1": ("Grüße\n".encode("latin-1"), r"byte 2, line 1 \(invalid start byte\)"),
    "later": (b"a\n" * 50_000 + b"b\xff", r"byte 100001, line 50001 \(invalid start byte\)"),
    "on_a_border": (b"\n" + b"a" * 65_534 + b"\xc3(\n", r"byte 65535, line 2 \(invalid contin"),
    "unfinished": (b"a\n" + "😀".encode()[:3], r"byte 2, line 2 \(unexpected end of data\)"),
    "utf16": ("text".encode("utf-16"), r"byte 0, line 1 \(invalid start byte\)"),
    "surrogate": (b"a\xed\xa0\x80", r"byte 1, line 1 \(invalid continuation byte\)"),
}


@pytest.mark.parametrize(("content", "match"), BAD.values(), ids=BAD.keys())
def test_what_is_not_utf8_is_refused_with_its_place(content, match, tmp_path):
    path = tmp_path / "book"
    with pytest.raises(ValueError, match=rf"^{path}: not UTF-8 at {match}.*; convert the file to"):
        written(path, content)


@pytest.mark.parametrize("content", ["", " \r\n\t\u3000", "\n" * 100_000], ids=len)
def test_a_text_without_a_word_is_refused(content, tmp_path):
    size = len(content.encode())
    with pytest.raises(ValueError, match=f"book: {size} bytes without a word; expected a text$"):
        written(tmp_path / "book", content)


def test_what_is_no_text_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such text file$"):
        check_text(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError, match=f"^{tmp_path}: a directory; expected a text file$"):
        check_text(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: not a regular file, .*; copy it to one$"):
        check_text(tmp_path / "pipe")


# Segments


def blocks(file: TextFile) -> list[str]:
    return [text for _, _, text in _blocks(file, 0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\nthree\n", ["one\ntwo\n", "three\n"]),
        ("a\nbb cc dd ee", ["a\n", "bb cc ", "dd ee"]),
        ("a\r\nb\r\nc\r\nd", ["a\r\nb\r\n", "c\r\nd"]),
        ("aaaaaaaaaaaaaaaaa", ["aaaaaaaa", "aaaaaaaa", "a"]),
        ("aaaaaaé😀b漢漢漢", ["aaaaaaé", "😀b漢", "漢漢"]),
        ("漢\u3000漢漢漢漢", ["漢\u3000", "漢漢", "漢漢"]),
        (" aaaaaaa a", [" ", "aaaaaaa ", "a"]),
        ("a\naaaaaa", ["a\naaaaaa"]),
    ],
)
def test_a_block_ends_at_a_line_or_a_word_or_a_character(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 8)
    assert blocks(written(tmp_path / "book", text)) == expected


@every_tokenizer
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_segments_from_any_place_are_the_same_tokens(name, data, tokenizers, folder):
    text = data.draw(texts.filter(str.strip), "text")
    with mock.patch.object(module, "BLOCK", data.draw(st.integers(4, 30), "block")):
        file, tokenizer = written(folder / "book", text), tokenizers[name]
        assert "".join(blocks(file)) == text
        assert all(0 < len(block.encode()) <= module.BLOCK for block in blocks(file))
        expected = [i for block in blocks(file) for i in tokenizer.encode(block)]

        size = data.draw(st.integers(1, len(expected) + 2), "size")
        found = list(token_segments(file, tokenizer, size))
        assert [s.tokens for s in found] == [
            expected[i : i + size] for i in range(0, len(expected), size)
        ]
        done = [s.bytes_done for s in found]
        assert done == sorted(done)
        assert done[-1:] == [file.size] * bool(expected)
        for segment in found:
            place = Place.from_dict(json.loads(json.dumps(segment.place.to_dict())))
            assert place == segment.place
            rest = list(token_segments(file, tokenizer, 3, place))
            assert [i for s in rest for i in s.tokens] == expected[place.tokens :]
        assert list(token_segments(file, tokenizer, size, found[0].place)) == found[1:]


def test_a_place_is_where_the_next_token_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 8)
    file = written(tmp_path / "book", "abcd\nabcd\nabcd")
    found = [(s.place, s.bytes_done) for s in token_segments(file, ByteTokenizer(), 5)]
    assert found == [(Place(5, 5, 0), 5), (Place(10, 10, 0), 10), (Place(14, 14, 0), 14)]
    found = [s.place for s in token_segments(file, ByteTokenizer(), 4)]
    assert found == [Place(4, 0, 4), Place(8, 5, 3), Place(12, 10, 2), Place(14, 14, 0)]


def test_blocks_without_tokens_belong_to_the_one_before(tokenizers, tmp_path, monkeypatch):
    """The last segment is at the end of the file, though white space comes after its tokens."""
    monkeypatch.setattr(module, "BLOCK", 8)
    file = written(tmp_path / "book", " " * 20 + "one two\n" + " " * 20 + "one\n" + " " * 20)
    (first, second) = token_segments(file, tokenizers["words"], 2)
    assert (first.tokens, first.place, first.bytes_done) == ([1, 2], Place(2, 44, 0), 44)
    assert (second.tokens, second.place, second.bytes_done) == ([1], Place(3, 72, 0), 72)
    assert list(token_segments(file, tokenizers["words"], 2, second.place)) == []


@every_tokenizer
def test_a_very_long_line_is_read(name, tokenizers, tmp_path):
    text = "abc" + "é漢😀" * 25_000  # 225 kB without white space; borders fall into characters
    file, tokenizer = written(tmp_path / "book", text), tokenizers[name]
    assert [len(block.encode()) for block in blocks(file)] == [65_534, 65_536, 65_534, 28_399]
    ids = [i for s in token_segments(file, tokenizer, 10_000) for i in s.tokens]
    assert ids == [i for block in blocks(file) for i in tokenizer.encode(block)]


@pytest.mark.parametrize("name", ["bytes", "byte_level"])
def test_the_tokens_of_a_file_are_its_text(name, tokenizers, tmp_path):
    text = "".join(CORPUS * 5)
    file = written(tmp_path / "book", text)
    assert {block[-1] for block in blocks(file)[:-1]} == {"\n"}
    ids = [i for s in token_segments(file, tokenizers[name], 4096) for i in s.tokens]
    assert tokenizers[name].decode(ids) == text


def test_a_big_file_takes_little_memory(tmp_path):
    line = "It was the best of times, it was the worst of times; é漢😀.\n".encode()
    count = 20_000_000 // len(line)
    with (tmp_path / "book").open("wb") as opened:
        opened.writelines(line for _ in range(count))
    tracemalloc.start()
    try:
        file = check_text(tmp_path / "book")
        tokens, total = 0, 0
        for segment in token_segments(file, ByteTokenizer(), 4096):
            tokens, total = segment.place.tokens, total + sum(segment.tokens)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tokens, total) == (file.size, count * sum(line))
    assert peak < 3_000_000


def test_the_encoding_mark_is_part_of_the_text(tmp_path):
    file = written(tmp_path / "book", b"\xef\xbb\xbfa")
    (segment,) = token_segments(file, ByteTokenizer(), 9)
    assert segment.tokens == [0xEF, 0xBB, 0xBF, 97]


# What goes wrong while reading


@pytest.mark.parametrize("content", [b"a\n" * 90_000, b"a\n" * 110_000, b""], ids=len)
def test_a_text_that_changes_its_size_is_refused(content, tmp_path):
    file = written(tmp_path / "book", b"a\n" * 100_000)
    segments = token_segments(file, ByteTokenizer(), 1000)
    assert next(segments).place.tokens == 1000
    file.path.write_bytes(content)
    match = f"book: changed while it was read: 200000 bytes when checked, {len(content)} now; check"
    with pytest.raises(ValueError, match=match):
        list(segments)


def test_a_text_that_vanishes_is_refused(tmp_path):
    file = written(tmp_path / "book", b"a\n" * 100_000)
    segments = token_segments(file, ByteTokenizer(), 1000)
    place = next(segments).place
    file.path.unlink()
    match = "book: vanished while it was read, at byte 131072 of 200000; put it back"
    with pytest.raises(ValueError, match=match):
        list(segments)
    file.path.write_bytes(b"a\n" * 100_000)
    assert [s.place.tokens for s in token_segments(file, ByteTokenizer(), 99_000, place)] == [
        100_000,
        199_000,
        200_000,
    ]


def test_a_text_that_is_no_more_utf8_is_refused(tmp_path):
    file = written(tmp_path / "book", "ab\n")
    file.path.write_bytes(b"a\xff\n")
    with pytest.raises(ValueError, match="book: not UTF-8 at byte 1, though it was when checked:"):
        list(token_segments(file, ByteTokenizer(), 2))


def test_a_place_in_a_character_is_refused(tmp_path):
    file = written(tmp_path / "book", "é\n")
    with pytest.raises(ValueError, match=r"book: not UTF-8 at byte 1, .* or the place is of anoth"):
        list(token_segments(file, ByteTokenizer(), 2, Place(1, 1, 0)))


@pytest.mark.parametrize("place", [Place(0, 4, 0), Place(0, -1, 0), Place(0, 0, -1)], ids=str)
def test_a_place_outside_the_text_is_refused(place, tmp_path):
    file = written(tmp_path / "book", "ab\n")
    with pytest.raises(
        ValueError, match=r"book: Place\(.*\) is not in this text of 3 bytes; start"
    ):
        token_segments(file, ByteTokenizer(), 2, place)


def test_a_place_of_another_tokenizer_is_refused(tokenizers, tmp_path):
    file = written(tmp_path / "book", "one two\n")
    place = next(token_segments(file, ByteTokenizer(), 5)).place
    match = r"book: Place\(tokens=5, offset=0, skip=5\) does not fit: 2 tokens in .* tokenizer that"
    with pytest.raises(ValueError, match=match):
        list(token_segments(file, tokenizers["words"], 2, place))


def test_segments_of_nothing_are_refused(tmp_path):
    file = written(tmp_path / "book", "ab\n")
    with pytest.raises(ValueError, match=r"^token_segments: size 0; expected 1 token or more$"):
        token_segments(file, ByteTokenizer(), 0)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tokens": 1, "offset": 0},
        BEGINNING.to_dict() | {"line": 3},
        BEGINNING.to_dict() | {"skip": -1},
        BEGINNING.to_dict() | {"skip": 1.0},
        BEGINNING.to_dict() | {"skip": None},
    ],
    ids=str,
)
def test_a_place_is_three_numbers(values):
    with pytest.raises(ValueError, match=r"^Place: \{.*\}; expected tokens, offset, skip, each 0"):
        Place.from_dict(values)

"""Texts into memories: killed anywhere, the same memory in the end; whose memory it is."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from atlas_lm import RULES, LanguageModel, ModelConfig, save_model
from atlas_lm import reading as module
from atlas_lm.memory import load_about
from atlas_lm.reading import load_memory, read_file, rebuild
from atlas_lm.text import ByteTokenizer, FileTokenizer, check_text, token_segments
from atlas_lm.trace import watch_retention

TITANS, DELTA = (replace(RULES[name], chunk=16) for name in ("titans", "delta_net"))
BYTES = ByteTokenizer()
TEXT = topics["assert"] + "Überraschung: 漢字 😀.\n" + topics["break"]
SEGMENT = 300
"""No multiple of a chunk; the text has more than five of them."""


def made(seed: int = 0, **changes) -> LanguageModel:
    torch.manual_seed(seed)
    shape = {"dim": 16, "depth": 2, "heads": 2, "rule": (TITANS, DELTA)}
    return LanguageModel(ModelConfig(**shape | changes)).eval()


MODEL = made()


@pytest.fixture
def book(tmp_path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, "utf-8")
    return path


@pytest.fixture
def second(tmp_path) -> Path:
    path = tmp_path / "second.txt"
    path.write_text(topics["continue"] * 2, "utf-8")
    return path


def read(book: Path, memory: Path, model: LanguageModel = MODEL, **options: Any):
    often: dict[str, Any] = {"segment": SEGMENT, "every": 0}
    return read_file(model, BYTES, book, memory, **often | options)


def content(path: Path) -> str:
    """A fingerprint of all that a memory file holds."""
    return load_memory(path, MODEL).fingerprint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Nothing catches it but us."""


def killing(at: int):
    """A hook that ends a reading after so many segments."""
    calls = iter(range(at + 1))

    def hook(_):
        if next(calls) == at:
            raise Killed

    return hook


# What is read


def test_a_memory_is_what_the_model_has_read(book, tmp_path):
    report = read(book, tmp_path / "memory")
    state = None
    with watch_retention(MODEL) as kept, torch.no_grad():
        for segment in token_segments(check_text(book), BYTES, SEGMENT):
            _, state = MODEL.encode(torch.tensor([segment.tokens]), state)
    found = load_memory(tmp_path / "memory", MODEL, BYTES)
    assert state is not None
    for name, tensor in state.tensors().items():
        torch.testing.assert_close(found.state.tensors()[name], tensor)
    lives = [None if life == float("inf") else life for life in kept.half_lives()]
    assert found.about.half_lives == pytest.approx(lives)
    assert lives[0] is not None
    assert found.fingerprint == report.memory.fingerprint
    assert names(tmp_path) == ["book.txt", "memory"]


def test_a_memory_says_what_it_has_read(book, second, tmp_path):
    size, tokens = book.stat().st_size, len(TEXT.encode())
    report = read(book, tmp_path / "memory")
    assert (report.tokens, report.already) == (tokens, False)
    read(second, tmp_path / "memory", journal=False)
    about = load_about(tmp_path / "memory")
    first, last = about.texts
    assert (first.name, first.path) == ("book.txt", str(book))
    assert (first.bytes, first.tokens) == (size, tokens)
    assert (last.sha256, last.path) == (check_text(second).sha256, None)
    assert about.tokens == int(load_memory(tmp_path / "memory", MODEL).state.position)
    assert about.kv_bytes == 2 * 2 * 16 * 4
    assert about.tokenizer == "bytes"


def test_a_text_is_read_on_top_of_what_was_read_before(book, second, tmp_path):
    read(book, tmp_path / "memory")
    middle = load_memory(tmp_path / "memory", MODEL).state
    found = read(second, tmp_path / "memory").memory.state
    for segment in token_segments(check_text(second), BYTES, SEGMENT):
        with torch.no_grad():
            _, middle = MODEL.encode(torch.tensor([segment.tokens]), middle)
    for name, tensor in middle.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor)


def test_a_text_that_was_just_read_is_not_read_again_unless_told(book, second, tmp_path):
    first = read(book, tmp_path / "memory").memory
    assert read(book, tmp_path / "memory").already
    assert content(tmp_path / "memory") == first.fingerprint
    assert not read(book, tmp_path / "memory", again=True).already
    assert int(load_memory(tmp_path / "memory", MODEL).state.position) == 2 * first.about.tokens
    read(second, tmp_path / "memory")
    assert not read(book, tmp_path / "memory").already  # it is no longer the last
    texts = [text.name for text in load_about(tmp_path / "memory").texts]
    assert texts == ["book.txt", "book.txt", "second.txt", "book.txt"]


def test_progress_tells_bytes_and_tokens(book, tmp_path):
    steps = []
    read(book, tmp_path / "memory", progress=steps.append)
    size = book.stat().st_size
    assert steps[0].bytes == steps[0].tokens == 0
    assert steps[-1].bytes == steps[-1].total == size
    assert [step.tokens for step in steps[1:-1]] == [*range(SEGMENT, size, SEGMENT), size]
    assert [step.bytes for step in steps] == sorted(step.bytes for step in steps)


# Killed


BLOCKS = {
    "plain": MODEL,
    "mac": made(rule=TITANS, block="mac", segment=64, depth=1),
    "attention": made(rule=(TITANS, "swa"), window=32),
}


@pytest.mark.parametrize("model", BLOCKS.values(), ids=BLOCKS.keys())
def test_killed_after_any_segment_it_ends_in_the_same_bits(model, book, second, tmp_path):
    read(second, tmp_path / "start", model)
    start = (tmp_path / "start").read_bytes()
    steps = []
    whole = read(book, tmp_path / "start", model, every=1e9, progress=steps.append)
    for at in range(len(steps)):
        memory = tmp_path / f"killed {at}"
        memory.write_bytes(start)
        with pytest.raises(Killed):
            read(book, memory, model, progress=killing(at))
        assert memory.read_bytes() == start
        report = read(book, memory, model, every=1e9)
        assert report.tokens == whole.tokens - steps[at].tokens
        found = load_memory(memory, model)
        assert found.about == whole.memory.about
        assert found.fingerprint == whole.memory.fingerprint
    assert not [name for name in names(tmp_path) if "part" in name]


def test_killed_again_and_again_it_ends_in_the_same_bits(book, tmp_path):
    expected = read(book, tmp_path / "whole").memory.fingerprint
    for _ in range(5):  # one segment further each time
        with pytest.raises(Killed):
            read(book, tmp_path / "memory", progress=killing(1))
    read(book, tmp_path / "memory")
    assert content(tmp_path / "memory") == expected


def test_a_state_that_goes_on_lies_in_memory_as_a_loaded_one(book, tmp_path):
    seen = []
    run = module._read_segment

    def look(model, tokens, reached):
        seen.append({n: (t.stride(), t.dtype) for n, t in reached.state.tensors().items()})
        assert not any(t.data_ptr() % 64 for t in reached.state.tensors().values() if t.numel())
        return run(model, tokens, reached)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_read_segment", look)
        with pytest.raises(Killed):
            read(book, tmp_path / "memory", progress=killing(2))
        read(book, tmp_path / "memory")
    assert len(seen) > 4
    assert all(each == seen[0] for each in seen)


KILLS = """
import os, signal, sys
from pathlib import Path
import torch
from atlas_lm import load_model
from atlas_lm.reading import load_memory, read_file
from atlas_lm.text import ByteTokenizer

folder, model, left = Path(sys.argv[1]), load_model(sys.argv[2]), 10**9

def read(memory):
    again = memory.name.startswith("again")
    read_file(model, ByteTokenizer(), folder / "book.txt", memory, segment=900, every=0,
              again=again, progress=lambda _: count())

def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def watched(function):
    def call(*args, **kwargs):
        count()
        out = function(*args, **kwargs)
        count()
        return out
    return call

os.replace, os.fsync, Path.unlink = (watched(f) for f in (os.replace, os.fsync, Path.unlink))
begun = (folder / "begun").read_bytes()
for name in ("fresh", "again"):
    if name == "again":
        (folder / name).write_bytes(begun)
    read(folder / name)
    expected, moments = load_memory(folder / name, model).fingerprint, 10**9 - left
    for moment in range(1, moments + 1):
        memory = folder / f"{name}{moment}"
        if name == "again":
            memory.write_bytes(begun)
        child = os.fork()
        if child == 0:
            left = moment
            read(memory)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, (name, moment)
        if name == "fresh" or moment < moments:  # after that, --again is a new command
            read(memory)
        assert load_memory(memory, model).fingerprint == expected, (name, moment)
    left = 10**9
    print(moments)
assert not [path for path in folder.iterdir() if "part" in path.name or path.name[0] == "."]
"""


def test_a_real_kill_at_any_moment_changes_nothing(book, tmp_path):
    """SIGKILL before and after every sync, rename and removal, and after every segment."""
    save_model(MODEL, tmp_path / "model")
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "book.txt").write_text(TEXT, "utf-8")
    read(folder / "book.txt", folder / "begun")
    command = [sys.executable, "-c", KILLS, folder, tmp_path / "model"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr
    assert all(int(moments) > 20 for moments in done.stdout.split())


def test_an_interrupted_reading_is_saved(book, tmp_path):
    def interrupt(step):
        if step.tokens == 2 * SEGMENT:
            raise KeyboardInterrupt

    expected = read(book, tmp_path / "whole").memory.fingerprint
    with pytest.raises(KeyboardInterrupt, match=r"600 tokens, kept in .*memory\.part; the same"):
        read(book, tmp_path / "memory", every=1e9, progress=interrupt)
    assert names(tmp_path) == ["book.txt", "memory.part", "whole"]
    assert read(book, tmp_path / "memory").tokens == len(TEXT.encode()) - 2 * SEGMENT
    assert content(tmp_path / "memory") == expected


def test_what_a_killed_save_left_is_removed(book, tmp_path):
    for name in (".memory.0123456789abcdef", ".memory.part.0123456789abcdef"):
        (tmp_path / name).write_text("half of a file")
    others = [".memory.txt", ".memory2.0123456789abcdef"]
    for name in others:
        (tmp_path / name).write_text("of somebody else")
    read(book, tmp_path / "memory")
    assert names(tmp_path) == [*others, "book.txt", "memory"]


# What an unfinished reading is of


def unfinished(book: Path, memory: Path, model: LanguageModel = MODEL) -> bytes:
    with pytest.raises(Killed):
        read(book, memory, model, progress=killing(2))
    return memory.with_name(memory.name + ".part").read_bytes()


OTHERS = {
    "text": ({"text": TEXT + "more"}, "of another text"),
    "memory": ({"start": True}, "that began with another memory than .*memory is now"),
    "segment": ({"segment": 400}, "in segments of 300 tokens, not 400"),
}


@pytest.mark.parametrize(("change", "match"), OTHERS.values(), ids=OTHERS.keys())
def test_an_unfinished_reading_of_something_else_is_refused(change, match, book, second, tmp_path):
    memory, part = tmp_path / "memory", tmp_path / "memory.part"
    left, change = unfinished(book, memory), dict(change)
    book.write_text(change.pop("text", TEXT), "utf-8")
    if change.pop("start", False):
        read(second, tmp_path / "other").memory.save(memory)
    before = memory.read_bytes() if memory.exists() else None
    with pytest.raises(ValueError, match=rf"part: an unfinished reading {match}.*--restart"):
        read(book, memory, **change)
    assert part.read_bytes() == left
    assert (memory.read_bytes() if memory.exists() else None) == before
    report = read(book, memory, restart=True, **change)
    assert report.tokens == book.stat().st_size
    assert not part.exists()


def test_an_unfinished_reading_of_another_model_is_refused(book, tmp_path):
    unfinished(book, tmp_path / "memory", made(seed=1))
    with pytest.raises(ValueError, match=r"with another model, [0-9a-f]{12}; this one is"):
        read(book, tmp_path / "memory")


@pytest.mark.parametrize("content", [b"", b"junk", None], ids=["empty", "junk", "no_progress"])
def test_a_part_that_is_none_is_refused_until_discarded(content, book, tmp_path):
    part = tmp_path / "memory.part"
    if content is None:
        read(book, tmp_path / "memory")
        (tmp_path / "memory").rename(part)
    else:
        part.write_bytes(content)
    with pytest.raises(ValueError, match=r"part: no unfinished reading .*--restart"):
        read(book, tmp_path / "memory")
    read(book, tmp_path / "memory", restart=True)
    assert not part.exists()


def test_a_text_that_changes_while_it_is_read_is_refused(book, tmp_path):
    def change(step):
        if step.tokens == 2 * SEGMENT:
            book.write_text(TEXT.replace("a", "b"), "utf-8")

    with pytest.raises(ValueError, match=r"book\.txt: changed since it was read"):
        read(book, tmp_path / "memory", progress=change)
    assert not (tmp_path / "memory").exists()


# Whose memory it is


def test_a_memory_of_another_model_is_refused_naming_both(book, tmp_path):
    read(book, tmp_path / "memory")
    match = r"another model: it is of [0-9a-f]{12}, this model is [0-9a-f]{12}; `atlas-lm rebuild`"
    for call in (load_memory, lambda path, model: read(book, path, model)):
        with pytest.raises(ValueError, match=match):
            call(tmp_path / "memory", made(seed=1))


def test_a_memory_of_another_tokenizer_is_refused(book, tmp_path):
    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(257)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    other = FileTokenizer(tmp_path / "tokenizer.json")
    read(book, tmp_path / "memory")
    with pytest.raises(ValueError, match="another tokenizer: it is of bytes, the model has token"):
        load_memory(tmp_path / "memory", MODEL, other)
    read_file(MODEL, other, book, tmp_path / "words")
    assert load_memory(tmp_path / "words", MODEL, other).about.tokens == len(other.encode(TEXT))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(book, tmp_path):
    with pytest.raises(ValueError, match="tokenizer: it has 257 ids, the model 100"):
        read(book, tmp_path / "memory", made(vocab=100))
    assert names(tmp_path) == ["book.txt"]


def test_a_file_that_does_not_say_whose_it_is_is_refused(tmp_path):
    MODEL.begin(1).save(tmp_path / "memory")
    with pytest.raises(ValueError, match="memory: does not say which model"):
        load_memory(tmp_path / "memory", MODEL)


def test_several_rows_are_no_memory(book, tmp_path):
    memory = read(book, tmp_path / "memory").memory
    replace(memory, state=memory.state.expand(2)).save(tmp_path / "memory")
    with pytest.raises(ValueError, match="memory: a ModelState; expected the memory of one reader"):
        load_memory(tmp_path / "memory", MODEL)


# Again with another model


def test_all_texts_are_read_again_with_another_model(book, second, tmp_path):
    other = made(seed=1)
    for text in (book, second):
        read_file(MODEL, BYTES, text, tmp_path / "old")
        read_file(other, BYTES, text, tmp_path / "expected")
    report = rebuild(other, BYTES, tmp_path / "old", tmp_path / "new")
    found, expected = (load_memory(tmp_path / name, other) for name in ("new", "expected"))
    assert [text.name for text in report.texts] == ["book.txt", "second.txt"]
    assert found.about.texts == expected.about.texts
    for name, tensor in expected.state.tensors().items():
        assert torch.equal(found.state.tensors()[name], tensor)
    assert rebuild(other, BYTES, tmp_path / "old", tmp_path / "new").already
    with pytest.raises(FileExistsError, match="old: there is a file already, of something else"):
        rebuild(other, BYTES, tmp_path / "old", tmp_path / "old")


def test_a_killed_rebuild_goes_on(book, second, tmp_path):
    options: dict[str, Any] = {"segment": SEGMENT, "every": 0}
    for text in (book, second):
        read(text, tmp_path / "old")
    steps = []
    old = tmp_path / "old"
    whole = rebuild(MODEL, BYTES, old, tmp_path / "all", progress=steps.append, **options)
    for at in range(len(steps)):
        new = tmp_path / f"new{at}"
        with pytest.raises(Killed):
            rebuild(MODEL, BYTES, old, new, progress=killing(at), **options)
        rebuild(MODEL, BYTES, old, new, **options)
        assert content(new) == whole.memory.fingerprint


def test_a_rebuild_begins_only_when_all_texts_are_as_they_were(book, second, tmp_path):
    for text in (book, second):
        read(text, tmp_path / "old")
    second.write_text("something else")
    with pytest.raises(ValueError, match=r"second\.txt: changed since it was read: its sha256"):
        rebuild(MODEL, BYTES, tmp_path / "old", tmp_path / "new")
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"second\.txt: no such text file"):
        rebuild(MODEL, BYTES, tmp_path / "old", tmp_path / "new")
    assert names(tmp_path) == ["book.txt", "old"]


def test_a_rebuild_needs_a_journal(book, tmp_path):
    read(book, tmp_path / "old", journal=False)
    with pytest.raises(ValueError, match=r"old: has no journal: .*where book\.txt lies"):
        rebuild(MODEL, BYTES, tmp_path / "old", tmp_path / "new")
    unfinished(book, tmp_path / "other")
    with pytest.raises(ValueError, match="has no journal: it has not read any text to its end"):
        rebuild(MODEL, BYTES, tmp_path / "other.part", tmp_path / "new")


# Disks and folders


@pytest.mark.parametrize("moment", [1, 3, 8], ids=["first", "third", "last"])
def test_a_full_disk_leaves_the_old_memory(moment, book, second, tmp_path, monkeypatch):
    read(second, tmp_path / "memory")
    old, fsync, calls = (tmp_path / "memory").read_bytes(), os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) >= moment:
            raise OSError(28, "No space left on device")
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"no space for its .* bytes; the file is as it was"):
            read(book, tmp_path / "memory")
    assert (tmp_path / "memory").read_bytes() == old
    assert [name for name in names(tmp_path) if name.startswith(".")] == []
    read(book, tmp_path / "memory")
    (tmp_path / "other").write_bytes(old)
    assert content(tmp_path / "memory") == read(book, tmp_path / "other").memory.fingerprint


def test_a_folder_that_cannot_be_written_to_is_noticed_at_once(book, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder to put the memory in"):
        read(book, tmp_path / "nowhere" / "memory")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="no permission to put the memory in there"):
        read(book, tmp_path / "memory")


@pytest.mark.parametrize(
    ("options", "match"),
    [({"segment": 0}, "segment: 0; expected 1"), ({"every": float("nan")}, "every: nan; expected")],
    ids=["segment", "every"],
)
def test_options_that_mean_nothing_are_refused(options, match, book, tmp_path):
    with pytest.raises(ValueError, match=match):
        read(book, tmp_path / "memory", **options)
    assert names(tmp_path) == ["book.txt"]

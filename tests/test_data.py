"""Prepared data: the documents that went in, what is refused, and the batches that come out."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

from atlas_lm import __version__
from atlas_lm.cli import main
from atlas_lm.data.prepare import Options, PrepareReport, prepare
from atlas_lm.data.shards import MANIFEST, UNFINISHED, Shards, ShardWriter, claim_folder
from atlas_lm.data.stream import Batches
from atlas_lm.text import BLOCK, ByteTokenizer, FileTokenizer, check_text, token_segments

TEXTS = ["Überraschung: 漢字 😀.\n", topics["assert"], "x", topics["break"], "1984 and 007\n" * 9]
END = 256


def made(out: Path, *sources: Any, again: bool = False, **options: Any) -> PrepareReport:
    return prepare(Options(sources=tuple(map(str, sources)), out=out, **options), again=again)


def lines(path: Path, texts: list[str], field: str = "text") -> Path:
    data = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


def texts_of(folder: Path) -> list[str]:
    """Every document, decoded; each is closed by an end, which stands for no text."""
    shards = Shards.open(folder, verify=True)
    tokenizer, found = shards.tokenizer(), []
    for number in range(shards.documents):
        tokens = shards.document(number).tolist()
        assert tokens[-1] == shards.manifest.end
        assert tokens.count(tokenizer.end) == 1
        found.append(tokenizer.decode(tokens))
    return found


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def book(tmp_path) -> Path:
    return lines(tmp_path / "book.jsonl", TEXTS)


# What is prepared


def test_documents_come_back_as_bytes(book, tmp_path):
    report = made(tmp_path / "out", book)
    shards = Shards.open(tmp_path / "out")
    assert [shards.document(i).tolist() for i in range(5)] == [
        [*text.encode(), END] for text in TEXTS
    ]
    assert shards.lengths.tolist() == [len(text.encode()) + 1 for text in TEXTS]
    assert shards.tokens == report.train.tokens == sum(shards.lengths)
    assert shards.document(1, 3, 7).tolist() == [*TEXTS[1].encode()[3:7]]
    assert (shards.manifest.tokenizer, shards.manifest.dtype) == ("bytes", "uint16")
    assert shards.manifest.version == __version__
    assert shards.manifest.command == f"atlas-lm data prepare {book} --out {tmp_path / 'out'}"
    assert names(tmp_path / "out") == [MANIFEST, "shard-00000.bin", "shard-00000.idx"]


def test_documents_come_back_from_a_trained_tokenizer(book, tmp_path):
    for name in ("out", "same"):
        report = made(tmp_path / name, book, train_tokenizer=300, valid=0.4, seed=1)
    assert sorted(texts_of(tmp_path / "out") + texts_of(tmp_path / "out/valid")) == sorted(TEXTS)
    assert report.train.vocab == 300
    assert report.train.tokens < sum(len(text.encode()) for text in TEXTS)
    for file in names(tmp_path / "out"):
        if not file.endswith(MANIFEST):  # it names the folder
            assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "same" / file).read_bytes()
    tokenizer = FileTokenizer(tmp_path / "out/tokenizer.json")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1984")] == ["1", "9", "8", "4"]
    made(tmp_path / "given", book, tokenizer=str(tmp_path / "out/tokenizer.json"))
    assert texts_of(tmp_path / "given") == TEXTS


def test_a_long_document_has_the_tokens_that_reading_it_has(tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("".join(topics.values())[: 2 * BLOCK + 1000], "utf-8")
    made(tmp_path / "out", text, train_tokenizer=400)
    shards = Shards.open(tmp_path / "out")
    segments = token_segments(check_text(text), shards.tokenizer(), 4096)
    expected = [token for segment in segments for token in segment.tokens]
    assert shards.document(0).tolist() == [*expected, shards.manifest.end]


def test_shards_hold_whole_documents(tmp_path):
    texts = ["a" * 9, "b" * 4, "c" * 4, "d" * 30, "e", "f"]
    made(tmp_path / "out", lines(tmp_path / "x.jsonl", texts), shard_tokens=10)
    shards = Shards.open(tmp_path / "out")
    found = [(shard.documents, shard.tokens) for shard in shards.manifest.shards]
    assert found == [(1, 10), (2, 10), (1, 31), (2, 4)]
    assert texts_of(tmp_path / "out") == texts


def test_large_vocabularies_need_wider_tokens(tmp_path):
    class Wide(ByteTokenizer):
        vocab = 2**16 + 1

    claim_folder(tmp_path)
    with ShardWriter(tmp_path, Wide()) as writer:
        writer.add(np.array([2**16, 3]))
        assert writer.finish("").dtype == "uint32"
    assert Shards.open(tmp_path, verify=True).document(0).tolist() == [2**16, 3]


def test_sources_of_every_kind(tmp_path):
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git/index").write_bytes(b"\xff\0")
    (folder / "b/two.md").write_text("two", "utf-8")
    (folder / "c.gz").write_bytes(gzip.compress(b"three"))
    (folder / "a.txt").write_text("one", "utf-8")
    packed = lines(tmp_path / "more.jsonl.gz", ["four", " \n", "five"], field="body")
    report = made(folder / "out", folder, packed, field="body")
    assert texts_of(folder / "out") == ["one", "two", "three", "four", "five"]
    assert (report.empty, report.bytes) == (1, 19)
    made(folder / "out", folder, again=True)  # its own files are no source
    assert texts_of(folder / "out") == ["one", "two", "three"]


def test_python_brings_texts(tmp_path, monkeypatch):
    made(tmp_path / "manual", "python:manual")
    assert texts_of(tmp_path / "manual") == [topics[name] for name in sorted(topics)]
    library = {
        "b.py": '"""Of b."""\nclass C:\n    """Of C:\n\n      indented.\n    """\n'
        '    async def f(self):\n        "Of f: \\d."\n        def g(): "Of g."\n',
        "a/__init__.py": "if True:\n    def f(): 'Of a.f.'\n",
        "c.py": "x = 1\n",
        "d.py": "no python",
        "test/e.py": "'Of a test.'",
        "site-packages/f.py": "'Of somebody else.'",
    }
    for name, code in library.items():
        (tmp_path / "library" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "library" / name).write_text(code)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "library"))
    made(tmp_path / "docstrings", "python:docstrings")
    assert texts_of(tmp_path / "docstrings") == [
        "a.f\n\nOf a.f.\n",
        "b\n\nOf b.\n\nb.C\n\nOf C:\n\nindented.\n\nb.C.f\n\nOf f: \\d.\n\nb.C.f.g\n\nOf g.\n",
    ]


def test_text_files_are_cut_where_they_should_be(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"one\nmore\n---\r\ntwo ---\n---\n---\nthree")
    report = made(tmp_path / "out", text, separator="---")
    assert texts_of(tmp_path / "out") == ["one\nmore\n", "two ---\n", "three"]
    assert report.empty == 1
    text.write_text("äöü" * 5 + "\n" + "abc\n" * 4, "utf-8")
    made(tmp_path / "cut", text, longest=12)
    assert texts_of(tmp_path / "cut") == ["äöüäöü"] * 2 + ["äöü\nabc\n", "abc\n" * 3]


def test_hugging_face_is_streamed(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return iter([{"text": "one"}, {"text": "two"}])

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    made(tmp_path / "a", "hf:some/name")
    made(tmp_path / "b", "hf:some/name:config:test")
    assert texts_of(tmp_path / "a") == texts_of(tmp_path / "b") == ["one", "two"]
    assert asked == [
        (("some/name", None), {"split": "train", "streaming": True}),
        (("some/name", "config"), {"split": "test", "streaming": True}),
    ]
    for name in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match="expected hf:NAME, hf:NAME:CONFIG or"):
            made(tmp_path / "c", name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"hf:x: .*datasets; pip install 'atlas-lm\[data\]'"):
        made(tmp_path / "c", "hf:x")


def test_content_and_seed_decide_what_is_kept_for_validation(tmp_path):
    texts = [f"document {i}" for i in range(400)]
    sides = {}
    for name, order, seed in (("a", texts, 0), ("b", texts[::-1], 0), ("c", texts, 1)):
        made(tmp_path / name, lines(tmp_path / "x.jsonl", order), valid=0.1, seed=seed)
        train, valid = texts_of(tmp_path / name), texts_of(tmp_path / name / "valid")
        assert [text for text in order if text not in valid] == train
        assert 20 < len(valid) < 60
        sides[name] = set(valid)
        assert len(train) + len(valid) == 400
    assert sides["a"] == sides["b"] != sides["c"]


def test_progress_tells_bytes_and_tokens(book, tmp_path):
    steps = []
    options = Options(sources=(str(book), "python:manual"), out=tmp_path / "out")
    report = prepare(options, progress=steps.append)
    total = book.stat().st_size + sum(len(text.encode()) for text in topics.values())
    assert (steps[0].bytes, steps[-1].bytes) == (0, total)
    assert {step.total for step in steps} == {total}
    assert steps[-1].tokens == report.train.tokens
    assert [step.bytes for step in steps] == sorted(step.bytes for step in steps)
    made_of, steps = len(steps), []
    trained = replace(options, train_tokenizer=300)
    prepare(trained, again=True, progress=steps.append)
    assert len(steps) == 2 * made_of - 1  # the documents are gone through twice
    assert [step.tokens for step in steps[:made_of]] == [0] * made_of


# What is refused


REFUSED = {
    "empty": ("x.txt", b" \n", "x.txt: no document with a word in it, 1 without"),
    "nothing": ("x.jsonl", b"", "x.jsonl: no document with a word in it, 0 without"),
    "binary": ("x.txt", b"abc\0", "x.txt: binary: a zero at byte 3"),
    "latin": ("x.txt", b"a\n---\nb\xfc\n", r"x.txt: not UTF-8 at byte 7 \(invalid start byte\)"),
    "long_latin": ("x.txt", b"a" * 11 + b"\xfc" * 9, "x.txt: not UTF-8 at byte 11"),
    "late_latin": ("x.txt", b"a" * 20 + b"\xfc", "x.txt: not UTF-8 at byte 20"),
    "half": ("x.txt", "ü".encode()[:1], "x.txt: not UTF-8 at byte 0"),
    "json": ("x.jsonl", b'{"text": "a"}\n\n{"text"\n', "x.jsonl: line 3: not JSON"),
    "list": ("x.jsonl", b"[1]\n", "x.jsonl: line 1: a list; expected an object with 'text'"),
    "field": ("x.jsonl", b'{"a": 1, "b": 2}', "line 1: no 'text'; it has a, b; choose with --f"),
    "number": ("x.jsonl", b'{"text": 1}', "line 1: 'text' is a int; expected text"),
    "surrogate": ("x.jsonl", b'{"text": "\\ud800"}', "line 1: 'text' has half of a surrogate"),
    "json_latin": ("x.jsonl", b'{"text": "a"}\n"\xfc"', "x.jsonl: not UTF-8 at byte 15"),
    "gzip": ("x.gz", b"abc", "x.gz: not a whole gzip file"),
    "half_gzip": ("x.gz", gzip.compress(b"abc" * 999)[:-9], "x.gz: not a whole gzip file"),
}


@pytest.mark.parametrize(("name", "data", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_sources_that_are_no_text_are_refused(name, data, match, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=match):
        made(tmp_path / "out", tmp_path / name, separator="---", longest=16)
    with pytest.raises(ValueError, match=r"out: its preparation is not finished: it has no mani"):
        Shards.open(tmp_path / "out")
    assert not [file for file in names(tmp_path / "out") if file.startswith(".")]


OPTIONS = {
    "sources": ({"sources": ()}, "sources: none"),
    "python": ({"sources": ("python:x",)}, "python:x: unknown; expected python:manual or"),
    "missing": ({"sources": ("nowhere",)}, "nowhere: no such file or folder"),
    "valid": ({"valid": 1.0}, "valid: 1.0; expected a part"),
    "shard": ({"shard_tokens": 0}, "shard_tokens: 0; expected 1"),
    "longest": ({"longest": 3}, "longest: 3; expected 4 bytes"),
    "small": ({"train_tokenizer": 256}, "train_tokenizer: 256; expected 257"),
    "both": ({"train_tokenizer": 300, "tokenizer": "x"}, "tokenizer: x, and one is trained"),
    "no_file": ({"tokenizer": "nowhere"}, "nowhere: no such tokenizer file"),
}


@pytest.mark.parametrize(("change", "match"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options_that_mean_nothing_are_refused(change, match, book, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        prepare(Options(**{"sources": (str(book),), "out": tmp_path / "out"} | change))
    assert names(tmp_path) == ["book.jsonl"]


def test_a_side_without_documents_is_refused(book, tmp_path):
    with pytest.raises(ValueError, match=r"valid: --valid 1e-09 of 5 documents left none for it"):
        made(tmp_path / "out", book, valid=1e-9)
    with pytest.raises(ValueError, match=r"out: --valid 0.999999 of 5 documents left none"):
        made(tmp_path / "out", book, valid=0.999999)


def test_other_peoples_files_are_left_alone(book, tmp_path):
    out = tmp_path / "out"
    (out / "valid").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    (out / "valid/tokenizer.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"valid/tokenizer\.json: a file of something else"):
        made(out, book, valid=0.4, seed=1)
    assert names(out) == ["notes.txt", "valid/tokenizer.json"]
    for file in (".shard-00000.bin.swp", "shard-1.bin"):
        (out / file).write_text("mine")
    made(out, book)
    made(out, book, again=True)
    assert (out / "shard-1.bin").read_text() == (out / ".shard-00000.bin.swp").read_text() == "mine"
    assert (out / "valid/tokenizer.json").read_text() == "{}"
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json: no manifest of prepared data"):
        made(tmp_path / "model", book, again=True)
    assert names(tmp_path / "model") == [MANIFEST]


def test_finished_data_is_replaced_only_when_told(book, tmp_path):
    made(tmp_path / "out", book, train_tokenizer=300, valid=0.4, seed=1)
    with pytest.raises(FileExistsError, match=r"out: prepared data is here already; --again"):
        made(tmp_path / "out", book)
    made(tmp_path / "out", book, again=True)
    assert texts_of(tmp_path / "out") == TEXTS
    assert names(tmp_path / "out") == [MANIFEST, "shard-00000.bin", "shard-00000.idx"]


# Damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "cut_tokens": (cut, "shard-00001.bin", r"[\d,]+ bytes; expected [\d,]+"),
    "cut_index": (cut, "shard-00000.idx", r"[\d,]+ bytes; expected [\d,]+"),
    "gone": (Path.unlink, "shard-00001.bin", "missing"),
    "index": (flip, "shard-00000.idx", r"no index of \d+ tokens"),
    "tokenizer": (flip, "tokenizer.json", "its sha256 is"),
    "no_tokenizer": (Path.unlink, "tokenizer.json", "missing"),
}


@pytest.mark.parametrize(("damage", "file", "match"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_data_is_refused(damage, file, match, book, tmp_path):
    made(tmp_path, book, train_tokenizer=300, shard_tokens=400)
    damage(tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file}: {match}.*; the data was damaged, prepare it a"):
        Shards.open(tmp_path)


def test_checksums_are_compared_when_asked(book, tmp_path):
    made(tmp_path, book, shard_tokens=400)
    flip(tmp_path / "shard-00001.bin")
    Shards.open(tmp_path)
    with pytest.raises(ValueError, match=r"shard-00001\.bin: its sha256 is .*prepare it again"):
        Shards.open(tmp_path, verify=True)


def test_manifests_that_are_none_are_refused(book, tmp_path):
    made(tmp_path, book)
    good = json.loads((tmp_path / MANIFEST).read_bytes())
    changes = ({"tokens": 1}, {"format": "x"}, {"dtype": "int8"}, {"shards": []}, {"more": 1})
    for data in ("junk", "[]", *(json.dumps(good | change) for change in changes)):
        (tmp_path / MANIFEST).write_text(data)
        with pytest.raises(ValueError, match=r"manifest\.json: no manifest of prepared data"):
            Shards.open(tmp_path)


def test_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder of prepared data"):
        Shards.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no prepared data: it has no manifest"):
        Shards.open(tmp_path)


KILLS = """
import os, signal, sys
from pathlib import Path
from atlas_lm.data.prepare import Options, prepare
from atlas_lm.data.shards import Shards

folder, left = Path(sys.argv[1]), 10**9
first = Options(sources=(str(folder / "book.jsonl"),), out=folder / "out", shard_tokens=400)
second = Options(sources=(str(folder / "more.jsonl"),), out=folder / "out", valid=0.2)

def watched(function):
    def call(*args, **kwargs):
        count()
        out = function(*args, **kwargs)
        count()
        return out
    return call

def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def sums(name="out"):
    return [shard.sha256 for shard in Shards.open(folder / name, verify=True).manifest.shards]

os.replace, os.fsync, Path.unlink = (watched(f) for f in (os.replace, os.fsync, Path.unlink))
prepare(first)
old, before = sums(), left
prepare(second, again=True)
new, new_valid, moments = sums(), sums("out/valid"), before - left
seen = set()
for moment in range(1, moments + 1):
    left = 10**9
    prepare(first, again=True)
    child = os.fork()
    if child == 0:
        left = moment
        prepare(second, again=True)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, moment
    try:
        found = "old" if sums() == old else "new" if sums() == new else "neither"
    except ValueError as error:
        assert "its preparation is not finished" in str(error), error
        found = "unfinished"
    assert found != "new" or sums("out/valid") == new_valid, moment
    seen.add(found)
    prepare(second, again=found != "unfinished")
    assert (sums(), sums("out/valid")) == (new, new_valid), moment
    assert not [path for path in (folder / "out").rglob(".*")], moment
print(moments, *sorted(seen))
"""


def test_a_real_kill_at_any_moment_leaves_old_data_or_new_or_unfinished(book, tmp_path):
    """SIGKILL before and after every sync, rename and removal."""
    lines(tmp_path / "more.jsonl", [f"document {i}" for i in range(20)])
    command = [sys.executable, "-c", KILLS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    moments, *seen = done.stdout.split()
    assert int(moments) > 30
    assert seen == ["new", "old", "unfinished"]


def test_a_full_disk_leaves_no_manifest(book, tmp_path, monkeypatch):
    fsync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="o space"):
            made(tmp_path / "out", book)
    assert names(tmp_path / "out") == [UNFINISHED, "shard-00000.bin"]
    made(tmp_path / "out", book)
    assert texts_of(tmp_path / "out") == TEXTS


# Batches


LENGTHS = [5, 1, 17, 8, 3, 29, 2, 12, 7, 40, 6, 11, 23, 9, 4, 31, 1, 14, 20, 10]
TOTAL = sum(LENGTHS)


@pytest.fixture
def numbered(tmp_path) -> Shards:
    """Documents whose tokens all differ: token n is the n-th of the data."""
    return of_lengths(tmp_path / "numbered", LENGTHS, shard_tokens=60)


def of_lengths(path: Path, lengths: list[int], shard_tokens: int = 2**26) -> Shards:
    claim_folder(path)
    with ShardWriter(path, ByteTokenizer(), shard_tokens) as writer:
        ends = np.cumsum([0, *lengths])
        for begin, end in pairwise(ends):
            writer.add(np.arange(begin, end))
        writer.finish("")
    return Shards.open(path)


def taken(batches: Batches, steps: int) -> list[tuple[list, list]]:
    return [(b.tokens.tolist(), b.reset.tolist()) for b in (next(batches) for _ in range(steps))]


def first_epoch(batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and resets of every row of the epoch that begins."""
    found = [next(batches) for _ in range(batches.epoch_steps)]
    for one, two in pairwise(found):
        assert torch.equal(one.tokens[:, -1], two.tokens[:, 0])
        assert torch.equal(one.reset[:, -1], two.reset[:, 0])
    parts = [found[0].tokens[:, :1], *(batch.tokens[:, 1:] for batch in found)]
    resets = [found[0].reset[:, :1], *(batch.reset[:, 1:] for batch in found)]
    return torch.cat(parts, 1), torch.cat(resets, 1)


@pytest.mark.parametrize("length", [1, 7, 16])
@pytest.mark.parametrize("batch", [1, 4])
def test_an_epoch_has_every_document_once_up_to_what_is_dropped(numbered, batch, length):
    batches = Batches(numbered, batch=batch, length=length, seed=3)
    tokens, reset = first_epoch(batches)
    assert tokens.dtype == torch.int64
    starts = np.cumsum([0, *LENGTHS])
    seen = tokens.flatten().tolist()
    assert len(seen) == len(set(seen)) == TOTAL - batches.dropped
    assert torch.equal(reset, torch.isin(tokens, torch.tensor(starts)))
    assert reset[:, 0].all()
    follows = tokens[:, 1:] == tokens[:, :-1] + 1
    assert follows[~reset[:, 1:]].all()
    ends = torch.isin(tokens[:, :-1], torch.tensor(starts[1:] - 1))
    assert ends[reset[:, 1:]].all()  # a document begins only where another has ended
    if batch == 1:
        assert batches.dropped < length


def test_only_the_shortest_row_ends_an_epoch(numbered):
    batches = Batches(numbered, batch=4, length=1)
    spread = batches.dropped
    assert 0 < spread <= 3 * max(LENGTHS)
    assert batches.epoch_steps + 1 == (TOTAL - spread) // 4


def test_every_epoch_and_seed_has_another_order(numbered):
    batches = Batches(numbered, batch=2, length=8)
    orders = []
    for epoch in range(3):
        assert batches.epoch == epoch
        orders.append(first_epoch(batches)[0].tolist())
        taken(batches, 1)
        batches.load_state_dict(batches.state_dict() | {"epoch_step": 0})
    orders.append(first_epoch(Batches(numbered, batch=2, length=8, seed=1))[0].tolist())
    orders.append(first_epoch(Batches(numbered, batch=2, length=8, seed=0))[0].tolist())
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
    assert orders[0] == orders[4]


def test_the_order_is_the_same_for_ever(numbered):
    """A change of it would make a run that is taken up see other data than it began with."""
    tokens = [tokens for tokens, _ in taken(Batches(numbered, batch=2, length=8, seed=5), 40)]
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    assert digest[:16] == "219b7abb427e946c"


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_sees_the_same_rows(numbered, ranks):
    whole = taken(Batches(numbered, batch=4, length=7), 40)
    parts = [
        taken(Batches(numbered, batch=4, length=7, rank=rank, ranks=ranks), 40)
        for rank in range(ranks)
    ]
    for step, (tokens, reset) in enumerate(whole):
        assert [row for part in parts for row in part[step][0]] == tokens
        assert [row for part in parts for row in part[step][1]] == reset


def test_taken_up_at_any_step_it_goes_on_as_if_run_through(numbered, monkeypatch):
    batches, states = Batches(numbered, batch=4, length=9, seed=2), []
    whole = []
    for _ in range(25):
        states.append(json.loads(json.dumps(batches.state_dict())))
        whole += taken(batches, 1)
    assert states[-1]["epoch"] > 2
    for step, state in enumerate(states):
        again = Batches(numbered, batch=4, length=9, seed=2)
        planned, calls = again._planned, []
        monkeypatch.setattr(again, "_planned", lambda n, p=planned, c=calls: c.append(n) or p(n))
        again.load_state_dict(state)
        assert len(calls) == 1  # nothing before it is gone through
        assert again.step == step
        assert taken(again, 25 - step) == whole[step:]
    half = Batches(numbered, batch=4, length=9, seed=2, rank=1, ranks=2)
    half.load_state_dict(states[5])
    assert taken(half, 1)[0][0] == whole[5][0][2:]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1}, "the state is of seed 1, these are of 0"),
        ({"data": 1}, "the state is of data 1"),
        ({"length": 9}, "the state is of length 9, these are of 8"),
        ({"epoch_step": 10**6}, r"batch 1000000 of epoch 0, step 0; that epoch has \d+ batches"),
        ({"more": 1}, "a state of .*more; expected batch, length, seed, data, step, epoch, epoch_"),
    ],
)
def test_states_of_other_batches_are_refused(numbered, change, match):
    batches = Batches(numbered, batch=2, length=8)
    with pytest.raises(ValueError, match=match):
        batches.load_state_dict(batches.state_dict() | change)


def test_one_document_is_enough_for_one_row(tmp_path):
    batches = Batches(of_lengths(tmp_path, [9]), batch=1, length=4)
    assert batches.epoch_steps == 2
    first = ([[0, 1, 2, 3, 4]], [[True, False, False, False, False]])
    second = ([[4, 5, 6, 7, 8]], [[False] * 5])
    assert taken(batches, 4) == [first, second] * 2
    assert (batches.epoch, batches.step, batches.dropped) == (1, 4, 0)


def test_too_little_data_is_refused_with_the_numbers(tmp_path):
    small = of_lengths(tmp_path / "small", [9, 9])
    match = "18 tokens in 2 documents are too few .* 2 rows x 9 tokens: expected 20 tokens in 2 d"
    with pytest.raises(ValueError, match=match):
        Batches(small, batch=2, length=9)
    with pytest.raises(ValueError, match="expected 9 tokens in 3 documents"):
        Batches(small, batch=3, length=2)
    uneven = of_lengths(tmp_path / "uneven", [3, 90])
    with pytest.raises(ValueError, match=r"no batch of 2 rows x 4 .* has 90 of all 93 tokens"):
        Batches(uneven, batch=2, length=4)


def test_epochs_without_a_batch_are_left_out(tmp_path):
    """Whether the short documents share a row, the order decides."""
    shards = of_lengths(tmp_path, [6, 4, 4])
    batches = Batches(shards, batch=2, length=5)
    lone = [n for n in range(40) if not batches._planned(n).steps]
    assert 0 < len(lone) < 40
    epochs = []
    for _ in range(10):
        next(batches)
        epochs.append(batches.epoch)
    assert epochs == [n for n in range(epochs[-1] + 1) if n not in lone]


@pytest.mark.parametrize(
    "options",
    [{"batch": 0}, {"length": 0}, {"seed": -1}, {"rank": 2, "ranks": 2}, {"batch": 3, "ranks": 2}],
)
def test_batches_that_mean_nothing_are_refused(numbered, options):
    with pytest.raises(ValueError, match="expected"):
        Batches(numbered, **{"batch": 2, "length": 4} | options)


# The command


def test_the_command_prepares_and_shows(book, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "data prepare book.jsonl --out out --valid 0.4 --seed 1 --train-tokenizer 300"
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    made, kept = (Shards.open(name) for name in ("out", "out/valid"))
    assert f"out: {made.documents} documents, {made.tokens:,} tokens\n" in out
    assert f"out/valid: {kept.documents} documents, {kept.tokens:,} tokens\n" in out
    assert "0 empty documents left out" in out
    assert err == ""
    assert main(["data", "show", "out", "--verify"]) == 0
    out = capsys.readouterr().out
    first = texts_of(tmp_path / "out")[0].strip().splitlines()[0]
    assert f"document 0: {first[:72]}\n" in out
    assert made.manifest.shards[0].sha256[:12] in out
    assert "tokenizer tokenizer.json, 300 ids, uint16, end 0" in out
    assert "every checksum is right" in out
    assert out.count("atlas-lm data prepare book.jsonl --out out --train-tokenizer 300") == 2


def test_the_command_tells_mistakes_in_one_line(book, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "out", book)
    monkeypatch.setitem(sys.modules, "datasets", None)
    mistakes = {
        "data prepare book.jsonl --out out": "out: prepared data is here already; --again",
        "data prepare --out new": "sources: none",
        "data prepare book.jsonl": "--out",
        "data prepare hf:x --out new": "pip install 'atlas-lm[data]'",
        "data show nowhere": "nowhere: no such folder of prepared data",
    }
    for command, message in mistakes.items():
        assert main(command.split()) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
    assert main(["data", "prepare", "book.jsonl", "--out", "out", "--again"]) == 0

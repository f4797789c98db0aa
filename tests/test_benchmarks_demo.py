"""The figures of the demo: books that are made, read side by side, and counted."""

import gzip
import json
import re
import subprocess
import sys

import pytest
import torch

from atlas_lm.demo import MODEL
from atlas_lm.demo.facts import TASK
from atlas_lm.models import LanguageModel, ModelConfig, load_model, save_model
from atlas_lm.text import ByteTokenizer, load_tokenizer, save_tokenizer
from benchmarks import demo, demo_faults, demo_lines, demo_models, demo_texts

ANY = ("nothing", "happens", "rains", "sings", "waits", "falls", "shines", "grows")
LINES = [f"Line {i} of a book in which nobody {ANY[i % 8]} at all.\n" for i in range(2000)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    made = LanguageModel(ModelConfig(dim=16, depth=2, heads=2, rule=("swa", "delta_net"), window=8))
    save_model(made, folder)
    save_tokenizer(ByteTokenizer(), folder)
    TASK.save(folder)
    return folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    (folder / "a.txt").write_text("".join(LINES))
    return folder


def maker(model, shelf, **changes) -> demo.Maker:
    given = {"characters": 30_000, "facts": 8, "seed": 0, "visitor": False, "told": "sentences"}
    pieces = demo.pieces_of(demo.shelf_texts(shelf))
    return demo.Maker(pieces=pieces, tokenizer=load_tokenizer(model), **given | changes)


def test_a_shelf_goes_round(shelf):
    pieces = demo.pieces_of(demo.shelf_texts(shelf))
    assert "".join(pieces) == "".join(LINES)
    assert len(pieces) > 3
    found = "".join(demo.Shelf("", pieces, len(pieces) - 1, 2 * len("".join(LINES))).pieces())
    assert found.startswith(pieces[-1] + pieces[0])
    assert 2 * len("".join(LINES)) <= len(found) < 2 * len("".join(LINES)) + 2 * demo.PIECE


@pytest.mark.parametrize("told", demo.WAYS)
def test_books_hold_their_facts_where_they_say(model, shelf, told):
    way = demo.WAYS[told]
    books = [maker(model, shelf, told=told)(number) for number in range(3)]
    for book in books:
        text = bytes(book.tokens.tolist()).decode()
        for fact, since in zip(book.story.facts, book.since, strict=True):
            said = fact.text.removesuffix(".")
            assert said[0].isupper()
            said = said[0].lower() + said[1:] if told == "small" else said
            assert text[: len(text) - since].endswith(way.before + said + way.after)
    assert len({book.story for book in books}) == 3
    words = maker(model, shelf, visitor=True)(0).story.facts
    strange = [{*fact.subject.lower().split()} <= {"book", *ANY} for fact in words]
    assert sum(strange) > len(strange) / 2  # a word that is taken is not taken twice


def test_books_are_read_side_by_side_as_each_alone(model, shelf):
    reader, _ = demo.open_model(model, "cpu")
    books = [maker(model, shelf, characters=n)(0) for n in (1, 30_000)]
    together = demo.read(reader, books)
    for row, book in enumerate(books):
        alone = demo.read(reader, [book])
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(together[row : row + 1].tensors()[name], tensor)


def test_figures():
    said = [
        demo.Said("code", "1234", "1234", 950),
        demo.Said("code", "1234", "4321", 20_000),
        demo.Said("place", "not told", "cellar", 1_000),
        demo.Said("unknown", "not told", "not told", None),
        demo.Said("unknown", "cellar", "not told", None),
    ]
    found = {name: (s["right"], s["count"]) for name, s in demo.figures(said).items()}
    assert found == {
        "code": (1, 2),
        "place": (0, 1),
        "unknown": (1, 2),
        "invented": (1, 2),
        "told, but denied": (1, 3),
        "told 100 to 999 tokens ago": (1, 1),
        "told 1,000 to 9,999 tokens ago": (0, 1),
        "told 10,000 to 99,999 tokens ago": (0, 1),
    }


def test_the_command(model, shelf, tmp_path, monkeypatch, capsys):
    out = tmp_path / "more" / "figures.json"
    given = ["demo", str(model), "--shelf", str(shelf), "--tokens", "20000", "40000"]
    given += ["--books", "2", "1", "--facts", "4", "--rows", "2", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", [*given, "--out", str(out)])
    demo.main()
    found = json.loads(out.read_text())["results"]
    assert [each["books"] for each in found] == [2, 1]
    assert 20_000 <= found[0]["tokens"] < 40_000 <= found[1]["tokens"]
    assert found[0]["shares"]["code"]["count"] == 4
    assert "2 books, 4 facts" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*given, "--books", "1", "2", "3"])
    with pytest.raises(SystemExit):
        demo.main()


# Texts and models


def test_texts_to_learn_with_and_to_test_with(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    for name in ("litbank_books", "enwik8", "pg19_test_subset"):
        (data / name).mkdir(parents=True)
    books = "".join(json.dumps({"text": f"Novel {i}.", "title": "x"}) + "\n" for i in range(10))
    (data / "litbank_books/litbank_100_books.jsonl.gz").write_bytes(gzip.compress(books.encode()))
    page = (
        "<page>\n<title>Huns</title>\n&lt;b&gt;They&lt;/b&gt; rode; see http://a.b/c too.\n</page>"
    )
    (data / "enwik8/enwik8.gz").write_bytes(gzip.compress(page.encode()))
    (data / "pg19_test_subset/7.txt").write_text("An old book.")
    monkeypatch.setattr(sys, "argv", ["demo_texts", str(data), str(tmp_path / "out")])
    demo_texts.main()
    found = {
        path.name: gzip.decompress(path.read_bytes()).decode()
        for path in tmp_path.glob("out/*/*.gz")
    }
    assert [json.loads(line)["text"] for line in found["novels.jsonl.gz"].splitlines()] == [
        f"Novel {i}." for i in (1, 3, 6, 8)
    ]
    assert found["encyclopaedia.txt.gz"].split() == ["Huns", "They", "rode;", "see", "too."]
    assert found["7.txt.gz"] == "An old book."
    assert len(found["docstrings.txt.gz"]) > 1_000_000
    read = "".join(demo_texts.python_texts().pieces())
    assert found["docstrings.txt.gz"][:2000] not in read
    assert "novels.jsonl.gz" in capsys.readouterr().out


def test_models_that_the_recipe_names():
    models = demo_models.named()
    assert list(models) == ["ours", "delta_net", "titans", "atlas", "swa"]
    assert models["ours"] == []
    assert models["titans"][-4:] == ["--batch", "8", "--steps", "24000"]
    assert "--data.pauses" in models["swa"]


WAITS = """
import signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("began", flush=True)
time.sleep(60)
"""


def test_models_are_saved_when_time_is_over(tmp_path, monkeypatch, capsys):
    def started(name, options):
        with (options.out / f"{name}.log").open("a") as log:
            return subprocess.Popen([sys.executable, "-c", WAITS], stdout=log)

    monkeypatch.setattr(demo_models, "started", started)
    (tmp_path / "tokenizer.json").write_text("{}")
    words = [str(tmp_path), str(tmp_path / "out"), "--seconds", "3", "--models", "swa", "titans"]
    monkeypatch.setattr(sys, "argv", ["demo_models", *words])
    demo_models.main()
    said = capsys.readouterr().out
    assert said[said.index("== swa") :].split() == (
        ["==", "swa", "began", "saved", "==", "titans", "began", "saved"]
    )


def test_a_model_is_trained_by_the_recipe_and_what_changes_it(tmp_path, monkeypatch):
    given = {}

    def popen(command, **_):
        given["command"] = command

    monkeypatch.setattr(subprocess, "Popen", popen)
    options = demo_models.argparse.Namespace(
        books=tmp_path, out=tmp_path, workers=3, change=["--steps", "8"]
    )
    demo_models.started("delta_net", options)
    command = " ".join(map(str, given["command"]))
    assert "-m atlas_lm train demo --resume --graph" in command
    assert f"--data.test-books {tmp_path / 'test'}" in command
    assert command.index("delta_net,delta_net") < command.index("--steps 8")


def test_what_goes_wrong_is_told(model, tmp_path, monkeypatch, capsys):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.txt").write_text("".join(LINES))
    words = [str(model), str(tmp_path), "--rows", "2", "--facts", "2", "--before", "0", "5000"]
    monkeypatch.setattr(sys, "argv", ["demo_faults", *words])
    demo_faults.main()
    said = capsys.readouterr().out
    assert len(re.findall(r"block 0: open to plain text +\d+\.\d+ %", said)) == 1  # swa has none
    assert "  0.0 % of" in said
    assert "At last courier ... reached the ..." in said
    assert "after 5,000 tokens, test: codes 0.000 places 0.000" in said


def test_heads_are_as_open_as_their_gates_say(model):
    made, _ = demo_faults.open_model(model, "cpu")
    tokens = torch.arange(64)[None]
    (opened,) = demo_faults.open_gates(made, tokens)
    assert opened.shape == (1, 64, 2)
    assert 0.3 < float(opened.mean()) < 0.7  # as they begin


@torch.no_grad()
def test_answers_count_if_all_of_their_tokens_are_what_the_model_says(model):
    made, _ = demo_faults.open_model(model, "cpu")
    tokens = torch.arange(64).repeat(3, 1)
    _, state = made(torch.arange(100)[None])
    targets = made(tokens, state.expand(3))[0].argmax(-1)
    targets[2, 12] += 1
    asked = torch.zeros_like(tokens, dtype=torch.bool)
    asked[:, 10:14] = True
    work = demo_faults.Work(tokens, targets, None, kinds={"codes": asked})
    assert demo_faults.known(made, work, state) == {"codes": pytest.approx(2 / 3)}
    assert demo_faults.known(made, work, None)["codes"] < 2 / 3


def test_words_that_begin_lines_are_known_as_after_a_space(tmp_path):
    tokenizer = load_tokenizer(MODEL)
    made = LanguageModel(ModelConfig(vocab=tokenizer.vocab, dim=16, depth=1, heads=2))
    save_model(made, tmp_path / "before", stored=torch.bfloat16)
    save_tokenizer(tokenizer, tmp_path / "before")
    TASK.save(tmp_path / "before")
    demo_lines.main([str(tmp_path / "before"), str(tmp_path / "after")])
    before, after = (
        load_model(tmp_path / n).state_dict()["embedding.weight"] for n in ("before", "after")
    )
    for begins, spaced in (("The", " The"), ("To", " To"), ("Courier", " Courier")):
        *others, last = tokenizer.encode(begins)
        assert torch.equal(after[last], before[tokenizer.encode(spaced)].squeeze(0))
        assert torch.equal(after[others], before[others])
    changed = (after != before).any(1).nonzero()[:, 0].tolist()
    assert set(changed) == set(demo_lines.twins(tokenizer))
    small = [tokenizer.encode(word)[0] for word in (" The", "the", " Courier", "A", " 7")]
    assert not set(small) & set(changed)

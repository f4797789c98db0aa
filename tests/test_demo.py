"""The demo: what is hidden where, what is asked, what is left on the disk, what it refuses."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from browser import seen_in_a_browser
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from atlas_lm import RULES, LanguageModel, ModelConfig, save_model
from atlas_lm.ask import ask
from atlas_lm.cli import main
from atlas_lm.demo import talk
from atlas_lm.demo.asking import answers, reach, read_end
from atlas_lm.demo.book import (
    PAGE,
    file_text,
    grep,
    hide,
    python_texts,
    sentence_at,
    shelf_texts,
    token_bounds,
)
from atlas_lm.demo.facts import TASK as LONG
from atlas_lm.demo.facts import Fact
from atlas_lm.demo.page import write_page
from atlas_lm.demo.show import MEMORY, SEGMENT, Answered, Reader, Setup, Shown, Watcher, run
from atlas_lm.demo.talk import HELP, Talk
from atlas_lm.demo.writes import Strong, Writes, lasting_memories
from atlas_lm.generate import read
from atlas_lm.memory import load_memory
from atlas_lm.reading import Step, read_file
from atlas_lm.text import ByteTokenizer, FileTokenizer, check_text
from atlas_lm.trace import trace

BYTES = ByteTokenizer()
TASK = replace(LONG, max_tokens=6)
"""Nobody here knows an answer: a few letters of it are enough."""
TEXT = topics["assert"] + "Überraschung: 漢字 😀. So it goes.\n\n" + topics["import"][:7000] + "\n"
DELTA = replace(RULES["delta_net"], chunk=1)


def made(seed: int = 0, **changes) -> LanguageModel:
    torch.manual_seed(seed)
    shape = {"dim": 16, "depth": 2, "heads": 2, "rule": DELTA}
    return LanguageModel(ModelConfig(**shape | changes)).eval()


READER = Reader("tiny", made(), BYTES, TASK)
WINDOW = Reader("window", made(rule="swa", window=16), BYTES, TASK)


@pytest.fixture
def book(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def setup(book: Path, folder: Path, **changes) -> Setup:
    made = {"reader": READER, "texts": file_text(book), "folder": folder, "facts": 8}
    return Setup(**made | changes)


class Notes(Watcher):
    """Remembers all that it is told; it may interrupt."""

    def __init__(self, stop_after: int = -1):
        self.steps: list[Step] = []
        self.lines: list[tuple[int, str, bool]] = []
        self.stop_after, self.over = stop_after, 0

    def reads(self, step: Step, process: int | None) -> None:
        self.steps.append(step)
        if step.tokens == self.stop_after * SEGMENT:
            raise KeyboardInterrupt

    def notices(self, page: int, sentence: str, hidden: bool) -> None:
        self.lines.append((page, sentence, hidden))

    def has_read(self) -> None:
        self.over += 1


# Hiding


FACTS = tuple(
    Fact("code", f"thing {i}", f"{i:04d}", f"The code of thing {i} is {i:04d}.") for i in range(6)
)


def test_a_book_is_the_text_with_facts_behind_sentences_in_their_order(book, tmp_path):
    made = hide(file_text(book), FACTS, 3, tmp_path / "made.txt")
    written = (tmp_path / "made.txt").read_text("utf-8")
    assert re.sub(r" The code of thing \d is \d{4}\.", "", written) == TEXT
    assert re.findall(r"The code of thing (\d)", written) == list("012345")
    for fact in FACTS:
        before, _, after = written.partition(f" {fact.text}")
        ends_line = after.lstrip(" ").startswith("\n")
        assert ends_line or re.search(r"[.!?][\"')\]_\u201d\u2019]*( The code .*)?$", before)
    assert [sentence_at(made, int(s)) for s in made.told] == [fact.text for fact in FACTS]
    assert made.bounds[-1] == len(written)
    pieces = [written[a:b] for a, b in pairwise(made.bounds)]
    assert "".join(pieces) == written
    assert all(pieces[s] == f" {fact.text}" for s, fact in zip(made.told, FACTS, strict=True))
    assert made.page(int(made.told[5])) == written.index(FACTS[5].text) // PAGE + 1
    assert made.pages == -(-len(written) // PAGE)


def test_the_same_seed_makes_the_same_book_and_another_one_another(book, tmp_path):
    shas = [hide(file_text(book), FACTS, s, tmp_path / "b.txt").file.sha256 for s in (1, 1, 2)]
    assert shas[0] == shas[1] != shas[2]


def test_facts_stand_anywhere(book, tmp_path):
    places = [hide(file_text(book), FACTS[:1], s, tmp_path / "b.txt").told[0] for s in range(60)]
    last = hide(file_text(book), FACTS[:1], 0, tmp_path / "b.txt").sentences
    assert len(set(places)) > 20
    assert min(places) < last / 10
    assert max(places) > last * 9 / 10


def test_long_texts_are_looked_at_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("atlas_lm.demo.book.PIECE", 700)
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    hide(file_text(path), FACTS, 0, tmp_path / "made.txt")
    written = (tmp_path / "made.txt").read_text("utf-8")
    assert re.sub(r" The code of thing \d is \d{4}\.", "", written) == TEXT


def test_texts_of_python_end_soon_after_so_many_characters():
    count = sum(map(len, python_texts(20_000).pieces()))
    assert 20_000 <= count < 120_000


def test_a_shelf_is_all_its_books(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"Book {name}. It is short.", "utf-8")
    (tmp_path / "cover.png").write_bytes(b"\x89PNG")
    texts = shelf_texts(tmp_path)
    assert "".join(texts.pieces()) == "Book a. It is short.\nBook b. It is short.\n"
    assert texts.name == f"2 books of {tmp_path.name}"


def byte_level(folder: Path) -> FileTokenizer:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    library.train_from_iterator([TEXT], trainer)
    library.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_tokens_before_a_sentence_are_those_of_the_text_before_it(
    book, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr("atlas_lm.text.BLOCK", 1000)
    tokenizer = BYTES if kind == "bytes" else byte_level(tmp_path)
    made = hide(file_text(book), FACTS, 0, tmp_path / "made.txt")
    found, written = token_bounds(made, tokenizer), (tmp_path / "made.txt").read_text("utf-8")
    expected = [len(tokenizer.encode(written[:bound])) for bound in made.bounds]
    assert found.tolist() == expected


def test_grep_tells_the_last_line(tmp_path):
    (tmp_path / "t").write_text("a cat\na dog\na cat and a hen\n")
    assert grep(tmp_path / "t", ["cat", "dog", "cow"]) == {"cat": 3, "dog": 2}
    assert grep(tmp_path / "t", []) == {}


# Asking


QUESTIONS = [
    "Where is Anna?",
    "What is the code of the amber kettle?",
    "Who?",
    "Where is Bo now?",
] * 2


@pytest.mark.parametrize("rule", [DELTA, replace(RULES["titans"], chunk=8), "swa"])
def test_many_at_once_are_answered_as_one_by_one(rule, monkeypatch):
    model = made(1, rule=rule, window=8).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 2  # or it would say the same to everything
    state = read(model, BYTES.encode(TEXT[:500]))[1]
    before = {name: t.clone() for name, t in state.tensors().items()}
    for where in (state, None):
        alone = [ask(model, BYTES, TASK, question, where).text for question in QUESTIONS]
        assert len(set(alone)) >= 3
        for rows in (64, 3):
            monkeypatch.setattr("atlas_lm.demo.asking.ROWS", rows)
            assert answers(model, BYTES, TASK, QUESTIONS, where) == alone
    assert all(torch.equal(before[name], t) for name, t in state.tensors().items())


def test_answers_end_at_a_stop_and_at_the_end_of_a_document():
    class Writes(LanguageModel):
        """Byte i of this after the prompt, whatever was read; the second row is a token ahead."""

        text = (*b" ab. c", 256)

        def logits(self, x):
            self.calls = getattr(self, "calls", -1) + 1
            ids = [self.text[self.calls], (*self.text[4:6], 256)[min(self.calls, 2)]]
            return 9.0 * torch.eye(257)[torch.tensor(ids)]

    model = Writes(ModelConfig(dim=16, depth=1, heads=2, rule=DELTA))
    assert answers(model, BYTES, TASK, ["One?", "Another?"], None) == ["ab", "c"]


def test_closed_sets_of_answers_are_weighed():
    task = replace(TASK, answers=("yes", "no", "not told"))
    alone = [ask(READER.model, BYTES, task, question, None).text for question in QUESTIONS]
    assert answers(READER.model, BYTES, task, QUESTIONS, None) == alone


def test_the_end_of_a_text_is_all_that_a_window_sees(book):
    model = made(2, rule="swa", window=16).double()
    assert reach(model.config) == 30
    whole = read(model, BYTES.encode(TEXT))[1]
    end = read_end(model, BYTES, check_text(book))
    ids = torch.tensor([BYTES.encode(TASK.prompt("Where is Anna?"))])
    assert torch.allclose(model(ids, whole)[0], model(ids, end)[0], rtol=0, atol=1e-12)
    cut = read(model, BYTES.encode(TEXT)[-20:])[1]
    assert not torch.allclose(model(ids, whole)[0], model(ids, cut)[0], rtol=0, atol=1e-12)


def test_whoever_sees_more_reads_all_of_it(book):
    assert reach(READER.model.config) is None
    end = read_end(READER.model, BYTES, check_text(book))
    assert int(end.position[0]) == len(TEXT.encode())


# Writes


@pytest.mark.parametrize("rule", [DELTA, (replace(RULES["titans"], chunk=8), "swa")])
def test_strengths_are_the_largest_writes_of_the_trace(rule, book, tmp_path):
    model = made(3, rule=rule, window=8)
    book.write_text(TEXT[:3000], "utf-8")
    made_book = hide(file_text(book), FACTS, 0, tmp_path / "made.txt")
    bounds, order = token_bounds(made_book, BYTES), []
    writes = Writes(model, bounds, lambda sentence, strength: order.append((sentence, strength)))
    with writes.watching():
        read_file(
            model,
            BYTES,
            made_book.file.path,
            tmp_path / "m",
            segment=300,
            progress=lambda _: writes.seen(),
        )
    tokens = torch.tensor([list(made_book.file.path.read_bytes())])
    write = trace(model, tokens)[0].write[:, 0].numpy()
    peaks = np.stack([write[:, a:b].max(1) for a, b in pairwise(bounds)], 1)
    expected = (peaks / np.sqrt((peaks**2).mean(1, keepdims=True))).mean(0)
    assert np.allclose(writes.peaks, peaks, rtol=1e-3, atol=1e-5)
    assert np.allclose(writes.strengths, expected, rtol=1e-3, atol=1e-5)
    assert [sentence for sentence, _ in order] == list(range(made_book.sentences))
    assert order[-1][1] == pytest.approx(expected[-1], rel=1e-3)
    taken_up = Writes(model, bounds, lambda *_: None, writes.peaks)
    assert np.array_equal(taken_up.strengths, writes.strengths)
    assert not any(part._forward_hooks for part in model.modules())


def test_memories_that_fade_by_themselves_are_not_watched():
    fading = replace(DELTA, retention="fixed")
    model, alike = made(0, rule=(fading, DELTA)), made(0, rule=fading)
    assert lasting_memories(model) == [model.blocks[1].mixer]
    assert lasting_memories(alike) == [block.mixer for block in alike.blocks]


def test_closed_gates_write_nothing(tmp_path, monkeypatch):
    """Nor is it computed how much."""
    model = made(0)
    for block in model.blocks:
        torch.nn.init.constant_(block.mixer.gates.up.bias, -9.0)
    monkeypatch.setattr("atlas_lm.demo.writes.trace_layer", None)
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:600], "utf-8")
    writes = Writes(model, np.array([0, 100, 600]), lambda *_: None)
    with writes.watching():
        read_file(model, BYTES, text, tmp_path / "m", segment=300, progress=lambda _: writes.seen())
    assert np.array_equal(writes.peaks, np.zeros((2, 2)))


def test_strong_is_what_few_are():
    strong = Strong(0.01, 2, known=range(200))
    assert not strong(150.0)
    assert strong(300.0)
    assert strong(301.0)
    assert not strong(302.0)
    assert sum(map(Strong(0.05, 1000), np.random.default_rng(0).random(2000))) < 200
    assert not any(map(Strong(0.5, 1000), range(90)))


# The whole of it


def test_what_is_shown_is_what_was_hidden_read_and_asked(book, tmp_path):
    notes = Notes()
    wanted = setup(book, tmp_path / "out", window=WINDOW, seed=5)
    shown = run(wanted, notes)
    told, written = wanted.story(), (tmp_path / "out/book.txt").read_text("utf-8")
    tokens = len(written.encode())
    assert (shown.tokens, shown.read_tokens, shown.bytes) == (tokens, tokens, tokens)
    assert [fact.text for fact in shown.facts] == [fact.text for fact in told.facts]
    for fact in shown.facts:
        before, _, after = written.partition(fact.text)
        assert fact.since == len(after.encode())
        assert fact.page == (len(before) - 1) // PAGE + 1
        assert fact.strength > 0
    assert shown.memory_bytes == (tmp_path / "out" / MEMORY).stat().st_size
    assert shown.kv_bytes == tokens * 2 * 2 * 16 * 4
    assert max(fact.strength for fact in shown.facts) <= max(shown.strip) * 1.001
    assert len(shown.strip) == shown.pages == -(-len(written) // PAGE)
    assert [a.question for a in shown.answers] == [a.question for a in told.asked]
    assert [a.truth for a in shown.answers] == [a.answer for a in told.asked]
    assert len(told.asked) == 10
    for asked, answered in zip(told.asked, shown.answers, strict=True):
        assert answered.since == (None if asked.fact is None else shown.facts[asked.fact].since)
    assert shown.found_by_grep == shown.told == 6
    assert notes.steps[-1].bytes == notes.steps[-1].total == tokens
    assert notes.over == 1


def test_answers_are_those_of_the_memory_file_an_empty_one_and_the_window(book, tmp_path):
    shown = run(setup(book, tmp_path / "out", window=WINDOW), Watcher())
    state = load_memory(tmp_path / "out" / MEMORY, READER.model, BYTES).state
    for answered in shown.answers[:3]:
        for who, reader, where in (
            ("memory", READER, state),
            ("empty", READER, None),
            (
                "window",
                WINDOW,
                read_end(WINDOW.model, BYTES, check_text(tmp_path / "out/book.txt")),
            ),
        ):
            alone = ask(reader.model, BYTES, TASK, answered.question, where)
            assert getattr(answered, who) == alone.text


def test_ranks_are_those_among_all_sentences(book, tmp_path):
    shown = run(setup(book, tmp_path / "out"), Watcher())
    peaks = np.load(tmp_path / "out/writes.npy")
    assert peaks.shape == (2, shown.sentences)
    strengths = (peaks / np.sqrt(np.square(peaks).mean(1, keepdims=True))).mean(0)
    for fact in shown.facts:
        assert fact.rank == 1 + sum(strengths > fact.strength * 1.00001)
    assert shown.strongest == sum(fact.rank <= 8 for fact in shown.facts)


def test_stopped_and_taken_up_is_the_same_memory(book, tmp_path):
    whole = run(setup(book, tmp_path / "whole"), Watcher())
    for stop in (1, 3):
        notes = Notes(stop_after=stop)
        with pytest.raises(KeyboardInterrupt, match="the same command goes on from there"):
            run(setup(book, tmp_path / "cut"), notes)
        assert notes.over == 1
    cut = run(setup(book, tmp_path / "cut"), Watcher())
    assert cut.read_tokens == whole.tokens - 4 * SEGMENT
    states = [load_memory(tmp_path / n / MEMORY, READER.model).state for n in ("whole", "cut")]
    first, second = (state.tensors() for state in states)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert cut.facts == whole.facts
    assert cut.answers == whole.answers
    assert cut.strip == whole.strip


def test_what_was_left_of_another_reading_is_not_taken_up(book, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(setup(book, tmp_path / "out"), Notes(stop_after=1))
    other = run(setup(book, tmp_path / "out", seed=1), Watcher())
    assert other.read_tokens == other.tokens
    assert other.facts == run(setup(book, tmp_path / "new", seed=1), Watcher()).facts
    again = run(setup(book, tmp_path / "out", seed=1), Watcher())
    assert again.read_tokens == other.tokens


def test_a_damaged_part_is_not_taken_up(book, tmp_path):
    run(setup(book, tmp_path / "out"), Watcher())
    (tmp_path / "out" / f"{MEMORY}.part").write_bytes(b"nothing")
    again = run(setup(book, tmp_path / "out"), Watcher())
    assert again.read_tokens == again.tokens


# Talking


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def visitor(book, tmp_path) -> Talk:
    run(setup(book, tmp_path / "out"), Watcher())
    return Talk(READER, tmp_path / "out")


def test_asking_changes_nothing_on_the_disk(visitor):
    before = files(visitor.folder)
    said = visitor.says("What is the code of the blue door?")
    assert re.fullmatch(r"(?s).*, \d+ % sure   \(an empty memory: .*, \d+ % sure\)", said)
    assert visitor.says("Please say the code of the blue door.") != HELP
    assert files(visitor.folder) == before


def test_what_is_told_is_read_into_this_memory_alone(visitor):
    visitor.says("/new")
    before = files(visitor.folder)
    said = visitor.says("The code of the blue door is 1234.")
    assert said == "memory 2 has read it. Ask: What is the code of the blue door?"
    after = files(visitor.folder)
    assert after[MEMORY] == before[MEMORY]
    assert after["memory-2.safetensors"] != before["memory-2.safetensors"]
    second = load_memory(visitor.folder / "memory-2.safetensors", READER.model)
    expected = read(READER.model, BYTES.encode(" The code of the blue door is 1234."))[1]
    for name, tensor in second.state.tensors().items():
        assert torch.allclose(tensor, expected.tensors()[name], atol=1e-6), name
    assert second.about.tokens == len(" The code of the blue door is 1234.")


def test_two_memories_never_mix(visitor):
    visitor.says("The code of the blue door is 1234.")
    first = (visitor.folder / MEMORY).read_bytes()
    visitor.says("/new")
    visitor.says("Courier Anna went to the cellar.")
    visitor.says("/new")
    assert (visitor.folder / MEMORY).read_bytes() == first
    second = (visitor.folder / "memory-2.safetensors").read_bytes()
    assert visitor.says("/1") == f"memory 1, {visitor.folder / MEMORY}"
    visitor.says("The code of the blue door is 1234.")
    assert (visitor.folder / MEMORY).read_bytes() != first
    assert (visitor.folder / "memory-2.safetensors").read_bytes() == second
    third = load_memory(visitor.folder / "memory-3.safetensors", READER.model)
    fresh = READER.model.begin(1).tensors()
    assert all(torch.equal(t, fresh[name]) for name, t in third.state.tensors().items())


def test_a_conversation_ends_and_survives_nonsense(visitor):
    said: list[str] = []
    lines = ["", "nonsense", "/9", "/quit", "Where is Anna?"]
    talk.talk(READER, visitor.folder, lines, said.append)
    assert said == [HELP] * 3


# The page


class Parsed(HTMLParser):
    """Tags, and the text of table cells."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(path.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._cell:
            self.rows[-1][-1] += data


@pytest.fixture
def shown(book, tmp_path) -> Shown:
    return run(setup(book, tmp_path / "out", window=WINDOW), Watcher())


def test_the_page_needs_no_script_and_no_network(shown, tmp_path):
    write_page(tmp_path / "p.html", shown)
    text = (tmp_path / "p.html").read_text("utf-8")
    assert "<script" not in text
    assert not re.search(r"@[a-z_]+@", text)
    assert not re.search(r"(?:src|href)=|url\(|https?:", text)
    assert "default-src 'none'" in text


def test_the_page_has_a_cell_a_page_a_dot_a_fact_and_a_row_a_question(shown, tmp_path):
    right = replace(shown.answers[0], memory=shown.answers[0].truth)
    shown = replace(shown, answers=(right, *shown.answers[1:]))
    write_page(tmp_path / "p.html", shown)
    page = Parsed(tmp_path / "p.html")
    classes = [attrs.get("class") for _, attrs in page.tags]
    assert classes.count("page") == shown.pages
    assert classes.count("fact") == len(shown.facts)
    assert len(page.rows) == 1 + len(shown.answers)
    assert page.rows[1][:3] == [right.question, right.truth, f"✓ {right.truth}"]
    assert page.rows[1][-2:] == [f"{right.since:,}", f"{right.page}"]
    assert page.rows[-1][-2:] == ["never told", ""]
    assert classes.count("right") == 1


def test_the_page_says_what_it_is_given_and_runs_none_of_it(shown, tmp_path):
    evil = "<script>alert(1)</script>@table@"
    first = replace(shown.answers[0], memory=evil, question=evil)
    write_page(tmp_path / "p.html", replace(shown, title=evil, answers=(first, *shown.answers[1:])))
    page = Parsed(tmp_path / "p.html")
    assert not any(tag == "script" for tag, _ in page.tags)
    assert sum(tag == "table" for tag, _ in page.tags) == 1
    assert page.rows[1][0] == evil


@pytest.mark.parametrize("width", [1200, 480])
def test_a_browser_draws_the_page_without_a_complaint(width, shown, tmp_path):
    write_page(tmp_path / "p.html", shown)
    expected = {"curves": 5, "over": 0, "figures": 0, "wide": 0, "console": []}
    assert seen_in_a_browser(tmp_path / "p.html", width) == expected


def test_dots_and_cells_are_as_bright_as_the_writes(shown, tmp_path):
    facts = (replace(shown.facts[0], strength=2.0), replace(shown.facts[1], strength=0.0))
    strip = (2.0, 0.5, *[0.5] * (shown.pages - 2))
    write_page(tmp_path / "p.html", replace(shown, facts=facts, strip=strip))
    tags = Parsed(tmp_path / "p.html").tags
    radii = [attrs["r"] for _, attrs in tags if attrs.get("class") == "fact"]
    glows = [attrs["fill-opacity"] for _, attrs in tags if attrs.get("class") == "wrote"]
    assert radii == ["6.0", "2.5"]
    assert glows == ["0.60"]


# The command


@pytest.fixture
def here(tmp_path, book, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for reader in (READER, WINDOW):
        save_model(reader.model, tmp_path / reader.name)
        TASK.save(tmp_path / reader.name)
    return tmp_path


COMMAND = "demo --model tiny --facts 8 --your-file text.txt"


def said(capsys, args: str) -> str:
    capsys.readouterr()
    assert main(args.split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_json_is_one_object_with_all_of_it(here, capsys):
    out = said(capsys, f"{COMMAND} --window window --seed 2 --json --html p.html")
    found = json.loads(out)
    assert found["format"] == "atlas-lm demo 1"
    assert (found["title"], found["seed"], found["model"]) == ("text.txt", 2, "tiny")
    assert set(found["shares"]) == {"memory", "window", "empty"}
    assert set(found["shares"]["memory"]) == {"code", "place", "unknown", "all"}
    assert found["shares"]["memory"]["all"]["count"] == len(found["answers"]) == 10
    assert set(found["answers"][0]) == {*Answered.__dataclass_fields__, "right"}
    assert set(found["facts"][0]) == {"kind", "text", "page", "since", "strength", "rank"}
    for answered in found["answers"]:
        for who, right in answered["right"].items():
            assert right == (answered[who] == answered["truth"])
    rights = [a["right"]["window"] for a in found["answers"]]
    assert found["shares"]["window"]["all"]["right"] == sum(rights)
    assert Path("p.html").exists()


def test_people_are_told_everything(here, capsys):
    out = said(capsys, COMMAND)
    found = json.loads(said(capsys, f"{COMMAND} --json"))
    assert f"{found['tokens']:,} tokens read in " in out
    assert "memory saved: " in out
    assert "book closed; a KV cache of this length would be " in out
    assert "grep    finds 6 of the 6 that were told, but keeps the book" in out
    assert (
        "memory  0.0 % right (0.0 to 27.8); codes 0 of 4, places 0 of 2, never told 0 of 4" in out
    )
    assert all(answered["question"] in out for answered in found["answers"])


def test_the_readers_of_the_package_are_taken_where_none_are_named(here, capsys):
    found = json.loads(said(capsys, "demo --facts 8 --your-file text.txt --json"))
    assert (found["model"], found["window"]) == ("model", "window")
    assert 2e6 < found["window_parameters"] <= found["parameters"] <= 3e6


def test_on_a_terminal_a_conversation_follows(here, capsys, monkeypatch):
    lines = iter(["The code of the blue door is 1234.", "/quit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert "memory 1 has read it" in said(capsys, COMMAND)
    assert HELP not in said(capsys, f"{COMMAND} --no-prompt")


def test_an_interrupted_command_says_how_to_go_on(here, capsys, monkeypatch):
    def interrupt(_screen, step, _process):
        if step.tokens:
            raise KeyboardInterrupt

    monkeypatch.setattr("atlas_lm.demo.screen.Screen.reads", interrupt)
    assert main(COMMAND.split()) == 130
    assert "the same command goes on from there" in capsys.readouterr().err


def refused(capsys, args: str) -> str:
    capsys.readouterr()
    assert main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atlas-lm: ")
    assert err.count("\n") == 1
    return err


def test_mistakes_are_told_in_a_line(here, capsys):
    (here / "empty.txt").write_text(" \n")
    (here / "image.txt").write_bytes(bytes(range(256)))
    (here / "zero.txt").write_bytes(b"One. Two.\0 Three.")
    (here / "short.txt").write_text("One. Two. Three.")
    (here / "shelf").mkdir()
    (here / "shelf/cover.png").write_bytes(b"\x89PNG")
    save_model(READER.model, here / "untrained")
    ours = "demo --model tiny --facts 8"
    wrong: list[tuple[str, str]] = [
        ("demo --model nowhere", "nowhere: no such model folder"),
        ("demo --model untrained", "task.json: missing"),
        (f"{ours} --your-file no.txt", "no.txt: no such text file"),
        (f"{ours} --your-file empty.txt", "empty.txt: 2 bytes without a word"),
        (f"{ours} --your-file image.txt", "image.txt: not UTF-8 at byte 128"),
        (f"{ours} --your-file zero.txt", "zero.txt: binary: a zero at byte 9"),
        (f"{ours} --your-file short.txt", "short.txt: too short: 2 sentences to hide 8 facts"),
        (f"{ours} --shelf shelf", "shelf: no books in it"),
        (f"{ours} --shelf nowhere", "nowhere: no such folder of books"),
        (f"{ours} --shelf shelf --your-file text.txt", "expected one of them"),
        (f"{ours} --your-file text.txt --out tiny", "tiny: not empty, and not of an earlier demo"),
        (f"{ours} --your-file text.txt --out text.txt", "text.txt: a file; expected a folder"),
        (f"{ours} --your-file text.txt --html no/p.html", "no such folder to put the page in"),
        ("demo --model tiny --facts 3 --your-file text.txt", "facts: 3; expected 4 or more"),
        (f"{ours} --seed -1 --your-file text.txt", "seed: -1; expected 0 or more"),
    ]
    for args, message in wrong:
        assert message in refused(capsys, args), args

"""The model that comes with the package: its size, and what it remembers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atlas_lm.cli import main
from atlas_lm.cli.demo import Demo
from atlas_lm.demo import MODEL, WINDOW
from atlas_lm.demo.book import Texts, python_texts
from atlas_lm.demo.facts import demo_story
from atlas_lm.demo.show import FACTS, MEMORY, Reader, Setup, Shown, Watcher, run
from atlas_lm.demo.talk import Talk
from atlas_lm.memory import Memory
from benchmarks.readme_demo import BETWEEN, README, replaced


@pytest.fixture(scope="module")
def readers() -> tuple[Reader, Reader]:
    demo = Demo(device="cpu")
    return demo._reader(MODEL), demo._reader(WINDOW)


class Beginning:
    """Some pages of Python's manual."""

    name = "some pages"

    def pieces(self):
        yield "".join(python_texts().pieces())[:12_000]


@pytest.fixture(scope="module")
def shown(readers, tmp_path_factory) -> Shown:
    folder = tmp_path_factory.mktemp("demo") / "out"
    reader, window = readers
    setup = Setup(reader=reader, window=window, texts=Beginning(), folder=folder, facts=8)
    return run(setup, Watcher())


def test_they_are_small_and_of_one_size(readers):
    for reader, folder in zip(readers, (MODEL, WINDOW), strict=True):
        assert (folder / "model.safetensors").stat().st_size <= 6e6
        assert 2e6 <= reader.parameters <= 3e6
        assert {p.dtype for p in reader.model.parameters()} == {torch.float32}  # while it reads


def test_it_is_there_before_pytorch_would_have_loaded_its_compiler():
    code = "import sys; from atlas_lm import load_model; from atlas_lm.demo import MODEL; "
    code += "load_model(MODEL); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_answers_from_a_memory_of_less_than_a_megabyte(shown):
    assert shown.memory_bytes <= 1e6
    assert [a.memory for a in shown.answers] == [a.truth for a in shown.answers]
    assert shown.strongest >= 7


def test_who_has_read_nothing_says_so(shown):
    assert {a.empty for a in shown.answers} == {"not told"}


@pytest.mark.parametrize("before", ["\n", "\n\n", "\n- "])
def test_facts_of_notes_are_known(readers, before):
    """Each on a line of its own, where words have other ids than after a space."""
    reader, right, asked = readers[0], 0, 0
    for number in range(10):
        told = demo_story(6, 5, number)
        notes = "".join(before + fact.text for fact in told.facts) + "\n"
        ids = torch.tensor([reader.tokenizer.encode(notes)])
        with torch.no_grad():
            _, state = reader.model.encode(ids)
        answers = reader.answers([each.question for each in told.asked], state)
        right += sum(a == each.answer for a, each in zip(answers, told.asked, strict=True))
        asked += len(answers)
    assert right >= 0.9 * asked


def test_facts_of_a_visitor_are_known_to_one_memory_alone(readers, tmp_path):
    reader = readers[0]
    Memory.begin(reader.model, reader.tokenizer).save(tmp_path / MEMORY)
    talk = Talk(reader, tmp_path)

    def answer(question: str) -> str:
        said = talk.says(question)
        assert said is not None
        return said.split(",")[0]

    for fact in ("The code of the blue door is 0420.", "Courier Dumbledore is in the dungeon."):
        talk.says(fact)
    assert answer("What is the code of the blue door?") == "0420"
    assert answer("Where is courier Dumbledore?") == "dungeon"
    talk.says("Courier Dumbledore went to the airport.")
    assert answer("Where is courier Dumbledore?") == "airport"
    talk.says("/new")
    assert answer("What is the code of the blue door?") == "not told"
    assert answer("Where is courier Dumbledore?") == "not told"
    talk.says("The code of the blue door is 9135.")
    assert answer("What is the code of the blue door?") == "9135"
    talk.says("/1")
    assert answer("What is the code of the blue door?") == "0420"


def test_every_command_knows_it_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("The code of the blue door is 0420. It rained all day.")
    assert (
        main(
            ["read", "notes.txt", "--model", "demo", "--memory", "m.safetensors", "--device", "cpu"]
        )
        == 0
    )
    capsys.readouterr()
    question = "What is the code of the blue door?"
    asked = [
        "ask",
        question,
        *["--model", "demo", "--memory", "m.safetensors", "--device", "cpu", "--json"],
    ]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["memory"]["text"], found["empty"]["text"]) == ("0420", "not told")
    Path("demo").mkdir()  # a folder of one's own of that name
    assert main(asked) == 2
    assert "demo/task.json: missing" in capsys.readouterr().err


def test_transformers_reads_it_in_float32():
    transformers = pytest.importorskip("transformers")
    import atlas_lm.hf  # noqa: F401

    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_readme_opens_with_this_demo():
    opening = BETWEEN.findall(README.read_text("utf-8"))[0]
    told = demo_story(FACTS, 0)
    rows = re.findall(r"(?m)^(\S.*?[?.])  +(.+?)  +[+-] ", opening)
    assert rows == [(asked.question, asked.answer) for asked in told.asked]


def test_the_readme_is_changed_between_its_marks_alone():
    before = "a\n<!-- demo -->\nold\n<!-- /demo -->\nb\n"
    after = replaced(before, r"new \1" + "\n")
    block = "```console\n$ atlas-lm demo\nnew \\1\n```\n"
    assert after == f"a\n<!-- demo -->\n{block}<!-- /demo -->\nb\n"
    assert replaced(after, "old\n") == replaced(before, "old\n")
    with pytest.raises(ValueError, match="expected one pair"):
        replaced("nothing", "new")


@pytest.mark.slow
def test_the_readme_tells_what_the_demo_answers(readers, tmp_path: Path):
    """The whole manual, a minute on two cores; another Python has another manual."""
    texts: Texts = python_texts()
    reader, window = readers
    again = run(Setup(reader=reader, window=window, texts=texts, folder=tmp_path), Watcher())
    opening = BETWEEN.findall(README.read_text("utf-8"))[0]
    said = re.findall(r"(?m)^\S.*?[?.]  +.+?  +[+-] (.+?)  +[+-] ", opening)
    assert said == [answered.memory for answered in again.answers]

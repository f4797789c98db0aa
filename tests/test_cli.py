"""The command: what it prints, what it refuses, and what it leaves alone."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from pydoc_data.topics import topics
from time import monotonic, sleep

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from atlas_lm import RULES, LanguageModel, ModelConfig, __version__, load_model, save_model
from atlas_lm import reading as module
from atlas_lm.ask import Task
from atlas_lm.cli import main, show
from atlas_lm.cli.inspect_text import read_traced
from atlas_lm.memory import load_memory
from atlas_lm.reading import Step
from atlas_lm.text import ByteTokenizer, check_text
from atlas_lm.trace import SIGNALS, trace

TEXT = topics["assert"] + "Überraschung: 漢字 😀.\n\n" + topics["break"]
COMMANDS = ("read", "ask", "generate", "inspect", "rebuild")
TASK = Task(
    templates={"short": "\nQ: {question}\nA: ", "long": "\nQuestion: {question}\nAnswer: "},
    stop=("\n",),
    max_tokens=8,
    answers=("kitchen", "garden", "nowhere"),
    not_told="nowhere",
)


def save_tiny(folder: Path, seed: int = 0, **changes) -> None:
    torch.manual_seed(seed)
    rules = tuple(replace(RULES[name], chunk=16) for name in ("titans", "delta_net"))
    shape = {"dim": 16, "depth": 2, "heads": 2, "rule": rules}
    save_model(LanguageModel(ModelConfig(**shape | changes)), folder)
    TASK.save(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a model, another, a text, and a memory of both."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny(folder / "model")
    save_tiny(folder / "other", seed=1)
    save_tiny(folder / "small", vocab=100)
    (folder / "book.txt").write_text(TEXT, "utf-8")
    assert main([*read_command(folder), "--no-journal"]) == 0
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    """A copy of it, to work in."""
    for path in made.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(made)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_command(folder: Path, memory: str = "memory", text: str = "book.txt") -> list[str]:
    options = ["--model", str(folder / "model"), "--memory", str(folder / memory)]
    return ["read", str(folder / text), *options, "--segment", "300"]


def files(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def said(capsys, args: str | list[str], code: int = 0) -> str:
    """What a command prints; nothing else, on the other channel."""
    capsys.readouterr()
    assert main(args.split() if isinstance(args, str) else args) == code
    out, err = capsys.readouterr()
    assert (out if code else err) == ""
    return err if code else out


def refused(capsys, args: str | list[str]) -> str:
    message = said(capsys, args, code=2)
    assert message.startswith("atlas-lm: ")
    assert message.count("\n") == 1
    return message


# Help


def test_help_lists_every_command_and_every_flag(capsys):
    assert said(capsys, []) == said(capsys, "--help")
    assert all(f"• {name}" in said(capsys, []) for name in COMMANDS)
    flags = ["segment", "every", "restart", "again", "journal", "no-journal"]
    assert all(f"--{flag}" in said(capsys, "read --help") for flag in flags)
    assert all("--model DIR" in said(capsys, f"{name} --help") for name in COMMANDS)
    assert said(capsys, "--version") == f"atlas-lm {__version__}\n"


def test_help_imports_nothing_slow():
    code = """
import sys
from atlas_lm.cli import main
assert main(["read", "--help"]) == 0
print([name for name in ("torch", "numpy", "tqdm", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_device_that_is_not_there_is_a_mistake(here, capsys):
    assert main([*read_command(here, "new"), "--device", "nowhere"]) == 2
    assert "--device nowhere: cannot be used here" in capsys.readouterr().err


# What the commands do


def test_read_tells_what_it_read_and_how_large_the_memory_is(here, capsys):
    out = said(capsys, read_command(here, "new"))
    state, size = load_memory(here / "new", load_model(here / "model")).state, len(TEXT.encode())
    assert f"read book.txt: {size:,} tokens\n" in out
    assert "tokens/s" in out
    assert f"{state.nbytes:,} bytes of memory for {size:,} bytes of text" in out
    assert f"KV cache of {state.nbytes / (2 * 2 * 16 * 4):.1f} tokens" in out
    before = files(here)
    assert "already read" in said(capsys, read_command(here, "new"))
    assert files(here) == before
    said(capsys, [*read_command(here, "new"), "--again"])
    assert f"{2 * size:,} tokens read" in said(capsys, "inspect new")


def test_inspect_shows_what_a_memory_holds(here, capsys):
    said(capsys, read_command(here, "new"))
    out = said(capsys, "inspect new --model model")
    assert out.splitlines()[0].endswith("tokens read, by model")
    assert str(here / "book.txt") in out
    assert "sha256 " + check_text(here / "book.txt").sha256[:12] in out
    shown = json.loads(said(capsys, "inspect new --json"))
    memory = load_memory(here / "new", load_model(here / "model"))
    first, last = shown["layers"]
    weights = [w[0].flatten(1) for w in memory.state.layers[0].memory.weights.values()]  # pyright: ignore[reportAttributeAccessIssue]
    assert first["weights"] == pytest.approx(torch.cat(weights, 1).norm(dim=-1).mean().item())
    assert first["momentum"] > 0
    assert last["momentum"] is None
    assert [layer["half_life"] for layer in (first, last)] == list(memory.about.half_lives)
    assert shown["tokens"] == shown["text_bytes"] == len(TEXT.encode())
    assert shown["kv_cache_tokens"] == pytest.approx(memory.state.nbytes / 256)
    assert shown["texts"][0]["path"] == str(here / "book.txt")


def test_inspect_shows_any_state_that_was_saved(here, capsys):
    load_model("model").begin(2).layers[0].save("layer")
    out = said(capsys, "inspect layer")
    assert "0 tokens read" in out
    assert "does not say which model" in out


def test_inspect_shows_where_a_text_was_written_to(here, capsys):
    out = said(capsys, "inspect book.txt --model model --html page.html").splitlines()
    assert f"{len(TEXT.encode()):,} tokens" in out[0]
    assert out[-1] == "page.html: every word of it"
    assert "Überraschung" in Path("page.html").read_text("utf-8")
    shown = json.loads(said(capsys, "inspect book.txt --model model --json"))["strongest"]
    assert len(out) == len(shown) + 2
    assert [s["write"] for s in shown] == sorted((s["write"] for s in shown), reverse=True)
    assert all(word in s["text"] for s in shown for word in s["words"])


def test_a_text_is_traced_in_pieces_as_in_one(here, monkeypatch):
    monkeypatch.setattr("atlas_lm.cli.inspect_text.SEGMENT", 333)
    model, tokens = load_model("model"), torch.tensor([ByteTokenizer().encode(TEXT)])
    steps: list[Step] = []
    found = read_traced(model, ByteTokenizer(), check_text("book.txt"), steps.append)
    whole, _ = trace(model, tokens)
    for name in SIGNALS:
        expected = getattr(whole, name)[:, 0].mean(0).numpy()
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-3, atol=1e-5)
    assert found.text == TEXT
    last_bytes = np.cumsum([len(letter.encode()) for letter in TEXT])
    assert (found.ends[last_bytes - 1] == np.arange(1, len(TEXT) + 1)).all()
    assert steps[-1] == Step(tokens.shape[1], tokens.shape[1], tokens.shape[1])


def test_content_tells_a_memory_from_a_text(here, capsys):
    Path("memory").rename("story.txt")
    Path("book.txt").rename("book.safetensors")
    assert "bytes of memory" in said(capsys, "inspect story.txt")
    assert "strongest" in said(capsys, "inspect book.safetensors --model model")


def test_ask_answers_with_and_without_the_memory(here, capsys):
    before = files(here)
    args = ["ask", "Where is it?", "And now?", "--model", "model", "--memory", "memory"]
    out = said(capsys, args)
    assert out.count("empty memory: ") == 2
    assert out.count(" %") == 4
    shown = json.loads(said(capsys, [*args, "--json", "--template", "long"]))
    assert [each["question"] for each in shown] == ["Where is it?", "And now?"]
    for answer in (shown[0]["memory"], shown[0]["empty"]):
        assert answer["text"] in (TASK.answers or ())
        assert answer["told"] is (answer["text"] != "nowhere")
    assert shown[0]["memory"]["probability"] != shown[0]["empty"]["probability"]
    assert files(here) == before


def test_generate_prints_text(here, capsys):
    Path("prompt").write_text("In an old house", "utf-8")
    prompt = ["--prompt", "In an old house", "--max-tokens", "20"]
    base = ["generate", "--model", "model", "--seed", "3"]
    written = said(capsys, [*base, *prompt])
    assert written == said(capsys, [*base, "--prompt-file", "prompt", "--max-tokens", "20"])
    assert written != said(capsys, [*base, *prompt, "--memory", "memory", "--temperature", "1"])
    assert said(capsys, [*base, *prompt, "--top-k", "1"]) == said(
        capsys, [*base, *prompt, "--temperature", "0", "--top-p", "0.5"]
    )
    assert said(capsys, [*base, "--max-tokens", "3"])  # a new document


def test_rebuild_reads_the_texts_with_another_model(here, capsys):
    said(capsys, read_command(here, "new"))
    args = "rebuild --memory new --model other --out built"
    assert "read book.txt" in said(capsys, args)
    load_memory("built", load_model("other"))
    assert "already" in said(capsys, args)
    assert "of another model" in refused(capsys, "inspect built --model model")


# Mistakes


def damaged(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)


def strange_tensors() -> None:
    save_file({"w": torch.ones(3)}, "strange")


READ = "read book.txt --model model --memory new"
ASK = "ask why --model model --memory memory"
WRITE = "generate --prompt a --model model"
MISTAKES: dict[str, tuple[Callable[[], object] | None, str, str]] = {
    "no_such_command": (None, "recite", "recite"),
    "no_such_flag": (None, f"{READ} --colour red", "--colour"),
    "flag_left_out": (None, "read book.txt --model model", "--memory FILE"),
    "flag_without_value": (None, "generate --model", "--model"),
    "no_number": (None, f"{READ} --segment many", "--segment: invalid literal .*'many'"),
    "no_fraction": (None, f"{WRITE} --top-k 1.5", "--top-k"),
    "no_segment": (None, f"{READ} --segment 0", "segment: 0; expected 1"),
    "negative_seconds": (None, f"{READ} --every -1", "every: -1.0; expected 0"),
    "no_text": (None, "read story.txt --model model --memory new", "story.txt: no such text"),
    "folder_as_text": (None, "read model --model model --memory new", "model: a directory"),
    "empty_text": (lambda: Path("book.txt").write_text(" \n"), READ, "without a word"),
    "latin_1": (lambda: Path("book.txt").write_bytes(b"gr\xfcn"), READ, "not UTF-8 at byte 2"),
    "no_model": (None, f"{READ} --model nowhere", "nowhere: no such model folder"),
    "no_weights": (Path("model/model.safetensors").unlink, READ, "model.safetensors: missing"),
    "bad_config": (lambda: Path("model/config.json").write_text("{"), READ, "not a JSON file"),
    "cut_weights": (
        lambda: Path("model/model.safetensors").write_bytes(b"\0" * 9),
        READ,
        "model.safetensors: not a whole safetensors file",
    ),
    "small_vocabulary": (None, f"{READ} --model small", "tokenizer: it has 257 ids, the model 100"),
    "bad_tokenizer": (
        lambda: Path("model/tokenizer.json").write_text("{}"),
        READ,
        "tokenizer.json: not a tokenizer",
    ),
    "no_folder": (None, f"{READ} --memory far/away", "away.*no such folder|far: no such folder"),
    "no_memory": (None, f"{ASK} --memory nowhere", "nowhere: no such memory file"),
    "damaged_memory": (lambda: damaged("memory"), ASK, "memory: the file was changed"),
    "read_on_damaged": (
        lambda: damaged("memory"),
        f"{READ} --memory memory",
        "memory: the file was changed",
    ),
    "memory_over_text": (None, f"{READ} --memory book.txt", "book.txt: not a whole safetensors"),
    "other_model": (None, f"{ASK} --model other", "it is of [0-9a-f]{12}, .*`atlas-lm rebuild`"),
    "read_with_other": (None, f"{READ} --model other --memory memory", "of another model"),
    "no_question": (None, "ask --model model --memory memory", "no question"),
    "no_template": (None, f"{ASK} --template rude", "template: 'rude' is not one of short, long"),
    "no_task": (Path("model/task.json").unlink, ASK, "task.json: missing"),
    "cold": (None, f"{WRITE} --temperature -1", "temperature: -1.0"),
    "top_p": (None, f"{WRITE} --top-p 2", "top_p: 2.0"),
    "two_prompts": (None, f"{WRITE} --prompt-file book.txt", "give one of them"),
    "no_prompt_file": (None, "generate --model model --prompt-file x", "x: No such file"),
    "latin_1_prompt": (
        lambda: Path("book.txt").write_bytes(b"gr\xfcn"),
        "generate --model model --prompt-file book.txt",
        "book.txt: not UTF-8",
    ),
    "inspect_nothing": (None, "inspect nowhere", "nowhere: no such file"),
    "inspect_folder": (None, "inspect model", "model: not a file"),
    "inspect_text": (None, "inspect book.txt", "book.txt: no memory file; .*give --model"),
    "inspect_weights": (strange_tensors, "inspect strange", "strange: not a memory file"),
    "page_of_memory": (None, "inspect memory --html x", "memory: a memory; --html shows a text"),
    "page_nowhere": (None, "inspect book.txt --model model --html far/x", "far: no such folder"),
    "no_journal": (None, "rebuild --memory memory --model other --out new", "has no journal"),
}


@pytest.mark.parametrize(("prepare", "args", "match"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_gets_one_line_and_changes_no_file(prepare, args, match, here, capsys):
    if prepare is not None:
        prepare()
    before = files(here)
    assert re.search(match, refused(capsys, args))
    assert files(here) == before


def test_a_full_disk_is_told_and_changes_no_file(here, capsys, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    before = files(here)
    monkeypatch.setattr(os, "fsync", full)
    assert "no space for its" in refused(capsys, [*read_command(here), "--again"])
    assert files(here) == before


def test_a_mistake_shows_its_traceback_if_asked(here, monkeypatch):
    monkeypatch.setenv("ATLAS_LM_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        main(["inspect", "nowhere"])


def test_a_bug_keeps_its_traceback(here, monkeypatch):
    def buggy(*_args, **_options):
        raise KeyError("not your fault")

    monkeypatch.setattr(module, "read_file", buggy)
    with pytest.raises(KeyError, match="not your fault"):
        main(read_command(here))


def test_output_that_nobody_reads_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["--version"]) == 141
        monkeypatch.undo()


def test_letters_that_the_terminal_does_not_know_are_replaced(here, monkeypatch):
    with open("out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        for args in (
            "inspect book.txt --model model",
            "generate --model model --seed 1 --prompt a --max-tokens 40",
        ):
            assert main(args.split()) == 0
        monkeypatch.undo()


# Stopped


def test_stopped_by_hand_it_says_how_to_go_on(here, capsys, monkeypatch):
    def interrupt(_bar, step: Step) -> None:
        if step.tokens:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(show.Bar, "show", interrupt)
        message = said(capsys, read_command(here, "new"), code=130)
    assert message.startswith("atlas-lm: stopped after 300 tokens, kept in")
    assert "the same command goes on" in message
    assert "300 of them earlier" in said(capsys, read_command(here, "new"))


WAITING = """
import signal, sys, time
from atlas_lm.cli import main, show

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
steps = []

def wait(bar, step):
    if step.tokens:
        steps.append(step)
    if len(steps) > 2:
        time.sleep(100)  # until a signal comes, however late

show.Bar.show = wait
sys.exit(main(sys.argv[1:]))
"""


def started(args: list[str], part: Path) -> subprocess.Popen[str]:
    """A command in a process of its own, once it has written there; it waits in the middle."""
    before = part.stat().st_mtime_ns if part.exists() else 0
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    give_up = monotonic() + 60
    while not part.exists() or part.stat().st_mtime_ns == before:
        assert process.poll() is None, process.communicate()
        assert monotonic() < give_up
        sleep(0.002)
    return process


def test_stopped_and_killed_it_ends_in_the_same_memory(here, capsys):
    Path("book.txt").write_text(TEXT * 20, "utf-8")
    model, part = load_model("model"), here / "new.part"
    args = [*read_command(here, "new"), "--every", "0"]
    stopped = started(args, part)
    stopped.send_signal(signal.SIGINT)
    message = stopped.communicate()[1]
    assert stopped.returncode == 130, message
    assert "the same command goes on" in message
    killed = started(args, part)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not Path("new").exists()
    assert "of them earlier" in said(capsys, args)
    said(capsys, read_command(here, "whole"))
    found, whole = (load_memory(name, model) for name in ("new", "whole"))
    assert found.fingerprint == whole.fingerprint
    assert [path.name for path in here.iterdir() if "part" in path.name] == []


# Progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), StringIO()], ids=["terminal", "file"])
def test_progress_shows_bytes_speed_and_time_left(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(show, "LINES_EVERY", 0)
    with show.Bar("book.txt") as bar:
        for done in range(500, 2001, 500):  # taken up at a quarter
            bar.show(Step(done, 2_000, done - 500))
            sleep(0.11)
    shown = stream.getvalue()
    assert "book.txt: " in shown
    assert "tokens/s" in shown
    if stream.isatty():
        assert "25%" in shown
        assert "2.00k/2.00k" in shown
    else:
        assert [line.split(", ")[0] for line in shown.splitlines()] == [
            "book.txt: 1.0 kB of 2.0 kB",
            "book.txt: 1.5 kB of 2.0 kB",
            "book.txt: 2.0 kB of 2.0 kB",
        ]
        assert shown.endswith(" 0 s left\n")


def test_durations_are_told_in_fitting_units():
    assert [show.duration(s) for s in (0.4, 99, 600, 9_000)] == ["0 s", "99 s", "10 min", "2.5 h"]

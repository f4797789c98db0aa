"""The pages for users: code that runs, commands that are understood, links that lead somewhere."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from atlas_lm.cli import Command, main
from atlas_lm.cli.sweep import parse_sweep
from atlas_lm.cli.train import parse_train

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ("in-your-model", "training", "memories-for-users", "demo", "from-loop-to-kernel")
PAGES = [DOCS / f"{name}.md" for name in NAMES]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Blocks of code in a language, each with the number of its first line."""
    text = page.read_text("utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block.group(1)) for block in found]


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """What is said to `atlas-lm`, also under torchrun, each with the number of its line."""
    found = []
    for first, block in blocks(page, "bash"):
        whole = block.replace("\\\n", "  ")
        for number, line in enumerate(whole.splitlines()):
            words = shlex.split(line, comments=True)
            if words[:1] == ["atlas-lm"]:
                found.append((first + number, words[1:]))
            elif words[:1] == ["torchrun"]:
                found.append((first + number, words[words.index("atlas_lm") + 1 :]))
    return found


def parsed(args: list[str]) -> Any:
    """The command as it would be run, and is not."""
    if args[0] == "train":
        return parse_train(args[1:])
    if args[0] == "sweep":
        return parse_sweep(args[1:])
    return tyro.cli(Command, prog="atlas-lm", args=args)


def write_recipe(page: Path, name: str) -> None:
    """Where a command names FILE.py:FUNCTION, the file is what the page shows of it."""
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        shown = [block for _, block in blocks(page, "python") if f"def {function}(" in block]
        Path(file).write_text(shown[0], "utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": page.stem}
    found = blocks(page, "python")
    assert found
    for first, block in found:
        # as many empty lines before it: a traceback tells the line of the page
        exec(compile("\n" * (first - 1) + block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = commands(page)
    assert bool(found) == bool(blocks(page, "bash"))
    for number, args in found:
        write_recipe(page, " ".join(args[1:2]))
        try:
            parsed(args)
        except (ValueError, SystemExit) as error:
            told = capsys.readouterr().err
            pytest.fail(f"{page.name}:{number}: atlas-lm {shlex.join(args)}\n{error}\n{told}")


def test_options_in_sentences_exist(capsys):
    asked = ("read", "generate", "data prepare", "sweep", "train books", "train demo")
    for command in asked:
        assert main([*command.split(), "--help"]) == 0
    known = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    for page in PAGES:
        named = re.findall(r"`(--[a-z][\w.-]*)", page.read_text("utf-8"))
        assert known.issuperset(named), f"{page.name}: {set(named) - known}: no such option"


# Links


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub calls them in links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))
    assert links
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}: no such file"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: no such heading"

"""The house stays one people want to live in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(ROOT.glob("atlas_lm/**/*.py"))


def readme_blocks(language: str) -> list[str]:
    parts = (ROOT / "README.md").read_text().split("```" + language + "\n")[1:]
    return [part.split("```")[0] for part in parts]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_files_and_functions_are_short_enough_to_see(file):
    source = file.read_text()
    assert len(source.splitlines()) <= 500
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            assert len(lines) <= 60, f"{node.name} is too long"


def test_modules_say_what_they_are():
    for file in FILES:
        assert ast.get_docstring(ast.parse(file.read_text())), f"{file} has no docstring"


def test_importing_brings_no_package_before_its_use():
    later = ("triton", "transformers", "tokenizers", "fla")
    code = f"from atlas_lm import *; import sys; print([m for m in {later} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_readme_example_runs_and_is_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = readme_blocks("python")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    exec(compile(example, "README.md", "exec"), {})


def test_readme_tree_names_every_file():
    tree = readme_blocks("text")[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    kinds = ("atlas_lm/**/*.py", "examples/*.py", "benchmarks/*.py", "docs/*.md", "tests/*.py")
    missing = [
        str(f.relative_to(ROOT))
        for kind in kinds
        for f in ROOT.glob(kind)
        if f.name != "__init__.py" and f.name not in named
    ]
    assert not missing, f"not in the README's tree: {missing}"

"""Every kernel compiles for the cards people have, and fits them. No GPU is needed."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from atlas_lm.ops import triton as package
from atlas_lm.ops.triton.catalogue import (
    COUNTS,
    LIMITS,
    ROUNDED,
    compilations,
    compilations_for,
    in_gluon,
    module_of,
)

CARDS = (80, 89, 90)
TOO_LARGE: dict[int, set[str]] = {80: set(), 89: set(), 90: set()}
"""Kernels that a card has too little shared memory for, known and accepted, by name."""

SCRIPT = """
import json, sys
from atlas_lm.ops.triton.catalogue import compilations_for, compile_for, module_of

def some(card, key):
    first = {}
    for each in compilations_for(card):
        first.setdefault(key(each), each)
    return first.values()

if sys.argv[1] == "all":
    work = [(card, each) for card in (80, 89, 90) for each in compilations_for(card)]
else:
    work = [(90, each) for each in some(90, lambda each: (module_of(each.fn), each.fn.__name__))]
    names = " of titans", "resident_kernel of titans, by a team"
    work += [(90, each) for each in compilations_for(90) if each.name.endswith(names)]
    work += [(card, each) for card in (80, 89) for each in some(card, lambda each: each.family)]
for card, each in work:
    made = {"card": card, "name": each.name, "family": each.family}
    try:
        made |= compile_for(each, card)._asdict()
    except Exception as error:
        made["error"] = f"{type(error).__name__}: {error}"[-500:]
    print(json.dumps(made), flush=True)
"""


def compiled(which: str, cache: Path) -> list[dict]:
    """In a process of its own: kernels decorated under the interpreter cannot be compiled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", SCRIPT, which]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict]) -> None:
    broken = [f"sm_{x['card']} {x['name']}: {x['error']}" for x in found if "error" in x]
    assert not broken, "\n\n".join(broken)
    too_large = {
        f"sm_{x['card']} {x['name']}: {x['shared']} of {LIMITS[x['card']]} bytes"
        for x in found
        if x["shared"] > LIMITS[x["card"]] and x["name"] not in TOO_LARGE[x["card"]]
    }
    assert not too_large
    for x in found:
        assert x["registers"] is None or 8 <= x["registers"] <= 255
        assert x["spilled"] is None or x["spilled"] >= 0


def test_each_kernel_compiles_and_fits(tmp_path):
    """For sm_90 at one size, memories at two; for older cards one kernel of each family."""
    found = compiled("some", tmp_path)
    check(found)
    assert {x["card"] for x in found} == set(CARDS)
    assert all({x["family"] for x in found if x["card"] == card} == families() for card in CARDS)


@pytest.mark.slow
def test_every_compilation_compiles_and_fits(tmp_path):
    found = compiled("all", tmp_path)
    check(found)
    assert len(found) == sum(len(compilations_for(card)) for card in CARDS)


def families() -> set[str]:
    return {each.family for each in compilations()}


def test_what_is_in_gluon_is_for_hopper_alone():
    there = {each.name for each in compilations() if in_gluon(each.fn)}
    assert there
    for card in CARDS:
        names = {each.name for each in compilations_for(card)}
        assert there <= names if card == 90 else not there & names


def in_triton(function: ast.FunctionDef) -> bool:
    made = (ast.unparse(decorator) for decorator in function.decorator_list)
    return any(each.startswith(("triton.jit", "gluon.jit")) for each in made)


def test_no_kernel_is_left_out():
    """A kernel is a function in Triton or Gluon that no other one calls."""
    functions, called = set(), set()
    for file in Path(package.__path__[0]).glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and in_triton(node):
                functions.add((file.stem, node.name))
                calls = (x.func for x in ast.walk(node) if isinstance(x, ast.Call))
                called |= {x.id for x in calls if isinstance(x, ast.Name)}
    listed = {(module_of(each.fn), each.fn.__name__) for each in compilations()}
    assert {each for each in functions if each[1] not in called} == listed


def test_compilations_are_of_all_arguments():
    for each in compilations():
        assert set(each.signature) == set(each.fn.arg_names), each.name
        constants = {name for name, kind in each.signature.items() if kind == "constexpr"}
        assert constants == set(each.constexprs), each.name


def test_tables_name_what_there_is():
    names = {each.name for each in compilations()}
    assert all(listed <= names for listed in TOO_LARGE.values())
    memories = {"writing", "writing_resident", "writing_backward", "writing_settle", "muon_kernels"}
    memories |= {"reading", "reading_hidden", "reading_backward", "writing_resident_backward"}
    arguments = [each.fn.arg_names for each in compilations() if each.family in memories]
    assert set().union(*arguments) >= ROUNDED | COUNTS

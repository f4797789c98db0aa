"""`atlas-lm doctor`: what it tells of a machine with and without a GPU, and what it refuses."""

import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from atlas_lm import RULES, __version__
from atlas_lm.cli import doctor, main
from atlas_lm.ops import kernels

pytest.importorskip("triton")

import triton

from atlas_lm.ops.triton import catalogue
from atlas_lm.ops.triton.catalogue import LIMITS, Compiled

REASONS = {
    "titans": "tensors on a CPU",
    "gated_delta_net": "tensors on a CPU",
    "deep_transformer": "features='exponential'",
    "swdt": "features='exponential'",
    "dot": "features='exponential'",
    "moneta": "objective='lp'",
    "yaad": "objective='huber'",
}


@pytest.fixture(autouse=True)
def _a_machine_without_gpu_or_interpreter(monkeypatch):
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch):
    """A card that takes kernels, as far as can be told without one."""
    found = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=150 * 10**9,
        shared_memory_per_block_optin=LIMITS[90],
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: torch.empty(*shape, device="meta"))
    monkeypatch.setattr(kernels, "why_not_here", lambda q: None)
    monkeypatch.setattr(kernels, "preferred", lambda q: True)


def said(capsys, args: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["doctor", *args.split()]) == code
    out, err = capsys.readouterr()
    assert (out if code else err) == ""
    return err if code else out


def row(text: str, first: str) -> list[str]:
    """The cells of the one line of a table that begins so."""
    (line,) = [x for x in text.splitlines() if x.startswith("  ") and x.split()[0] == first]
    return [cell.strip() for cell in line.strip().split("  ") if cell.strip()]


def in_a_process(code: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What it tells


def test_versions_and_no_gpu(capsys):
    first, second = said(capsys, "").splitlines()[:2]
    python, torch_ = platform.python_version(), torch.__version__
    versions = f"Python {python}, PyTorch {torch_}, Triton {triton.__version__}"
    assert first == f"atlas-lm {__version__}, {versions}"
    assert second == "no GPU"


def test_every_rule_and_why_no_kernel_takes_it(capsys):
    text = said(capsys, "")
    for name in RULES:
        assert row(text, name)[1] == "chunked"
    for name, reason in REASONS.items():
        assert row(text, name) == [name, "chunked", reason]


def test_every_family_of_kernels_and_how_to_check_numbers(capsys):
    text = said(capsys, "")
    for family in {each.family for each in catalogue.compilations()}:
        count = sum(each.family == family for each in catalogue.compilations())
        assert row(text, family) == [family, str(count)]
    assert "python -m benchmarks.speed" in text.splitlines()[-1]


def test_json(capsys):
    told = json.loads(said(capsys, "--json"))
    assert (told["version"], told["triton"], told["gpu"]) == (__version__, triton.__version__, None)
    assert [each["rule"] for each in told["rules"]] == list(RULES)
    assert {each["takes"] for each in told["rules"]} == {"chunked"}
    reasons = {each["rule"]: each["reason"] for each in told["rules"]}
    assert reasons.items() >= REASONS.items()
    assert told["compiled_for"] is None
    assert len(told["kernels"]) == len(catalogue.compilations())
    assert {each["shared"] for each in told["kernels"]} == {None}


def test_on_a_gpu(capsys, gpu):
    text = said(capsys, "")
    assert text.splitlines()[1] == "NVIDIA H200, compute capability 90, 140 GiB"
    assert row(text, "titans") == ["titans", "triton"]
    assert row(text, "dot") == ["dot", "chunked", "features='exponential'"]
    told = json.loads(said(capsys, "--json"))
    assert told["gpu"]["capability"] == 90
    assert {"rule": "titans", "takes": "triton", "reason": None} in told["rules"]


def test_under_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "interpreted", lambda: True)
    reason = "the interpreter, which only checks them"
    assert row(said(capsys, ""), "titans") == ["titans", "chunked", reason]
    assert "TRITON_INTERPRET=1" in said(capsys, "--compile --capability 90", code=2)


def test_without_triton():
    code = """
import sys
sys.modules["triton"] = None
from atlas_lm.cli import main
assert main(["doctor"]) == 0
assert main(["doctor", "--compile", "--capability", "90"]) == 0
"""
    once, again = in_a_process(code).split("atlas-lm ")[1:]
    assert once == again
    assert "no Triton" in once.splitlines()[0]
    assert row(once, "titans")[2] == "this machine: Triton is not installed"
    assert row(once, "dot")[2] == "features='exponential'"
    assert once.splitlines()[-1] == "kernels: none without Triton; every rule runs as chunked"


def test_help_imports_neither_torch_nor_triton():
    code = """
import sys
from atlas_lm.cli import main
assert main(["doctor", "--help"]) == 0
print([name for name in ("torch", "triton") if name in sys.modules])
"""
    told = in_a_process(code)
    assert all(flag in told for flag in ("--compile", "--capability N", "--json"))
    assert told.splitlines()[-1] == "[]"


# Compiling


def test_compiles_for_a_card_that_is_not_here(tmp_path):
    code = f"""
import os
os.environ["TRITON_CACHE_DIR"] = {str(tmp_path)!r}
from atlas_lm.cli import main
from atlas_lm.ops.triton import catalogue
few = [each for each in catalogue.compilations() if each.family == "gated_norm"]
catalogue.compilations = lambda: few
assert main("doctor --compile --capability 89 --json".split()) == 0
"""
    told = json.loads(in_a_process(code))
    assert told["compiled_for"] == {"capability": 89, "shared": 99 * 1024}
    assert [each["name"] for each in told["kernels"]] == [
        "gated_norm.forward",
        "gated_norm.backward",
    ]
    for each in told["kernels"]:
        assert each["error"] is None
        assert each["fits"]
        assert 0 <= each["shared"] < 99 * 1024
        assert 8 <= each["registers"] <= 255
        assert each["spilled"] == 0


def test_what_fits_what_does_not_and_what_fails(capsys, monkeypatch):
    def compile_for(compilation, capability):
        assert capability == 86
        if compilation.name == "gated_norm.forward":
            raise RuntimeError("at 3:4\n\nno such thing\n")
        if compilation.name == "gated_norm.backward":
            return Compiled(100 * 1024, None, None)
        return Compiled(99 * 1024, 128, 1300)

    monkeypatch.setattr(catalogue, "compile_for", compile_for)
    text = said(capsys, "--compile --capability 86")
    assert "compiled for sm_86, which has 99 KiB of shared memory" in text
    expected = ["short_conv", "6", "99.0 KiB", "128", "1,300 bytes", "all fit"]
    assert row(text, "short_conv") == expected
    expected = ["gated_norm", "2", "100.0 KiB", "unknown", "unknown", "2 cannot run"]
    assert row(text, "gated_norm") == expected
    assert "  gated_norm.forward: not compiled: no such thing\n" in text
    assert "  gated_norm.backward: 100.0 KiB of shared memory, too much\n" in text


def test_compiles_for_this_card_unless_told(capsys, gpu, monkeypatch):
    asked = set()

    def compile_for(compilation, capability):
        asked.add(capability)
        return Compiled(0, 8, 0)

    monkeypatch.setattr(catalogue, "compile_for", compile_for)
    assert "compiled for sm_90, which has 227 KiB" in said(capsys, "--compile")
    assert "compiled for sm_80, which has 163 KiB" in said(capsys, "--compile --capability 80")
    assert asked == {80, 90}


# What it refuses


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("--compile", "--compile: no GPU here; name one by --capability: 80, 86, 89, 90, 100"),
        ("--capability 89", "--capability: give --compile too"),
        ("--compile --capability 12", "--capability: 12 is not one of 80, 86, 89, 90, 100"),
        ("--compile --capability ada", "ada"),
        ("--fast", "--fast"),
    ],
)
def test_mistakes(capsys, args, expected):
    message = said(capsys, args, code=2)
    assert message.startswith("atlas-lm: ")
    assert expected in message
    assert message.count("\n") == 1


def test_layer_it_speaks_of():
    assert (doctor.DIM, doctor.HEADS) == (1024, 16)

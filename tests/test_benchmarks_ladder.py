"""The ladder without a GPU: every rung gives the numbers of the first, or it is told."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from atlas_lm import RULES
from benchmarks import gpu, ladder

TITANS = replace(RULES["titans"], chunk=8)
TINY = ladder.Shape(2, 40, 1, 16, 16, torch.float32, TITANS)
CPU_LADDER = ladder.rungs_on("cpu")
CPU_RUNGS = [rung.name for rung in CPU_LADDER]


class FakeGraph:
    def replay(self):
        """What was recorded was also done."""


@pytest.fixture
def tiny(monkeypatch):
    """The ladder at a tiny size, without other processes, by a clock that says 2 ms."""
    monkeypatch.setattr(ladder, "SHAPES", {"cpu": TINY, "cuda": TINY})
    monkeypatch.setattr(ladder, "COMPARED", 19)
    monkeypatch.setattr(ladder, "grown", lambda rung: 3.0)

    def seconds(*calls, repeats):
        return [call() and 0.002 for call in calls]

    monkeypatch.setattr(ladder.cpu, "seconds", seconds)
    made = ladder.inputs(TINY, "cpu")
    monkeypatch.setattr(ladder, "inputs", lambda shape, device: made)
    return made


def run(monkeypatch, tmp_path, *arguments):
    """The exit code and the rows by rung."""
    out = tmp_path / "ladder.json"
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--quick", "--out", str(out), *arguments])
    with pytest.raises(SystemExit) as left:
        ladder.main()
    report = json.loads(out.read_text())
    assert {"processor", "gpu", "torch", "date", "command", "commit"} <= report["machine"].keys()
    return left.value.code, {row["rung"]: row for row in report["rows"]}


def break_rung(monkeypatch, name, run):
    """One rung of the ladder computes something else."""
    rungs = [replace(r, run=run) if r.name == name else r for r in CPU_LADDER]
    monkeypatch.setattr(ladder, "rungs_on", lambda device: rungs)


@pytest.mark.parametrize("rung", CPU_LADDER, ids=lambda rung: rung.name)
def test_every_rung_is_the_reference(rung):
    shape = TINY._replace(dtype=torch.float64, heads=2, hidden=24)
    made = ladder.inputs(shape, "cpu").cut(0, 29)
    # the outer loop's tensors too
    made = made.with_inputs({n: x.double() for n, x in made.inputs().items()})
    found, expected = (ladder.call_of(r, made)() for r in (rung, CPU_LADDER[0]))
    assert len(found) == (11 if rung.backward else 1)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_matrices_in_bfloat16_are_as_good_as_products_in_it():
    made = ladder.inputs(TINY._replace(dtype=torch.bfloat16), "cpu").cut(0, 29)
    first, _, matrices, vectors = (ladder.call_of(r, made)() for r in CPU_LADDER)
    errors = [ladder.error_of(found, first) for found in (matrices, vectors)]
    assert errors[0]["compared"] == 11
    assert all(1e-3 < e["error"] < ladder.ALLOWED[torch.bfloat16] for e in errors)


def test_the_report_has_every_rung(tiny, monkeypatch, tmp_path, capsys):
    code, rows = run(monkeypatch, tmp_path, "--device", "cpu")
    assert code == 0
    assert list(rows) == CPU_RUNGS
    loop, step, matrices, vectors = rows.values()
    assert "times_faster" not in loop
    assert "forward_backward_ms" not in step
    assert [r["times_faster_in"] for r in (step, matrices, vectors)] == [
        "forward",
        "forward",
        "forward_backward",
    ]
    assert (loop["batch"], step["batch"]) == (1, 2)
    assert loop["us_a_token"] == pytest.approx(2000 / 40)
    assert step["us_a_token"] == pytest.approx(2000 / 80)
    assert [r["times_faster"] for r in (step, matrices, vectors)] == pytest.approx([2, 1, 1])
    assert all(row["error"] < 1e-5 and row["mib"] == 3 for row in rows.values())
    told = capsys.readouterr().out
    assert all(name in told for name in CPU_RUNGS)


@pytest.fixture
def like_a_gpu(tiny, kernel_device, monkeypatch):
    """Kernels in Triton's interpreter, which is slow: nothing is called only to be timed."""
    if kernel_device != "cpu":
        pytest.skip("kernels are compiled here, for a GPU")
    monkeypatch.setattr(gpu, "require_cuda", lambda: None)
    monkeypatch.setattr(gpu, "cost", lambda call, clear, repeats, warm_ups: gpu.Cost(2.0, 0.5))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(gpu, "warm_up", lambda call: None)
    monkeypatch.setattr(gpu, "recording", lambda graph: nullcontext())
    monkeypatch.setattr(ladder, "inputs", lambda shape, device: ladder.cut(tiny, 1, 9))


def test_kernels_and_graphs_are_rungs_on_a_gpu(like_a_gpu, monkeypatch, tmp_path):
    from atlas_lm.ops.triton import memorize

    teams, chosen, sizes_of = [], memorize.team_of, memorize.sizes_of
    monkeypatch.setattr(memorize, "team_of", lambda *a: teams.append("chosen") or chosen(*a))
    monkeypatch.setattr(memorize, "sizes_of", lambda *a: teams.append(a[-1]) or sizes_of(*a))
    code, rows = run(monkeypatch, tmp_path, "--device", "cuda")
    assert code == 0, rows
    kernels = ["kernels, one program a memory", "kernels, several programs a memory"]
    assert list(rows) == [*CPU_RUNGS, *kernels, "the same recorded"]
    assert [row["compared"] for row in rows.values()] == [11, 1, 11, 11, 11, 11, 11]
    assert [row["mib"] for row in rows.values()] == [512] * 6 + [None]
    assert teams[:3] == [1, "chosen", 1]  # forced in one of them and only there


def test_a_rung_without_room_is_excused(like_a_gpu, monkeypatch, tmp_path):
    def cost(call, clear, repeats, warm_ups):
        if "grad.k" in call():
            raise torch.cuda.OutOfMemoryError("none left")
        return gpu.Cost(2.0, 0.5)

    monkeypatch.setattr(gpu, "cost", cost)
    monkeypatch.setattr(ladder, "rungs_on", lambda device: CPU_LADDER)
    code, rows = run(monkeypatch, tmp_path, "--device", "cuda")
    assert code == 0
    assert rows[CPU_RUNGS[2]]["skipped"] == "out of memory"
    assert "us_a_token" not in rows[CPU_RUNGS[2]]


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_rung_gets_no_time_and_exit_code_1(tiny, monkeypatch, tmp_path, capsys, wrong):
    break_rung(monkeypatch, CPU_RUNGS[2], lambda made: ladder.with_matrices(made) * wrong)
    code, rows = run(monkeypatch, tmp_path, "--device", "cpu")
    assert code == 1
    row = rows[CPU_RUNGS[2]]
    assert row["skipped"].startswith("off by nan at y" if wrong != wrong else "off by 0.01 at ")
    assert "forward_ms" not in row
    assert "times_faster" not in row
    assert rows[CPU_RUNGS[3]]["times_faster_in"] == "forward"  # than the one before that
    assert row["skipped"] in capsys.readouterr().out


def test_a_wrong_gradient_and_an_error_are_told(tiny, monkeypatch, tmp_path):
    def detached(made):
        return ladder.with_matrices(replace(made, k=made.k.detach() + 0 * made.k))

    break_rung(monkeypatch, CPU_RUNGS[2], detached)
    code, rows = run(monkeypatch, tmp_path, "--device", "cpu")
    assert code == 1
    assert "at grad.k, allowed" in rows[CPU_RUNGS[2]]["skipped"]

    def failing(made):
        raise ValueError("no such thing")

    break_rung(monkeypatch, CPU_RUNGS[3], failing)
    code, rows = run(monkeypatch, tmp_path, "--device", "cpu")
    assert code == 1
    assert rows[CPU_RUNGS[3]]["skipped"] == "ValueError: no such thing"


def test_nonsense_is_refused(capsys):
    for arguments in (["--device", "tpu"], ["--rungs", "all"], ["fast"]):
        with pytest.raises(SystemExit) as left:
            ladder.parse(arguments)
        assert left.value.code == 2
    assert "invalid choice: 'tpu'" in capsys.readouterr().err
    assert ladder.parse([]).device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_without_a_gpu_there_are_no_kernels(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as left:
        ladder.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "this benchmark needs a CUDA GPU, and torch sees none\n"

"""The GPU benchmarks without a GPU: what they count, refuse and report; the check of kernels."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from atlas_lm import RULES
from atlas_lm.testing import kernels
from atlas_lm.testing.kernels import Comparison, check_kernels, failures
from benchmarks import figures, gpu, models, speed

SMALL = {"batch": 2, "heads": 1, "device": "cpu"}
TITANS = replace(RULES["titans"], chunk=8)


@pytest.fixture
def on_cpu(monkeypatch):
    """The benchmark on a CPU at a tiny size, with a clock that says 2 ms."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "require_cuda", lambda: None)
    monkeypatch.setattr(speed, "SHAPES", ((2, 70),))
    small = partial(check_kernels, tokens=9, before=5, batch=1)
    monkeypatch.setattr(speed, "check_kernels", lambda *a, before, **k: small(*a, **k))

    def cost(call, clear, repeats, warm_ups):
        clear()
        call()
        return gpu.Cost(ms=2.0, gib=0.5)

    monkeypatch.setattr(gpu, "cost", cost)
    monkeypatch.setattr(gpu, "Recorded", lambda call: call)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["speed.py", *arguments])
    with pytest.raises(SystemExit) as left:
        speed.main()
    return left.value.code


def test_without_a_gpu_there_is_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "this benchmark needs a CUDA GPU, and torch sees none\n"


@pytest.mark.parametrize("packed", [False, True])
def test_the_yardstick_is_within_itself(packed):
    found = check_kernels(TITANS, 16, 16, 16, 19, before=5, impl="chunked", packed=packed, **SMALL)
    names = {c.name for c in found}
    assert {"y", "end.weights.w1", "grad.k", "grad.gates.momentum", "grad.state.anchor.w2"} <= names
    assert not failures(found)
    errors = {c.name: c.error for c in found}
    assert errors["end.keys"] == errors["end.position"] == 0
    assert 1e-3 < errors["y"] < 0.05
    assert 1e-4 < errors["grad.k"] < 0.05
    assert (errors["grad.weights.w1"] > 0) == packed  # a reset is all that reads the initial memory


@pytest.mark.parametrize("name", ["y", "grad.v", "end.weights.w2"])
@pytest.mark.parametrize("wrong", [1.02, float("nan")])
def test_a_wrong_kernel_is_found(monkeypatch, name, wrong):
    right = kernels._evaluate

    def evaluate(made, impl, state):
        found = right(made, "chunked", state)
        return found | {name: found[name] * wrong} if impl == "triton" else found

    monkeypatch.setattr(kernels, "_evaluate", evaluate)
    found = check_kernels(TITANS, 16, 16, 16, 19, before=5, **SMALL)
    assert [c.name for c in failures(found)] == [name]


def test_a_comparison_allows_twice_the_yardstick():
    assert Comparison("y", 0.02, 0.01).holds
    assert not Comparison("y", 0.021, 0.01).holds
    assert not Comparison("y", float("nan"), 0.01).holds
    assert "y: error 0.021 against 0.01" in str(Comparison("y", 0.021, 0.01))


def test_operations_are_counted_as_documented():
    titans = speed.flops(speed.ROWS["titans"])
    projections = 2 * 1024 * (5 * 1024 + 32) + 2 * 32 * 16 * 4
    memory = 16 * (2 * 64 * 256 * (6 + 5) + 2 * 64 * (64 + 256))
    assert titans == projections + memory
    steps = 16 * 2 * 5 * (4 * 64 * 64 * 256 + 2 * 64**3)
    often, seldom = (speed.flops(speed.ROWS[n]) for n in ("atlas_r16", "atlas_r64"))
    assert often - seldom == steps / 16 - steps / 64


def test_every_row_is_the_layer_that_the_target_is_about():
    hidden = {n: r.config().hidden for n, r in speed.ROWS.items() if r.goal}
    assert list(hidden.values()) == [256, None, 64, 256, 256, 64, 64]
    assert all(r.config().value_width == 64 for r in speed.ROWS.values())


def test_layers_and_lengths_are_reported(on_cpu, monkeypatch, tmp_path, capsys):
    out = tmp_path / "speed.json"
    arguments = ("--rules", "linear_attention,delta_net", "--peers", "attention,gla")
    options = ("--impl", "chunked", "--lengths", "64,128", "--out", str(out))
    assert run(monkeypatch, *arguments, *options) == 0
    report = json.loads(out.read_text())
    rows = {row["layer"]: row for row in report["layers"]}
    assert list(rows) == ["delta_net", "linear_attention", "attention", "gla"]
    assert rows["attention"]["forward_backward_ms"] == 2.0
    assert rows["delta_net"]["tokens_s"] == 70_000
    expected = 3 * speed.flops(speed.ROWS["delta_net"]) * 140 / 0.002 / 790e12
    assert rows["delta_net"]["share_of_peak"] == pytest.approx(expected)
    assert rows["gla"]["skipped"]  # not installed, or no GPU
    assert {n for n, row in rows.items() if row.get("replayed_ms") == 2.0} == set(list(rows)[:2])
    assert [(r["layer"], r["tokens"]) for r in report["lengths"]][-2:] == [
        ("attention", 64),
        ("attention", 128),
    ]
    assert report["lengths"][0]["forward_us_a_token"] == pytest.approx(2000 / 64)
    assert {"gpu", "torch", "triton", "date", "command", "commit"} <= report["machine"].keys()
    assert "delta_net" in capsys.readouterr().out


def test_over_length_no_memory_forgets(on_cpu):
    layer = speed.forgetting_nothing(lambda: speed.layer_of(speed.ROWS["omeganet"], "chunked"))
    maps = next(m for m in layer.modules() if isinstance(m, speed.GateMaps))
    x = torch.randn(1, 5, maps.down.in_features, dtype=maps.down.weight.dtype)
    gates = maps(x, torch.ones(3))
    assert (gates.retention == 1).all()
    assert gates.rate.unique().numel() > 1


@pytest.mark.parametrize("wrong", [1.02, float("nan")])
def test_a_graph_with_other_numbers_gets_no_speed(on_cpu, monkeypatch, wrong):
    def recorded(call):
        return lambda: [*call()[:-1], call()[-1] * wrong]

    monkeypatch.setattr(gpu, "Recorded", recorded)
    make = partial(speed.layer_of, speed.ROWS["delta_net"], "chunked")
    found = speed.replayed(make, 1, 9, quick=True, deadline=gpu.ENDLESS)
    assert found == {"not_replayed": f"off by {0.02 if wrong == wrong else wrong:.2g}"}


def test_a_wrong_rule_gets_no_speed_and_exit_code_1(on_cpu, monkeypatch, tmp_path, capsys):
    wrong = [Comparison("grad.k", 0.5, 0.01), Comparison("y", 0.01, 0.01)]
    monkeypatch.setattr(speed, "check_kernels", lambda *a, **k: wrong)
    out = tmp_path / "speed.json"
    arguments = ("--rules", "delta_net", "--peers", "none", "--impl", "triton", "--out", str(out))
    assert run(monkeypatch, *arguments) == 1
    report = json.loads(out.read_text())
    assert report["layers"] == []
    assert report["numbers"][0]["holds"] is False
    assert "WRONG delta_net: fresh grad.k: error 0.5 against 0.01" in capsys.readouterr().out


def test_a_budget_ends_a_run_and_unknown_names_are_refused(on_cpu, monkeypatch, tmp_path):
    out = tmp_path / "speed.json"
    arguments = ("--rules", "delta_*", "--peers", "none", "--impl", "chunked", "--budget", "-1")
    assert run(monkeypatch, *arguments, "--out", str(out)) == 0
    (row,) = json.loads(out.read_text())["layers"]
    assert row["skipped"] == "no time left (--budget)"
    assert "unknown nets" in str(run(monkeypatch, "--rules", "nets"))


@pytest.fixture
def small_models(on_cpu, monkeypatch):
    monkeypatch.setattr(models, "SIZES", {"100M": {"depth": 1, "dim": 64, "heads": 1}})
    monkeypatch.setattr(models, "VOCAB", 32)
    monkeypatch.setattr(models, "BUDGET", 64)
    monkeypatch.setattr(models, "PROMPTS", (8, 16))
    monkeypatch.setattr(models, "BATCHES", (1, 3))
    monkeypatch.setattr(models, "DECODED", 2)


def test_models_are_trained_and_decoded(small_models, monkeypatch, tmp_path, capsys):
    out = tmp_path / "models.json"
    arguments = ["--sizes", "100M", "--mixers", "delta_net", "--lengths", "32,128"]
    monkeypatch.setattr(sys, "argv", ["models.py", *arguments, "--out", str(out)])
    monkeypatch.setattr(models, "PER_TOKEN", models.PER_TOKEN | {"tokens": 8})
    models.main()
    report = json.loads(out.read_text())
    training = {(r["mixer"], r["tokens"]): r for r in report["training"]}
    assert training["delta_net", 32]["tokens_s"] == 64 / 0.002
    assert training["attention", 128]["batch"] == 1
    assert report["per_token"]["tokens_s"] == 64 / 0.002
    assert report["crossing"][0]["faster_from"] == "32 or less"  # the same clock for both
    sizes = {(r["mixer"], r["prompt"], r["batch"]): r["state_bytes"] for r in report["decoding"]}
    assert sizes["delta_net", 16, 3] == sizes["delta_net", 8, 1]
    assert sizes["attention", 16, 1] - sizes["attention", 8, 3] == 8 * 2 * 64 * 2
    assert "tokens from which the memory trains faster" in capsys.readouterr().out


def test_the_crossing_is_interpolated_between_lengths():
    lengths, theirs = [1000, 10_000, 100_000], {1000: 8.0, 10_000: 4.0, 100_000: 1.0}
    assert models.faster_from(lengths, dict.fromkeys(lengths, 2.0), theirs) == 31_623
    assert models.faster_from(lengths, dict.fromkeys(lengths, 9.0), theirs) == "1000 or less"
    for none in (dict.fromkeys(lengths, 0.5), {}):
        found = models.faster_from(lengths if none else [], none, theirs)
        assert found == "not within the table"


@pytest.fixture
def both_without_kernels(small_models, monkeypatch):
    plain = models.config_of
    monkeypatch.setattr(
        models, "config_of", lambda size, mixer, impl, vocab: plain(size, mixer, vocab=vocab)
    )


def test_the_same_training_twice_gives_one_curve(both_without_kernels):
    made = list(models.curves("delta_net", steps=12, batch=2, tokens=64))
    curve = made[-1]
    assert len(made) == len(curve["losses"]["chunked"]) == 12
    assert curve["largest_difference"] == 0
    losses = curve["losses"]["triton"]
    assert 5 < losses[0] < 6
    assert losses[-1] < losses[0]


def test_curves_that_run_out_of_time_keep_what_they_have(both_without_kernels):
    (curve,) = models.curves("delta_net", 12, gpu.Deadline(0), batch=2, tokens=64)
    assert [len(losses) for losses in curve["losses"].values()] == [1, 1]


def test_bytes_follow_one_another_as_the_table_says(on_cpu):
    tokens = models.markov_bytes(8, 500, torch.Generator().manual_seed(0)).cpu()
    after = {}
    for row in tokens.tolist():
        for a, b in pairwise(row):
            after.setdefault(a, set()).add(b)
    assert max(len(found) for found in after.values()) <= 4
    assert len(after) > 100


def test_every_report_has_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"layer": "titans", "peer": False, "batch": 8, "tokens": 4096, "goal_ms": 6}
    times = {"forward_backward_ms": 9.0, "forward_backward_us_a_token": 0.3}
    missing = {"layer": "gla", "peer": True, "tokens": 4096, "skipped": "not installed"}
    trained = {"size": "100M", "mixer": "titans", "tokens": 4096, "tokens_s": 1e5}
    curve = {"losses": {"chunked": [2.0, 1.0], "triton": [2.0, 1.1]}, "largest_difference": 0.1}
    for report in (
        {"layers": [row | times, missing], "lengths": [row | times, missing]},
        {"layers": [missing], "training": [trained]},
        {"curve": curve},
    ):
        path = figures.draw(report | {"machine": gpu.machine()}, tmp_path / "some.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()
    with pytest.raises(SystemExit, match="nothing in it"):
        figures.draw({"layers": [missing], "machine": gpu.machine()}, tmp_path / "some.png")

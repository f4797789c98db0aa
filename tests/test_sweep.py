"""Sweeps: which runs, resumed and failed ones, and what the tables say of them."""

import csv
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from math import exp, isclose
from pathlib import Path
from shutil import copytree
from statistics import fmean, median, stdev
from time import monotonic, sleep

import pytest
import torch
from watchers import At, interrupt

from atlas_lm import RULES
from atlas_lm.cli import main
from atlas_lm.models.costs import Costs, costs
from atlas_lm.recipes import RECIPES
from atlas_lm.sweep import figures, runs
from atlas_lm.sweep.figures import short_first, state_panel, styles_of, swept_panels
from atlas_lm.sweep.grid import Planned, Value, plan, values_of, with_rule_fields
from atlas_lm.sweep.runs import join, run_all, status_of, write_sweep
from atlas_lm.sweep.side_by_side import FAILED, STOPPED, side_by_side
from atlas_lm.sweep.tables import (
    Chance,
    Row,
    Run,
    chance_of,
    estimate,
    latex,
    plain_text,
    rows_of,
    shown_table,
    student_quantile,
    wilson,
)
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import QuestionData, TaskData
from atlas_lm.train.guard import NotFinite
from atlas_lm.train.loop import train
from atlas_lm.train.run_folder import read_config, write_config
from atlas_lm.train.watch import Watch, read_lines

TINY = [
    *("--model.vocab", "16", "--model.dim", "8", "--model.depth", "1", "--length", "12"),
    *("--data.longer", "24", "--batch", "4", "--steps", "4", "--log-every", "2"),
    *("--evaluate-every", "0", "--checkpoint-every", "0", "--evaluate-batches", "2"),
    *("--threads", "1", "--device", "cpu"),
]


def sweep(out: Path, *args: str) -> int:
    return main(["sweep", "recall", "--out", str(out), *TINY, *args])


def refused(capsys, *args: str) -> str:
    assert main(["sweep", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atlas-lm: ")
    assert err.count("\n") == 1
    return err


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Which runs


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["1,4,16"], ["1", "4", "16"]),
        (["titans,[atlas,attention]"], ["titans", "[atlas,attention]"]),
        (["192", "384"], ["192 384"]),
        (["[192,384],[768]"], ["[192,384]", "[768]"]),
        (["1e-3"], ["1e-3"]),
        ([], [""]),
    ],
)
def test_values_are_listed_with_commas(words, texts):
    assert [value.text for value in values_of(words)] == texts


@pytest.mark.parametrize("text", ["1,,2", "1,1", "[1,2", "1,2]", "[1],[1]", ","])
def test_a_list_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="expected different values with commas between"):
        values_of([text])


def listed(**options: str) -> dict[str, list[Value]]:
    return {name.replace("__", "."): values_of([text]) for name, text in options.items()}


def configured(chosen: dict[str, Value]) -> TrainConfig:
    config = RECIPES["recall"]()
    for name, value in chosen.items():
        config = replace(config, **{name: int(value.text)})
    return config


def test_every_setting_comes_with_every_seed_and_every_seed_after_the_other():
    made = plan(listed(rule__chunk="4,8", batch="2,6"), [0, 1], configured)
    assert [run.name for run in made] == [
        *("chunk=4_batch=2_seed=0", "chunk=4_batch=6_seed=0"),
        *("chunk=8_batch=2_seed=0", "chunk=8_batch=6_seed=0"),
        *("chunk=4_batch=2_seed=1", "chunk=4_batch=6_seed=1"),
        *("chunk=8_batch=2_seed=1", "chunk=8_batch=6_seed=1"),
    ]
    last = made[-1]
    assert (last.config.batch, last.config.seed) == (6, 1)
    assert last.config.model.rule == replace(RULES["titans"], chunk=8)
    assert last.settings == {"rule.chunk": "8", "batch": "6"}


def with_rule(rule) -> TrainConfig:
    config = RECIPES["recall"]()
    return replace(config, model=replace(config.model, rule=rule))


def test_a_field_of_the_rule_is_changed_where_it_can_be():
    changed = with_rule_fields(with_rule("atlas"), {"window": "3", "stride": "4"}).model.rule
    assert changed == replace(RULES["atlas"], window=3, stride=4)
    both = with_rule_fields(with_rule(("titans", "attention", "atlas")), {"stride": "4"})
    assert both.model.rule == ("titans", "attention", replace(RULES["atlas"], stride=4))
    # the same rule has the same name, by whatever words it came about
    assert with_rule_fields(with_rule("atlas"), {"window": "16"}).model.rule == "atlas"
    assert with_rule_fields(with_rule("titans"), {"optimizer": "gd"}).model.rule == replace(
        RULES["titans"], optimizer="gd"
    )
    with pytest.raises(ValueError, match=r"--rule.stride 4: Rule: stride=4 works with .* second"):
        with_rule_fields(with_rule("titans"), {"stride": "4"})
    with pytest.raises(ValueError, match=r"--rule.window 4: attention has no fields"):
        with_rule_fields(with_rule("attention"), {"window": "4"})


def test_the_command_line_of_a_sweep(capsys, tmp_path):
    out = tmp_path / "out"
    assert sweep(out, "--model.rule", "delta_net,[titans,swa]", "--seeds", "2", "--dry-run") == 0
    told = capsys.readouterr().out.splitlines()
    names = [f"rule={rule}_seed={s}" for s in (0, 1) for rule in ("delta_net", "titans+swa")]
    assert told == [*(f"new       {name}" for name in names), f"4 runs of 4 steps in {out}"]
    assert not out.exists()
    assert sweep(out, "--model.tied", "True,False", "--seed", "5,7", "--dry-run") == 0
    assert "new       tied=False_seed=7" in capsys.readouterr().out


def test_typos_are_answered_before_anything_runs(capsys, tmp_path):
    out = str(tmp_path / "out")
    start = ["recall", "--out", out]
    told = refused(capsys, *start, "--rule.windw", "1,4")
    assert "--rule.windw: a rule has no such field (did you mean 'window'?); it has network" in told
    told = refused(capsys, *start, "--optimizer.lrr", "1,2")
    assert "(did you mean '--optimizer.lr'?)" in told
    assert "(did you mean 'recall'?)" in refused(capsys, "recal", "--out", out)
    assert "no --out; expected" in refused(capsys, "recall", "--batch", "1,2")
    assert "batch: 0; expected" in refused(capsys, *start, "--batch", "4,0")
    assert "invalid" in refused(capsys, *start, "--batch", "4,x").lower()
    assert "--seeds 0; expected 1 or more" in refused(capsys, *start, "--seeds", "0")
    told = refused(capsys, *start, "--seed", "1,2", "--seeds", "2")
    assert "the seeds are listed in --seed" in told
    assert "a sweep goes on by itself" in refused(capsys, *start, "--resume")
    assert "given twice; list its values" in refused(capsys, *start, "--batch", "1", "--batch", "2")
    assert "expected an option" in refused(capsys, "recall", "more", "--out", out)
    assert "expected `atlas-lm sweep RECIPE" in refused(capsys, "--out", out, "recall")
    assert "sweep.json: missing" in refused(capsys, str(tmp_path))
    assert not Path(out).exists()


@pytest.mark.parametrize("words", [[], ["recall"], ["recall", "--out", "x"]])
def test_help_tells_how_a_mixture_is_written(words, capsys):
    assert main(["sweep", *words, "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--model.rule titans,[atlas,attention]" in told
    assert "--rule.window 1,4,16" in told


# Runs


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """Two rules and a learning rate that breaks, with two seeds of each."""
    out = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["atlas-lm"])
        rates = ["--optimizer.lr", "1e-3,1e30"]
        assert sweep(out, "--model.rule", "delta_net,attention", *rates, "--seeds", "2") == 0
    return out


def test_a_sweep_leaves_a_row_a_run(swept):
    rows = table(swept / "sweep.csv")
    assert len(rows) == 8
    assert sorted(row["run"] for row in rows) == sorted(p.name for p in (swept / "runs").iterdir())
    for row in rows:
        folder = swept / "runs" / row["run"]
        assert (row["model.rule"], int(row["seed"])) == (
            read_config(folder).model.rule,
            read_config(folder).seed,
        )
        if row["optimizer.lr"] == "1e30":
            assert row["status"] == "failed"
            assert "there is no checkpoint yet. Begin another run with a lower" in row["reason"]
            assert row["loss"] == row["parameters"] == ""
            continue
        lines = read_lines(folder / "metrics.jsonl")
        last = [line for line in lines if line["kind"] == "eval"][-1]
        speeds = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
        for name in ("loss", "accuracy", "accuracy@12", "accuracy@24"):
            assert float(row[name]) == last[name]
        assert float(row["tokens_per_second"]) == median(speeds)
        config = read_config(folder)
        assert json.loads((folder / "costs.json").read_text()) == asdict(costs(config.model, 12))


def test_a_setting_is_a_mean_with_an_interval(swept):
    by_run, rows = table(swept / "sweep.csv"), table(swept / "table.csv")
    assert [(row["model.rule"], row["optimizer.lr"]) for row in rows] == [
        *(("delta_net", "1e-3"), ("delta_net", "1e30")),
        *(("attention", "1e-3"), ("attention", "1e30")),
    ]
    good, bad = rows[0], rows[1]
    assert (bad["n"], bad["failed"], bad["loss"]) == ("0", "2", "")
    own = [
        float(run["loss"])
        for run in by_run
        if run["model.rule"] == "delta_net" and run["status"] == "finished"
    ]
    assert (good["n"], good["failed"]) == ("2", "0")
    assert isclose(float(good["loss"]), fmean(own))
    half = 12.706205 * stdev(own) / 2**0.5
    assert isclose(float(good["loss low"]), fmean(own) - half, rel_tol=1e-6)
    assert isclose(float(good["loss high"]), fmean(own) + half, rel_tol=1e-6)
    assert good["accuracy@24 says"] == "at chance"  # after four steps
    model = read_config(swept / "runs" / by_run[0]["run"]).model
    expected = costs(model, 12)
    assert good["state_bytes"] == str(expected.state_bytes)
    assert good["flops_per_token"] == str(expected.flops_per_token)
    assert "at chance & at chance" in (swept / "table.tex").read_text()


def test_recall_is_in_the_order_of_state_bytes(swept):
    rows = table(swept / "equal_state.csv")
    sizes = [int(row["state_bytes"]) for row in rows]
    assert sizes == sorted(sizes)
    assert {row["model.rule"]: row["state_grows"] for row in rows} == {
        "delta_net": "False",
        "attention": "True",
    }
    for row in rows:
        model = replace(tiny().model, rule=row["model.rule"], heads=2)
        for length in (12, 24):  # a state that grows, when it was asked
            expected = costs(model, length).state_bytes
            assert int(row[f"accuracy@{length} state_bytes"]) == expected
    assert (swept / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert (swept / "equal_state.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_again_makes_nothing_and_more_makes_more(swept, tmp_path, capsys, monkeypatch):
    trained, swept = [], Path(copytree(swept, tmp_path / "copy"))

    def watched(config, folder, *args, **options):
        trained.append(folder.name)
        return train(config, folder, *args, **options)

    monkeypatch.setattr(runs, "train", watched)
    again = ["--model.rule", "delta_net,attention", "--optimizer.lr", "1e-3,1e30", "--seeds", "2"]
    assert sweep(swept, *again) == 0
    assert trained == []
    assert "failed" not in capsys.readouterr().out.splitlines()[-1]
    # the rate that was fixed is now one of two, and a run that is there has another name
    more = ["--model.rule", "delta_net,attention", "--optimizer.lr", "0.001,2e-3"]
    assert sweep(swept, *more) == 0
    assert trained == ["rule=delta_net_lr=2e-3_seed=0", "rule=attention_lr=2e-3_seed=0"]
    assert len(table(swept / "sweep.csv")) == 10
    assert [row["n"] for row in table(swept / "table.csv")] == ["2", "0", "2", "0", "1", "1"]
    capsys.readouterr()
    for path in swept.glob("*.csv"):
        path.unlink()
    assert main(["sweep", str(swept), "--metric", "accuracy@24"]) == 0
    assert len(table(swept / "sweep.csv")) == 10
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["model.rule", "optimizer.lr", "n"]
    assert "figure.png: a picture of it" in out
    told = refused_after(capsys, str(swept), "--metric", "acuracy")
    assert "no such figure (did you mean 'accuracy'?)" in told
    assert "to add runs" in refused(capsys, str(swept), "--batch", "3")


def test_further_seeds_take_the_best_value_of_what_is_tuned(tmp_path, capsys, monkeypatch):
    """A stand-in for training: delta_net is better at 2e-3, attention fails there."""
    accuracy = {("delta_net", 1e-3): 0.5, ("delta_net", 2e-3): 0.75, ("attention", 1e-3): 0.25}
    trained = []

    def pretended(config, folder, **_):
        trained.append(folder.name)
        rule, rate = config.model.rule, config.optimizer.lr
        write_config(folder, config, "recall")
        if (rule, rate) not in accuracy:
            raise NotFinite("the loss is not finite")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        found = {"accuracy": accuracy[rule, rate] + config.seed / 100, "loss": 1.0}
        lines = {"kind": "eval", "step": config.steps, **found}
        (folder / "metrics.jsonl").write_text(json.dumps(lines) + "\n")

    monkeypatch.setattr(runs, "train", pretended)
    grid = ["--model.rule", "delta_net,attention", "--optimizer.lr", "1e-3,2e-3", "--seeds", "3"]
    assert sweep(tmp_path, *grid, "--tune", "optimizer.lr", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[4:] == [
        f"4 runs of 4 steps in {tmp_path}",
        "then other seeds of each combination at its best optimizer.lr",
    ]
    assert trained == []
    assert sweep(tmp_path, *grid, "--tune", "optimizer.lr") == 0
    best = [("delta_net", "2e-3"), ("attention", "1e-3")]
    assert trained[4:] == [f"rule={r}_lr={lr}_seed={seed}" for seed in (1, 2) for r, lr in best]
    assert len(table(tmp_path / "sweep.csv")) == len(trained) == 8
    for _ in range(2):
        rows = table(tmp_path / "table.csv")
        assert [(row["model.rule"], row["optimizer.lr"], row["n"]) for row in rows] == [
            (*pair, "3") for pair in best
        ]
        assert float(rows[0]["accuracy"]) == pytest.approx(0.76)
        assert main(["sweep", str(tmp_path)]) == 0
    assert sweep(tmp_path, *grid, "--tune", "optimizer.lr") == 0
    assert len(trained) == 8


def test_only_what_is_listed_can_be_tuned(tmp_path, capsys):
    out = ("recall", "--out", str(tmp_path), *TINY)
    assert "of which values are listed, as --opt" in refused(capsys, *out, "--tune", "optimizer.lr")
    more = ("--rule.window", "1,4", "--tune", "optimizer.lr", "--optimizer.lr", "1e-3")
    assert "of which values are listed: rule.window" in refused(capsys, *out, *more)
    assert not list(tmp_path.iterdir())


def refused_after(capsys, *args: str) -> str:
    assert main(["sweep", *args]) == 2
    return capsys.readouterr().err


def tiny(**changes) -> TrainConfig:
    config = RECIPES["recall"]()
    model = replace(config.model, vocab=16, dim=8, depth=1, rule="delta_net")
    sizes = {"steps": 6, "batch": 4, "length": 12, "checkpoint_every": 2, "threads": 1}
    data = replace(config.data, longer=())
    return replace(config, model=model, data=data, **sizes | changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def test_a_run_that_was_stopped_goes_on(tmp_path, capsys):
    run = Planned("a_seed=0", tiny(), {})
    write_sweep(tmp_path, "recall", [run])
    folder = tmp_path / "runs" / run.name

    assert status_of(folder) == "new"
    with pytest.raises(KeyboardInterrupt):
        train(run.config, folder, watch=[At(3, interrupt)], device="cpu")
    assert status_of(folder) == "begun"
    assert run_all(tmp_path, "recall", [run], "cpu") == []
    assert status_of(folder) == "finished"
    notes = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "note"]
    assert [note["step"] for note in notes] == [2]
    train(run.config, tmp_path / "whole", device="cpu")
    found, expected = weights(folder), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "run 1 of 1, a_seed=0: begins" in capsys.readouterr().err


def test_being_told_to_stop_stops_the_sweep(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt("stopped after step 3, which is saved; the same with --resume")

    monkeypatch.setattr(runs, "train", stopped)
    with pytest.raises(KeyboardInterrupt, match="step 3, which is saved; the same command goes on"):
        run_all(tmp_path, "recall", [Planned("a", tiny(), {})], "cpu")


def test_only_what_may_end_otherwise_is_tried_again(tmp_path, monkeypatch):
    tried = []

    def broken(config, folder, **_):
        tried.append(folder.name)
        raise runs.NotFinite("nan") if config.seed else ValueError("out of memory")

    monkeypatch.setattr(runs, "train", broken)
    planned = [Planned("a", tiny(seed=0), {}), Planned("b", tiny(seed=1), {})]
    assert run_all(tmp_path, "recall", planned, "cpu") == ["a", "b"]
    assert run_all(tmp_path, "recall", planned, "cpu") == ["a"]
    assert tried == ["a", "b", "a"]


def test_another_run_takes_no_folder_of_an_old_one(tmp_path):
    old = Planned("seed=0", tiny(), {"batch": "4"})
    write_sweep(tmp_path, "recall", [old])
    train(old.config, tmp_path / "runs" / "seed=0", device="cpu")
    same = Planned("batch=4_seed=0", tiny(log_every=7), {"batch": "4"})
    # what was planned and never begun is not in the way
    write_sweep(tmp_path, "recall", [Planned("later_seed=0", tiny(batch=2), {"batch": "2"})])
    later = Planned("later_seed=0", tiny(batch=2), {"batch": "2"})
    assert [run.name for run in join(tmp_path, [later])] == ["later_seed=0"]
    other = Planned("seed=0", tiny(batch=8), {"batch": "8"})
    twice = Planned("twice_seed=0", tiny(batch=8), {"batch": "8"})
    assert [run.name for run in join(tmp_path, [same, other, twice])] == ["seed=0", "seed=0_2"]
    write_sweep(tmp_path, "recall", join(tmp_path, [same, other]))
    assert list(runs.read_sweep(tmp_path)) == ["seed=0", "seed=0_2"]


@pytest.mark.slow
def test_several_at_a_time_come_to_the_same(tmp_path):
    planned = [Planned(f"seed={s}", tiny(seed=s), {}) for s in (0, 1)]
    broken = Planned("broken", tiny(optimizer=replace(tiny().optimizer, lr=1e30)), {})
    assert run_all(tmp_path / "one", "recall", [*planned, broken], "cpu") == ["broken"]
    assert run_all(tmp_path / "two", "recall", [*planned, broken], "cpu", jobs=2) == ["broken"]
    for run in planned:
        one, two = (weights(tmp_path / n / "runs" / run.name) for n in ("one", "two"))
        assert all(torch.equal(one[name], two[name]) for name in one)


def patient(watch: Watch) -> bool:
    """Until it is told to stop, which it hears as training does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch.begin(0, 1)
    for _ in range(3000):
        watch.stepped(1)
        sleep(0.02)
    return True


def fatal(watch: Watch) -> bool:
    os._exit(7)


def failing(watch: Watch) -> bool:
    return False


def test_side_by_side_until_time_is_over():
    works = {"fatal": fatal, "failing": failing, "patient": patient}
    codes: dict[str, int] = {}
    with pytest.raises(KeyboardInterrupt, match="time is over"):
        side_by_side(works, 3, monotonic() + 2, lambda name, code: codes.update({name: code}))
    assert codes == {"fatal": 7, "failing": FAILED, "patient": STOPPED}


def test_a_sweep_whose_time_is_over_has_tables_and_goes_on(tmp_path, monkeypatch, capsys):
    def over(out, recipe, runs, device, jobs, tuned, until):
        run_all(out, recipe, runs[:1], device, 1, tuned)
        monkeypatch.setattr("atlas_lm.cli.sweep.monotonic", lambda: until)
        raise KeyboardInterrupt("time is over; the same command goes on")

    monkeypatch.setattr(runs, "run_all", over)
    assert sweep(tmp_path, "--seeds", "2", "--seconds", "9") == 0
    told = capsys.readouterr().out
    assert "time is over; the same command goes on" in told
    assert [row["status"] for row in table(tmp_path / "sweep.csv")] == ["finished"]
    monkeypatch.undo()
    assert sweep(tmp_path, "--seeds", "2") == 0
    assert [row["status"] for row in table(tmp_path / "sweep.csv")] == ["finished"] * 2
    capsys.readouterr()
    assert "--seconds 0.0; expected more" in refused(capsys, "recall", "--seconds", "0")


# Estimates


def test_student_s_quantiles_are_those_of_the_books():
    book = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 29: 2.0452, 199: 1.9720}
    for freedom, value in book.items():
        assert isclose(student_quantile(freedom), value, abs_tol=6e-5)


def test_an_interval_holds_the_mean_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    held = 0
    for values in draws.tolist():
        found = estimate(values)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0 <= found.high
    assert 0.935 < held / 2000 < 0.965


def test_a_guess_is_at_chance_and_knowing_is_not():
    chance = Chance(1 / 8, 400)
    assert str(estimate([0.13, 0.12, 0.128], chance)) == "at chance"
    assert str(estimate([0.9, 0.91, 0.92], chance)) == "0.910 [0.885, 0.935]"
    # a single run has no interval over seeds, but was asked so many questions
    assert str(estimate([0.14], chance)) == "at chance"
    assert str(estimate([0.2], chance)) == "0.200"
    # seeds that agree by being asked the same questions are not surer of it
    assert estimate([0.14, 0.14, 0.14], chance).at_chance
    # seeds that differ, though none of them guesses; and where two of three do
    assert str(estimate([0.9, 0.2, 0.25], chance)) == "0.450 [0.000, 1.000]"
    assert estimate([0.9, 0.12, 0.13], chance).at_chance
    assert str(estimate([2.0], None)) == "2.000"
    assert estimate([1.0, 1.0], chance)[:3] == (1.0, 1.0, 1.0)


def test_wilson_s_interval():
    low, high = wilson(0.5, 100)
    assert isclose(low, 0.40383, abs_tol=1e-5)
    assert isclose(high, 0.59617, abs_tol=1e-5)
    assert isclose(wilson(0.0, 10)[1], 0.27753, abs_tol=1e-5)


def test_chance_is_told_by_the_kind_of_data():
    config = tiny()
    rows = config.batch * config.evaluate_batches
    # keys are told apart by nobody who guesses among the values of 4 or 8 pairs
    assert chance_of(config, "accuracy") == Chance(1 / 4, rows * 4)
    assert chance_of(config, "accuracy@24") == Chance(1 / 8, rows * 8)
    task = TaskData(task="mqar/64-4:vocab=256", tests=("mqar/64-8:vocab=64",))
    found = chance_of(replace(config, data=task, length=64), "accuracy")
    assert found == Chance(1 / 4, rows * 4)
    found = chance_of(replace(config, data=task, length=64), "accuracy@64-8:vocab=64")
    assert found == Chance(1 / 8, rows * 8)
    found = chance_of(replace(config, data=replace(task, longer=(128,)), length=64), "accuracy@128")
    assert found == Chance(1 / 4, rows * 4)
    questions = QuestionData(tasks=("babilong/qa1", "babilong/qa7"))
    asked = replace(config, data=questions, length=512)
    assert chance_of(asked, "accuracy") == Chance(1 / 6, rows)
    assert chance_of(asked, "accuracy@qa7-512") == Chance(1 / 4, rows)
    text = RECIPES["python_text"]()
    assert chance_of(text, "accuracy") is None


# Tables


def some(settings: dict[str, str], *values: float, **changes) -> list[Run]:
    price = Costs(1000, 900, 4096, False, 2000.0)
    price = replace(price, **{n: v for n, v in changes.items() if hasattr(price, n)})
    return [
        Run(
            name=f"{settings} {seed}",
            settings=settings,
            seed=seed,
            status="finished",
            reason="",
            figures={"loss": exp(-value), "accuracy": value, "tokens_per_second": 10.0 + seed},
            costs=price,
            chances={"accuracy": Chance(1 / 8, 1000)},
            states={"accuracy": 2 * price.state_bytes} if price.state_grows else {},
        )
        for seed, value in enumerate(values)
    ]


def rows() -> list[Row]:
    return rows_of(
        [
            *some({"rule.window": "4", "model.rule": "atlas", "batch": "8"}, 0.5, 0.6, 0.7),
            *some({"rule.window": "16", "model.rule": "atlas", "batch": "8"}, 0.9),
            *some(
                {"rule.window": "4", "model.rule": "[a_b,c]", "batch": "8"},
                *(0.12, 0.13),
                state_bytes=99,
                state_grows=True,
            ),
        ]
    )


def test_a_table_for_people():
    lines = shown_table(rows(), ["loss", "accuracy"])
    assert lines[0] == [
        *("rule.window", "model.rule", "n", "parameters", "state bytes", "FLOPs/token"),
        *("tokens/s", "loss", "accuracy"),
    ]
    assert lines[1][:7] == ["4", "atlas", "3", "1,000", "4,096", "2,000", "11"]
    assert lines[1][8] == "0.600 [0.352, 0.848]"
    assert lines[2][7:] == ["0.407", "0.900"]
    assert lines[3][4] == "99 and growing"
    assert lines[3][8] == "at chance"
    text = plain_text(lines).splitlines()
    assert len({line.index("1,000") for line in text[1:]}) == 1


def test_latex_is_escaped():
    text = latex(shown_table(rows(), ["accuracy"]))
    assert r"\begin{tabular}{llrrrrrr}" in text
    assert r"4 & {[}a\_b,c] & 2 & 1,000 & 99 and growing & 2,000 & 10 & at chance \\" in text
    assert latex([["a\\b", "n"], ["50 %", "~^#$&{}"]]).splitlines()[5] == (
        r"50 \% & \textasciitilde{}\textasciicircum{}\#\$\&\{\} \\"
    )


def test_the_figure_is_along_numbers_with_a_line_for_the_rest():
    (panel,) = swept_panels(rows(), "accuracy")
    assert (panel.along, panel.log, panel.joined) == ("rule.window", False, True)
    assert panel.ticks == {4.0: "4", 16.0: "16"}
    places = {label: [x for x, _ in points] for label, points in panel.lines.items()}
    assert places == {"model.rule atlas": [4.0, 16.0], "model.rule [a_b,c]": [4.0]}
    third = rows_of(
        [
            *some({"a": "1", "b": "x", "c": "p"}, 0.5),
            *some({"a": "9", "b": "y", "c": "p"}, 0.5),
            *some({"a": "1", "b": "y", "c": "q"}, 0.5),
        ]
    )
    panels = swept_panels(third, "accuracy")
    assert [(panel.title, list(panel.lines)) for panel in panels] == [
        ("c p", ["b x", "b y"]),
        ("c q", ["b y"]),
    ]
    assert panels[0].log
    (words,) = swept_panels(rows_of([*some({"r": "x"}, 0.5), *some({"r": "y"}, 0.5)]), "loss")
    assert (words.ticks, words.joined) == ({0: "x", 1: "y"}, False)


def test_recall_against_bytes():
    panel = state_panel(rows(), "accuracy")
    assert {label: [x for x, _ in points] for label, points in panel.lines.items()} == {
        "window 4, rule atlas": [4096],
        "window 16, rule atlas": [4096],
        "window 4, rule [a_b,c] (state grows)": [198],
    }


def test_panels_go_from_short_to_long():
    names = ["accuracy@256-64", "accuracy@64-16", "accuracy@64-4", "accuracy@1024-256"]
    assert short_first(names) == [names[2], names[1], names[0], names[3]]
    named = ["accuracy@qa2-64", "accuracy@qa1-32"]
    assert short_first(named) == named
    assert short_first(["loss"]) == ["loss"]
    assert len(set(styles_of(map(str, range(70))).values())) == 70


def test_without_matplotlib_tables_are_written_all_the_same(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (swept / "table.csv").unlink()
    assert main(["sweep", str(swept)]) == 0
    assert "pip install 'atlas-lm[plots]'" in capsys.readouterr().err
    assert table(swept / "table.csv")
    with pytest.raises(ImportError, match=r"atlas-lm\[plots\]"):
        figures.draw_figures(tmp_path, rows(), ["accuracy"], "accuracy")

"""The tables of docs/evidence.md: models of equal size, every run planned, and what is kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atlas_lm.sweep.runs import join, reason_of, status_of, write_sweep
from atlas_lm.train.run_folder import read_config, write_config, write_json
from benchmarks.evidence.__main__ import main
from benchmarks.evidence.kept import keep, take_up
from benchmarks.evidence.lengths import main as lengths
from benchmarks.evidence.lengths import named
from benchmarks.evidence.models import equal_to, non_embedding
from benchmarks.evidence.tables import TABLES, TUNED, Scale


@pytest.mark.parametrize("name", TABLES)
def test_models_of_a_table_are_of_equal_size(name):
    runs = TABLES[name].runs(Scale(seeds=2))
    assert len({run.name for run in runs}) == len(runs)
    for dim in {run.settings["model.dim"] for run in runs}:
        models = [run.config.model for run in runs if run.settings["model.dim"] == dim]
        sizes = [non_embedding(model) for model in models]
        assert max(sizes) <= 1.03 * min(sizes)
    for model in {run.settings["model"] for run in runs}:
        own = [run for run in runs if run.settings["model"] == model]
        same = [run.config for run in runs if run.settings["model"] != model]
        assert {run.seed for run in own} == {0, 1}
        assert {c.steps for c in same} == {run.config.steps for run in own}
        assert {run.config.optimizer.lr for run in own} == {
            float(run.settings[TUNED]) for run in own
        }


def test_a_model_that_cannot_be_so_small():
    model = TABLES["recall"].runs(Scale(models=("atlas",)))[0].config.model
    with pytest.raises(ValueError, match="parameters with the narrowest feed-forward layers"):
        equal_to(model, 1000)


def test_a_table_from_end_to_end(tmp_path, capsys):
    small = ["--dims", "16", "32", "--steps", "2", "--batch", "2", "--tests", "1", "--seeds", "2"]
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    chosen = ["--models", "transformer", "gated_delta_net"]
    main(["recall", *chosen, *small, *folders, "--dry-run"])
    assert "8 runs of 2 steps" in capsys.readouterr().out
    for _ in range(2):  # the second time there is nothing to do
        main(["recall", *chosen, *small, *folders])
    main(["recall", "--tables-only", *folders])
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert {"table.csv", "runs.jsonl", "figure.png", "equal_state.png", "by_pairs.png"} <= names
    lines = (tmp_path / "results" / "runs.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    assert [run["status"] for run in runs] == ["finished"] * 12
    assert all(run["evaluations"][-1]["accuracy@64-4"] >= 0 for run in runs)
    assert str(tmp_path) not in "".join(lines)
    with pytest.raises(ValueError, match="none of the models of recall"):
        main(["recall", "--models", "nobody", *folders])


def test_a_machine_that_has_only_the_results_goes_on(tmp_path, capsys):
    small = ["--dims", "16", "--steps", "2", "--batch", "2", "--tests", "1", "--seeds", "2"]
    chosen = ["--models", "transformer", "gated_delta_net", "--results", str(tmp_path / "results")]
    main(["recall", *chosen, *small, "--runs", str(tmp_path / "first")])
    first = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    second = tmp_path / "second"
    capsys.readouterr()
    main(["recall", *chosen, *small, "--runs", str(second)])
    assert "6 runs of" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()} == first
    assert list((tmp_path / "first").rglob("*.safetensors"))
    assert not list(second.rglob("*.safetensors"))
    assert named(second) == {}  # nobody to be asked at other lengths
    main(["recall", *chosen, *small, "--seeds", "3", "--runs", str(second)])
    assert len(list(second.rglob("*.safetensors"))) == 2


def test_what_diverged_is_not_tried_again_and_texts_may_lie_elsewhere(tmp_path):
    run = TABLES["language"].runs(Scale(data=Path("/one/books"), models=("swa",)))[0]
    broken = replace(run, name="broken", config=replace(run.config, seed=7))
    half = replace(run, name="half", config=replace(run.config, seed=8))
    for each in (broken, half):
        folder = tmp_path / "runs" / each.name
        write_config(folder, each.config, "language")
        write_json(folder / "environment.json", {"device": "cpu", "command": "/one/python"})
    failure = {"reason": "step 3: the loss is not finite", "again": False}
    write_json(tmp_path / "runs" / "broken" / "failed.json", failure)
    write_sweep(tmp_path, "language", [broken, half])
    lines = keep(tmp_path, tmp_path / "results").read_text()
    assert "/one" not in lines
    moved = TABLES["language"].runs(Scale(data=Path("/two/books"), models=("swa",)))
    other = tmp_path / "other"
    assert take_up(tmp_path / "results", other, "language", moved) == ["broken"]
    folder = other / "runs" / "broken"
    assert status_of(folder) == "failed"
    assert reason_of(folder) == failure
    config = replace(moved[0].config, seed=7)
    assert read_config(folder) == config
    assert [each.name for each in join(other, [replace(moved[0], config=config)])] == ["broken"]
    assert take_up(tmp_path / "results", other, "language", moved) == []
    assert take_up(tmp_path, tmp_path / "nothing", "language", moved) == []


def test_models_without_a_run_are_not_asked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sweep\.json: missing"):
        lengths(["babilong", "--runs", str(tmp_path), "--results", str(Path("x"))])

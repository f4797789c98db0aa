"""The tables of docs/evidence.md: models of equal size, every run planned, and what is kept."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.recipes.demo import SHORT
from atlas_lm.sweep.grid import Planned
from atlas_lm.sweep.runs import join, reason_of, status_of, write_sweep
from atlas_lm.text import ByteTokenizer
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import HiddenData
from atlas_lm.train.loop import train
from atlas_lm.train.run_folder import read_config, write_config, write_json
from atlas_lm.train.start import first_model
from benchmarks.evidence.__main__ import main
from benchmarks.evidence.binding import Learner, cases, of_table, rows_of, steps_to_half, weighed
from benchmarks.evidence.binding import main as binding
from benchmarks.evidence.kept import keep, take_up
from benchmarks.evidence.lengths import main as lengths
from benchmarks.evidence.lengths import named
from benchmarks.evidence.models import equal_to, non_embedding
from benchmarks.evidence.quiet import main as quiet_command
from benchmarks.evidence.quiet import quiet
from benchmarks.evidence.tables import TABLES, TUNED, Scale


@pytest.mark.parametrize("name", TABLES)
def test_models_of_a_table_have_equal_runs(name):
    runs = TABLES[name].runs(Scale(seeds=2))
    assert len({run.name for run in runs}) == len(runs)
    for model in {run.settings["model"] for run in runs}:
        own = [run for run in runs if run.settings["model"] == model]
        same = [run.config for run in runs if run.settings["model"] != model]
        assert {run.seed for run in own} == {0, 1}
        assert {c.steps for c in same} == {run.config.steps for run in own}
        assert {run.config.optimizer.lr for run in own} == {
            float(run.settings[TUNED]) for run in own
        }


@pytest.mark.parametrize("name", TABLES)
def test_models_of_a_table_are_of_equal_size_or_begin_with_one_of_the_package(name):
    runs = TABLES[name].runs(Scale())
    if name == "babilong-from-demo":
        for run in runs:
            begun = first_model(run.config)
            assert begun.config.depth == run.config.model.depth
        return
    for dim in {run.settings["model.dim"] for run in runs}:
        models = [run.config.model for run in runs if run.settings["model.dim"] == dim]
        sizes = [non_embedding(model) for model in models]
        assert max(sizes) <= 1.03 * min(sizes)


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
    for longer in (["--steps", "4"], ["--batch", "3"]):
        with pytest.raises(ValueError, match="a table is of one length"):
            main(["recall", *chosen, *small, *longer, "--runs", str(tmp_path / "third")])
    assert not (tmp_path / "third").exists()
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


def test_models_are_asked_every_task_at_lengths_they_never_learned(tmp_path, capfd):
    model = ModelConfig(vocab=257, dim=16, depth=1, heads=2, rule="delta_net", tied=True)
    data = HiddenData(tasks=("niah/number",), lengths=(512,))
    config = TrainConfig(model=model, data=data, steps=1, batch=1, length=512, threads=1)
    settings = {"model": "delta_net", "model.dim": "16", TUNED: "1e-3"}
    train(config, tmp_path / "runs" / "one", device="cpu")
    write_sweep(tmp_path, "niah", [Planned("one", config, settings)])
    command = ["niah", "--runs", str(tmp_path), "--results", str(tmp_path / "results")]
    for samples in ("1", "2"):
        lengths([*command, "--lengths", "0.6k,0.7k", "--samples", samples, "--jobs", "2"])
        said = json.loads((tmp_path / "results" / "delta_net.json").read_text())
        found = [(each["task"], each["length"], each["count"]) for each in said["results"]]
        kinds = ("number", "pass-key", "uuid")
        assert found == [(f"niah/{k}", n, int(samples)) for k in kinds for n in (600, 700)]
    assert (tmp_path / "results" / "accuracy-by-length.png").is_file()
    assert capfd.readouterr().out.count("== delta_net niah/uuid") == 2


def test_rows_of_binding_ask_for_what_was_told():
    rows = rows_of(5, 2, 8, torch.Generator().manual_seed(0))
    told_keys, told_values = rows.k[:, 1:10:2], rows.v[:, 1:10:2]
    assert torch.equal(told_values, rows.values)
    for row in range(2):
        assert torch.equal(rows.q[row, 10:], told_keys[row, rows.asked[row]])
    assert rows.kinds.argmax(-1)[0].tolist() == [0, 1] * 5 + [2] * 5
    few = rows_of(5, 2, 8, torch.Generator().manual_seed(0), noise=False)
    assert few.k.shape[1] == 10
    assert torch.equal(few.values, rows.values)


def test_a_closed_gate_leaves_a_token_out_of_muons_momentum_only_if_it_weighs():
    case = of_table("titans", optimizer="muon", stride=4)
    rows = rows_of(8, 2, 32, torch.Generator().manual_seed(0))
    noise = rows.kinds[..., :1, None].bool()
    other = replace(rows, v=torch.where(noise, -rows.v, rows.v))
    moved = {}
    for each in (case, weighed(case)):
        torch.manual_seed(0)
        learner = Learner(each)
        with torch.no_grad():
            learner.gates.down.weight.copy_(torch.eye(8, 3))
            learner.gates.up.weight.zero_()
            learner.gates.up.weight[:2, 0] = -9.0
            moved[each.name] = float((learner(rows) - learner(other)).abs().max())
    assert moved[weighed(case).name] == 0
    assert moved[case.name] > 0.1


def test_binding_from_end_to_end(tmp_path, capsys):
    few = ["--cases", "gated_delta_net", "--pairs", "8", "--draws", "2", "--steps", "2"]
    binding([*few, "--seeds", "1", "--out", str(tmp_path)])
    found = {path.stem: json.loads(path.read_text())["rows"] for path in tmp_path.iterdir()}
    assert {name: len(rows) for name, rows in found.items()} == {
        "told": 12,
        "learned": 1,
        "without_noise": 1,
    }
    linear = next(row for row in found["told"] if row["case"] == "linear_attention")
    assert linear["start"]["mean"] > 0.9
    assert found["learned"][0]["case"] == "gated_delta_net"
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert steps_to_half([0.0, 1.0, 0.4, 0.6], running=2) == 2
    assert steps_to_half([0.0, 0.1], running=2) is None
    with pytest.raises(ValueError, match="cases: nobody: not among"):
        binding(["--cases", "nobody"])


NET = ("gated_delta_net", "gated_delta_net")
SENTENCE = "the kitchen is west of the garden "


def test_what_memories_write_of_plain_text_is_told_by_head():
    model = LanguageModel(
        ModelConfig(vocab=257, dim=16, depth=3, heads=2, d_k=4, d_v=4, rule=(SHORT, *NET))
    )
    tokens = np.frombuffer(SENTENCE.encode() * 200, np.uint8)
    for head in quiet(model, ByteTokenizer(), tokens):
        assert head.writes == len(tokens)
        assert head.kept < -0.2 * 0.001 * len(tokens)
    for block in model.blocks[1:]:  # rates, then retentions: closed
        gates = block.mixer.gates
        with torch.no_grad():
            gates.up.weight.zero_()
            gates.up.bias.copy_(torch.tensor([-0.5, 0.25, -1.0, 0.0]))
    heads = quiet(model, ByteTokenizer(), tokens)
    assert [(head.block, head.head) for head in heads] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [head.writes for head in heads] == 2 * [0, len(tokens)]
    assert [head.written for head in heads] == pytest.approx(2 * [0, len(tokens) / 4])
    assert [head.kept for head in heads] == [0.0] * 4
    assert {rate for rate, _ in heads[1].strongest} == {0.25}
    assert all(words in 3 * SENTENCE for _, words in heads[1].strongest)
    assert heads[0].strongest == []


def test_what_is_written_of_python_s_manual_is_told_and_kept(tmp_path, capsys):
    quiet_command(["demo", "--tokens", "3000", "--out", str(tmp_path / "quiet.json")])
    assert capsys.readouterr().out.startswith("3,000 tokens of Python")
    assert len(json.loads((tmp_path / "quiet.json").read_text())) == 9

"""Recipes and the command line: whole runs by name, any field changed, typos answered."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from math import isclose

import pytest
import torch

from atlas_lm import RULES, LanguageModel, ModelConfig, Rule
from atlas_lm.cli import main
from atlas_lm.cli.recipe import parsed, rule_from, rule_text
from atlas_lm.recipes import LINES, RECIPES
from atlas_lm.train.config import TrainConfig, differences
from atlas_lm.train.data import RecallData, TaskData, TextData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def refused(capsys, args: str) -> str:
    assert main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atlas-lm: ")
    assert err.count("\n") == 1
    return err


def changed(recipe: str, args: str) -> TrainConfig:
    return parsed(recipe, RECIPES[recipe](), f"--out x {args}".split()).config


# Recipes


@pytest.mark.parametrize("name", LINES)
def test_every_recipe_is_a_configuration_that_a_file_can_hold(name):
    config = RECIPES[name]()
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with torch.device("meta"):
        LanguageModel(config.model)


def test_every_recipe_has_a_line_and_every_line_a_recipe():
    assert list(RECIPES) == list(LINES)
    assert all(len(line) < 80 and RECIPES[name].__doc__ for name, line in LINES.items())


def test_the_paper_s_sizes_are_trained_as_the_paper_says():
    table = {"170m": (3e-3, 15), "340m": (1.5e-3, 15), "760m": (1.25e-3, 30), "1_3b": (7e-4, 100)}
    for size, (rate, billions) in table.items():
        config = RECIPES[f"paper_{size}"]()
        assert config.batch * config.length == 524_288
        assert isclose(config.steps * 524_288, billions * 1e9, rel_tol=1e-4)
        assert isclose(config.schedule.warmup * 524_288, 1e9, rel_tol=1e-3)
        assert (config.optimizer.lr, config.optimizer.weight_decay) == (rate, 0.1)
        assert (config.schedule.name, config.clip, config.precision) == ("cosine", 1.0, "bf16")


def test_books_has_a_hundred_million_parameters():
    config = RECIPES["books"]()
    with torch.device("meta"):
        model = LanguageModel(config.model)
    assert 100e6 < sum(p.numel() for p in model.parameters()) < 115e6
    assert (config.model.depth, config.model.dim, config.model.heads) == (12, 768, 12)
    assert config.length == 4096


def test_mqar_is_trained_and_tested_as_published():
    config = RECIPES["mqar"]()
    assert isinstance(config.data, TaskData)
    learned = {task.name: config.data.rows_of(task) for task in config.data.learned}
    assert learned == {
        "mqar/64-4": 100_000,
        "mqar/128-8": 20_000,
        "mqar/256-16": 20_000,
        "mqar/256-32": 20_000,
        "mqar/256-64": 20_000,
    }
    turns = Counter(config.data.mix)
    assert all(learned[name] == 20_000 * n for name, n in turns.items())
    assert config.steps * config.batch == 32 * 180_000
    assert (config.model.dim, config.model.depth, config.data.vocab) == (128, 2, 8192)
    assert config.evaluate_batches * config.batch >= 1000
    shapes = [name.removeprefix("mqar/") for name in config.data.tests]
    assert shapes == ["64-4", "64-8", "64-16", "128-32", "256-64", "512-128", "1024-256"]
    assert config.data.task in config.data.tests


def test_mad_is_trained_and_tested_as_published():
    config = RECIPES["mad"]()
    assert config.steps * config.batch == 200 * 12_800
    assert config.evaluate_batches * config.batch == 1280
    assert config.optimizer.lr * config.schedule.floor == pytest.approx(1e-6)
    for task, (length, vocab, examples) in {
        "mad/in-context-recall": (128, 16, 12_800),
        "mad/fuzzy-recall": (128, 16, 12_800),
        "mad/noisy-recall:noise=0.4": (128, 32, 12_800),
        "mad/selective-copying": (256, 16, 12_800),
        "mad/compression": (63, 47, 12_800),
        "mad/memorisation": (32, 256, 256),
    }.items():
        other = changed("mad", f"--data.task {task}")
        assert isinstance(other.data, TaskData)
        assert (other.sized().length, other.data.vocab) == (length, vocab)
        assert [other.data.rows_of(each) for each in other.data.learned] == [examples]
    longer = changed("mad", "--length 256 --data.examples 800 --data.longer 512 1024")
    assert (longer.sized().length, longer.data) == (
        256,
        TaskData(task="mad/in-context-recall", examples=800, longer=(512, 1024)),
    )


# Configurations


def test_a_config_comes_back_from_json_whatever_it_holds():
    rules = (replace(RULES["atlas"], chunk=16), "swa")
    config = TrainConfig(
        model=ModelConfig(rule=rules),
        data=TextData(path="a", valid="b"),
        optimizer=OptimizerConfig(name="muon", betas=(0.8, 0.99), lr_memory=1e-4),
        schedule=Schedule(name="wsd"),
        carry=True,
        segment=64,
    )
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    other = replace(config, seed=1, model=replace(config.model, dim=128))
    assert differences(config.to_dict(), other.to_dict()) == {
        "seed": (0, 1),
        "model.dim": (256, 128),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bach": 3}, r"bach: no such field \(did you mean 'batch'\?\)"),
        ({"model": {"dmi": 3}}, r"model.dmi: no such field \(did you mean 'dim'\?\)"),
        ({"data": {"kind": "recal"}}, r"data.kind: 'recal' \(did you mean 'recall'\?\)"),
        ({"optimizer": {"l_r": 1}}, r"optimizer.l_r: no such field \(did you mean 'lr'\?\)"),
        ({"schedule": {"warmup": -1}}, "schedule.warmup: -1; expected 0 steps or more"),
        ({"data": {"kind": "task", "task": "mqra"}}, r"task: 'mqra' \(did you mean 'mqar'\?\)"),
        ({"data": {"kind": "task", "mix": ["x"]}}, "task: 'x' is not one of mqar, "),
        ({"data": {"kind": "task", "tests": ["mqar:x=1"]}}, "'mqar:x=1': no setting 'x'"),
        ({"data": {"kind": "task", "longer": [0]}}, "data.longer: 0; expected a whole number"),
        ({"data": {"kind": "task", "examples": -1}}, "data.examples: -1; expected a whole number"),
        (
            {"data": {"kind": "task", "task": "mqar/64-8", "examples": None}},
            "data.examples: nobody has published how many rows of mqar/64-8 to learn from",
        ),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: 0; expected a whole number, 1 or more"),
        ({"batch": 6, "accumulate": 4}, "accumulate: 4 parts of a batch of 6 rows"),
        ({"segment": 0}, "segment: 0; expected"),
        ({"clip": -1.0}, "clip: -1.0; expected"),
        ({"carry": True}, "carry: the rows of recall do not go on"),
        ({"carry": True, "data": TaskData()}, "carry: the rows of a task do not go on"),
        ({"length": 0}, "length: 0; expected a whole number, 1 or more"),
        ({"length": -1, "data": TaskData()}, "length: -1; expected a whole number, 0 or more"),
        ({"length": 900}, "length: 900 tokens of recall are 300 pairs, with keys among 128"),
        ({"data": RecallData(longer=(900,))}, "--model.vocab 600 or more"),
        (
            {"data": RecallData(shortest=300)},
            "data.shortest: 300; expected at most the length, 256",
        ),
        (
            {"carry": True, "data": TextData(), "model": ModelConfig(rule="attention")},
            "carry: the state of attention grows with every token",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**changes)
    with pytest.raises(ValueError, match=r"optimizer\.lr: -1; expected 0 or more"):
        OptimizerConfig(lr=-1)
    with pytest.raises(ValueError, match="optimizer: betas"):
        OptimizerConfig(betas=(0.9, 1.0))


# The command line


def test_every_field_can_be_changed():
    args = "--model.dim 32 --model.rule titans --optimizer.lr 1e-3 --optimizer.betas 0.8 0.9"
    more = "--data.longer 96 --schedule.name wsd --segment 12 --compile --no-carry --steps 7"
    begun, config = RECIPES["quickstart"](), changed("quickstart", f"{args} {more}")
    assert config.model.dim == 32
    assert config.model.rule == "titans"
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-3, (0.8, 0.9))
    assert config.data == replace(begun.data, longer=(96,))
    assert (config.schedule.name, config.segment, config.compile) == ("wsd", 12, True)
    assert (config.steps, config.batch) == (7, begun.batch)
    assert changed("quickstart", "") == begun


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("atlas", "atlas"),
        ("titans,attention", ("titans", "attention")),
        ("atlas:chunk=16:stride=4", replace(RULES["atlas"], chunk=16, stride=4)),
        ("dla:objective=l2:norm=False", replace(RULES["dla"], objective="l2", norm=False)),
        ("swa,omeganet:window=2", ("swa", replace(RULES["omeganet"], window=2))),
    ],
)
def test_a_rule_is_written_in_one_word(text, rule):
    assert rule_from(text) == rule
    assert rule_from(rule_text(rule)) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("atals", r"rule: 'atals' \(did you mean 'atlas'\?\) is not one of"),
        ("atlas:chnk=3", r"no field 'chnk' \(did you mean 'chunk'\?\)"),
        ("swa:window=3", "swa has no fields; see --model.window"),
        ("atlas:chunk=0", "Rule: chunk=0 must be a whole number"),
    ],
)
def test_a_rule_that_is_none_is_refused(text, message, capsys):
    with pytest.raises(ValueError, match=message):
        rule_from(text)
    assert re.search(message, refused(capsys, f"train quickstart --out x --model.rule {text}"))


def test_typos_are_answered(capsys):
    told = refused(capsys, "train qiuckstart --out x")
    assert "no recipe 'qiuckstart' (did you mean 'quickstart'?); there are quickstart, " in told
    told = refused(capsys, "train quickstart --out x --model.dmi 3")
    assert "--model.dmi: no such option (did you mean '--model.dim'?)" in told
    told = refused(capsys, "train quickstart --out x --lr 3")
    assert "--lr: no such option (did you mean '--optimizer.lr'?)" in told
    assert "expected `atlas-lm train RECIPE" in refused(capsys, "train --out x quickstart")
    assert "--out DIR" in refused(capsys, "train quickstart")
    assert "heads: 2 do not divide dim=3" in refused(capsys, "train recall --out x --model.dim 3")
    assert "batch: 0; expected" in refused(capsys, "train recall --out x --batch 0")
    assert "'fp32', 'bf16'" in refused(capsys, "train recall --out x --precision fp16")


def test_help_lists_recipes_and_then_every_field_with_a_text(capsys):
    assert main(["train", "--help"]) == 0
    short = capsys.readouterr().out
    assert all(f"{name:<12} {line}" in short for name, line in LINES.items())
    assert main(["train", "quickstart", "--help"]) == 0
    long = capsys.readouterr().out
    config = RECIPES["quickstart"]()
    for part, prefix in ((config, ""), (config.optimizer, "optimizer."), (config.data, "data.")):
        for field in fields(part):
            if field.name in ("model", "data", "optimizer", "schedule"):
                continue
            name = f"--{prefix}{field.name.replace('_', '-')}"
            told = re.search(rf"\n\W*{name}[ ,].*?\(default", long, re.DOTALL)
            assert told, name
            assert re.search("[a-z]{3}", re.sub(r"\{.*?\}|--\S*", "", told.group(0))), name


def test_help_comes_without_pytorch():
    code = """
import sys
from atlas_lm.cli import main
assert main(["train", "--help"]) == 0
print([name for name in ("torch", "numpy", "tqdm") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_recipe_of_one_s_own_lies_in_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from atlas_lm.recipes import RECIPES\n"
        "def small(): return replace(RECIPES['recall'](), batch=3)\n"
        "def wrong(): return 3\n"
    )
    from atlas_lm.cli.train import recipe_called

    assert recipe_called(f"{file}:small")().batch == 3
    assert "(did you mean 'small'?)" in refused(capsys, f"train {file}:smal --out x")
    assert "wrong returned a int; expected a TrainConfig" in refused(
        capsys, f"train {file}:wrong --out x"
    )
    assert "no such file of recipes" in refused(capsys, f"train {tmp_path}/no.py:small --out x")


def test_the_type_of_rules_is_the_one_that_the_command_line_knows():
    """Otherwise tyro would make subcommands of it."""
    from typing import get_type_hints

    from atlas_lm.cli.recipe import RuleType

    assert get_type_hints(ModelConfig)["rule"] == RuleType
    assert isinstance(rule_from("atlas:chunk=8"), Rule)

"""Which runs make each table: models of equal size, the same tokens, the same rates to choose from.

Models have as many parameters as atlas with feed-forward layers of the default width, or as the
recipe's own. All rates are tried with the first seed; further seeds take the best of each model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from atlas_lm.models.config import ModelConfig
from atlas_lm.recipes import RECIPES
from atlas_lm.recipes.demo import SHORT
from atlas_lm.rules import Rule
from atlas_lm.sweep.grid import Planned, Settings, run_name
from atlas_lm.tasks.table import GROUPS
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import HiddenData, TaskData, TextData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule
from benchmarks.evidence.models import changed, equal_to, mixers, non_embedding

TUNED = "optimizer.lr"
Mixer = str | Rule | ModelConfig


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of a table is made; None: as much as it says itself."""

    steps: int | None = None
    batch: int | None = None
    dims: tuple[int, ...] = ()
    rates: tuple[str, ...] = ()
    seeds: int | None = None
    models: tuple[str, ...] = ()
    """Of these names alone."""
    tests: int | None = None
    """Batches of every evaluation."""
    data: Path | None = None
    """Folder of texts."""


@dataclass(frozen=True)
class Table:
    """A table and the runs that it is made of."""

    about: str
    runs: Callable[[Scale], list[Planned]]
    by_pairs: bool = False
    """There is a picture along the number of pairs."""


def planned(
    scale: Scale,
    of_dim: Callable[[int], tuple[TrainConfig, Mapping[str, Mixer]]],
    *,
    dims: Sequence[int],
    rates: Sequence[str],
    seeds: int,
    told: Mapping[str, str] | None = None,
    size_of: str = "atlas",
) -> list[Planned]:
    """Runs of all models at all widths and rates: those of the first seed, then of the next.

    of_dim    a run of this width, whose model is replaced by each of these
    told      what else distinguishes them from other runs of the table
    size_of   whose size all of them get
    """
    found: list[tuple[Settings, TrainConfig]] = []
    for dim in scale.dims or dims:
        config, named = of_dim(dim)
        config = _scaled(config, scale)
        models = {n: _model(config.model, mixer) for n, mixer in named.items()}
        size = non_embedding(models[size_of])
        for name, model in models.items():
            if not scale.models or name in scale.models:
                settings = {**(told or {}), "model": name, "model.dim": str(dim)}
                found.append((settings, replace(config, model=equal_to(model, size))))
    return _seeded(found, scale.rates or rates, scale.seeds or seeds)


def _scaled(config: TrainConfig, scale: Scale) -> TrainConfig:
    return replace(
        config,
        steps=scale.steps or config.steps,
        batch=scale.batch or config.batch,
        evaluate_batches=scale.tests or config.evaluate_batches,
    )


def _seeded(
    found: Sequence[tuple[Settings, TrainConfig]], rates: Sequence[str], seeds: int
) -> list[Planned]:
    runs = []
    for seed, (settings, config), rate in product(range(seeds), found, rates):
        own = {**settings, TUNED: rate}
        optimizer = replace(config.optimizer, lr=float(rate))
        runs.append(
            Planned(run_name(own, seed), replace(config, seed=seed, optimizer=optimizer), own)
        )
    return runs


def _model(config: ModelConfig, mixer: Mixer) -> ModelConfig:
    return mixer if isinstance(mixer, ModelConfig) else replace(config, rule=mixer)


def _fast(config: TrainConfig) -> TrainConfig:
    """Recorded, and in bfloat16, where there is a GPU."""
    gpu = torch.cuda.is_available()
    return replace(config, precision="bf16" if gpu else "fp32", graph=gpu)


def _learned_rows(config: TrainConfig, steps: int, batch: int, tests: int) -> TrainConfig:
    """A run on rows of a task that is tested on so many rows at the end."""
    return replace(
        _fast(config),
        steps=steps,
        batch=batch,
        schedule=Schedule(warmup=steps // 20, floor=0.0),
        evaluate_every=max(steps // 4, 1),
        evaluate_batches=max(tests // batch, 1),
        checkpoint_every=max(steps // 4, 1),
        keep=1,
        log_every=max(steps // 16, 1),
        threads=1,
    )


# Recall

ATLAS = {"chunk": 16, "stride": 4}
"""Of recall: rows are short. Deep memories with chunks of 64 learned none of it in as many steps as
those with chunks of 16 took to learn it (docs/evidence.md)."""


def _mqar(dim: int, steps: int = 8000) -> TrainConfig:
    model = ModelConfig(vocab=8192, dim=dim, depth=2, heads=max(dim // 32, 1), window=64, tied=True)
    recipe = replace(RECIPES["mqar"](), model=model)
    return _learned_rows(recipe, steps, batch=64, tests=1024)


def recall(scale: Scale) -> list[Planned]:
    return planned(
        scale,
        lambda dim: (_mqar(dim), mixers(**ATLAS)),
        dims=(64, 128),
        rates=("1e-3", "3e-3"),
        seeds=3,
    )


# Around atlas


START = (0.1, 1.0, 1.0)
"""Of the coefficients, instead of 1 / i!: given keys, omeganet holds more (docs/evidence.md)."""
NEWEST = 0.5
"""Of a window's weight, the newest pair's to begin with: with it more seeds of omeganet bound, but
too few to prove it (docs/evidence.md)."""


def variants(config: ModelConfig, chunk: int, stride: int) -> dict[str, Mixer]:
    """The paper's Table 6, and how often Newton-Schulz is taken."""
    atlas = changed("atlas", chunk=chunk, stride=stride)
    return {
        "atlas": atlas,
        "without muon": changed("omeganet", chunk=chunk),
        "window 1": replace(atlas, window=1),
        "no polynomial": replace(atlas, features="identity"),
        "linear memory": replace(atlas, network="linear", norm=False),
        "gated memory": changed("atlas_pp", chunk=chunk, stride=stride),
        "other start": replace(config, rule=atlas, coefficients=START),
        "without muon, other start": replace(
            config, rule=changed("omeganet", chunk=chunk), coefficients=START
        ),
        "newest first": replace(config, rule=atlas, newest=NEWEST),
        "without muon, newest first": replace(
            config, rule=changed("omeganet", chunk=chunk), newest=NEWEST
        ),
        "with attention (MAG)": replace(config, rule=atlas, block="mag"),
        "with attention (MAL)": replace(config, rule=atlas, block="mal"),
    } | {
        f"stride {other}": replace(atlas, stride=other)
        for other in (1, 4, 16, 64)
        if other <= chunk and other != stride
    }


def ablation_recall(scale: Scale) -> list[Planned]:
    def of_dim(dim: int) -> tuple[TrainConfig, dict[str, Mixer]]:
        config = _mqar(dim)
        found = variants(config.model, **ATLAS)
        found["chunk 64"] = changed("atlas", chunk=64, stride=ATLAS["stride"])
        return config, found

    return planned(scale, of_dim, dims=(64,), rates=("1e-3", "3e-3"), seeds=3)


def ablation_language(scale: Scale) -> list[Planned]:
    def of_dim(dim: int) -> tuple[TrainConfig, dict[str, Mixer]]:
        config = _books(dim, scale)
        return config, variants(config.model, chunk=64, stride=16)

    return planned(scale, of_dim, dims=(256,), rates=("2e-3",), seeds=2)


# MAD


def mad(scale: Scale) -> list[Planned]:
    """Six tasks, a fifth of the published epochs; of memorisation all of them."""
    five = ("transformer", "gated_delta_net", "titans", "omeganet", "atlas")
    runs = []
    for task in GROUPS["mad"]:
        few = task == "mad/memorisation"

        def of_dim(dim: int, task=task, few=few) -> tuple[TrainConfig, dict[str, Mixer]]:
            model = ModelConfig(dim=dim, depth=2, heads=max(dim // 64, 1), window=64)
            recipe = RECIPES["mad"]()
            recipe = replace(recipe, model=model, data=TaskData(task=task, examples=None))
            config = _learned_rows(recipe, 400 if few else 4000, batch=128, tests=1280)
            return config, {n: m for n, m in mixers(**ATLAS).items() if n in five}

        runs += planned(
            scale,
            of_dim,
            dims=(128,),
            rates=("5e-4", "1e-3", "3e-3"),
            seeds=1,
            told={"data.task": task},
        )
    return runs


# Long texts


def _lasting(rule: str | Rule) -> tuple[str | Rule, ...]:
    """A short memory, and three that are to last."""
    return (SHORT, rule, rule, rule)


def _long(recipe: str, scale: Scale) -> list[Planned]:
    """The recipe's own model, titans, atlas and a sliding window, from new weights, in rows of up
    to 1,024 tokens: gradients of deep memories reach no further (docs/log.md)."""

    def of_dim(dim: int) -> tuple[TrainConfig, dict[str, Mixer]]:
        config = _fast(RECIPES[recipe]())
        assert isinstance(config.data, HiddenData)
        data = replace(config.data, lengths=(256, 512, 1024), made=0.5)
        if scale.data is not None:
            data = _in_folder(data, scale.data)
        model = replace(config.model, dim=dim, vocab=4096)
        config = replace(
            config,
            start=None,
            data=data,
            model=model,
            price=30.0,
            length=1024,
            batch=8,
            steps=12_000,
            evaluate_every=3000,
            checkpoint_every=3000,
            keep=1,
            threads=1,
        )
        narrow = replace(model, expansion=4, d_k=16, d_v=32, heads=6)
        titans = replace(narrow, rule=_lasting(changed("titans", **ATLAS)), d_k=48, d_v=48, heads=4)
        return config, {
            "gated_delta_net": model,
            "titans": titans,
            "atlas": replace(narrow, rule=_lasting(changed("atlas", **ATLAS))),
            "swa": replace(model, rule="swa", heads=4, window=256),
        }

    own = "gated_delta_net"
    return planned(scale, of_dim, dims=(192,), rates=("2e-3",), seeds=1, size_of=own)


def _in_folder(data: HiddenData, folder: Path) -> HiddenData:
    """What `benchmarks.demo_texts` made, and bAbI beside it, if it is there."""
    babi = folder / "babi"
    return replace(
        data,
        books=str(folder / "train"),
        test_books=str(folder / "test"),
        tokenizer=str(folder / "tokenizer.json"),
        babi=str(babi) if babi.is_dir() else None,
        workers=3,
    )


def babilong(scale: Scale) -> list[Planned]:
    return _long("babilong", scale)


def niah(scale: Scale) -> list[Planned]:
    return _long("niah", scale)


def from_demo(scale: Scale) -> list[Planned]:
    """The recipe, what was tried around it, and a window transformer that comes from the demo too:
    each of its own size."""
    config = replace(_fast(RECIPES["babilong"]()), evaluate_batches=16, keep=1, threads=1)
    assert isinstance(config.data, HiddenData)
    if scale.data is not None:
        data = replace(_in_folder(config.data, scale.data), tokenizer=None)
        config = replace(config, data=data)
    config, data = _scaled(config, scale), config.data
    model = replace(config.model, vocab=4096)
    deeper = replace(model, depth=8, rule=(SHORT, *7 * ("gated_delta_net",)))
    window = replace(model, rule="swa", heads=4, mlp=512)
    alone = replace(data, rows=1, pauses=0)
    tried = {
        "gated_delta_net": replace(config, model=model),
        "swa": replace(config, model=window, start="demo-window", data=alone, price=0.0),
        "fewer questions": replace(config, model=model, data=replace(data, times=1)),
        "eight blocks": replace(config, model=deeper),
        "decoys": replace(config, model=model, data=replace(data, decoys=0.5)),
    }
    found = [
        ({"model": name, "model.dim": str(model.dim)}, each)
        for name, each in tried.items()
        if not scale.models or name in scale.models
    ]
    return _seeded(found, scale.rates or ("1e-3",), scale.seeds or 1)


# Language


def _books(dim: int, scale: Scale) -> TrainConfig:
    """50M bytes of books, a document a row; gradients reach as far as a row does."""
    model = ModelConfig(
        vocab=257,
        dim=dim,
        depth=4,
        heads=max(dim // 64, 1),
        window=256,
        tied=True,
        retention=0.9999,
    )
    return replace(
        _fast(TrainConfig(model=model)),
        data=TextData(path=str(scale.data or ""), excerpts=True),
        optimizer=OptimizerConfig(weight_decay=0.1),
        schedule=Schedule(warmup=150, floor=0.1),
        steps=3000,
        batch=16,
        length=1024,
        evaluate_every=500,
        evaluate_batches=32,
        checkpoint_every=500,
        keep=1,
        log_every=250,
        samples=0,
        threads=1,
    )


def language(scale: Scale) -> list[Planned]:
    six = ("transformer", "swa", "gated_delta_net", "titans", "omeganet", "atlas")
    return planned(
        scale,
        lambda dim: (
            _books(dim, scale),
            {n: m for n, m in mixers(chunk=64, stride=16).items() if n in six},
        ),
        dims=(256,),
        rates=("1e-3", "3e-3"),
        seeds=3,
    )


TABLES: dict[str, Table] = {
    "recall": Table("MQAR: ten models by pairs and by bytes of memory", recall, by_pairs=True),
    "ablation-recall": Table("around atlas, on MQAR", ablation_recall, by_pairs=True),
    "ablation-language": Table("around atlas, on books", ablation_language),
    "babilong": Table("bAbI in books, to be asked at any length", babilong),
    "babilong-from-demo": Table("the same, from the model of the demo", from_demo),
    "niah": Table("needles in books, to be asked at any length", niah),
    "mad": Table("the six tasks of MAD", mad),
    "language": Table("books by bytes", language),
}

"""Two ranks make what one makes: losses, gradients, checkpoints, by DDP and by FSDP.

The file is a program too: `torchrun --nproc-per-node 2 tests/test_distributed.py DIR
RUN...` makes runs that the tests look at.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atlas_lm import RULES, LanguageModel, ModelConfig
from atlas_lm.data.prepare import Options, prepare
from atlas_lm.models.folder import load_model
from atlas_lm.train import ranks as module
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import RecallData, TextData
from atlas_lm.train.loop import train
from atlas_lm.train.objective import NextToken
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.ranks import Ranks, adding_up, shard
from atlas_lm.train.schedules import Schedule

RULE = {
    "titans": replace(RULES["titans"], chunk=8),
    "atlas": replace(RULES["atlas"], chunk=8, window=4, stride=4),
}
STEPS, HALF = 10, 6
PARALLEL, OPTIMIZERS = ("ddp", "fsdp"), ("adamw", "muon")
EVERY = [f"{rule}-{optimizer}" for rule in RULE for optimizer in OPTIMIZERS]
QUICK = ("ddp-titans-adamw", "ddp-atlas-muon", "fsdp-atlas-adamw", "fsdp-titans-muon")
GOES_ON = ("ddp-atlas-muon", "fsdp-carried")
"""Runs of two ranks that go on on one, and the other way round."""
GOES_ON_TOO = ("fsdp-titans-muon", "ddp-carried")


def config_of(name: str, folder: Path) -> TrainConfig:
    """`ddp-atlas-muon`: a small model on recall, all of whose steps are told.

    `fsdp-carried`: on text, with memories that go on from batch to batch, in segments and parts, so
    that documents begin on some ranks and not on others, or on none.
    """
    how, rule, optimizer = (name + "-adamw").split("-")[:3]
    config = TrainConfig(
        model=ModelConfig(
            vocab=32, dim=16, depth=2, heads=2, d_k=8, rule=RULE.get(rule, RULE["titans"])
        ),
        data=RecallData(),
        optimizer=OptimizerConfig(name=optimizer, lr=3e-3),  # pyright: ignore[reportArgumentType]
        schedule=Schedule(name="constant", warmup=2),
        steps=STEPS,
        batch=8,
        length=24,
        log_every=1,
        evaluate_batches=1,
        checkpoint_every=HALF,
        parallel="fsdp" if how == "fsdp" else "ddp",
    )
    if rule != "carried":
        return config
    data = TextData(path=str(folder / "data"))
    return replace(config, data=data, segment=12, accumulate=2, carry=True, samples=0)


def prepare_text(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(24):
        text = f"{number} " * (20 + 7 * number % 31)
        (folder / "texts" / f"{number:02}.txt").write_text(text, "utf-8")
    prepare(Options(sources=(str(folder / "texts"),), out=folder / "data"))


def half_of(run: Path, new: Path) -> None:
    """The run as it was at its first checkpoint."""
    shutil.copytree(run, new, ignore=shutil.ignore_patterns("model", f"step-*{STEPS}"))


def run_all(folder: Path, names: list[str]) -> None:
    """What the program does, on each rank."""
    ranks = Ranks.join("cpu")  # for all of these runs
    for name in names:
        resume = name.endswith("-resumed")
        config = config_of(name.removesuffix("-resumed"), folder)
        train(config, folder / name, resume, device="cpu")
    ranks.leave()
    gc.collect()
    assert not threads_of_gloo()


def threads_of_gloo() -> list[str]:
    """One that is still there when Python ends may abort it; told on Linux only."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").glob("*"))
    return [name for name in names if "gloo" in name]


def run_on_two_ranks(folder: Path, names: list[str]) -> None:
    program = subprocess.Popen(
        [*TORCHRUN, __file__, str(folder), *names],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = program.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        program.terminate()  # which torchrun passes on to its ranks
        _, said = program.communicate()
    assert program.returncode == 0, said


TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node", "2"),
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Runs of one rank."""
    folder = tmp_path_factory.mktemp("runs")
    prepare_text(folder)
    for name in (*EVERY, "carried"):
        train(config_of(f"one-{name}", folder), folder / f"one-{name}", device="cpu")
    return folder


@pytest.fixture(scope="module")
def made(alone) -> Path:
    """And of two ranks, some of them resumed."""
    run_on_two_ranks(alone, [*QUICK, "ddp-carried", "fsdp-carried", *halves(alone, GOES_ON)])
    return alone


def halves(folder: Path, names: Sequence[str]) -> list[str]:
    """Runs of one rank, ready to go on on two."""
    for name in names:
        half_of(folder / same_on_one(name), folder / f"{name}-resumed")
    return [f"{name}-resumed" for name in names]


def same_on_one(name: str) -> str:
    return f"one-{name.partition('-')[2]}"


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in told] == list(range(1, STEPS + 1))
    return [line["loss"] for line in told]


def check_same(folder: Path, name: str, run: Path | None = None) -> None:
    """Muon's Newton-Schulz steps are in bfloat16: the last bit of a gradient, which is added up in
    another order, is seen after the second digit of the update."""
    one, run = folder / same_on_one(name), run or folder / name
    muon = "muon" in name
    assert losses(run) == pytest.approx(losses(one), rel=2e-4 if muon else 2e-6)
    weights, expected = (load_model(path / "model").state_dict() for path in (run, one))
    assert list(weights) == list(expected)
    for part, weight in weights.items():
        assert torch.allclose(weight, expected[part], atol=2e-3 if muon else 1e-4), part


# What they learn


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_learn_what_one_learns(made, name):
    check_same(made, name)
    assert losses(made / name)[-1] < losses(made / name)[0]


@pytest.mark.slow
def test_every_way_two_ranks_learn_and_go_on(made, tmp_path):
    names = [f"{how}-{name}" for how in PARALLEL for name in EVERY]
    rest = [name for name in names if name not in QUICK]
    run_on_two_ranks(made, [*rest, *halves(made, GOES_ON_TOO)])
    for name in rest:
        check_same(made, name)
    for name in GOES_ON_TOO:
        check_goes_on_on_one(made, name, tmp_path / name)
        check_goes_on_on_two(made, name)


@pytest.mark.parametrize("how", PARALLEL)
def test_documents_may_begin_on_some_ranks_only(made, how):
    """An initial memory has a gradient on one of them, or on none, and nobody waits for ever."""
    check_same(made, f"{how}-carried")


# Checkpoints from one number of ranks to another


@pytest.mark.parametrize("name", GOES_ON)
def test_a_checkpoint_of_two_ranks_goes_on_on_one(made, tmp_path, name):
    check_goes_on_on_one(made, name, tmp_path / "run")


@pytest.mark.parametrize("name", GOES_ON)
def test_a_checkpoint_of_one_rank_goes_on_on_two(made, name):
    check_goes_on_on_two(made, name)


def check_goes_on_on_one(folder: Path, name: str, run: Path) -> None:
    half_of(folder / name, run)
    train(config_of(name, folder), run, resume=True, device="cpu")
    check_same(folder, name, run)
    assert losses(run)[:HALF] == losses(folder / name)[:HALF]


def check_goes_on_on_two(folder: Path, name: str) -> None:
    run = folder / f"{name}-resumed"
    check_same(folder, name, run)
    assert losses(run)[:HALF] == losses(folder / same_on_one(name))[:HALF]


def test_every_rank_writes_a_part(made):
    for name in QUICK:
        said = json.loads((made / name / "checkpoints/step-00000010/meta.json").read_text())
        assert said["ranks"] == 2
        assert sorted(said["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


# One rank


def test_alone_there_is_nothing_to_agree_on():
    ranks = Ranks.join("cpu")
    assert (ranks.rank, ranks.ranks, ranks.first) == (0, 1, True)
    x = torch.tensor([1.0, 2.0])
    assert ranks.mean(x).tolist() == ranks.sum(x).tolist() == [1.0, 2.0]
    assert ranks.mean(x) is not x
    assert ranks.rows(x) is x
    ranks.barrier()
    ranks.leave()


def test_a_rank_that_cannot_be_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="--device nowhere: cannot be used here"):
        Ranks.join("nowhere")
    with pytest.raises(ValueError, match="--device cuda: cannot be used here"):
        Ranks.join("cuda")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE: 'two' in the environment; expected a number"):
        Ranks.join("cpu")


def test_gpus_are_given_out_by_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert module._device(None, 1, 4) == torch.device("cuda:1")
    assert module._device("cpu", 1, 4) == torch.device("cpu")
    with pytest.raises(ValueError, match="process 2 of this machine has no GPU: there are 2"):
        module._device("cuda", 2, 4)
    with pytest.raises(ValueError, match="each takes the GPU of its own number"):
        module._device("cuda:1", 0, 4)


def test_shard_refuses_what_it_does_not_know():
    objective = NextToken(LanguageModel(ModelConfig(vocab=8, dim=8, depth=1, heads=1)))
    with pytest.raises(ValueError, match="parallel: 'zero' is not one of ddp, fsdp"):
        shard(objective, Ranks.join("cpu"), "zero")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Linear holds no LanguageModel"):
        shard(torch.nn.Linear(2, 2), Ranks.join("cpu"), "ddp")


def test_an_initial_memory_always_has_a_gradient():
    """Of zero where no document begins; others, and outputs, are what they are without."""
    torch.manual_seed(0)
    model = LanguageModel(config_of("one-titans-adamw", Path()).model)
    tokens, targets = torch.randint(0, 32, (2, 16)), torch.randint(0, 32, (2, 16))
    _, _, state = NextToken(model)(tokens, targets)
    state = state.detach()
    plain, _, _ = NextToken(model)(tokens, targets, state)
    plain.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    unread = [n for n, grad in expected.items() if grad is None]
    assert unread == [f"blocks.{i}.mixer.memory.{w}" for i in range(2) for w in ("w1", "w2")]
    model.zero_grad()
    objective = shard(NextToken(model), Ranks.join("cpu"), "ddp")
    with adding_up(objective, last=False):
        nats, _, _ = objective(tokens, targets, state)
        nats.backward()
    assert torch.equal(nats, plain)
    for name, parameter in model.named_parameters():
        grad, before = parameter.grad, expected[name]
        assert grad is not None
        assert torch.equal(grad, torch.zeros_like(grad) if before is None else before), name


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2:])

"""Checkpoints: whole or not there, damage noticed, everything as it was."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.data.recall import associative_recall
from atlas_lm.train import checkpoints as module
from atlas_lm.train import random_state
from atlas_lm.train.checkpoints import Checkpoints
from atlas_lm.train.ranks import model_state, optimizer_state


class Learner:
    """A small model, two optimizers, and all that has to go on."""

    def __init__(self, seed: int = 0, **changes):
        torch.manual_seed(seed)
        shape = {"vocab": 16, "dim": 8, "depth": 2, "heads": 2, "rule": "titans"}
        self.model = LanguageModel(ModelConfig(**shape | changes))
        inside = [p for p in self.model.blocks.parameters() if p.ndim == 2]  # pyright: ignore[reportAttributeAccessIssue]
        known = {id(p) for p in inside}
        rest = [p for p in self.model.parameters() if id(p) not in known]
        self.optimizers = [torch.optim.Muon(inside, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
        self.step = 0

    def learn(self, steps: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            loss, _ = self.model.loss(*associative_recall(2, 4, 16))  # from the global generator
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict:
        return {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.model, self.optimizers),
            "random": random_state.capture(),
            "progress": {"step": self.step, "third": 1 / 3, "note": "é", "none": None},
        }

    def restore(self, state: dict) -> None:
        random_state.restore(state["random"])
        self.step = state["progress"]["step"]


def tensors(value: float) -> dict:
    return {"model": {"w": torch.full((3, 5), float(value)), "b": torch.full((2,), -float(value))}}


def loaded(checkpoints: Checkpoints) -> float:
    """The value that `tensors` was made of."""
    state, path = tensors(0.0), checkpoints.latest()
    assert path is not None
    checkpoints.load(path, state)
    value = state["model"]["w"][0, 0].item()
    assert torch.equal(state["model"]["w"], torch.full((3, 5), value))
    assert torch.equal(state["model"]["b"], torch.full((2,), -value))
    return value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Going on


def test_a_run_goes_on_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    one = Learner()
    one.learn(3)
    checkpoints.save(one.step, one.state())
    expected = one.learn(4)

    other = Learner(seed=1)
    path, state = checkpoints.latest(), other.state()
    assert path == tmp_path / "step-00000003"
    checkpoints.load(path, state)  # pyright: ignore[reportArgumentType]
    other.restore(state)
    assert state["progress"] == {"step": 3, "third": 1 / 3, "note": "é", "none": None}
    assert other.learn(4) == expected
    for mine, theirs in zip(other.model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_loading_does_not_touch_the_optimizers_options(tmp_path):
    checkpoints, one = Checkpoints(tmp_path, keep=1), Learner()
    one.learn()
    checkpoints.save(1, one.state())
    other = Learner()
    other.optimizers[1].param_groups[0]["lr"] = 0.25
    checkpoints.load(tmp_path / "step-00000001", other.state())
    assert other.optimizers[1].param_groups[0]["lr"] == 0.25
    moments = other.optimizers[1].state[other.model.embedding.weight]
    assert moments["step"].item() == 1
    assert torch.equal(
        moments["exp_avg"], one.optimizers[1].state[one.model.embedding.weight]["exp_avg"]
    )


def test_a_checkpoint_before_the_first_step_loads(tmp_path):
    checkpoints, one = Checkpoints(tmp_path, keep=1), Learner()
    checkpoints.save(0, one.state())
    other = Learner(seed=1)
    other.learn()
    checkpoints.load(tmp_path / "step-00000000", other.state())
    assert torch.equal(other.model.embedding.weight, one.model.embedding.weight)
    assert not other.optimizers[1].state


def test_random_numbers_go_on():
    def drawn() -> list:
        return [
            [random.random(), random.gauss(), random.randrange(10**9)],
            [np.random.rand(), np.random.randn(), np.random.randint(10**9)],  # noqa: NPY002
            torch.randn(3).tolist(),
        ]

    for draws in (0, 1):  # with and without the second of a pair of gaussians at hand
        random.seed(4)
        np.random.seed(4)  # noqa: NPY002
        for _ in range(draws):
            random.gauss()
            np.random.randn()  # noqa: NPY002
        state = random_state.capture()
        first = drawn()
        assert drawn() != first
        random_state.restore(state)
        assert drawn() == first
    before = torch.get_rng_state()
    random_state.restore({"rank-7": state["rank-0"]})  # of a rank that is not here
    assert torch.equal(torch.get_rng_state(), before)


# What is kept


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder", keep=2)
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    for step, value in enumerate([3.0, 1.0, float("nan"), 2.0, None, 5.0], 1):
        checkpoints.save(step, tensors(step), best=value)
    assert names(checkpoints.folder) == ["step-00000002", "step-00000005", "step-00000006"]
    assert checkpoints.best() == checkpoints.folder / "step-00000002"
    assert loaded(checkpoints) == 6
    checkpoints.save(10**9, tensors(7))  # nine digits are more than eight
    assert loaded(checkpoints) == 7


def test_a_step_that_is_there_is_not_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, tensors(1))
    before = (tmp_path / "step-00000001" / "__0_0.distcp").stat()
    checkpoints.save(1, tensors(1), best=0.5)
    assert (tmp_path / "step-00000001" / "__0_0.distcp").stat() == before
    assert checkpoints.best() == tmp_path / "step-00000001"
    assert loaded(checkpoints) == 1


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "step-notes.tmp.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000007.tmp").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest() is None
    for step in (1, 9):
        checkpoints.save(step, tensors(step))
        assert loaded(checkpoints) == step
    assert names(tmp_path) == ["step-00000009", "step-notes.tmp.txt"]


def test_keep_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep: 0; expected 1 checkpoint or more"):
        Checkpoints(tmp_path, keep=0)


# Killed


class Killed(BaseException):
    """Nothing is done after it, not even by those who tidy up."""


def kill_at(monkeypatch, moment: int) -> list[int]:
    """Die at the n-th time that something happens to the disk; gives back how often it did."""
    count = [0]

    def mortal(act):
        def acting(*args, **options):
            count[0] += 1
            if count[0] >= moment:
                raise Killed
            return act(*args, **options)

        return acting

    acts = ((os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "rename"))
    for owner, name in (*acts, (os, "mkdir"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, mortal(getattr(owner, name)))
    # torch's writer of files says nothing to the disk but this
    monkeypatch.setattr(module, "save_tensors", mortal(module.save_tensors))
    monkeypatch.setattr(shutil, "rmtree", mortal(shutil.rmtree))
    return count


def test_killed_at_any_moment_there_is_a_whole_one(tmp_path):
    """Steps 1 to 3 are there, 4 is being written and 1 removed; whatever is left can be gone on
    from."""
    seen, moment, finished = set(), 0, False
    while not finished:
        moment += 1
        folder = tmp_path / str(moment)
        checkpoints = Checkpoints(folder, keep=2)
        for step in (1, 2, 3):
            checkpoints.save(step, tensors(step))
        with pytest.MonkeyPatch.context() as patch:
            count = kill_at(patch, moment)
            with suppress(Killed, CheckpointException):
                checkpoints.save(4, tensors(4))
            finished = count[0] < moment
        seen.add(value := loaded(checkpoints))
        for step in range(int(value) + 1, 7):
            checkpoints.save(step, tensors(step))
        assert names(folder) == ["step-00000005", "step-00000006"]
        assert loaded(checkpoints) == 6
    assert moment > 8
    assert seen == {3, 4}


def test_half_written_ones_are_told_from_whole_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, tensors(step))
    half = tmp_path / "step-00000002"
    (half / "meta.json").unlink()
    assert loaded(checkpoints) == 1
    with pytest.raises(ValueError, match=r"half-written, it has no meta\.json; delete the folder"):
        checkpoints.load(half, tensors(0))


# Damage


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.json"])
def test_damage_is_noticed(tmp_path, name):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tensors(1), best=0.25)
    path, file = tmp_path / "step-00000001", tmp_path / "step-00000001" / name
    good = file.read_bytes()
    places = random.Random(0).sample(range(len(good)), 12)
    damaged = [good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :] for n in (0, len(good) - 2, *places)]
    for bad in (*damaged, good[:-5], good[: len(good) // 2], b"", good + b"x"):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match="step-00000001/") as caught:
            checkpoints.load(path, tensors(0))
        assert str(caught.value).startswith(f"{file}: ")
        assert f"delete the folder {path}, and --resume takes the one before" in str(caught.value)
    file.write_bytes(good)
    assert loaded(checkpoints) == 1


def test_a_file_that_is_gone_is_noticed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tensors(1))
    (tmp_path / "step-00000001" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp: missing; delete the folder"):
        loaded(checkpoints)


def test_the_list_of_tensors_makes_nothing_else(tmp_path):
    class Rude:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'harm'}",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Rude()))
    with pytest.raises(pickle.UnpicklingError, match="has no place in a list of tensors"):
        module._read_index(tmp_path / ".metadata")
    assert names(tmp_path) == [".metadata"]


# Of something else


def refused(checkpoints: Checkpoints, learner: Learner) -> str:
    path = checkpoints.latest()
    assert path is not None
    before = learner.model.embedding.weight.clone()
    with pytest.raises(ValueError, match="step-00000001: of another model") as caught:
        checkpoints.load(path, learner.state())
    assert torch.equal(learner.model.embedding.weight, before)
    return str(caught.value)


def test_another_model_is_refused_by_its_first_difference(tmp_path):
    checkpoints, one = Checkpoints(tmp_path, keep=1), Learner()
    one.learn()
    checkpoints.save(1, one.state())
    wide = refused(checkpoints, Learner(dim=16))
    assert "model/embedding.weight is [16, 8] (torch.float32) in it" in wide
    assert "and [16, 16] (torch.float32) here; --resume with the options of that run" in wide
    deep = refused(checkpoints, Learner(depth=3))
    assert "model/blocks.2.norm.weight is missing in it and [8] (torch.float32) here" in deep
    flat = refused(checkpoints, Learner(depth=1))
    assert "model/blocks.1.mixer.conv.weight is [" in flat
    assert " in it and missing here" in flat


def test_other_optimizers_are_refused(tmp_path):
    checkpoints, one = Checkpoints(tmp_path, keep=1), Learner()
    one.learn()
    checkpoints.save(1, one.state())
    other = Learner()
    other.optimizers = [torch.optim.AdamW(other.model.parameters())]
    assert "optimizer/Muon/blocks.0" in refused(checkpoints, other)


def test_values_that_are_not_there_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tensors(1))
    with pytest.raises(ValueError, match="it says nothing of progress/step"):
        checkpoints.load(tmp_path / "step-00000001", tensors(0) | {"progress": {"step": 0}})


# A full disk


def unchanged_after(checkpoints: Checkpoints, *codes: int) -> None:
    with pytest.raises(OSError, match="no space for it") as caught:
        checkpoints.save(2, tensors(2) | {"large": torch.zeros(50_000)})
    assert caught.value.errno in codes
    assert caught.value.filename == str(checkpoints.folder / "step-00000002")
    assert "earlier checkpoints are as they were, make room and go on with --resume" in str(
        caught.value
    )
    assert names(checkpoints.folder) == ["step-00000001"]
    assert loaded(checkpoints) == 1


def test_a_file_that_may_not_grow(tmp_path):
    """A limit of the system's: the nearest to a full disk that any user can have."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tensors(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        unchanged_after(checkpoints, errno.EFBIG, errno.ENOSPC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.save(2, tensors(2))
    assert loaded(checkpoints) == 2


@pytest.mark.parametrize(
    "seen",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        # what torch makes of it, as seen on a full tmpfs
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    ],
)
def test_a_full_disk(tmp_path, monkeypatch, seen):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tensors(1))

    def full(*_, storage_writer, **__):
        (storage_writer.path / "__0_0.distcp").write_bytes(b"half")
        raise CheckpointException("write", {0: (seen, [])})  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "save_tensors", full)
    unchanged_after(checkpoints, errno.ENOSPC)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written") as caught:
        Checkpoints(tmp_path / "file", keep=1).save(1, tensors(1))
    assert caught.value.filename == str(tmp_path / "file" / "step-00000001")


def test_meta_is_for_people_too(tmp_path):
    Checkpoints(tmp_path, keep=1).save(3, tensors(1) | {"progress": {"tokens": 12}}, best=2.5)
    said = json.loads((tmp_path / "step-00000003" / "meta.json").read_text())
    assert (said["step"], said["best"], said["ranks"]) == (3, 2.5, 1)
    assert said["values"] == {"progress/tokens": 12}
    assert sorted(said["files"]) == [".metadata", "__0_0.distcp"]

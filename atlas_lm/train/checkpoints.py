"""Checkpoints that survive: whole or not there, the last few and the best, checked when read.

    step-00000300/         every name without an ending is whole
      meta.json            step, plain values, and size and checksum of every file; written last
      .metadata            which tensors there are, of PyTorch's distributed checkpoint
      __0_0.distcp         tensors, of rank 0
    step-00000400.tmp/     being written, or left by a run that was killed meanwhile

Written by any number of ranks, read by any other.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.serialization import _get_layout

from atlas_lm.train.ranks import agreed, together
from atlas_lm.whole_files import write_whole

FORMAT = "atlas-lm checkpoint 1"
META, INDEX = "meta.json", ".metadata"
WHOLE = re.compile(r"step-(\d{8,})")
UNFINISHED = ".tmp"
OWN_RANK = re.compile(r"(^|/)rank-\d+/")
"""Names that belong to one rank; another number of ranks has others."""

State = dict[str, Any]
"""Tensors, plain values, dicts of these, and objects with `state_dict` and `load_state_dict`."""


class Checkpoints:
    """The checkpoints in a folder.

    checkpoints = Checkpoints(Path("run/checkpoints"), keep=2)
    checkpoints.save(100, {"model": model_state(model), "data": batches})
    checkpoints.load(checkpoints.latest(), state)

    Of several ranks, all have to make the same calls.

    keep    how many to keep, besides the best
    """

    def __init__(self, folder: str | os.PathLike, keep: int):
        if keep < 1:
            raise ValueError(f"keep: {keep}; expected 1 checkpoint or more")
        self.folder, self.keep = Path(folder), keep

    def latest(self) -> Path | None:
        """The newest that is whole."""
        return agreed(lambda: next(iter(_whole(self.folder)), None))

    def best(self) -> Path | None:
        """That of the lowest value that was given to `save`."""
        return agreed(lambda: _best(_whole(self.folder)))

    # Saving

    def save(self, step: int, state: State, *, best: float | None = None) -> None:
        """Write one, whole or not at all, then remove those that are not to be kept.

        best    the lower, the better
        """
        path = self.folder / f"step-{step:08}"
        temporary = path.with_name(path.name + UNFINISHED)
        tensors, values = _divided(state)
        try:
            if agreed(lambda: self._prepared(path, temporary, best)):
                _write_tensors(temporary, tensors)
                files = together(lambda: _described(temporary))
                about = {"step": step, "best": best, "ranks": len(files), "values": values}
                agreed(lambda: _finish(temporary, path, about, files))
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise _explained(error, path) from error
            raise
        agreed(self._remove_old)

    def _prepared(self, path: Path, temporary: Path, best: float | None) -> bool:
        """Make room for it; False if this step is there already."""
        if (path / META).exists():
            about = _read_meta(path)
            if best is not None:
                _write_meta(path, about | {"best": best})
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in [path, *self.folder.glob(f"step-*{UNFINISHED}")]:
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir()
        return True

    def _remove_old(self) -> None:
        found = _whole(self.folder)
        for path in found[self.keep :]:
            if path != _best(found):
                aside = path.with_name(path.name + UNFINISHED)
                path.rename(aside)  # at once: half of it must not pass for a whole one
                shutil.rmtree(aside, ignore_errors=True)

    # Loading

    def load(self, path: Path, state: State) -> None:
        """Fill a state of the same kind, in place, with what a checkpoint holds."""
        values = agreed(lambda: _read_meta(path))["values"]
        together(lambda: _check_files(path))
        metadata = _read_index(path / INDEX)
        saved = {
            name: (about.size, about.properties.dtype)
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }
        opened = _opened(state, saved)
        tensors, _ = _divided(opened)
        _check_names(path, tensors, saved)
        wanted = {name: tensor for name, tensor in tensors.items() if name in saved}
        with _plain_errors():
            load_tensors(wanted, storage_reader=_Reader(path, metadata), no_dist=_alone())
        _fill(path, state, opened, values)


# Folders


def _whole(folder: Path) -> list[Path]:
    """Newest first."""
    if not folder.is_dir():
        return []
    steps = {p: WHOLE.fullmatch(p.name) for p in folder.iterdir()}
    found = [(int(named[1]), path) for path, named in steps.items() if named]
    return [path for _, path in sorted(found, reverse=True) if (path / META).is_file()]


def _best(found: list[Path]) -> Path | None:
    values = {}
    for path in found:
        try:
            value = _read_meta(path)["best"]
        except ValueError:  # damaged; whoever loads it is told
            continue
        if value is not None and isfinite(value):
            values[path] = value
    return min(values, key=lambda path: values[path]) if values else None


def _finish(temporary: Path, path: Path, about: State, files: list[State]) -> None:
    """Name the files of all ranks in meta.json, and then the folder as one that is whole."""
    from atlas_lm import __version__

    named = {name: file for of_rank in files for name, file in of_rank.items()}
    for name, file in named.items():
        found = temporary / name
        if not found.is_file() or found.stat().st_size != file["bytes"]:
            raise OSError(
                errno.ENOENT,
                "written by another rank, and not seen here; --out has to be a folder that all "
                "machines share",
                str(found),
            )
    _write_meta(temporary, {"version": __version__} | about | {"files": named})
    _sync_folder(temporary)
    temporary.rename(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Have the names in it on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# meta.json


def _write_meta(path: Path, about: State) -> None:
    about = {"format": FORMAT} | about | {"sha256": None}
    about["sha256"] = _sum_of(about)
    write_whole(path / META, (json.dumps(about, indent=1) + "\n").encode())


def _read_meta(path: Path) -> State:
    file = path / META
    if not file.is_file():
        raise ValueError(f"{path}: half-written, it has no {META}; {_delete(path)}")
    try:
        about = json.loads(file.read_bytes())
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}")
        if about["sha256"] != _sum_of(about):
            raise ValueError("its checksum is another")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: damaged, or no checkpoint of this version ({error}); {_delete(path)}"
        ) from error
    return about


def _sum_of(about: State) -> str:
    text = json.dumps(about | {"sha256": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _delete(path: Path) -> str:
    return f"delete the folder {path}, and --resume takes the one before"


# Files


def _described(path: Path) -> State:
    """Size and checksum of the files of this rank, after they are on the disk."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = sorted(path.glob(f"__{rank}_*"))
    if rank == 0:
        found.append(path / INDEX)
    files = {}
    for file in found:
        with file.open("rb") as data:
            sha256 = hashlib.file_digest(data, "sha256").hexdigest()
            os.fsync(data.fileno())
        files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256}
    return files


def _check_files(path: Path) -> None:
    """Of every rank some: reading all takes as long as loading them."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name, about in sorted(_read_meta(path)["files"].items())[rank::ranks]:
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: missing; {_delete(path)}")
        size = file.stat().st_size
        if size != about["bytes"]:
            raise ValueError(
                f"{file}: {size:,} bytes; expected {about['bytes']:,}; {_delete(path)}"
            )
        with file.open("rb") as data:
            sha256 = hashlib.file_digest(data, "sha256").hexdigest()
        if sha256 != about["sha256"]:
            raise ValueError(
                f"{file}: damaged, its sha256 is {sha256[:12]}; expected {about['sha256'][:12]}; "
                f"{_delete(path)}"
            )


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with _plain_errors():
        save_tensors(tensors, storage_writer=FileSystemWriter(path), no_dist=_alone())


def _alone() -> bool:
    return not dist.is_initialized()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What went wrong on one of the ranks as what it was, and no word about being alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
        try:
            yield
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            known = [cause for cause in causes if isinstance(cause, OSError | ValueError)]
            if not known and any("inline_container" in str(cause) for cause in causes):
                # all that is left of an OSError once it has passed through the writer of zip files
                known = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
            raise (known or causes or [error])[0] from error


def _explained(error: OSError, path: Path) -> OSError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = "no space for it" if full else f"cannot be written ({error.strerror or error})"
    return OSError(
        error.errno or errno.EIO,
        f"{reason}; earlier checkpoints are as they were, make room and go on with --resume",
        str(path),
    )


class _Reader(FileSystemReader):
    """Of files whose index was read here."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _read_index(file: Path) -> Metadata:
    with file.open("rb") as data:
        return _Index(data).load()


class _Index(pickle.Unpickler):
    """PyTorch's list of tensors, which is a pickle: only what such a list consists of is made."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib"):  # where Python 3.13 has it, 3.11 has nothing
            return PurePosixPath
        found = None
        if module.startswith(("torch", "collections")):
            found = super().find_class(module, name)
        if isinstance(found, torch.dtype) or found in (torch.Size, _get_layout, OrderedDict):
            return found
        if is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a list of tensors")


# States


def _named(state: State, before: str = "") -> Iterator[tuple[str, Any]]:
    """`model/head.weight` and the like: everything in it that is no dict."""
    for name, value in state.items():
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        if isinstance(value, dict):
            yield from _named(value, f"{before}{name}/")
        else:
            yield before + name, value


def _divided(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and plain values."""
    both = dict(_named(state))
    tensors = {n: v for n, v in both.items() if isinstance(v, Tensor)}
    return tensors, {n: v for n, v in both.items() if not isinstance(v, Tensor)}


def _opened(state: State, saved: dict[str, Any], before: str = "") -> State:
    """The same as dicts alone, with places for what objects will hold."""
    out = {}
    for name, value in state.items():
        here = f"{before}{name}/"
        if hasattr(value, "blank"):
            inside = {n.removeprefix(here): s for n, s in saved.items() if n.startswith(here)}
            value = value.blank(inside)
        elif hasattr(value, "state_dict"):
            value = value.state_dict()
        out[name] = _opened(value, saved, here) if isinstance(value, dict) else value
    return out


def _check_names(path: Path, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else."""
    here = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    for name in [*here, *sorted(saved)]:
        if here.get(name) != saved.get(name) and not OWN_RANK.search(name):
            raise ValueError(
                f"{path}: of another model: {name} is {_shape(saved.get(name))} in it and "
                f"{_shape(here.get(name))} here; --resume with the options of that run, or begin "
                "another in a new --out"
            )


def _shape(about: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if about is None else f"{list(about[0])} ({about[1]})"


def _fill(path: Path, state: State, opened: State, values: State, before: str = "") -> None:
    """Plain values into the dicts, dicts into the objects they came from."""
    for name, value in list(opened.items()):
        here = f"{before}{name}"
        if isinstance(value, dict):
            inside = state[name] if isinstance(state[name], dict) else value
            _fill(path, inside, value, values, here + "/")
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value)
        elif not isinstance(value, Tensor):
            if here not in values:
                raise ValueError(f"{path}: it says nothing of {here}; it is of another version")
            opened[name] = state[name] = values[here]

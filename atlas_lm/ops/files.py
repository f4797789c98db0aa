"""Memory as a file: safetensors, with a checksum of everything in it, never half-written."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from atlas_lm.whole_files import write_whole

FORMAT = "atlas-lm memory 1"


class MemoryFile(NamedTuple):
    """What a memory file holds."""

    tensors: dict[str, Tensor]
    layout: dict
    about: dict[str, str]


def write_memory(
    path: str | os.PathLike, tensors: dict[str, Tensor], layout: dict, about: dict[str, str]
) -> None:
    """Write the tensors of a state, its layout, and what else there is to say about it."""
    from atlas_lm import __version__

    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
    same = _same(tensors)
    metadata = {
        "format": FORMAT,
        "library": f"atlas-lm {__version__}",
        "layout": json.dumps(layout),
        "about": json.dumps(about),
        "shapes": json.dumps({n: list(t.shape) for n, t in sorted(tensors.items())}),
        "same": json.dumps(same),
    }
    tensors = {n: t for n, t in tensors.items() if n not in same}
    write_whole(path, save(tensors, metadata | {"sha256": fingerprint(tensors, metadata)}))


def read_memory(path: str | os.PathLike) -> MemoryFile:
    """Read a memory file; what was changed since it was written is refused."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such memory file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # copies: numbers in a mapped file are aligned otherwise, which changes bits on a CPU
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "no format")
        raise ValueError(f"{path}: not a memory file: it says {found!r}, expected {FORMAT!r}")
    if metadata.get("sha256") != fingerprint(tensors, metadata):
        raise ValueError(f"{path}: the file was changed after it was written (checksum differs)")
    for name, other in json.loads(metadata.get("same", "{}")).items():
        if other not in tensors:
            raise ValueError(
                f"{path}: not the tensors of a memory: {name} is {other}, which is none"
            )
        tensors[name] = tensors[other].clone()
    return MemoryFile(tensors, json.loads(metadata["layout"]), json.loads(metadata["about"]))


def read_about(path: str | os.PathLike) -> dict[str, str]:
    """The texts that were saved beside a state."""
    return read_memory(path).about


def _same(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Those that another one equals, which is written for both: where a chunk begins, the memory is
    its own anchor, which would be half of the file."""
    first: dict[str, str] = {}
    named = {n: first.setdefault(fingerprint({"": t}, {}), n) for n, t in tensors.items()}
    return {name: other for name, other in named.items() if name != other}


def fingerprint(tensors: dict[str, Tensor], texts: dict[str, str]) -> str:
    """Of all these tensors and texts, so that a changed byte anywhere is noticed."""
    digest = hashlib.sha256()
    for key in sorted(texts.keys() - {"sha256"}):
        digest.update(f"{key}={texts[key]}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""What a memory file holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlas_lm.cli.show import size_line
from atlas_lm.memory import About, load_memory
from atlas_lm.models import ModelState, load_model
from atlas_lm.models.summary import name_of, size_text
from atlas_lm.ops import MemoryState
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.files import read_memory


@dataclass(frozen=True)
class Layer:
    """One memory of a model."""

    rule: str
    weights: float
    """Frobenius norm of a head's fast weights, mean over the heads."""
    momentum: float | None
    half_life: float | None
    """Tokens after which half of what was written is forgotten; None: nothing is, or unknown."""


def inspect_memory(path: Path, model: Path | None, as_json: bool) -> None:
    """Print what it has read and how its layers stand."""
    if model is not None:
        load_memory(path, load_model(model))
    file = read_memory(path)
    state, said = Carried.restored(file, path), file.about
    about = About.from_texts(said, path) if said else None
    memories = list(_memories(state))
    lives = about.half_lives if about else ()
    layers = [_layer(m, life) for m, life in zip_longest(memories, lives[: len(memories)])]
    counted = state if isinstance(state, ModelState) else next(iter(memories), None)
    tokens = int(counted.position.max()) if counted is not None else 0
    if as_json:
        print(json.dumps(_plain(state, about, tokens, layers), indent=2))
        return
    whose = "" if model is None else f", by {model}"
    print(f"{path}: {tokens:,} tokens read{whose}")
    for line in _about_lines(state, about):
        print(f"  {line}")
    for line in _layer_lines(layers):
        print(f"  {line}")


def _memories(state: Any) -> Iterator[MemoryState]:
    """All of them, from the first layer to the last."""
    if isinstance(state, MemoryState):
        yield state
    elif isinstance(state, Carried):
        for field in fields(state):
            yield from _memories(getattr(state, field.name))
    elif isinstance(state, tuple):
        for part in state:
            yield from _memories(part)


def _layer(memory: MemoryState, half_life: float | None) -> Layer:
    momentum = _norm(memory.momentum) if memory.momentum else None
    return Layer(name_of(memory.rule), _norm(memory.weights), momentum, half_life)


def _norm(weights: dict[str, Tensor]) -> float:
    """Of all tensors `[b h . .]` of a head together, mean over heads."""
    squares = [w.double().square().flatten(2).sum(-1) for w in weights.values()]
    return torch.stack(squares).sum(0).sqrt().mean().item()


def _about_lines(state: Carried, about: About | None) -> Iterator[str]:
    if about is None:
        yield f"{size_text(state.nbytes)}; it does not say which model and texts it is of"
        return
    yield size_line(state.nbytes, about)
    yield f"model {about.model[:12]}, tokenizer {about.tokenizer[:27]}, atlas-lm {about.version}"
    for number, text in enumerate(about.texts, 1):
        where = text.path or text.name
        sizes = f"{text.bytes:,} bytes, {text.tokens:,} tokens, sha256 {text.sha256[:12]}"
        yield f"text {number}: {where}: {sizes}"


def _layer_lines(layers: list[Layer]) -> Iterator[str]:
    rows = [("memory", "rule", "weights", "momentum", "half-life")]
    for number, layer in enumerate(layers, 1):
        momentum = "none" if layer.momentum is None else f"{layer.momentum:.4g}"
        life = "none" if layer.half_life is None else f"{layer.half_life:,.0f} tokens"
        rows.append((str(number), layer.rule, f"{layer.weights:.4g}", momentum, life))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()


def _plain(
    state: Carried, about: About | None, tokens: int, layers: list[Layer]
) -> dict[str, object]:
    out: dict[str, object] = {"tokens": tokens, "bytes": state.nbytes}
    if about is not None:
        out |= {
            "text_bytes": about.text_bytes,
            "kv_cache_tokens": state.nbytes / about.kv_bytes,
            "model": about.model,
            "tokenizer": about.tokenizer,
            "version": about.version,
            "texts": [asdict(text) for text in about.texts],
        }
    return out | {"layers": [asdict(layer) for layer in layers]}

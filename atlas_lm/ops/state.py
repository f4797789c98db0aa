"""The state of a memory: what it has learned so far, and what it needs to go on exactly."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.networks import SLOW
from atlas_lm.rules import Rule
from atlas_lm.shapes import Gate, Keys, TokenFlag, Values, WindowGate

FORMAT = "atlas-lm memory 1"


class Gates(NamedTuple):
    """How much is kept, written, carried on and listened to, for every token and head."""

    retention: Gate
    """alpha in (0, 1]: 1 keeps everything."""
    rate: Gate
    """eta >= 0: 0 writes nothing."""
    momentum: Gate | None
    """theta in (0, 1]; momentum and muon only."""
    importance: WindowGate
    """gamma: `[..., j]` weighs the pair j tokens back."""
    threshold: Gate | None = None
    """Huber's delta, per pair."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Gates:
        """The gates with a function applied to each there is."""
        return Gates(*(g if g is None else function(g) for g in self))  # pyright: ignore[reportArgumentType]


class Tokens(NamedTuple):
    """What comes in to be read and written, as `memorize` takes it."""

    q: Keys
    k: Keys
    v: Values
    gates: Gates
    mask: TokenFlag | None
    reset: TokenFlag | None


@dataclass(frozen=True, eq=False)
class MemoryState:
    """Goes into `memorize` and comes out; every tensor has the batch first.

    Chunks, windows and strides count a row's own tokens, so rows may be at different positions.
    """

    rule: Rule
    weights: dict[str, Tensor]
    """Fast weights now, `[b h out in]`."""
    anchor: dict[str, Tensor]
    """Fast weights when the chunk of the next token began: where its gradients are taken."""
    momentum: dict[str, Tensor]
    """S, like the weights; empty under gd."""
    keys: Tensor
    """Keys of the last c-1 pairs `[b c-1 h k]`, the newest last, zeros before the first."""
    values: Tensor
    thresholds: Tensor | None
    position: Tensor
    """Tokens read since the row's document began, int64 `[b]`."""
    past: dict[str, Tensor]
    """Exponential rules only: every past key, and its coefficients now and at the anchor, by row
    from the document's first token, `[b t h .]`."""

    @classmethod
    def begin(cls, rule: Rule, weights: dict[str, Tensor], batch: int, past, *, keys, values):
        """An unread memory. `past`: names and widths; `keys`, `values` show sizes, `[b t h .]`."""
        heads, c = keys.shape[2], rule.window
        # a copy: an optimiser that moves the weights in place must not move a memory that was read
        fast = {n: w.expand(batch, *w.shape).clone() for n, w in weights.items() if n not in SLOW}
        momentum = {n: torch.zeros_like(w) for n, w in fast.items()} if rule.uses_momentum else {}
        return cls(
            rule=rule,
            weights=fast,
            anchor=dict(fast),
            momentum=momentum,
            keys=keys.new_zeros(batch, c - 1, heads, keys.shape[3]),
            values=values.new_zeros(batch, c - 1, heads, values.shape[3]),
            thresholds=keys.new_zeros(batch, c - 1, heads) if rule.objective == "huber" else None,
            position=torch.zeros(batch, dtype=torch.int64, device=keys.device),
            past={n: keys.new_zeros(batch, 0, heads, width) for n, width in past.items()},
        )

    @property
    def batch(self) -> int:
        return self.position.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a flat name."""
        out = {}
        for name, value in self._parts().items():
            if isinstance(value, dict):
                out |= {f"{name}.{key}": tensor for key, tensor in value.items()}
            elif value is not None:
                out[name] = value
        return out

    def map(self, function: Callable[[Tensor], Tensor]) -> MemoryState:
        """The state with a function applied to each of its tensors."""
        return _join(self.rule, {n: function(t) for n, t in self.tensors().items()})

    def to(self, *args, **kwargs) -> MemoryState:
        """Move, or convert to float32 or float64."""
        moved = self.map(lambda t: t.to(*args, **kwargs) if t.is_floating_point() else t)
        dtype = moved.keys.dtype
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"MemoryState.to: {dtype} loses the memory; use float32 or float64")
        return replace(moved, position=self.position.to(moved.keys.device))

    def detach(self) -> MemoryState:
        """Cut the graph: truncated backpropagation."""
        return self.map(Tensor.detach)

    def clone(self) -> MemoryState:
        return self.map(Tensor.clone)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> MemoryState:
        """Some rows, in this order; still a batch, of one row for an integer."""
        index = rows if isinstance(rows, slice) else self._index(rows)
        return self.map(lambda t: t[index])

    def expand(self, n: int) -> MemoryState:
        """Every row n times in succession."""
        return self.map(lambda t: t.repeat_interleave(n, 0))

    @staticmethod
    def stack(states: Sequence[MemoryState]) -> MemoryState:
        """Rows of several states, at whatever positions, as one batch."""
        if not states:
            raise ValueError("MemoryState.stack: no states given")
        first = states[0]
        for state in states[1:]:
            state.require(first.rule, first.row_shapes(), "MemoryState.stack")
            if state.keys.dtype != first.keys.dtype:
                raise TypeError(
                    f"MemoryState.stack: {state.keys.dtype} beside {first.keys.dtype}; "
                    "convert with state.to(dtype)"
                )
        length = max((p.shape[1] for s in states for p in s.past.values()), default=0)
        parts = [s._padded(length).tensors() for s in states]
        return _join(first.rule, {n: torch.cat([p[n] for p in parts]) for n in parts[0]})

    def reset(self, rows: Tensor | Sequence[int], weights: dict[str, Tensor]) -> MemoryState:
        """The state with these rows (numbers, or one flag a row) as if nothing had been read."""
        flags = self._index(rows)
        if flags.dtype != torch.bool:
            flags = torch.zeros_like(self.position).bool().index_fill(0, flags, True)
        widths = {n: p.shape[-1] for n, p in self.past.items()}
        fast = {n: w.to(self.keys) for n, w in weights.items() if n not in SLOW}
        new = MemoryState.begin(
            self.rule, fast, self.batch, widths, keys=self.keys, values=self.values
        )
        new.require(self.rule, self.row_shapes(), "MemoryState.reset to these weights")
        length = max((p.shape[1] for p in self.past.values()), default=0)
        blank = new._padded(length).tensors()

        def choose(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(flags.view(-1, *[1] * (old.ndim - 1)), new, old)

        return _join(self.rule, {n: choose(t, blank[n]) for n, t in self.tensors().items()})

    def require(self, rule: Rule, shapes: dict[str, tuple[int, ...]], where: str) -> None:
        """Refuse this state for another rule or other shapes, naming both sides."""
        if self.rule != rule:
            mine, theirs = self.rule.describe(), rule.describe()
            wrong = [f for f in mine if mine[f] != theirs[f]]
            raise ValueError(
                f"{where}: the state is of another rule: "
                f"state has {', '.join(f'{f}={mine[f]!r}' for f in wrong)}; "
                f"expected {', '.join(f'{f}={theirs[f]!r}' for f in wrong)}"
            )
        mine = self.row_shapes()
        wrong = [n for n in sorted(mine | shapes) if mine.get(n) != shapes.get(n)]
        if wrong:
            raise ValueError(
                f"{where}: the state does not fit: "
                f"state has {', '.join(f'{n} {mine.get(n)}' for n in wrong)}; "
                f"expected {', '.join(f'{n} {shapes.get(n)}' for n in wrong)} (shapes of one row)"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file; the old file stays until the new one is whole."""
        path = Path(path)
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in self.tensors().items()}
        data = save(tensors, _metadata(self.rule, tensors))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @staticmethod
    def load(path: str | os.PathLike, rule: Rule | None = None) -> MemoryState:
        """Read a saved state; `rule`, if given, must be the one it was written with.

        A rule made of functions cannot be read back from a file: give the same rule here.
        """
        tensors, metadata = _read(Path(path))
        written = json.loads(metadata["rule"])
        if rule is None:
            rule = _rule_from(written, path)
        expected = rule.describe()
        wrong = [f for f in expected | written if expected.get(f) != written.get(f)]
        if wrong:
            raise ValueError(
                f"{path}: the memory is of another rule: "
                f"file has {', '.join(f'{f}={written.get(f)!r}' for f in wrong)}; "
                f"expected {', '.join(f'{f}={expected.get(f)!r}' for f in wrong)}"
            )
        try:
            state = _join(rule, tensors)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: not the tensors of a memory: {sorted(tensors)}") from error
        state._check_whole(path)
        return state

    def _parts(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rule"}

    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one row, with the growing axis of the past left out."""
        return {
            n: tuple(t.shape[2:] if n.startswith("past.") else t.shape[1:])
            for n, t in self.tensors().items()
        }

    def _index(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """Numbers of rows `[n]`, or one flag a row, where the state is."""
        index = torch.atleast_1d(torch.as_tensor(rows))
        if index.numel() == 0:
            index = index.long()
        if index.dtype == torch.bool:
            valid = index.shape == self.position.shape
        elif index.is_floating_point() or index.ndim > 1:
            valid = False
        else:  # a GPU would have to wait for its numbers
            valid = index.is_cuda or all(-self.batch <= i < self.batch for i in index.tolist())
        if not valid:
            raise IndexError(
                f"MemoryState: rows {rows} of a batch of {self.batch}; "
                "expected their numbers, or one flag a row"
            )
        return index.to(self.keys.device)

    def _padded(self, length: int) -> MemoryState:
        """The past filled up with zeros to this length."""
        past = {
            n: torch.cat([p, p.new_zeros(p.shape[0], length - p.shape[1], *p.shape[2:])], 1)
            for n, p in self.past.items()
        }
        return replace(self, past=past)

    def _check_whole(self, path) -> None:
        shapes = {n: tuple(t.shape) for n, t in self.tensors().items()}
        fast = {n: shapes[f"weights.{n}"] for n in self.weights}
        consistent = (
            fast
            and {n: shapes.get(f"anchor.{n}") for n in self.anchor} == fast
            and (
                not self.rule.uses_momentum
                or {n: tuple(m.shape) for n, m in self.momentum.items()} == fast
            )
            and self.keys.shape[1:2] == (self.rule.window - 1,)
            and self.position.dtype == torch.int64
            and all(t.shape[:1] == self.position.shape for t in self.tensors().values())
            and all((self.position <= p.shape[1]).all() for p in self.past.values())
        )
        if not consistent:
            raise ValueError(f"{path}: the tensors of the memory do not fit together: {shapes}")


def extended(coefficients: Tensor, length: int) -> Tensor:
    """Coefficients of past keys `[b h s f]`, with zeros for the keys up to `length`."""
    return functional.pad(coefficients, (0, 0, 0, length - coefficients.shape[2]))


def part_of(past: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The coefficients "now." or at the "anchor.", by the name of their weights."""
    return {n.removeprefix(prefix): x for n, x in past.items() if n.startswith(prefix)}


def _join(rule: Rule, tensors: dict[str, Tensor]) -> MemoryState:
    """A state from the flat names of `MemoryState.tensors`."""
    parts: dict = {"weights": {}, "anchor": {}, "momentum": {}, "past": {}, "thresholds": None}
    for name, tensor in tensors.items():
        group, _, key = name.partition(".")
        if key:
            parts[group][key] = tensor
        else:
            parts[group] = tensor
    return MemoryState(rule=rule, **parts)


def _metadata(rule: Rule, tensors: dict[str, Tensor]) -> dict[str, str]:
    from atlas_lm import __version__

    metadata = {
        "format": FORMAT,
        "library": f"atlas-lm {__version__}",
        "rule": json.dumps(rule.describe()),
        "dtype": str(tensors["keys"].dtype),
        "position": json.dumps(tensors["position"].tolist()),
        "shapes": json.dumps({n: list(t.shape) for n, t in sorted(tensors.items())}),
    }
    return metadata | {"sha256": _fingerprint(tensors, metadata)}


def _fingerprint(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of everything in the file, so that a changed byte anywhere is noticed."""
    digest = hashlib.sha256()
    for key in sorted(metadata.keys() - {"sha256"}):
        digest.update(f"{key}={metadata[key]}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such memory file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "no format")
        raise ValueError(f"{path}: not a memory file: it says {found!r}, expected {FORMAT!r}")
    if metadata.get("sha256") != _fingerprint(tensors, metadata):
        raise ValueError(f"{path}: the file was changed after it was written (checksum differs)")
    return tensors, metadata


def _rule_from(written: dict[str, object], path) -> Rule:
    custom = [f for f, v in written.items() if isinstance(v, str) and v.startswith("function ")]
    if custom:
        raise ValueError(
            f"{path}: the rule holds functions ({', '.join(f'{f}={written[f]}' for f in custom)}); "
            "pass the same rule: MemoryState.load(path, rule=rule)"
        )
    try:
        return Rule(**written)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: written by another version of atlas-lm ({error})") from error

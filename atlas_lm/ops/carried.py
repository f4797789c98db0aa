"""What every state of the library can do, from one memory to a whole model.

A state is a frozen dataclass of tensors with the batch first, of dicts of them, and of states.
It goes in and comes out; nothing is changed in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from atlas_lm.ops.files import MemoryFile, read_memory, write_memory
from atlas_lm.rules import Rule


@dataclass(frozen=True, eq=False)
class Carried:
    """Goes into a call and comes out, with everything that is needed to go on exactly."""

    kinds: ClassVar[dict[str, type[Carried]]] = {}
    growing: ClassVar[tuple[str, ...]] = ()
    """Fields whose second axis grows with the tokens read."""

    def __init_subclass__(cls) -> None:
        Carried.kinds[cls.__name__] = cls

    @property
    def batch(self) -> int:
        return next(iter(self.tensors().values())).shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a flat name."""
        out = {}
        for name, value in self._parts().items():
            out |= _flat(name, value)
        return out

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The state with a function applied to each of its tensors."""
        return self._combine([self], lambda tensors: function(tensors[0]))

    def to(self, *args, **kwargs) -> Self:
        """Move, or convert to float32 or float64."""

        def moved(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t.to(torch.empty(0, device=t.device).to(*args, **kwargs).device)
            out = t.to(*args, **kwargs)
            if out.dtype not in (t.dtype, torch.float32, torch.float64):
                raise TypeError(
                    f"{type(self).__name__}.to: {out.dtype} loses the memory; "
                    "use float32 or float64"
                )
            return out

        return self.map(moved)

    def detach(self) -> Self:
        """Cut the graph: truncated backpropagation."""
        return self.map(lambda t: t.detach() if t.requires_grad else t)

    def clone(self) -> Self:
        return self.map(Tensor.clone)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Self:
        """Some rows, in this order; still a batch, of one row for an integer."""
        index = rows if isinstance(rows, slice) else self.row_index(rows)
        return self.map(lambda t: t[index])

    def expand(self, n: int) -> Self:
        """Every row n times in succession."""
        return self.map(lambda t: t.repeat_interleave(n, 0))

    @staticmethod
    def stack(states: Sequence[Any]) -> Any:
        """Rows of several states of one kind, at whatever positions, as one batch."""
        if not states:
            raise ValueError("stack: no states given")
        first = states[0]
        for state in states[1:]:
            state.require_like(first, f"{type(first).__name__}.stack")
        return first._combine(first.aligned(states), torch.cat)

    @staticmethod
    def choose(rows: Tensor, chosen: Any, other: Any) -> Any:
        """`chosen` in these rows (one flag each), `other` elsewhere; both of one kind."""

        def pick(pair: list[Tensor]) -> Tensor:
            return torch.where(rows.view(-1, *[1] * (pair[0].ndim - 1)), *pair)

        return chosen._combine(chosen.aligned([chosen, other]), pick)

    def aligned(self, states: Sequence[Any]) -> Sequence[Any]:
        """These states with what grows with the tokens read made equally long."""
        return states

    def require_like(self, other: Carried, where: str) -> None:
        """Refuse this state beside one of another kind, naming both sides."""
        mine, expected = self.row_shapes(), other.row_shapes()
        wrong = [n for n in sorted(mine | expected) if mine.get(n) != expected.get(n)]
        if wrong or self.layout() != other.layout():
            raise ValueError(
                f"{where}: the state does not fit: it has "
                f"{', '.join(f'{n} {mine.get(n)}' for n in wrong[:4]) or 'other rules'}; expected "
                f"{', '.join(f'{n} {expected.get(n)}' for n in wrong[:4]) or 'these'}"
            )
        theirs = other.tensors()
        for name, mine in self.tensors().items():
            if mine.dtype != theirs[name].dtype:
                raise TypeError(
                    f"{where}: {name} is {mine.dtype} beside {theirs[name].dtype}; "
                    "convert with state.to(dtype)"
                )

    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one row, with axes that grow left out."""
        out = {}
        for name, value in self._parts().items():
            if isinstance(value, Carried):
                value = (value,)
            if isinstance(value, tuple):
                for i, part in enumerate(value):
                    out |= {f"{name}.{i}.{n}": shape for n, shape in part.row_shapes().items()}
            else:
                axis = 2 if name in self.growing else 1
                out |= {n: tuple(t.shape[axis:]) for n, t in _flat(name, value).items()}
        return out

    def row_index(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """Numbers of rows `[n]`, or one flag a row, where the state is."""
        index = torch.atleast_1d(torch.as_tensor(rows))
        if index.numel() == 0:
            index = index.long()
        if index.dtype == torch.bool:
            valid = index.shape == (self.batch,)
        elif index.is_floating_point() or index.ndim > 1:
            valid = False
        else:  # a GPU would have to wait for its numbers
            valid = index.is_cuda or all(-self.batch <= i < self.batch for i in index.tolist())
        if not valid:
            raise IndexError(
                f"{type(self).__name__}: rows {rows} of a batch of {self.batch}; "
                "expected their numbers, or one flag a row"
            )
        return index.to(next(iter(self.tensors().values())).device)

    def row_flags(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """The same as one flag a row."""
        index = self.row_index(rows)
        if index.dtype == torch.bool:
            return index
        none = torch.zeros(self.batch, dtype=torch.bool, device=index.device)
        return none.index_fill(0, index, True)

    def save(self, path: str | os.PathLike, about: dict[str, str] | None = None) -> None:
        """Write a safetensors file; the old file stays until the new one is whole.

        `about`: texts to keep beside it (`atlas_lm.ops.files.read_about` gives them back).
        """
        write_memory(path, self.tensors(), self.layout(), about or {})

    @staticmethod
    def load(path: str | os.PathLike, rule: Rule | None = None) -> Any:
        """Read a saved state, of whatever kind; `rule`, if given, must be that of its memories.

        A rule made of functions cannot be read back from a file: give the same rule here.
        """
        return Carried.restored(read_memory(path), path, rule)

    @staticmethod
    def restored(memory: MemoryFile, path: str | os.PathLike, rule: Rule | None = None) -> Any:
        """The state in what was read from a file; `path` for messages."""
        try:
            state = _rebuild(memory.layout, memory.tensors, rule, path)
            if state.tensors().keys() != memory.tensors.keys():
                raise KeyError("tensors that the layout does not name")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: not the tensors of a memory: {sorted(memory.tensors)}"
            ) from error
        state.check_whole(path)
        return state

    def check_whole(self, path: str | os.PathLike) -> None:
        """Refuse tensors that do not fit together."""
        batch = self.batch
        for name, tensor in self.tensors().items():
            if tensor.shape[:1] != (batch,):
                raise ValueError(
                    f"{path}: the tensors of the memory do not fit together: "
                    f"{name} has {tuple(tensor.shape)} beside a batch of {batch}"
                )
        for value in self._parts().values():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Carried):
                    part.check_whole(path)

    def layout(self) -> dict[str, object]:
        """Everything but the tensors, as plain values: what a file says about the state."""
        described = {n: _described(v) for n, v in self._parts().items()}
        return {"kind": type(self).__name__} | described

    def _parts(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _combine(
        self, states: Sequence[Carried], function: Callable[[list[Tensor]], Tensor]
    ) -> Self:
        parts = [s._parts() for s in states]
        combined = {n: _combined([p[n] for p in parts], function) for n in parts[0]}
        return type(self)(**combined)


def _flat(name: str, value: object) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Carried):
        inside = value.tensors()
    elif isinstance(value, dict):
        inside = value
    elif isinstance(value, tuple):
        inside = {k: t for i, part in enumerate(value) for k, t in _flat(str(i), part).items()}
    else:
        return {}
    return {f"{name}.{key}": tensor for key, tensor in inside.items()}


def _combined(values: list[Any], function: Callable[[list[Tensor]], Tensor]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return function(values)
    if isinstance(first, Carried):
        return first._combine(first.aligned(values), function)
    if isinstance(first, dict):
        return {k: function([v[k] for v in values]) for k in first}
    if isinstance(first, tuple):
        return tuple(_combined(list(each), function) for each in zip(*values, strict=True))
    return first


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Carried):
        return value.layout()
    if isinstance(value, dict):
        return {"names": list(value)}
    if isinstance(value, tuple):
        return [_described(v) for v in value]
    return {"rule": value.describe()} if isinstance(value, Rule) else value


def _rebuild(layout: dict, tensors: dict[str, Tensor], rule: Rule | None, path) -> Carried:
    """A state from its layout and the flat names of `Carried.tensors`."""

    def value(name: str, said: Any) -> Any:
        if said == "tensor":
            return tensors[name]
        if isinstance(said, list):
            return tuple(value(f"{name}.{i}", s) for i, s in enumerate(said))
        if not isinstance(said, dict):
            return said
        if "kind" in said:
            prefix = f"{name}."
            inside = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            return _rebuild(said, inside, rule, path)
        if "rule" in said:
            return _checked_rule(said["rule"], rule, path)
        return {key: tensors[f"{name}.{key}"] for key in said["names"]}

    if layout["kind"] not in Carried.kinds:
        import_module("atlas_lm.models")  # where the states of layers and models are defined
    kind = Carried.kinds[layout["kind"]]
    return kind(**{name: value(name, said) for name, said in layout.items() if name != "kind"})


def _checked_rule(written: dict[str, object], rule: Rule | None, path) -> Rule:
    """The rule a file names, which must be the one that was asked for."""
    if rule is None:
        return _rule_from(written, path)
    expected = rule.describe()
    wrong = [f for f in expected | written if expected.get(f) != written.get(f)]
    if wrong:
        raise ValueError(
            f"{path}: the memory is of another rule: "
            f"file has {', '.join(f'{f}={written.get(f)!r}' for f in wrong)}; "
            f"expected {', '.join(f'{f}={expected.get(f)!r}' for f in wrong)}"
        )
    return rule


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

"""Kernels in Gluon on the CPU: their own source, with another language under it.

    monkeypatch.setattr(module, "kernel", OnCPU(module.kernel))

Gluon has no interpreter. Here what registers hold is a tensor of PyTorch, layouts are nothing, and
programs run one after the other. What a card leaves to whoever writes a kernel is kept book of:
which products are in flight, what they read, and which stores they need not see yet.

Not seen are layouts, registers, and who waits for whom: races between warps, whose barriers are the
compiler's, or between programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction


class Hazard(RuntimeError):
    """What a card does not say: a missing wait or a missing fence."""


class OnCPU:
    """A kernel that is launched as others are, `kernel[grid](*args, **constants)`."""

    def __init__(self, kernel: Any, bfloat16: torch.dtype = torch.bfloat16):
        """bfloat16: what stands for it. In float32 only the mathematics are left."""
        self.arg_names, self.kernel, self.bfloat16 = kernel.arg_names, kernel, bfloat16

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            given = [_pointer(x) if isinstance(x, Tensor) else x for x in args]
            for ids in product(*map(range, grid)):
                language = Language(ids, self.bfloat16)
                _in_python(self.kernel, language, {})(*given, **constants)
                if language.in_flight:
                    raise Hazard("a product is never waited for")

        return launch


class Value(Tensor):
    """What registers hold.

    A scalar has a dimension of one element: types of those without give way to others in PyTorch,
    and do not in Gluon. An assignment such as `x *= y` makes a new value.
    """

    def _not_in_place(self, other: Any) -> Any:
        return NotImplemented

    __iadd__ = __isub__ = __imul__ = _not_in_place
    __itruediv__ = __ifloordiv__ = __imod__ = _not_in_place
    __iand__ = __ior__ = __ixor__ = _not_in_place


class Pointer:
    """Addresses of elements of a tensor, counted from its first."""

    def __init__(self, elements: Tensor, at: Tensor):
        self.elements, self.at = elements, at
        self.dtype = SimpleNamespace(element_ty=elements.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.elements, self.at + offset)

    __radd__ = __add__

    def load(self, mask: Any = None, other: Any = float("nan")) -> Value:
        at, inside = self._checked(mask)
        found = torch.where(inside, self.elements[at.where(inside, 0)], other)
        return found.to(self.elements.dtype).as_subclass(Value)

    def store(self, value: Value, mask: Any = None) -> None:
        at, inside = self._checked(mask)
        self.elements[at[inside]] = value.to(self.elements.dtype).expand_as(at)[inside]

    def _checked(self, mask: Any) -> tuple[Tensor, Tensor]:
        mask = torch.tensor(True) if mask is None else mask
        at, inside = (x.as_subclass(Tensor) for x in torch.broadcast_tensors(self.at, mask))
        found = at[inside]
        if ((found < 0) | (found >= len(self.elements))).any():
            raise IndexError(f"elements {found.min()} to {found.max()} of {len(self.elements)}")
        return at, inside


class Shared:
    """Shared memory or a part of it, NaN until something is stored.

    Of each element is known whether a fence is missing, and how many products in flight read it.
    """

    def __init__(self, values: Tensor, unfenced: Tensor, readers: Tensor):
        self.values, self.unfenced, self.readers = values, unfenced, readers
        self.dtype, self.shape = values.dtype, list(values.shape)

    def index(self, i: Any) -> Shared:
        return Shared(*(x[int(i)] for x in (self.values, self.unfenced, self.readers)))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(*(x.permute(*order) for x in (self.values, self.unfenced, self.readers)))

    def store(self, value: Value) -> None:
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            raise TypeError(f"{value.dtype} {value.shape} into {self.dtype} {self.shape}")
        if self.readers.any():
            raise Hazard("what a product in flight reads is overwritten")
        self.values.copy_(value)
        self.unfenced.fill_(True)

    def load(self, layout: Any) -> Value:
        return self.values.clone().as_subclass(Value)


class InFlight:
    """A product that nobody has waited for: its sum is no value yet, only other products may add
    to it."""

    def __init__(self, value: Value, operands: list[Shared]):
        self.value, self.operands, self.done = value, operands, False
        for each in operands:
            each.readers += 1

    def finish(self) -> None:
        self.done = True
        for each in self.operands:
            each.readers -= 1

    def _too_early(self, *_: Any) -> Any:
        raise Hazard("a sum is used before its product is waited for")

    __getattr__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _too_early


class Language:
    """What Gluon's names stand for while one program runs."""

    static_range = range
    float32, int32, int64 = torch.float32, torch.int32, torch.int64

    def __init__(self, ids: Sequence[int], bfloat16: torch.dtype):
        self.ids, self.bfloat16 = ids, bfloat16
        self.allocated: list[Shared] = []
        self.in_flight: list[InFlight] = []

    def program_id(self, axis: int) -> Value:
        return torch.tensor([self.ids[axis]], dtype=torch.int32).as_subclass(Value)

    def arange(self, start: int, end: int, layout: Any = None) -> Value:
        return torch.arange(start, end, dtype=torch.int32).as_subclass(Value)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Value:
        return torch.zeros(*shape, dtype=dtype).as_subclass(Value)

    def to_tensor(self, x: Any) -> Any:
        return torch.tensor([x]).as_subclass(Value) if isinstance(x, int | float) else x

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Pointers, too, can be chosen by one condition."""
        if isinstance(condition, Tensor) and condition.numel() > 1:
            return torch.where(condition, x, y)
        return x if condition else y

    def sqrt(self, x: Value) -> Tensor:
        return x.sqrt()

    def sum(self, x: Value, axis: int) -> Tensor:
        return x.sum(axis, keepdim=x.ndim == 1)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = float("nan")) -> Tensor:
        found = pointer.load(mask, other)
        return found.to(self.bfloat16) if found.dtype == torch.bfloat16 else found

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        pointer.store(self.to_tensor(value), mask)

    def SliceLayout(self, *_: Any) -> None:
        """Nobody looks at it."""

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any):
        unfenced = torch.zeros(*shape, dtype=torch.bool)
        values = torch.full(tuple(shape), float("nan"), dtype=dtype)
        made = Shared(values, unfenced, torch.zeros(*shape, dtype=torch.int32))
        self.allocated.append(made)
        return made

    def fence_async_shared(self) -> None:
        for each in self.allocated:
            each.unfenced.fill_(False)

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        """Operands as they are now: until the product is waited for they cannot change."""
        operands = [x for x in (a, b) if isinstance(x, Shared)]
        if any(x.unfenced.any() for x in operands):
            raise Hazard("a product reads what was stored and not fenced")
        if a.dtype != b.dtype:
            raise TypeError(f"a product of {a.dtype} and {b.dtype}")
        before = acc.value if isinstance(acc, InFlight) else acc
        left, right = (x.values if isinstance(x, Shared) else x for x in (a, b))
        made = left.to(torch.float32) @ right.to(torch.float32)
        if before.shape != made.shape or before.dtype != made.dtype:
            raise TypeError(f"{made.shape} added to {before.dtype} {before.shape}")
        made = before + made if use_acc else made
        new = InFlight(made.as_subclass(Value), operands)
        self.in_flight.append(new)
        return new if is_async else self.warpgroup_mma_wait(0, deps=(new,))

    def warpgroup_mma_wait(self, num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        """Those of `deps` that are done become values."""
        while len(self.in_flight) > num_outstanding:
            self.in_flight.pop(0).finish()
        found = [x.value if isinstance(x, InFlight) and x.done else x for x in deps]
        return found[0] if len(found) == 1 else tuple(found)


def _pointer(x: Tensor) -> Pointer:
    """To the first element of a tensor; what lies behind the last one is out of bounds."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    start = torch.zeros(1, dtype=torch.int64).as_subclass(Value)
    return Pointer(x.detach().as_strided((extent,), (1,)), start)


def _in_python(kernel: Any, language: Language, made: dict[int, dict[str, Any]]) -> FunctionType:
    """The function that a kernel was made of, where all names of its module stand for ours."""
    fn = kernel.fn
    names = made.get(id(fn.__globals__))
    if names is None:
        names = made[id(fn.__globals__)] = {}
        for name, value in list(fn.__globals__.items()):
            names[name] = _ours(value, language, made)
    return FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)


def _ours(value: Any, language: Language, made: dict[int, dict[str, Any]]) -> Any:
    """What a name of a module stands for, if it is of a language or in one."""
    if value is gl or value is tl or value is hopper:
        return language
    if isinstance(value, triton.JITFunction | InterpretedFunction | ConstexprFunction):
        return _in_python(value, language, made)
    if isinstance(value, tl.constexpr):
        return value.value
    name = getattr(value, "__name__", "")
    if name and getattr(hopper, name, None) is value:
        return getattr(language, name, value)
    return value

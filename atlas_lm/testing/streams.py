"""The contract of whatever reads a stream: `y, state = module(x, state, mask, reset)`.

One pass == cut anywhere == token by token; nothing sees the future or another row; padding and
packing change nothing; training computes what evaluation does; every parameter gets a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn

from atlas_lm.testing.rules import assert_close


def check_stream(module: nn.Module, x: Tensor, cuts: Sequence[int] | None = None) -> None:
    """Raise AssertionError unless the contract holds on x, `[b t d]` or token ids `[b t]`, b >= 2.

    Without `cuts` the sequence is cut near its middle, and read token by token.
    """
    assert x.shape[0] >= 2, "check_stream: give at least two rows"
    check_parameters(module, x)
    with torch.no_grad():
        check_modes(module, x)
        half = x.shape[1] // 2
        for points in [cuts] if cuts is not None else [[1, half, half + 1], range(x.shape[1])]:
            check_cut_at(module, x, points)
        check_future(module, x)
        check_rows(module, x)
        check_padded(module, x)
        check_packed(module, x)


def results(module: nn.Module, *args) -> dict[str, Tensor]:
    """Outputs and final state of one call, by name."""
    y, state = module(*args)
    return {"y": y} | state.tensors()


def perturbed(module: nn.Module) -> nn.Module:
    """The module with every parameter moved by a rounding error."""
    moved, noise = deepcopy(module), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in moved.parameters():
            p *= 1 + 1e-15 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
    return moved


def check_cut_at(module: nn.Module, x: Tensor, cuts: Sequence[int]) -> None:
    points = [0, *sorted({c for c in cuts if 0 < c < x.shape[1]}), x.shape[1]]
    outputs, state = [], None
    for start, stop in pairwise(points):
        y, state = module(x[:, start:stop], state)
        outputs.append(y)
    assert state is not None
    found = {"y": torch.cat(outputs, 1)} | state.tensors()
    what = f"cut into {len(points) - 1} against one pass"
    assert_close(found, results(module, x), what, lambda: results(perturbed(module), x))


def check_future(module: nn.Module, x: Tensor) -> None:
    at = x.shape[1] // 2
    other = torch.cat([x[:, :at], _changed(x[:, at:])], 1)
    y, moved = module(x)[0], module(other)[0]
    assert_close({"y": moved[:, :at]}, {"y": y[:, :at]}, "outputs before a changed token")
    assert not torch.equal(moved[:, at:], y[:, at:]), "a changed token must change its own output"


def check_rows(module: nn.Module, x: Tensor) -> None:
    y, state = module(x)
    for row in range(x.shape[0]):
        found = {"y": y[row : row + 1]} | state[row].tensors()
        alone = x[row : row + 1]
        what = f"row {row} of a batch against the row alone"
        assert_close(
            found, results(module, alone), what, lambda a=alone: results(perturbed(module), a)
        )


def check_padded(module: nn.Module, x: Tensor) -> None:
    """Left, right and in the middle: every row gives what it gives alone, then and afterwards."""
    total, more = x.shape[1], x[:, :3]
    lengths = [max(1, total // 3), total - total // 4, *[total] * (x.shape[0] - 2)]
    for side in ("left", "right", "between"):
        mask, padded = _padded(x, lengths, side)
        y, state = module(padded, None, mask)
        after, _ = module(more, state)
        for row, length in enumerate(lengths):
            found = {"y": y[row : row + 1, mask[row]], "after": after[row : row + 1]}
            what = f"row {row}, padded {side}"
            _assert_alone(module, found, x[row : row + 1, :length], more[row : row + 1], what)
        if x.is_floating_point():
            assert not y[~mask].any(), f"padded {side}: output where there is no token"


def check_packed(module: nn.Module, x: Tensor) -> None:
    """Documents behind each other in one row give what each gives alone."""
    total, row, more = x.shape[1], x[:1], x[:1, :3]
    borders = [0, total // 4, total // 4 + 1, total - total // 3, total]
    reset = torch.zeros(1, total, dtype=torch.bool)
    reset[0, borders[1:-1]] = True
    y, state = module(row, None, None, reset)
    after, _ = module(more, state)
    for start, stop in pairwise(borders):
        found = {"y": y[:, start:stop]} | ({"after": after} if stop == total else {})
        _assert_alone(module, found, row[:, start:stop], more, f"packed tokens {start} to {stop}")


def check_modes(module: nn.Module, x: Tensor) -> None:
    was = module.training
    y = {mode: module.train(mode)(x)[0] for mode in (True, False)}
    module.train(was)
    assert torch.equal(y[True], y[False]), "train() and eval() differ"


def check_parameters(module: nn.Module, x: Tensor) -> None:
    """Every parameter that is learned receives a gradient, and a finite one."""
    module.zero_grad()
    y, _ = module(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)
    (y * weights).sum().backward()
    for name, p in module.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, f"{name}: no gradient"
            assert p.grad.abs().max() > 0, f"{name}: no gradient"
            assert p.grad.isfinite().all(), f"{name}: gradient is not finite"
    module.zero_grad()


def _assert_alone(module: nn.Module, found: dict, x: Tensor, more: Tensor, what: str) -> None:
    """What was found is what the tokens give alone, and what comes after them."""

    def alone(module: nn.Module) -> dict[str, Tensor]:
        y, state = module(x)
        given = {"y": y, "after": module(more, state)[0]}
        return {name: given[name] for name in found}

    what = f"{what}, against the tokens alone"
    assert_close(found, alone(module), what, lambda: alone(perturbed(module)))


def _changed(x: Tensor) -> Tensor:
    return x * 0.7 + 0.1 if x.is_floating_point() else x.flip(1).roll(1, 0)


def _padded(x: Tensor, lengths: Sequence[int], side: str) -> tuple[Tensor, Tensor]:
    """Rows cut to these lengths among places without a token, filled with what must not matter."""
    width = x.shape[1] + 3
    mask = torch.zeros(x.shape[0], width, dtype=torch.bool)
    filling = float("nan") if x.is_floating_point() else 0
    padded = torch.full((x.shape[0], width, *x.shape[2:]), filling, dtype=x.dtype)
    for row, length in enumerate(lengths):
        start = width - length if side == "left" else 0
        places = torch.arange(start, start + length)
        if side == "between":
            places += 2 * (places >= length // 2)
        mask[row, places] = True
        padded[row, places] = x[row, :length]
    return mask, padded

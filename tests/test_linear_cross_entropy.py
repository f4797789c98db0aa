"""The loss of a head, a few rows at a time: values, gradients, and what is never allocated."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.nn import linear_cross_entropy as module
from atlas_lm.nn.linear_cross_entropy import linear_cross_entropy


@pytest.fixture(autouse=True)
def _four_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "rows_at_once", lambda vocab: 4)


def made(rows, dtype=torch.float64, dim=6, vocab=11):
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, dim, generator=random, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=random, dtype=torch.float64)
    targets = torch.randint(0, vocab, (rows,), generator=random)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def at_once(x, weight, targets):
    logits = linear(x, weight)
    return cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum"
    )


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in numbers, and which operations ran."""

    def __init__(self):
        super().__init__()
        self.numel, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        sizes = [
            t.untyped_storage().nbytes() // t.itemsize
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor)
        ]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8, 13])
def test_values_and_gradients_are_those_of_all_logits_at_once(rows):
    x, weight, targets = made(rows)
    found, expected = (f(x, weight, targets) for f in (linear_cross_entropy, at_once))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    # another factor than 1: what comes in to the backward must count
    pairs = (torch.autograd.grad(-2.5 * y, (x, weight)) for y in (found, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_rows_without_a_target_do_not_count():
    x, weight, targets = made(9)
    counts = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    found = linear_cross_entropy(x, weight, torch.where(counts, targets, -100))
    expected = at_once(x[counts], weight, targets[counts])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    pairs = (torch.autograd.grad(y, (x, weight)) for y in (found, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_gradients_are_derivatives():
    x, weight, targets = made(6, dim=3, vocab=5)
    assert torch.autograd.gradcheck(lambda a, b: linear_cross_entropy(a, b, targets), (x, weight))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_what_is_wanted_gets_a_gradient(frozen):
    x, weight, targets = made(9)
    both = torch.autograd.grad(at_once(x, weight, targets), (x, weight))
    (x if frozen == "x" else weight).requires_grad_(False)
    linear_cross_entropy(x, weight, targets).backward()
    got, expected = (weight.grad, both[1]) if frozen == "x" else (x.grad, both[0])
    torch.testing.assert_close(got, expected)
    assert (x if frozen == "x" else weight).grad is None


def test_without_gradients_none_are_made():
    x, weight, targets = made(9)
    with torch.no_grad(), Largest() as seen:
        loss = linear_cross_entropy(x, weight, targets)
    assert not loss.requires_grad
    assert "logsumexp" in seen.names
    assert not {"exp_", "zeros_like", "empty_like"} & seen.names
    torch.testing.assert_close(loss, at_once(x, weight, targets).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_is_as_near_to_float64_as_all_at_once(dtype):
    x, weight, targets = made(37, dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in (x, weight))
    expected = torch.autograd.grad(at_once(exact[0], exact[1], targets), exact)
    found, plain = (f(x, weight, targets) for f in (linear_cross_entropy, at_once))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0)
    for grads in zip(
        torch.autograd.grad(found, (x, weight)),
        torch.autograd.grad(plain, (x, weight)),
        expected,
        strict=True,
    ):
        assert grads[0].dtype == dtype
        mine, theirs = (float((g.double() - grads[2]).norm()) for g in grads[:2])
        assert mine <= 1.5 * theirs


def test_under_autocast_logits_are_rounded_and_gradients_are_not():
    x, weight, targets = made(13, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (f(x, weight, targets) for f in (linear_cross_entropy, at_once))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert abs(found - at_once(x, weight, targets)) > 1e-4
    for mine, theirs in zip(
        *(torch.autograd.grad(y, (x, weight)) for y in (found, expected)), strict=True
    ):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_no_tensor_is_larger_than_a_few_rows_of_logits():
    rows, vocab = 64, 500
    x, weight, targets = made(rows, torch.float32, dim=4, vocab=vocab)
    with Largest() as seen:
        linear_cross_entropy(x, weight, targets).backward()
    assert seen.numel == 4 * vocab
    with Largest() as seen:
        at_once(x, weight, targets).backward()
    assert seen.numel == rows * vocab


def test_a_small_vocabulary_takes_more_rows(monkeypatch):
    monkeypatch.undo()
    assert module.rows_at_once(32_000) == 2048
    assert module.rows_at_once(256) == 65_536


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_learns_what_it_learned_before(tied):
    torch.manual_seed(0)
    config = ModelConfig(vocab=13, dim=16, depth=1, heads=2, rule="delta_net", tied=tied)
    model = LanguageModel(config).double()
    tokens, targets = torch.randint(0, 13, (2, 2, 9))
    targets[0, :4] = -100
    found, _ = model.loss(tokens, targets)
    logits, _ = model(tokens)
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    weights = list(model.parameters())
    pairs = (torch.autograd.grad(y, weights, materialize_grads=True) for y in (found, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)

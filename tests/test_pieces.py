"""Tokens cut into pieces: each with the pairs before it that its windows reach, and gradients."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from atlas_lm.ops.pieces import copied, cut_into_pieces


def numbered(tokens: int, before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of two rows and two heads that are their numbers; those before them are negative."""
    x = torch.arange(-before, tokens, dtype=torch.float64).view(1, -1, 1, 1).expand(2, -1, 2, 3)
    return x[:, :before].clone(), x[:, before:].clone()


@pytest.mark.parametrize(("chunk", "window"), [(4, 1), (4, 3), (4, 5), (4, 9), (1, 2)])
def test_pieces_with_what_is_before_them(chunk, window):
    """Also where a window reaches over more than one piece."""
    before, x = numbered(12, window - 1)
    pieces = cut_into_pieces(torch.zeros(2, dtype=torch.int64), 12, None, None, chunk, window)
    found = pieces.split_pairs(before, x)
    assert found.shape == (12 // chunk, 2, 2, window - 1 + chunk, 3)
    for n, piece in enumerate(found):
        assert piece[0, 0, :, 0].tolist() == list(range(n * chunk - window + 1, (n + 1) * chunk))


@pytest.mark.parametrize(("chunk", "window"), [(4, 3), (4, 5), (4, 9), (1, 2)])
def test_gradients_of_pieces(chunk, window):
    """A token gets the sum over all pieces that it is in: exact, and exact once more."""
    before, x = (torch.randn_like(each).requires_grad_() for each in numbered(8, window - 1))
    pieces = cut_into_pieces(torch.zeros(2, dtype=torch.int64), 8, None, None, chunk, window)
    assert gradcheck(pieces.split_pairs, (before, x))
    assert gradgradcheck(pieces.split_pairs, (before, x))


def test_a_gradient_is_left_as_it_was():
    before, x = (each.requires_grad_() for each in numbered(8, 2))
    pieces = cut_into_pieces(torch.zeros(2, dtype=torch.int64), 8, None, None, 4, 3)
    found = pieces.split_pairs(before, x)
    grad = torch.randn_like(found)
    given = grad.clone()
    found.backward(grad)
    assert torch.equal(grad, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 8, 12])
def test_copies_of_wide_rows_are_copies(dtype, width):
    """Rows of 16 bytes and others, from views that begin anywhere."""
    x = torch.randn(2, 6, 3, 2 * width + 1).to(dtype)
    for view in (x[..., :width], x[..., 1 : width + 1], x[:, 1:, :, :width].transpose(1, 2)):
        made = copied(view)
        assert made.is_contiguous()
        assert torch.equal(made, view)
        assert made.data_ptr() != view.data_ptr()


def test_cutting_and_joining_have_gradients_of_any_order():
    pieces = cut_into_pieces(torch.zeros(2, dtype=torch.long), 8, None, None, chunk=4, window=3)
    x = torch.randn(2, 8, 3, 2, dtype=torch.float64, requires_grad=True)
    window = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x, window):
        cut = pieces.split(x) ** 2
        return pieces.join(cut) + pieces.split_pairs(window, x).pow(2).sum()

    assert gradcheck(there_and_back, (x, window))
    assert gradgradcheck(there_and_back, (x, window))

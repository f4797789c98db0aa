"""Layers of flash-linear-attention as mixers: by a stand-in that takes what they take.

The package's own kernels need a GPU (benchmarks/fla_mixers.py runs them); here a plain linear
attention with a short convolution keeps the same things in the same kind of cache.
"""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atlas_lm import LanguageModel, MemoryState, ModelConfig
from atlas_lm.cli.recipe import rule_from, rule_text
from atlas_lm.models.costs import costs
from atlas_lm.nn import fla
from atlas_lm.nn.fla import FlaConfig, FlaMixer
from atlas_lm.ops.carried import Carried
from atlas_lm.testing import check_stream


class GatedDeltaNet(nn.Module):
    """y_t = S_t q_t with S_t = a S_{t-1} + v_t k_t^T, after a convolution of the last two tokens.

    Takes what layers of the package take; writes into the cache that it is given, as they do."""

    def __init__(
        self,
        hidden_size: int = 2048,
        head_dim: int = 256,
        num_heads: int = 6,
        expand_v: float = 2,
        layer_idx: int | None = None,
        **kwargs,
    ):
        super().__init__()
        if head_dim > 64:
            raise ValueError("head_dim: too wide")
        assert layer_idx is not None
        self.layer_idx, self.heads = layer_idx, num_heads
        self.conv = nn.Parameter(torch.tensor([0.7, 0.4]))
        value = int(head_dim * expand_v)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden_size, num_heads * width, bias=False)
            for width in (head_dim, head_dim, value)
        )
        self.o_proj = nn.Linear(num_heads * value, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs,
    ):
        assert attention_mask is None
        last = None
        if past_key_values is not None and len(past_key_values) > self.layer_idx:
            last = past_key_values[self.layer_idx]
        cu_seqlens = kwargs.get("cu_seqlens")
        x, borders = hidden_states, None
        if cu_seqlens is not None:
            assert len(x) == 1
            borders = cu_seqlens.tolist()
            rows = [x[0, a:b] for a, b in pairwise(borders)]
        else:
            rows = list(x)
        out, states, tails = [], [], []
        for n, row in enumerate(rows):
            state = None if last is None else last["recurrent_state"][n]
            tail = None if last is None else last["conv_state"][0][n]
            y, state, tail = self.one(row, state, tail)
            out.append(y)
            states.append(state)
            tails.append(tail)
        if last is not None:
            last["conv_state"][0].fill_(torch.nan)  # what is written into is no longer the caller's
        if past_key_values is not None and use_cache:
            past_key_values.update(
                recurrent_state=torch.stack(states),
                conv_state=(torch.stack(tails), None),
                layer_idx=self.layer_idx,
                offset=x.shape[1],
            )
        y = torch.cat(out)[None] if borders is not None else torch.stack(out)
        return y, None, past_key_values

    def one(self, x: Tensor, state: Any, tail: Tensor | None):
        tail = x.new_zeros(x.shape[-1]) if tail is None else tail
        before = torch.cat([tail[None], x])[:-1]
        z = self.conv[0] * x + self.conv[1] * before
        q, k, v = (
            p(z).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (part.to(torch.promote_types(x.dtype, torch.float32)) for part in (q, k, v))
        if state is None:
            state = q.new_zeros(self.heads, v.shape[-1], k.shape[-1])
        out = []
        for t in range(len(x)):
            state = 0.9 * state + v[t, :, :, None] * k[t, :, None, :]
            out.append((state @ q[t, :, :, None]).flatten())
        return self.o_proj(torch.stack(out).to(x.dtype)), state, x[-1]


Layer: Any = GatedDeltaNet
"""For layers that take less."""


class Mamba2(Layer):
    """Knows no sequences, and goes on by one token at a time."""

    def __init__(self, num_heads: int | None = None, head_dim: int = 4, hidden_size=8, **kwargs):
        super().__init__(hidden_size, head_dim, hidden_size // head_dim, **kwargs)

    def forward(self, hidden_states, past_key_values: Any = None, use_cache=False, **kwargs):
        if len(past_key_values) and hidden_states.shape[1] != 1:
            raise ValueError("Mamba2 cached decoding only supports a single new token per step.")
        return super().forward(hidden_states, None, past_key_values, use_cache)


class Attention(Layer):
    """Keeps every token."""

    def forward(self, hidden_states, past_key_values: Any = None, use_cache=False, **kwargs):
        past_key_values.update(attn_state=(hidden_states, hidden_states), layer_idx=0)
        return hidden_states, None, past_key_values


class MultiScaleRetention(Layer):
    """Asks how far all rows are."""

    def forward(self, hidden_states, past_key_values: Any = None, use_cache=False, **kwargs):
        offset = past_key_values.get_seq_length(self.layer_idx)
        x = hidden_states + offset
        cu_seqlens = kwargs.get("cu_seqlens")
        return super().forward(x, None, past_key_values, use_cache, cu_seqlens=cu_seqlens)


class Particular(Layer):
    def forward(self, hidden_states, past_key_values: Any = None, use_cache=False, **kwargs):
        assert hidden_states.dtype == torch.bfloat16, "does not support float32"


LAYERS = (GatedDeltaNet, Mamba2, Attention, MultiScaleRetention, Particular)


@pytest.fixture
def layers(monkeypatch):
    """As if the package were there, with kernels that run here."""
    package, module = ModuleType("fla"), ModuleType("fla.layers")
    for layer in LAYERS:
        setattr(module, layer.__name__, layer)
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.layers", module)
    monkeypatch.setattr(fla, "DEVICES", ("cpu", "cuda"))
    fla._blank.cache_clear()
    costs.cache_clear()
    yield
    fla._blank.cache_clear()
    costs.cache_clear()


def mixer(rule: str = "fla:GatedDeltaNet", dim: int = 8, heads: int = 2) -> FlaMixer:
    torch.manual_seed(0)
    return FlaMixer(FlaConfig.parsed(rule, dim, heads))


# The contract


def test_a_layer_streams_pads_and_packs_as_ours_do(layers, float64):
    check_stream(mixer(), torch.randn(3, 7, 8))


def test_a_model_of_such_layers_does_too(layers, float64):
    config = ModelConfig(vocab=11, dim=8, depth=2, heads=2, rule=("fla:GatedDeltaNet", "delta_net"))
    check_stream(LanguageModel(config), torch.randint(0, 11, (2, 6)))


def test_what_it_computes_is_the_layer_s_own(layers, float64):
    own, x = mixer(), torch.randn(2, 5, 8)
    assert torch.equal(own(x)[0], own.layer(x)[0])
    lengths = torch.tensor([0, 2, 5])
    y = own.layer(x[:1], cu_seqlens=lengths)[0]
    reset = torch.zeros(1, 5, dtype=torch.bool)
    reset[:, 2] = True
    assert torch.equal(own(x[:1], None, None, reset)[0], y)


def test_a_state_is_like_any_other(layers, tmp_path):
    config = ModelConfig(vocab=11, dim=8, depth=1, heads=2, rule="fla:GatedDeltaNet:expand_v=1")
    model = LanguageModel(config)
    tokens = torch.randint(0, 11, (2, 6))
    _, state = model(tokens[:, :4])
    expected, _ = model(tokens[:, 4:], state)
    state.save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state")
    assert torch.equal(model(tokens[:, 4:], loaded)[0], expected)
    assert loaded.tensors()["layers.0.kept.recurrent_state"].shape == (2, 2, 4, 4)
    # the same rows once more, others at their beginning, and one that is told to forget
    again = Carried.stack([state[1], model.begin(1), state[0]])
    y, _ = model(tokens[[1, 0, 0], 4:], again)
    torch.testing.assert_close(y[[2, 0]], expected)
    torch.testing.assert_close(y[1:2], model(tokens[:1, 4:])[0])
    forgot = model.reset(state, [0])
    torch.testing.assert_close(model(tokens[:, 4:], forgot)[0][:1], model(tokens[:1, 4:])[0])


def test_convolutions_go_on_in_the_precision_of_their_input(layers):
    own = mixer().bfloat16()
    x = torch.randn(2, 6, 8, dtype=torch.bfloat16)
    whole, _ = own(x)
    first, state = own(x[:, :3])
    assert {t.dtype for t in state.kept.values()} == {torch.float32}
    torch.testing.assert_close(torch.cat([first, own(x[:, 3:], state)[0]], 1), whole)


def test_states_that_go_in_are_not_written_into(layers):
    own, x = mixer(), torch.randn(2, 4, 8)
    _, state = own(x)
    before = state.clone()
    own(x[:, :1], state)
    assert all(torch.equal(t, before.tensors()[n]) for n, t in state.tensors().items())


def test_making_a_state_draws_no_random_numbers(layers):
    own = mixer()
    torch.manual_seed(1)
    expected = torch.randn(2)
    torch.manual_seed(1)
    fla._blank.cache_clear()
    own.begin(1)
    assert torch.equal(torch.randn(2), expected)


def test_a_layer_that_goes_on_by_one_token_is_given_one(layers, float64):
    own, x = mixer("fla:Mamba2"), torch.randn(2, 6, 8)
    whole, _ = own(x)
    first, state = own(x[:, :2])
    torch.testing.assert_close(torch.cat([first, own(x[:, 2:], state)[0]], 1), whole)
    with pytest.raises(ValueError, match="takes no padding and no packed documents"):
        own(x, None, torch.ones(2, 6, dtype=torch.bool))


def test_positions_are_counted_for_all_rows_alike(layers, float64):
    own, x = mixer("fla:MultiScaleRetention"), torch.randn(2, 6, 8)
    _, state = own(x[:, :2])
    expected, _ = own.layer(x[:, 2:] + 2, past_key_values=_cache(own, state), use_cache=True)[:2]
    assert torch.equal(own(x[:, 2:], state)[0], expected)
    uneven = Carried.stack([state[0], own.begin(1)])
    with pytest.raises(ValueError, match="counts positions of all rows alike"):
        own(x, uneven)
    with pytest.raises(ValueError, match="counts positions of all rows alike"):
        own(x, None, torch.ones(2, 6, dtype=torch.bool))


def _cache(own: FlaMixer, state) -> object:
    class Zero(fla._Cache):
        def get_seq_length(self, layer=0, *_):
            return 0

    return Zero(own.config, fla._unflat(state.kept, torch.zeros(1).double()), state.position, False)


# Settings, and what is refused


def test_sizes_of_the_model_are_its_own_unless_told_otherwise(layers):
    layer: Any = mixer().layer
    assert layer.q_proj.weight.shape == (8, 8)
    assert layer.v_proj.weight.shape == (16, 8)
    layer = mixer("fla:GatedDeltaNet:head_dim=3:num_heads=5:expand_v=1.0").layer
    assert layer.q_proj.weight.shape == layer.v_proj.weight.shape == (15, 8)
    assert mixer("fla:Mamba2").layer.heads == 2  # it has as many as its width makes


def test_a_rule_is_one_word(layers):
    text = "fla:GatedDeltaNet:head_dim=4:mode=chunk"
    assert rule_from(text) == text == rule_text(text)
    assert rule_from(f"{text},titans") == (text, "titans")
    config = ModelConfig(dim=8, heads=2, rule=(text, "attention"))
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("fla:", "'fla:' names no layer; expected fla:NAME"),
        ("fla:GatedDeltaNet:head_dim", "'head_dim' is no setting; expected NAME=VALUE"),
        ("fla:GatedDeltaNet:heads=3", "has no setting 'heads'; it has head_dim, num_heads, expand"),
        ("fla:GatedDeltaNet:head_dim=99", "the layer cannot be made: head_dim: too wide"),
        ("fla:Gated", "fla.layers has no 'Gated'; it has Attention, GatedDeltaNet"),
        ("fla:Attention", "the layer keeps attn_state, which grows .* rules attention and swa"),
        ("fla:Particular", "does not support float32 .*--precision bf16"),
    ],
)
def test_what_is_refused(layers, rule, message):
    with pytest.raises(ValueError, match=message):
        mixer(rule)(torch.randn(2, 3, 8), None)


def test_other_blocks_have_attention_of_their_own():
    with pytest.raises(ValueError, match="'fla:GatedDeltaNet' is for block='plain'"):
        ModelConfig(rule="fla:GatedDeltaNet", block="mag")


def test_without_a_gpu_it_says_so(layers, monkeypatch):
    monkeypatch.setattr(fla, "DEVICES", ("cuda",))
    model = LanguageModel(ModelConfig(dim=8, heads=2, depth=1, rule="fla:GatedDeltaNet"))
    with pytest.raises(ValueError, match="kernels run on a CUDA GPU only, and this is cpu"):
        model(torch.zeros(1, 2, dtype=torch.long))


def test_without_the_package_it_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        mixer()


# Costs


def test_what_such_a_model_costs(layers):
    config = ModelConfig(vocab=16, dim=8, depth=2, heads=2, rule="fla:GatedDeltaNet:expand_v=1")
    found = costs(config, 64)
    model = LanguageModel(config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    state = model(torch.zeros(1, 64, dtype=torch.long))[1]
    assert found.state_bytes == state.nbytes
    maps = sum(p.weight.numel() for p in model.modules() if isinstance(p, nn.Linear))
    numbers = 2 * 4 * 4
    # the stand-in reads by products that a counter sees, the package by kernels that it does not
    seen = 2 * numbers
    assert found.flops_per_token == 2 * maps + config.depth * (4 * numbers + seen)

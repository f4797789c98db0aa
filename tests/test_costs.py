"""What a model costs: counted, and by hand on paper."""

from dataclasses import replace
from math import isclose
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from atlas_lm import RULES, LanguageModel, ModelConfig
from atlas_lm.models.costs import Costs, costs
from atlas_lm.nn.attention import Attention

SMALL: dict[str, Any] = {"vocab": 64, "dim": 64, "depth": 2, "heads": 2}
HEADS, WIDTH, CHUNK = 2, 32, 64


def small(rule, **changes) -> ModelConfig:
    return ModelConfig(**SMALL | {"rule": rule} | changes)


def linear_maps(config: ModelConfig) -> int:
    """Two operations for every weight of a linear map, of which each is used once a token."""
    model = LanguageModel(config)
    maps = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    return 2 * sum(part.weight.numel() for part in maps)


def operation(config: ModelConfig) -> float:
    """What is left of a block and head."""
    return (costs(config).flops_per_token - linear_maps(config)) / config.depth


def test_the_delta_rule_by_hand():
    """Of a tile of T tokens, in order: keys with keys, the triangular system for values and keys,
    what is read before the write, the write, the read, queries with keys, and these with errors."""
    t, d = 64, WIDTH
    tile = 2 * t * t * d + t * t * 2 * d + 3 * 2 * t * d * d + 2 * 2 * t * t * d
    assert operation(small("delta_net")) == HEADS * tile / t


def test_titans_by_hand():
    """A memory of two matrices, f x d and d x f, both with a momentum.

    Forward and backward over the keys are 3 products with one of them, writing adds up both
    matrices and both momenta, reading is with all four and, inside of a chunk, through scores."""
    t, d, f = CHUNK, WIDTH, 4 * WIDTH
    gradients, writes, reads = 3 * 2 * t * f * d, 4 * 2 * t * f * d, 4 * 2 * t * f * d
    scores = 2 * 2 * t * t * d + 2 * 2 * t * t * f
    gates = 2 * t**3 + 2 * t**2
    chunk = gradients + writes + reads + scores + gates
    assert operation(small("titans")) == HEADS * chunk / t


def test_newton_schulz_is_in_the_count():
    """One more step of X <- a X + (b A + c A A) X, A = X X^T, for both matrices of a memory, at
    every token; with a stride of 16 at every 16th."""
    f, d, features = 64, WIDTH, 153

    def step(rows: int, columns: int) -> int:
        return 2 * 2 * rows * rows * columns + 2 * rows**3

    hand = HEADS * (step(f, features) + step(d, f))
    atlas = RULES["atlas"]
    for stride in (1, 16):
        five, four = (
            costs(small(replace(atlas, stride=stride, ns_steps=n))).flops_per_token for n in (5, 4)
        )
        assert isclose(five - four, SMALL["depth"] * hand / stride)
    assert costs(small("atlas")).flops_per_token > SMALL["depth"] * 5 * hand


def count(config: ModelConfig, length: int) -> float:
    """A whole model by the counter alone, but for what works on each channel by itself."""
    model, by_channel = LanguageModel(config), {torch.ops.aten.convolution: lambda *_, **__: 0}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=by_channel) as counter:
        model(torch.zeros(1, length, dtype=torch.long))
    return counter.get_total_flops() / length


@pytest.mark.parametrize("rule", ["linear_attention", "omeganet", "dot", ("titans", "swla")])
@pytest.mark.parametrize("length", [24, 512])
def test_one_block_over_few_tokens_tells_what_a_model_over_many_costs(rule, length):
    config = small(rule)
    assert isclose(costs(config, length).flops_per_token, count(config, length), rel_tol=1e-9)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("attention", {}),
        ("swa", {"window": 24}),
        ("titans", {"block": "mag", "window": 40}),
        ("titans", {"block": "mal", "window": 40}),
        ("titans", {"block": "mac", "segment": 64}),
        ("titans", {"block": "mac", "segment": 64, "persistent": 3}),
        ("attention", {"persistent": 3}),
    ],
)
def test_attention_costs_what_every_token_sees(rule, changes, monkeypatch):
    """Every pair that is visible, counted in the masks themselves."""
    seen = []
    visible = Attention._visible

    def looked(self, *args):
        mask = visible(self, *args)
        seen.append(int(mask.sum()) + mask.shape[-2] * self.config.persistent)
        return mask

    monkeypatch.setattr(Attention, "_visible", looked)
    config, length = small(rule, **changes), 128
    without = costs(config, length).flops_per_token
    seen.clear()
    model = LanguageModel(config)
    tokens = torch.zeros(1, length, dtype=torch.long)
    if rule == "attention" and not config.persistent:  # which is causal by a kernel of its own
        seen = [length * (length + 1) // 2] * config.depth
    else:
        with torch.no_grad():
            model(tokens)
    attended = 4 * config.dim * sum(seen) / length
    memory = 0.0
    if rule == "titans":
        titans = small("titans")
        memory = costs(titans, length).flops_per_token - linear_maps(titans)
    rest = without - linear_maps(config) - attended - memory
    recalled, calls = 0, 1
    if config.block == "mac":
        # a product with both matrices of a memory, and what was recalled goes through the four maps
        # of attention beside the token
        recalled = 2 * 2 * HEADS * WIDTH * 4 * WIDTH + 2 * 4 * config.dim**2
        calls = length // config.segment
    # keys and values of persistent tokens are made once a call
    kept = 2 * config.persistent * config.dim * 3 * config.dim * calls / length
    assert isclose(rest, config.depth * (recalled + kept), abs_tol=1e-6)


@pytest.mark.parametrize("rule", ["delta_net", "omeganet", "attention", "swa", "dot", "swdt"])
def test_parameters_and_bytes_of_state(rule):
    config, length = small(rule, window=16, tied=rule == "swa"), 256
    model = LanguageModel(config)
    found = costs(config, length)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.non_embedding == found.parameters - (1 if config.tied else 2) * 64 * 64
    with torch.no_grad():
        _, state = model(torch.zeros(1, length, dtype=torch.long))
    assert found.state_bytes == state.nbytes
    assert found.state_grows == (rule in ("attention", "dot", "swdt"))


def test_counting_changes_nothing_and_is_remembered():
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    costs.cache_clear()
    config = small("titans", impl="triton")  # counted as the chunked form, which runs anywhere
    first = costs(config, 100)
    assert torch.equal(torch.randn(3), expected)
    assert costs(config, 100) is first
    assert first == costs(small("titans"), 100)
    assert isinstance(first, Costs)
    with pytest.raises(ValueError, match="length: 0; expected a number of tokens"):
        costs(config, 0)

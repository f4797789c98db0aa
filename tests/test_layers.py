"""The contract of layers, for every rule; what layers refuse; where their gates begin."""

import copy
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from atlas_lm import RULES, LayerState, MemoryConfig, MemoryLayer, MemoryState, Rule, memorize
from atlas_lm.nn.attention import Attention, AttentionConfig
from atlas_lm.nn.conv import ShortConv
from atlas_lm.nn.gates import GateMaps
from atlas_lm.nn.packing import Packing
from atlas_lm.ops import recall
from atlas_lm.testing import assert_close, check_stream, example

SMALL = {
    name: replace(rule, chunk=min(rule.chunk, 8), window=min(rule.window, 5))
    for name, rule in RULES.items()
}
OTHERS = {
    "softmax": Rule(features="exponential", objective="dot", normalize=True, chunk=8, window=3),
    "muon_stride": replace(SMALL["atlas"], stride=3),
    "no_norm": replace(SMALL["titans"], norm=False),
}
EVERY = SMALL | OTHERS


pytestmark = pytest.mark.usefixtures("float64")


def layer_of(rule: Rule, **changes) -> MemoryLayer:
    sizes: dict[str, Any] = {
        "dim": 12,
        "heads": 2,
        "d_k": 4,
        "expansion": 2,
        "gate_rank": 5,
    } | changes
    return MemoryLayer(MemoryConfig(rule=rule, **sizes))


@pytest.mark.parametrize("name", EVERY)
def test_a_memory_layer_keeps_the_contract(name):
    check_stream(layer_of(EVERY[name]), torch.randn(2, 21, 12))


@pytest.mark.parametrize("changes", [{"conv": 1}, {"d_v": 3}, {"heads": 1, "d_k": 3}], ids=str)
def test_other_shapes_keep_the_contract(changes):
    check_stream(layer_of(SMALL["titans"], **changes), torch.randn(3, 20, 12))


@pytest.mark.parametrize("name", ["titans", "atlas", "gated_delta_net"])
def test_queries_and_keys_with_a_centre_keep_the_contract(name):
    layer = layer_of(SMALL[name], centred=True)
    assert layer.centre is not None
    torch.nn.init.normal_(layer.centre)
    check_stream(layer, torch.randn(2, 21, 12))


def test_a_centre_is_taken_from_queries_and_keys_before_their_length():
    layer = layer_of(SMALL["gated_delta_net"], centred=True)
    plain = layer_of(SMALL["gated_delta_net"])
    assert layer.centre is not None
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(1, 9, 12)
    assert torch.equal(layer(x)[0], plain(x)[0])  # it begins at zero
    torch.nn.init.normal_(layer.centre)
    mixed, _ = layer.conv(layer.project(x), layer.conv.begin(1, x), None)
    both = torch.nn.functional.silu(mixed)[..., :16].view(1, 9, 2, 2, 4) - layer.centre
    q, k, *_ = layer.write_inputs(x, layer.conv.begin(1, x), None)
    for part, expected in ((q, both[:, :, 0]), (k, both[:, :, 1])):
        torch.testing.assert_close(
            part, expected / expected.norm(dim=-1, keepdim=True), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("persistent", [0, 3])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attention_keeps_the_contract(window, persistent):
    config = AttentionConfig(dim=12, heads=2, window=window, persistent=persistent)
    check_stream(Attention(config), torch.randn(2, 21, 12))


def test_attention_in_blocks_is_attention_at_once(monkeypatch):
    module = Attention(AttentionConfig(dim=12, heads=2, window=7, persistent=2))
    x = torch.randn(2, 50, 12)
    expected, _ = module(x)
    monkeypatch.setattr("atlas_lm.nn.attention.BLOCK", 4)
    assert_close({"y": module(x)[0]}, {"y": expected}, "blocks of 4")


def test_a_window_sees_what_full_attention_sees_of_it():
    """Against one masked softmax, written down."""
    module = Attention(AttentionConfig(dim=8, heads=1, window=3))
    x = torch.randn(1, 9, 8)
    q, k, v = module.project(x).view(1, 9, 3, 8).unbind(2)
    angle = torch.arange(9)[:, None] * 10_000.0 ** -(torch.arange(4) / 4)

    def turn(u):
        z = torch.complex(u[..., :4], u[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (distance >= 0) & (distance < 3)
    y = scaled_dot_product_attention(turn(q), turn(k), v, seen)
    assert_close({"y": module(x)[0]}, {"y": module.out(y)}, "attention")


def test_attention_far_into_a_text_sees_distances_only():
    """At a million tokens rotation is as exact as at the first."""
    module = Attention(AttentionConfig(dim=8, heads=2, window=5))
    x = torch.randn(1, 12, 8)
    _, state = module(x)
    far = replace(state, position=state.position + 10**9)
    assert torch.equal(module(x, far)[0], module(x, state)[0])


def test_the_cache_of_a_window_does_not_grow():
    module = Attention(AttentionConfig(dim=8, heads=2, window=5))
    state = None
    for _ in range(4):
        _, state = module(torch.randn(2, 7, 8), state)
        assert state.keys.shape == (2, 4, 2, 4)


def test_convolution_is_the_sum_it_says():
    conv = ShortConv(3, 4)
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(2, 6, 3)
    y, tail = conv(x, conv.begin(2, x), None)
    padded = torch.cat([torch.zeros(2, 3, 3), x], 1)
    for t in range(6):
        expected = sum(conv.weight[j] * padded[:, 3 + t - j] for j in range(4))
        assert_close({"y": y[:, t]}, {"y": expected}, f"token {t}")
    assert torch.equal(tail, x[:, 3:])


@pytest.mark.parametrize("autocast", [False, True])
def test_in_one_call_the_convolution_is_the_same(autocast, monkeypatch):
    conv = ShortConv(6, 4).float()
    torch.nn.init.normal_(conv.weight)
    x, tail = torch.randn(3, 40, 6).float().requires_grad_(), torch.randn(3, 3, 6).float()
    found = []
    for few in (0, 10**9):
        monkeypatch.setattr("atlas_lm.nn.conv.FEW", few)
        with torch.autocast("cpu", enabled=autocast):
            y, after = conv(x, tail, None)
        grads = torch.autograd.grad(y.square().sum(), (x, conv.weight))
        found.append({"y": y, "tail": after, "x": grads[0], "weight": grads[1]})
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("asked_for_gradients", [False, True])
def test_in_one_call_the_convolution_is_no_less_exact_in_bfloat16(asked_for_gradients, monkeypatch):
    conv = ShortConv(6, 4).bfloat16()
    torch.nn.init.normal_(conv.weight)
    x, tail = torch.randn(3, 40, 6).bfloat16(), torch.randn(3, 3, 6).bfloat16()
    errors = []
    for few in (0, 10**9):
        monkeypatch.setattr("atlas_lm.nn.conv.FEW", few)
        with torch.set_grad_enabled(asked_for_gradients):
            y, after = conv(x, tail, None)
        assert (y.dtype, after.dtype) == (torch.bfloat16, torch.bfloat16)
        with torch.no_grad():
            exact, _ = copy.deepcopy(conv).double()(x.double(), tail.double(), None)
        errors.append(((y.detach().double() - exact).norm() / exact.norm()).item())
    assert 0 < errors[0] <= errors[1] < 0.01


def test_nothing_to_pack_costs_nothing():
    assert Packing.of(None, None) is None


# Gates


@pytest.mark.parametrize("name", SMALL)
def test_gates_begin_where_they_should(name):
    rule = SMALL[name]
    torch.manual_seed(0)
    maps = layer_of(rule).gates
    coefficients = torch.ones(2, 3) if rule.features == "polynomial" else None
    gates = maps(torch.randn(4, 50, 12), coefficients)
    if rule.retention == "learned":
        assert 0.998 < gates.retention.mean() < 0.9995
    if rule.retention == "none":
        assert (gates.retention == 1).all()
    if rule.retention == "fixed":
        assert torch.equal(gates.retention[0, 0], torch.tensor([1 - 1 / 32, 1 - 1 / 64]))
    if rule.uses_momentum:
        assert 0.85 < gates.momentum.mean() < 0.95
    assert_close({"sum": gates.importance.sum(-1)}, {"sum": torch.ones(4, 50, 2)}, "importance")
    most = maps.highest_rate(coefficients)
    assert (gates.rate <= most).all()
    assert (gates.rate > 0).all()


def test_the_newest_pair_may_begin_with_a_share_of_its_own():
    layer = layer_of(SMALL["omeganet"], newest=0.75)
    with torch.no_grad():
        layer.gates.up.weight.zero_()
    weights = layer.gates(torch.randn(1, 4, 12), torch.ones(2, 3)).importance
    others = torch.full_like(weights[..., 1:], 0.25 / (SMALL["omeganet"].window - 1))
    expected = torch.cat([torch.full_like(weights[..., :1], 0.75), others], -1)
    assert_close({"importance": weights}, {"importance": expected}, "newest")


def test_gates_can_close():
    """A rate of exactly 0 and a retention of exactly 1: the memory stands still."""
    layer = layer_of(SMALL["titans"])
    with torch.no_grad():
        layer.gates.up.weight.zero_()
        layer.gates.up.bias[:4] = -1.0
    x = torch.randn(1, 20, 12)
    _, state = layer(x)
    for name, w in state.memory.weights.items():
        assert torch.equal(w[0], layer.weights[name])


def test_a_rate_at_its_highest_survives_a_repeated_token():
    """The bound of `highest_rate`, at the token that breaks steps which noise does not."""
    for name in ("ttt_linear", "omeganet", "titans", "delta_net"):
        layer = layer_of(RULES[name])
        with torch.no_grad():
            layer.gates.up.weight.zero_()
            layer.gates.up.bias[:2] = 1.0
        y, _ = layer(torch.randn(1, 1, 12).expand(1, 512, 12))
        assert y.isfinite().all()
        assert y[:, -64:].abs().max() < 4 * y[:, :64].abs().max(), name


# Reading alone


@pytest.mark.parametrize("name", EVERY)
def test_recall_is_a_read_without_a_write(name):
    made = example(EVERY[name], 13)
    _, state = made.run()
    # momentum would move the weights whatever the rate
    state = replace(state, momentum={n: torch.zeros_like(s) for n, s in state.momentum.items()})
    silent = made.gates._replace(
        retention=torch.ones_like(made.gates.retention), rate=torch.zeros_like(made.gates.rate)
    )
    expected, _ = memorize(
        made.q, made.k, made.v, silent, made.weights, made.rule, made.coefficients, state
    )
    found = recall(made.q, made.weights, made.rule, state, made.coefficients)
    assert_close({"y": found}, {"y": expected}, "recall")
    assert_close(
        {"y": recall(made.q, made.weights, made.rule, state.recollection(), made.coefficients)},
        {"y": found},
        "recollection",
    )


# What layers refuse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "atlass"}, r"rule: 'atlass' is not one of linear_attention"),
        ({"dim": 10, "heads": 4}, r"heads: 4 do not divide dim=10"),
        ({"dim": 0}, r"dim: 0 must be a whole number, 1 or more"),
        ({"d_k": -1}, r"d_k: -1 must be"),
        ({"retention": 0.0}, r"retention: 0.0 must be above 0 and at most 1"),
        ({"conv": 2.5}, r"conv: 2.5 must be"),
        (
            {"coefficients": (0.0, 1.0, 1.0)},
            r"coefficients: \(0, 1, 1\); expected 3 numbers above 0",
        ),
        (
            {"coefficients": (1.0,)},
            r"coefficients: \(1\); expected 3 numbers above 0, one for each",
        ),
        ({"rule": "titans", "coefficients": (1.0,)}, r"coefficients: these are of polynomial"),
        (
            {"rule": "titans", "newest": 0.5},
            r"newest: this is of a window, and the rule's holds one",
        ),
        (
            {"newest": 1.0},
            r"newest: 1.0 is no share of a window; expected more than 0 and less than 1",
        ),
    ],
)
def test_a_wrong_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**{"dim": 12} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 12, "heads": 5}, r"heads: 5 heads of an even width"),
        ({"window": 0}, r"window: 0 must be 1 or more, or None"),
        ({"persistent": -1}, r"persistent: -1"),
    ],
)
def test_a_wrong_attention_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**{"dim": 12, "heads": 2} | changes)


def test_polynomial_features_begin_where_they_are_told():
    for given, expected in ((None, (1.0, 1.0, 0.5)), ((0.1, 1.0, 2.0), (0.1, 1.0, 2.0))):
        log_coefficients = layer_of(SMALL["atlas"], coefficients=given).log_coefficients
        assert log_coefficients is not None
        torch.testing.assert_close(log_coefficients.exp(), torch.tensor(expected).expand(2, 3))


def test_wrong_inputs_are_refused():
    layer = layer_of(SMALL["titans"])
    _, state = layer(torch.randn(2, 3, 12))
    with pytest.raises(ValueError, match=r"x: shape \(2, 3, 11\), expected \[batch, time, 12\]"):
        layer(torch.randn(2, 3, 11))
    with pytest.raises(ValueError, match=r"state: holds 2 rows, x has a batch of 3"):
        layer(torch.randn(3, 3, 12), state)


def test_a_layer_state_is_a_file_too(tmp_path):
    layer = layer_of(SMALL["atlas"])
    x = torch.randn(2, 13, 12)
    _, state = layer(x)
    state.save(tmp_path / "memory", about={"note": "two rows"})
    loaded = MemoryState.load(tmp_path / "memory")
    assert isinstance(loaded, LayerState)
    assert torch.equal(layer(x, loaded)[0], layer(x, state)[0])


def test_rows_at_different_positions_are_stacked():
    layer = layer_of(SMALL["dot"])
    rows = [torch.randn(1, n, 12) for n in (3, 11)]
    state = LayerState.stack([layer(r)[1] for r in rows])
    x = torch.randn(2, 5, 12)
    found, _ = layer(x, state)
    for i, row in enumerate(rows):
        expected, _ = layer(torch.cat([row, x[i : i + 1]], 1))
        assert_close({"y": found[i : i + 1]}, {"y": expected[:, -5:]}, f"row {i}")


def test_half_lives_follow_the_bias():
    maps = GateMaps(SMALL["titans"], dim=4, heads=1, rank=2, retention=0.99)
    assert log(1 - 0.01 * maps.initial_bias()[1]) == pytest.approx(log(0.99))


@pytest.mark.parametrize("rule", ["titans", "atlas"])
def test_a_momentum_gate_that_is_shut_far(rule):
    """Training can push it to where a sigmoid is 0 in float32."""
    torch.manual_seed(0)
    layer = MemoryLayer(MemoryConfig(dim=8, heads=1, rule=replace(RULES[rule], chunk=4)))
    with torch.no_grad():
        layer.gates.up.bias.fill_(-200.0)
    x = torch.randn(1, 9, 8, requires_grad=True)
    y, _ = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()

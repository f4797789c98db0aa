"""Experiments on the operation itself: what can be proved about them, and that they repeat."""

import json
import math
from dataclasses import replace

import pytest
import torch

from atlas_lm import RULES, Gates, Rule
from atlas_lm.eval.mechanism import capacity, context, cost, factors, forgetting, poisoning
from atlas_lm.eval.mechanism.__main__ import main
from atlas_lm.eval.mechanism.figures import draw
from atlas_lm.eval.mechanism.measured import interval, student_quantile
from atlas_lm.eval.mechanism.pairs import (
    Pairs,
    Setting,
    accuracy,
    constant_gates,
    initial_memory,
    natural_rate,
    random_pairs,
    read,
    relative_error,
    settings_grid,
    write,
)
from atlas_lm.nn.gates import NORMED, GateMaps
from atlas_lm.ops.features import default_coefficients

FINITE = ("linear_attention", "delta_net", "gated_delta_net", "swla", "dla", "omeganet", "atlas")


# --- what all experiments share ---


def test_intervals_are_students():
    found = interval(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert found.mean == 3.0
    assert found.draws == 5
    assert found.low == pytest.approx(3 - half, abs=0.01)
    assert found.high == pytest.approx(3 + half, abs=0.01)
    assert interval(torch.tensor([0.0, 1.0]), 0, 1).low == 0
    for freedom, value in ((1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (100, 1.984)):
        assert student_quantile(freedom) == pytest.approx(value, rel=0.01)


def test_one_who_knows_recalls_all_and_silence_nothing():
    pairs = random_pairs(20, 3, 4, 6, seed=0)
    assert torch.equal(accuracy(pairs.values[None], pairs.values), torch.ones(1, 3).double())
    assert accuracy(7 * pairs.values[None], pairs.values).min() == 1
    for nothing in (0.0, float("nan")):
        silent = torch.full_like(pairs.values, nothing)[None]
        assert accuracy(silent, pairs.values).max() == 0
    assert relative_error(torch.zeros_like(pairs.values)[None], pairs.values).allclose(
        torch.ones(1, 3)
    )
    assert float(relative_error(torch.full_like(pairs.values, torch.nan)[None], pairs.values)[0, 0])


def test_a_guess_recalls_one_in_all_candidates():
    told, guessed = (random_pairs(64, 400, 4, 16, seed=s).values for s in (0, 1))
    assert float(accuracy(guessed[None], told).mean()) == pytest.approx(1 / 64, abs=0.003)


def test_pairs_have_length_1_values_mean_0():
    pairs = random_pairs(5, 2, 4, 6, seed=3)
    assert pairs.keys.norm(dim=-1).allclose(torch.ones(5, 2))
    assert pairs.values.norm(dim=-1).allclose(torch.ones(5, 2))
    assert pairs.values.mean(-1).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["linear_attention", "delta_net", "titans", "omeganet", "atlas"])
def test_the_unit_of_rates_is_that_of_layers(name):
    rule = RULES[name]
    coefficients = default_coefficients(rule, torch.zeros(()))
    highest = float(GateMaps(rule, 4, 1, 2, 0.999).highest_rate(coefficients))
    normed = NORMED if rule.norm and rule.optimizer != "muon" else 1
    assert normed * natural_rate(rule) == pytest.approx(highest)


# --- capacity ---


@pytest.mark.parametrize(("d", "p"), [(4, 1), (4, 2), (4, 3), (6, 2), (8, 2)])
def test_a_linear_memory_holds_as_many_pairs_as_it_has_features(d, p):
    settings = capacity.CapacitySettings(draws=2)
    case = capacity.Case("linear", p, d)
    width = d if p == 1 else math.comb(d + p, p)
    found = capacity.capacity_of(case, "least_squares", settings)
    assert found.exact.mean == found.exact.low == width == found.features
    assert found.counting_bound == width
    assert capacity.proposition("linear", p, d, case.d_v) == width


@pytest.mark.parametrize(("d", "p", "rank"), [(4, 1, 4), (4, 2, 14), (4, 3, 30), (6, 2, 27)])
def test_keys_of_length_1_hold_fewer(d, p, rank):
    """Of 15 monomials 1 is the sum of others: x1^2 + ... + xd^2 = 1; of 35, 5."""
    found = capacity.capacity_of(
        capacity.Case("linear", p, d), "unit_keys", capacity.CapacitySettings(draws=2)
    )
    assert found.exact.mean == found.exact.high == rank == capacity.unit_key_rank(p, d)


def test_parameters_are_counted():
    assert capacity.Case("linear", 2, 4).parameters == 8 * 15
    assert capacity.Case("mlp", 1, 4).parameters == 16 * 4 + 8 * 16
    assert capacity.Case("gated_mlp", 2, 4).parameters == 2 * 16 * 15 + 8 * 16


def test_a_deep_memory_holds_more_than_a_matrix_and_no_more_than_its_parameters():
    settings = capacity.CapacitySettings(draws=2, offline_steps=250)
    case = capacity.Case("mlp", 1, 4)
    found = {
        count: capacity.offline(case.rule, random_pairs(count, 2, 4, 8, seed=0), settings)[0]
        for count in (8, 40)
    }
    assert found[8].max() < 0.05, "twice what a matrix of these keys holds"
    assert found[40].min() > 0.05, "24 is all there is room for"


def test_the_delta_rule_reaches_what_least_squares_says():
    settings = capacity.CapacitySettings(draws=2)
    rule = capacity.Case("linear", 1, 8).rule
    few, many = (
        capacity.inner(rule, random_pairs(4, 2, 8, 16, seed=1), settings, n)[0] for n in (1, 64)
    )
    assert many.max() < 1e-3 < few.min()


# --- context against tokens ---

SMALL = context.ContextSettings(windows=(1, 2, 64), draws=2, groups=2)


def gates_drawn(tokens: int, draws: int, rows: int, momentum: bool) -> Gates:
    """Another rate, retention and momentum for every token, of all sizes."""
    generator = torch.Generator().manual_seed(0)

    def drawn(low: float, high: float) -> torch.Tensor:
        between = torch.rand(rows, tokens, draws, generator=generator, dtype=torch.float64)
        return low * (high / low) ** between

    rate, keep, theta = drawn(0.05, 4), drawn(0.9, 1), drawn(0.05, 1)
    ones = torch.ones(rows, tokens, draws, 1, dtype=torch.float64)
    return Gates(keep, rate, theta if momentum else None, ones)


@pytest.mark.parametrize("optimizer", ["gd", "momentum"])
def test_no_gates_of_window_1_get_below_the_floor(optimizer):
    told, pairs, alike = context.groups(SMALL)
    rule = Rule(optimizer=optimizer, chunk=1)
    gates = gates_drawn(len(told), 2, 300, optimizer == "momentum")
    weights = {"w": torch.zeros(2, 4, 4, dtype=torch.float64)}
    found = read(pairs.keys, rule, weights, write(told, rule, gates, weights))
    floor = context.error_floor(alike)
    assert (relative_error(found, pairs.values) >= floor - 1e-12).all()
    assert floor.min() > 0.4


def test_the_floor_is_that_of_one_row():
    """The answer in the direction of the second value, at any write, by hand."""
    rho = torch.tensor([[0.9]], dtype=torch.float64)
    s = torch.linspace(-3, 3, 60_001, dtype=torch.float64)
    least = float(((1 - s) ** 2 + (s * 0.9) ** 2).min())
    assert float(context.error_floor(rho)) == pytest.approx(math.sqrt(least / 2), rel=1e-6)


def test_a_window_succeeds_where_single_tokens_fail():
    rows = context.measure_context(SMALL).rows
    by = {(r.optimizer, r.window, r.visits): r for r in rows}
    for optimizer in ("gd", "momentum"):
        alone, joint = by[optimizer, 1, 1], by[optimizer, 64, 64]
        assert alone.error.low > alone.floor.mean
        assert joint.error.mean < 0.05
    assert by["gd", 1, 2].told_again


def test_a_window_at_rate_1_keeps_rho_to_the_power_of_its_visits():
    settings = replace(SMALL, alike=(0.9, 0.9), rates=(1.0,), optimizers=("gd",))
    found = {w: context.context_of(context.Case("gd", w, 1), settings).error.mean for w in (32, 64)}
    assert found[64] / found[32] == pytest.approx(0.9**32, rel=1e-6)


def test_told_often_enough_window_1_succeeds_too():
    """An effect of optimisation, not of information."""
    assert context.context_of(context.Case("gd", 1, 32), SMALL).error.mean < 0.05


def test_a_pause_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="span: 20 tokens end before a window of 64"):
        context.ContextSettings(span=20)


# --- poisoning ---


def stored_in(name: str, **changes):
    settings = poisoning.PoisoningSettings(draws=2, passes=8, ascent_steps=8, **changes)
    pairs = random_pairs(settings.pairs, 2, settings.d_k, settings.d_v, 0)
    others = random_pairs(settings.others, 2, settings.d_k, settings.d_v, 1).values
    rule = replace(RULES[name], chunk=min(RULES[name].chunk, 8))
    return settings, pairs, poisoning.store(rule, pairs, others, settings)


@pytest.mark.parametrize("name", FINITE)
def test_a_closed_gate_costs_exactly_nothing(name):
    settings, pairs, stored = stored_in(name)
    for gate in ("closed", "masked"):
        burst = poisoning.burst_of("random", 20, pairs, stored, settings)
        after = poisoning.after_burst(burst, gate, pairs, stored)
        for n, w in stored.state.weights.items():
            assert torch.equal(after.weights[n], w), gate


def test_a_closed_gate_does_not_stop_momentum_but_a_mask_does():
    settings, pairs, stored = stored_in("titans")
    burst = poisoning.burst_of("random", 20, pairs, stored, settings)
    closed, masked = (
        poisoning.after_burst(burst, gate, pairs, stored) for gate in ("closed", "masked")
    )
    theta = stored.setting.momentum
    moved = sum(theta**i for i in range(1, 21))
    for n, w in stored.state.weights.items():
        expected = w + moved * stored.state.momentum[n]
        torch.testing.assert_close(closed.weights[n], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(masked.weights[n], w)


def test_an_adversary_harms_more_than_noise_of_the_same_length():
    settings, pairs, stored = stored_in("delta_net")
    noise, worst = (
        poisoning.burst_of(kind, 8, pairs, stored, settings) for kind in ("random", "adversarial")
    )

    def error_after(burst: Pairs) -> float:
        state = poisoning.after_burst(burst, "open", pairs, stored)
        found = read(pairs.keys, stored.rule, stored.weights, state)
        return float(relative_error(found, pairs.values).mean())

    assert error_after(worst) > 1.2 * error_after(noise)
    assert worst.keys.norm(dim=-1).allclose(torch.ones(8, 2))
    assert worst.values.norm(dim=-1).allclose(torch.ones(8, 2))


def test_misleading_tokens_are_the_stored_keys_with_other_values():
    settings, pairs, stored = stored_in("delta_net")
    burst = poisoning.burst_of("misleading", 11, pairs, stored, settings)
    assert torch.equal(burst.keys[8:], pairs.keys[:3])
    assert torch.equal(burst.values[7], pairs.values[0])


def test_surprise_protects_and_refuses():
    rows = poisoning.measure_poisoning(
        poisoning.PoisoningSettings(rules=("delta_net",), tokens=(16,), draws=4, ascent_steps=4)
    ).rows
    by = {(r.burst, r.gate): r for r in rows}
    for burst in poisoning.BURSTS:
        assert by[burst, "surprise"].lost.mean <= by[burst, "open"].lost.mean
        assert by[burst, "closed"].lost.mean == 0
    for burst in ("misleading", "random"):
        assert by[burst, "surprise"].learned.mean < by[burst, "open"].learned.mean


def test_an_adversary_who_knows_the_gate_gets_through_it():
    settings, pairs, stored = stored_in("delta_net")
    open_made, known = (
        poisoning.burst_of("adversarial", 16, pairs, stored, settings, gate)
        for gate in ("open", "surprise")
    )

    def left(burst: Pairs) -> float:
        state = poisoning.after_burst(burst, "surprise", pairs, stored)
        found = read(pairs.keys, stored.rule, stored.weights, state)
        return float(torch.cosine_similarity(found[0], pairs.values, dim=-1).mean())

    assert left(known) < left(open_made)


# --- forgetting ---


def test_with_a_closed_gate_a_linear_memory_keeps_its_retention_to_the_power_of_the_distance():
    settings = replace(forgetting.QUICK, retentions=(1.0, 0.999), tokens=300)
    for row in forgetting.closed_stream("gated_delta_net", settings):
        assert row.strength.mean == pytest.approx(row.retention**row.distance, rel=1e-3)
        assert row.rate == 0
        assert row.accuracy.mean == 1


def test_with_an_open_gate_what_is_old_is_at_chance():
    settings = replace(forgetting.QUICK, retentions=(1.0,), tokens=4096, draws=4, asked=32)
    rows = forgetting.open_stream("delta_net", settings)
    assert rows[0].accuracy.mean > 0.5
    assert rows[-1].accuracy.mean < 0.06


def test_the_stream_is_the_same_however_it_is_cut():
    settings = replace(forgetting.QUICK, tokens=5000)
    whole = forgetting.stream_part(0, 5000, settings)
    parts = [forgetting.stream_part(a, b, settings) for a, b in ((0, 7), (7, 4100), (4100, 5000))]
    assert torch.equal(torch.cat([p.keys for p in parts]), whole.keys)
    assert forgetting.spans(3, 5000) == [(3, 2048), (2048, 4096), (4096, 5000)]
    assert forgetting.age_ranges(40) == [(1, 8), (9, 16), (17, 32), (33, 40)]
    newest = forgetting.pairs_of_age(1, 1, settings)
    assert torch.equal(newest.values[0], whole.values[-1])


def test_what_decay_has_rounded_to_signs_counts_as_forgotten():
    values = random_pairs(1, 1, 4, 8, seed=0)
    others = random_pairs(3, 1, 4, 8, seed=1).values
    alive, dead = (forgetting.recalled(values.values[None] * s, values, others) for s in (1, 1e-40))
    assert (float(alive), float(dead)) == (1, 0)


# --- factors and cost ---


def test_one_factor_is_changed_and_nothing_else():
    for factor, values in factors.FACTORS.items():
        for value in values:
            rule, retention = factors.variant(factor, value)
            if factor == "retention":
                assert (rule, retention) == (RULES["atlas"], value)
                continue
            mine, theirs = rule.describe(), RULES["atlas"].describe()
            assert {n for n in mine if mine[n] != theirs[n]} <= {factor, "norm", "degree"}
            assert mine[factor] == value


def test_atlas_is_one_row_of_every_factor():
    rows = factors.measure_factors(factors.QUICK).rows
    base = [r for r in rows if r.base]
    assert {(r.factor, r.value) for r in base} == {("window", "16"), ("stride", "1")}
    assert len({(r.accuracy, r.time, r.state_bytes) for r in base}) == 1
    assert base[0].time == 1


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="factors: 'widow' is not one of degree, window"):
        factors.FactorSettings(factors=("widow",))
    with pytest.raises(ValueError, match="rules: 'atlass' is not one of"):
        poisoning.PoisoningSettings(rules=("atlass",))
    with pytest.raises(ValueError, match="lengths: 100 is no multiple of segment=64"):
        cost.CostSettings(lengths=(100,), segment=64)


def test_state_is_flat_for_finite_rules_and_grows_with_attention():
    settings = cost.CostSettings(
        mixers=("attention", "swa", *FINITE, "titans"), lengths=(64, 128, 256), segment=64,
        dim=16, window=32, rounds=1,
    )  # fmt: skip
    rows = cost.measure_cost(settings).rows
    sizes = {m: [r.state_bytes for r in rows if r.mixer == m] for m in settings.mixers}
    for mixer in ("swa", *FINITE, "titans"):
        assert len(set(sizes[mixer])) == 1, mixer
    assert sizes["attention"] == [2 * 4 * 16 * n + 8 for n in (64, 128, 256)]
    assert all(0 < r.microseconds <= r.slowest for r in rows)
    assert [r.beside_attention for r in rows if r.mixer == "attention"] == [1, 1, 1]


# --- running them ---


@pytest.mark.parametrize(
    ("measure", "settings"),
    [
        (context.measure_context, replace(context.QUICK, windows=(1, 8), optimizers=("muon",))),
        (poisoning.measure_poisoning, poisoning.QUICK),
        (forgetting.measure_forgetting, forgetting.QUICK),
    ],
)
def test_a_seed_repeats_and_another_differs(measure, settings):
    first, again, other = (
        measure(s).to_dict()["rows"] for s in (settings, settings, replace(settings, seed=1))
    )
    assert first == again
    assert first != other


def test_draws_do_not_see_each_other():
    """A draw is a head: the first of three is what it is alone."""
    rule, weights = RULES["titans"], initial_memory(RULES["titans"], 3, 4, 6, seed=0)
    pairs, gates = random_pairs(9, 3, 4, 6, seed=0), settings_grid(RULES["titans"], (1.0,))
    together = write(pairs, rule, constant_gates(rule, gates, 9, pairs.keys), weights)
    first = Pairs(pairs.keys[:, :1], pairs.values[:, :1])
    own = {n: w[:1] for n, w in weights.items()}
    alone = write(first, rule, constant_gates(rule, gates, 9, first.keys), own)
    torch.testing.assert_close(together.weights["w1"][:, :1], alone.weights["w1"])
    assert Setting(0.5, 0.9, 0.99).closed() == Setting(0.0, 0.9, 1.0)


def test_the_command_writes_results_and_pictures(tmp_path, capsys):
    assert main(["context", "cost", "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "context.json").read_text())
    assert report["settings"]["seed"] == 0
    assert {r["window"] for r in report["rows"]} == {1, 2, 8, 32}
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "15 rows in" in capsys.readouterr().out


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    assert main(["capacities", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == (
        "atlas_lm.eval.mechanism: capacities: no such experiment; one of capacity, context, "
        "factors, poisoning, forgetting, cost"
    )
    (tmp_path / "taken").write_text("")
    assert main(["cost", "--quick", "--out", str(tmp_path / "taken")]) == 2


@pytest.mark.parametrize(
    ("measure", "settings"),
    [
        (poisoning.measure_poisoning, poisoning.QUICK),
        (forgetting.measure_forgetting, forgetting.QUICK),
        (factors.measure_factors, factors.QUICK),
        (
            capacity.measure_capacity,
            replace(capacity.QUICK, networks=("linear",), passes=2),
        ),
    ],
)
def test_every_experiment_has_a_picture(measure, settings, tmp_path):
    report = json.loads(json.dumps(measure(settings).to_dict()))
    assert (tmp_path / "a.png").name in draw(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000

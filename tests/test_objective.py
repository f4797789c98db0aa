"""The loss, and the price of writing."""

import pytest
import torch

from atlas_lm import RULES, LanguageModel, ModelConfig
from atlas_lm.data.recall import associative_recall
from atlas_lm.nn.gates import MARGIN, TOLD, GateMaps
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import RecallData
from atlas_lm.train.loop import train
from atlas_lm.train.objective import NextToken
from atlas_lm.train.optimizers import OptimizerConfig


def made(rule="delta_net") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(
        ModelConfig(vocab=32, dim=16, depth=2, heads=2, window=16, d_k=4, rule=rule)
    )


def rows():
    return associative_recall(2, 4, 32, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", [*RULES, "swa"])
def test_open_gates_cost_their_price(rule):
    """Half open to begin with, whatever the rule makes of it, and where forgetting is learned a
    tenth, each from closed for good; nothing where nothing is learned or all of it fades."""
    model = made(rule)
    free, dear = NextToken(model), NextToken(model, price=2.0)
    nats, count, _ = free(*rows())
    paid, *_ = dear(*rows())
    opening = 0.0 if rule in ("swa", "retnet") else 0.5 + MARGIN
    opening += 0.1 + MARGIN if rule in RULES and RULES[rule].retention == "learned" else 0.0
    assert (paid - nats).item() == pytest.approx(2.0 * float(count) * opening, rel=0.1)
    with torch.no_grad():
        assert torch.equal(dear(*rows())[0], free(*rows())[0])


def test_open_gates_cost_little_where_a_token_is_not_plain():
    model = made("gated_delta_net")
    objective = NextToken(model, price=2.0)
    everywhere, *_ = objective(*rows())
    plain = torch.ones_like(rows()[0], dtype=torch.bool)
    assert torch.equal(objective(*rows(), plain=plain)[0], everywhere)
    plain[0, 3:] = False
    some, count, _ = objective(*rows(), plain=plain)
    little, *_ = objective(*rows(), plain=torch.zeros_like(plain))
    share = plain.float().mean().item()
    assert (some - little).item() == pytest.approx(
        2.0 * float(count) * share * (0.6 + 2 * MARGIN - TOLD * 0.5), rel=0.1
    )
    nothing, *_ = NextToken(model)(*rows())
    assert (little - nothing).item() == pytest.approx(2.0 * float(count) * TOLD * 0.5, rel=0.1)


def test_a_gate_that_is_closed_at_all_tokens_opens_where_they_are_not_plain():
    """It has no other gradient."""
    model = made("gated_delta_net")
    maps = [part for part in model.modules() if isinstance(part, GateMaps)]
    for part in maps:
        torch.nn.init.constant_(part.up.bias, -1.0)
    plain = torch.ones_like(rows()[0], dtype=torch.bool)
    for told, moved in (([], False), ([3, 4], True)):
        plain[:, told] = False
        paid, *_ = NextToken(model, price=1.0)(*rows(), plain=plain)
        grads = torch.autograd.grad(paid, [part.up.bias for part in maps])
        rates = [grad[:2] for grad in grads]  # of the two heads
        assert all(bool((grad < 0).all()) is moved for grad in rates)
        assert moved or not any(grad.any() for grad in rates)


def closed_parts(model: LanguageModel) -> tuple[float, float]:
    """Of all gates of these rows, how many write nothing and how many forget nothing, exactly."""
    found = []
    for part in model.modules():
        if isinstance(part, GateMaps):
            part.register_forward_hook(lambda _m, _i, gates: found.append(gates))
    model(rows()[0])
    written = torch.stack([gates.rate for gates in found])
    kept = torch.stack([gates.retention for gates in found])
    return float((written == 0).float().mean()), float((kept == 1).float().mean())


def test_the_price_closes_gates_and_nothing_else_does():
    writing, forgetting = [], []
    for price in (0.0, 3.0):
        model = made("gated_delta_net")
        objective = NextToken(model, price=price)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(60):
            nats, count, _ = objective(*rows())
            optimizer.zero_grad()
            (nats / count).backward()
            optimizer.step()
        for parts, part in zip((writing, forgetting), closed_parts(model), strict=True):
            parts.append(part)
    assert writing[0] < 0.1
    assert writing[1] > 0.5
    assert forgetting[0] < 0.5
    assert forgetting[1] > 0.9


def test_the_price_rises_from_step_to_step_and_evaluation_pays_nothing(tmp_path):
    config = TrainConfig(
        model=made().config,
        data=RecallData(),
        optimizer=OptimizerConfig(lr=0.0),
        length=12,
        batch=2,
        steps=4,
        price=8.0,
        log_every=1,
    )
    train(config, tmp_path / "run", device="cpu")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    *losses, evaluated = [float(part.split(",")[0]) for part in text.split('"loss": ')[1:]]
    assert losses == pytest.approx(
        [evaluated + 8.0 * (0.5 + MARGIN) * (i / 4) ** 2 for i in range(4)], abs=0.3
    )


def test_a_price_that_cannot_be():
    with pytest.raises(ValueError, match="price: -1; expected nats a target, 0 or more"):
        TrainConfig(price=-1)
    with pytest.raises(ValueError, match="price: a compiled block does not tell"):
        TrainConfig(price=1.0, compile=True)

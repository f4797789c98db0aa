"""Models of every rule learn associative recall; lower precision learns it as well."""

import pytest
import torch

from atlas_lm import RULES, LanguageModel, ModelConfig
from atlas_lm.data.recall import associative_recall
from atlas_lm.models.lm import NO_TARGET

SMALL = {"vocab": 32, "dim": 64, "d_k": None}
"""Learns four pairs in a few hundred steps."""
NARROW = {"vocab": 64, "dim": 32, "d_k": 8}
"""Every rule is cheap."""


def trained(
    rule, sizes: dict, steps: int, pairs: int, low: str | None = None, batch: int = 32
) -> tuple[list[float], float]:
    """Losses on the way, and the share of answers that are right at the end."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = LanguageModel(ModelConfig(depth=2, heads=2, rule=rule, window=16, **sizes))
    if low == "parameters":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        return min(1, (step + 1) / 50) * max(0.05, 1 - step / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses = []
    for _ in range(steps):
        tokens, targets = associative_recall(batch, pairs, model.config.vocab, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=low == "autocast"):
            loss, _ = model.loss(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, accuracy(model, pairs, low)


@torch.no_grad()
def accuracy(model: LanguageModel, pairs: int, low: str | None) -> float:
    generator = torch.Generator().manual_seed(2)
    tokens, targets = associative_recall(256, pairs, model.config.vocab, generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=low == "autocast"):
        logits, _ = model(tokens)
    asked = targets != NO_TARGET
    return (logits.argmax(-1)[asked] == targets[asked]).float().mean().item()


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", ["delta_net", "titans"])
def test_a_model_begins_to_learn(name):
    """Below the best guess that remembers nothing, ln 16 = 2.77."""
    losses, _ = trained(RULES[name], SMALL, steps=150, pairs=4)
    assert mean(losses[-10:]) < 2.3


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RULES, "attention", "swa"])
def test_every_rule_learns_for_500_steps(name):
    """Two chunks of tokens; no gradient that is not finite."""
    rule = RULES.get(name, name)
    batch = 8 if "atlas" in name else 16
    losses, right = trained(rule, NARROW, steps=500, pairs=24, batch=batch)
    print(f"{name}: loss {losses[0]:.3f} -> {mean(losses[-20:]):.3f}, {right:.1%} right")
    assert mean(losses[-20:]) < mean(losses[:20]) - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("low", ["autocast", "parameters"])
@pytest.mark.parametrize("name", ["delta_net", "titans"])
def test_bfloat16_learns_what_float32_learns(name, low):
    """Within two points of the accuracy."""
    _, full = trained(RULES[name], SMALL, steps=1200, pairs=4)
    _, half = trained(RULES[name], SMALL, steps=1200, pairs=4, low=low)
    print(f"{name}: float32 {full:.1%}, bfloat16 {low} {half:.1%}")
    assert full > 0.9
    assert half > full - 0.02


def test_recall_tells_and_asks():
    tokens, targets = associative_recall(5, 7, 64, torch.Generator().manual_seed(3))
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        told = dict(zip(row[0:14:2], row[1:14:2], strict=True))
        assert len(told) == 7
        assert wanted[:14] == [NO_TARGET] * 14
        assert wanted[14:] == [told[key] for key in row[14:]]
    with pytest.raises(ValueError, match="pairs: 33 different keys do not fit the 32 of vocab=64"):
        associative_recall(1, 33, 64)

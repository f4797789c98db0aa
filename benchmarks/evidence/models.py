"""Models of equal size: the feed-forward layers are as wide as makes up for the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from atlas_lm import LanguageModel
from atlas_lm.models.config import ModelConfig
from atlas_lm.rules import RULES, Rule

STEP = 8
"""Widths of feed-forward layers are whole multiples of this, which products on a GPU like."""


def changed(name: str, **fields: object) -> Rule:
    """A rule of the table with these fields, as far as it can have them."""
    rule, allowed = RULES[name], dict(fields)
    if rule.optimizer != "muon":
        allowed.pop("stride", None)
    return replace(rule, **allowed)  # pyright: ignore[reportArgumentType]


def mixers(chunk: int, stride: int) -> dict[str, str | Rule]:
    """The ten of the recall table. Deep memories take gradients at the beginning of their chunk."""
    deep = ("titans", "dla", "omeganet", "atlas", "atlas_pp", "dot")
    return {
        "transformer": "attention",
        "swa": "swa",
        "linear_attention": "linear_attention",
        "gated_delta_net": "gated_delta_net",
    } | {name: changed(name, chunk=chunk, stride=stride) for name in deep}


@lru_cache(maxsize=512)
def non_embedding(config: ModelConfig) -> int:
    """Parameters without the embedding and the head."""
    with torch.device("meta"):
        model = LanguageModel(config)
    ends = config.vocab * config.dim * (1 if config.tied else 2)
    return sum(p.numel() for p in model.parameters()) - ends


def equal_to(config: ModelConfig, parameters: int) -> ModelConfig:
    """The model with feed-forward layers of a width at which it has about so many parameters
    besides the embedding and the head."""
    fewest = replace(config, mlp=STEP)
    one = non_embedding(replace(config, mlp=2 * STEP)) - non_embedding(fewest)
    steps = 1 + (parameters - non_embedding(fewest)) / one
    if steps < 0.5:
        raise ValueError(
            f"{config.rule}: has {non_embedding(fewest):,} parameters with the narrowest "
            f"feed-forward layers; expected room in {parameters:,}"
        )
    return replace(config, mlp=STEP * max(round(steps), 1))

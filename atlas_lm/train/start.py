"""What a run begins with: new weights, or those of a model that is there, and its tokenizer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from atlas_lm.models.config import ModelConfig
from atlas_lm.models.folder import load_model, model_folder
from atlas_lm.models.lm import LanguageModel
from atlas_lm.text import TOKENIZER_FILE
from atlas_lm.train.config import TrainConfig, differences
from atlas_lm.train.data import Data, QuestionData, StoryData


def first_model(config: TrainConfig) -> LanguageModel:
    """As the run begins with it."""
    if config.start is None:
        return LanguageModel(config.model)
    model = load_model(model_folder(config.start)).float().train()
    wanted = config.model
    if _is_deeper(wanted, model.config):
        wanted = replace(wanted, depth=model.config.depth, rule=model.config.rule)
    other = differences(model.config.to_dict(), wanted.to_dict())
    if other:
        name, (theirs, ours) = next(iter(other.items()))
        raise ValueError(
            f"start: the model in {config.start} has {name} {theirs}, that of this run {ours}; "
            "expected the same model, or a plain one with more blocks after the same ones"
        )
    return model if wanted is config.model else deepened(model, config.model)


def _is_deeper(config: ModelConfig, start: ModelConfig) -> bool:
    """Whether it has more blocks, and those of the start come first. Plain ones, of which it is
    known what they add to the stream."""
    same = [config.rule_of(i) == start.rule_of(i) for i in range(start.depth)]
    return config.depth > start.depth and all(same) and config.block == "plain"


@torch.no_grad()
def deepened(model: LanguageModel, config: ModelConfig) -> LanguageModel:
    """With more blocks, which change nothing until they have learned: what they add begins as 0."""
    deeper = LanguageModel(config).train()
    deeper.load_state_dict(model.state_dict(), strict=False)
    for block in deeper.blocks[model.config.depth :]:
        for name, part in block.named_modules():
            if isinstance(part, nn.Linear) and name.split(".")[-1] == "out":
                part.weight.zero_()
    return deeper


def data_of(config: TrainConfig) -> Data:
    """The data of a run, with the tokenizer of the model that it starts with, if that has one and
    the data names none."""
    data = config.data
    of_texts = isinstance(data, QuestionData | StoryData)
    if config.start is None or not of_texts or data.tokenizer is not None:
        return data
    path = model_folder(config.start) / TOKENIZER_FILE
    return replace(data, tokenizer=str(path)) if path.exists() else data

"""What a run begins with: new weights, or those of a model that is there, and its tokenizer."""

from __future__ import annotations

from dataclasses import replace

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
    other = differences(model.config.to_dict(), config.model.to_dict())
    if other:
        name, (theirs, ours) = next(iter(other.items()))
        raise ValueError(
            f"start: the model in {config.start} has {name} {theirs}, that of this run {ours}; "
            "expected the same model"
        )
    return model


def data_of(config: TrainConfig) -> Data:
    """The data of a run, with the tokenizer of the model that it starts with, if that has one and
    the data names none."""
    data = config.data
    of_texts = isinstance(data, QuestionData | StoryData)
    if config.start is None or not of_texts or data.tokenizer is not None:
        return data
    path = model_folder(config.start) / TOKENIZER_FILE
    return replace(data, tokenizer=str(path)) if path.exists() else data

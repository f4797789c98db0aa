"""Language models: blocks of memory and attention, one config, one state."""

from atlas_lm.models.config import ModelConfig
from atlas_lm.models.folder import fingerprint_of, load_model, model_folder, save_model
from atlas_lm.models.lm import LanguageModel, ModelState

__all__ = [
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "fingerprint_of",
    "load_model",
    "model_folder",
    "save_model",
]

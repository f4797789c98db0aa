"""Sequence models that learn to memorise while they read."""

from atlas_lm.models import LanguageModel, ModelConfig, ModelState, load_model, save_model
from atlas_lm.nn import LayerState, MemoryConfig, MemoryLayer
from atlas_lm.ops import Gates, MemoryState, init_memory, memorize, recall
from atlas_lm.rules import RULES, Rule

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Gates",
    "LanguageModel",
    "LayerState",
    "MemoryConfig",
    "MemoryLayer",
    "MemoryState",
    "ModelConfig",
    "ModelState",
    "Rule",
    "init_memory",
    "load_model",
    "memorize",
    "recall",
    "save_model",
]

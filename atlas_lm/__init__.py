"""Sequence models that learn to memorise while they read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_PLACES = ("rules", "ops", "nn", "models")


def __getattr__(name: str):
    """PyTorch is imported with the first name that needs it, so that `atlas-lm --help` is quick."""
    if name in __all__:
        for place in _PLACES:
            module = import_module(f"atlas_lm.{place}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

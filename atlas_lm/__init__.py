"""Sequence models that learn to memorise while they read."""

from atlas_lm.ops import Gates, MemoryState, init_memory, memorize
from atlas_lm.rules import RULES, Rule

__version__ = "0.1.0"

__all__ = ["RULES", "Gates", "MemoryState", "Rule", "init_memory", "memorize"]

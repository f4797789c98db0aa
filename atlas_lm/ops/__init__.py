"""The mathematics: no parameters, no modules. `memorize` is the one operation."""

from atlas_lm.ops.memorize import memorize
from atlas_lm.ops.networks import init_memory
from atlas_lm.ops.recall import recall
from atlas_lm.ops.state import Gates, MemoryState

__all__ = ["Gates", "MemoryState", "init_memory", "memorize", "recall"]

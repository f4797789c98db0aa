"""Layers: embeddings in, embeddings out, a state that goes in and comes out."""

from atlas_lm.nn.attention import Attention, AttentionConfig, AttentionState
from atlas_lm.nn.memory import LayerState, MemoryConfig, MemoryLayer

__all__ = [
    "Attention",
    "AttentionConfig",
    "AttentionState",
    "LayerState",
    "MemoryConfig",
    "MemoryLayer",
]

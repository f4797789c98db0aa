"""Layers: embeddings in, embeddings out, a state that goes in and comes out."""

from atlas_lm.nn.attention import Attention, AttentionState
from atlas_lm.nn.memory import LayerState, MemoryConfig, MemoryLayer

__all__ = ["Attention", "AttentionState", "LayerState", "MemoryConfig", "MemoryLayer"]

"""One memory, end to end: tell it facts, let it read on, keep it in a file, ask.

24 facts with 16-dimensional keys are more than a memory on the keys themselves can hold, and few
for one on their polynomial features (153 of them).
"""

import tempfile
from dataclasses import replace

import torch
from torch.nn.functional import normalize

from atlas_lm import RULES, Gates, MemoryState, Rule, init_memory, memorize

HEADS, WIDTH, FACTS, ROUNDS, DISTRACTION = 2, 16, 24, 100, 20_000


def pairs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = normalize(torch.randn(1, tokens, HEADS, WIDTH), dim=-1)
    return keys, torch.randn(1, tokens, HEADS, WIDTH)


def gates(tokens: int, rate: float) -> Gates:
    """Keep everything; write every token at this rate."""
    ones = torch.ones(1, tokens, HEADS)
    return Gates(ones, rate * ones, None, ones.unsqueeze(-1))


def remember(rule: Rule, rate: float, told, heard, file: str) -> float:
    """Write the facts, read on with a closed gate, save, load, ask; the share recalled."""
    (keys, values), (other_keys, other_values) = told, heard
    weights = init_memory(rule, HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    state = None
    for _ in range(ROUNDS):
        writing = gates(FACTS, rate)
        _, state = memorize(keys, keys, values, writing, weights, rule, state=state)
    closed = gates(DISTRACTION, 0.0)
    _, state = memorize(other_keys, other_keys, other_values, closed, weights, rule, state=state)
    state.save(file)

    memory = MemoryState.load(file)
    asking = gates(FACTS, 0.0)
    said, _ = memorize(keys, keys, values, asking, weights, rule, state=memory)
    nearest = torch.cdist(said[0].transpose(0, 1), values[0].transpose(0, 1)).argmin(-1)
    share = (nearest == torch.arange(FACTS)).float().mean().item()
    print(f"{rule.features:>10} keys: {share:4.0%} of {FACTS} facts recalled", end=" ")
    print(f"after {int(memory.position):,} tokens, from {memory.nbytes:,} bytes")
    return share


torch.manual_seed(0)
told, heard = pairs(FACTS), pairs(DISTRACTION)
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    file = f"{folder}/memory.safetensors"
    plain = remember(RULES["delta_net"], 1.0, told, heard, file)
    polynomial = replace(RULES["delta_net"], features="polynomial")
    lifted = remember(polynomial, 0.4, told, heard, file)
assert plain < lifted == 1.0

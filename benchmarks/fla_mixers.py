"""Layers of flash-linear-attention as our mixers, on a GPU: `python -m benchmarks.fla_mixers`.

Each reads a text in one pass, in parts, and packed with others, which must come to the same; its
weights must get gradients, and a model of it must take steps that lower its loss. Less than a
minute. Needs `pip install flash-linear-attention`.
"""

from __future__ import annotations

from time import monotonic

import torch

from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.models.costs import costs
from benchmarks import gpu

LAYERS = ("GatedDeltaNet", "GatedLinearAttention", "DeltaNet", "Mamba2:head_dim=64")
LENGTH, CUTS = 300, (128, 129, 250)
FAR = 0.03
"""Relative error that bfloat16 may make, and nothing else could: a state that is lost makes 1."""


def main() -> None:
    gpu.require_cuda()
    for name in LAYERS:
        began, model = monotonic(), made(name)
        tokens = torch.randint(0, 256, (2, LENGTH), device=gpu.DEVICE)
        found = {"parts": parts(model, tokens), "packed": packed(model, tokens)}
        learned = learns(model, tokens)
        price = costs(model.config, LENGTH)
        errors = ", ".join(
            f"{what} {'refused' if e is None else f'{e:.4f}'}" for what, e in found.items()
        )
        print(
            f"{name:<24} {errors}; loss {learned[0]:.3f} to {learned[1]:.3f}; state "
            f"{price.state_bytes:,} bytes, {price.flops_per_token:,.0f} FLOPs a token; "
            f"{monotonic() - began:.1f} s",
            flush=True,
        )
        assert all(error is None or error < FAR for error in found.values()), name
        assert learned[1] < learned[0], name


def made(name: str) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(dim=256, depth=2, heads=4, rule=f"fla:{name}")
    return LanguageModel(config).to(gpu.DEVICE)


def read(model: LanguageModel, tokens: torch.Tensor, state=None, reset=None):
    with torch.no_grad(), torch.autocast(gpu.DEVICE, torch.bfloat16):
        return model.eval()(tokens, state, None, reset)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def parts(model: LanguageModel, tokens: torch.Tensor) -> float:
    """One pass against the same tokens cut: long, one alone, long, long; through a copy too."""
    whole, state, out = read(model, tokens)[0], None, []
    for part in tokens.tensor_split(CUTS, 1):
        logits, state = read(model, part, state)
        state = state.clone()
        out.append(logits)
    return apart(torch.cat(out, 1), whole)


def packed(model: LanguageModel, tokens: torch.Tensor) -> float | None:
    """A document after another in one row against that document alone."""
    reset = torch.zeros_like(tokens, dtype=torch.bool)
    reset[:, 100] = True
    try:
        found, _ = read(model, tokens, reset=reset)
    except ValueError as error:
        print(error)
        return None
    return apart(found[:, 100:], read(model, tokens[:, 100:])[0])


def learns(model: LanguageModel, tokens: torch.Tensor) -> tuple[float, float]:
    """The loss before and after some steps; every weight has to get a gradient."""
    model.train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(5):
        with torch.autocast(gpu.DEVICE, torch.bfloat16):
            loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        lost = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert not lost, f"no gradient: {', '.join(lost)}"
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()

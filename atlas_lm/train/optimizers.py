"""What moves the weights: AdamW, or Muon for the matrices between layers and AdamW for the rest.

    group        parameters                                            weight decay
    matrices     weights of linear maps                                yes
    embedding    one vector a token; a rare one would only shrink      no
    memory       initial memories, 3-D: at zero they would be dead     no
    vectors      norms, biases, convolutions, coefficients, gains      no

Under `muon`, the matrices of blocks go to `torch.optim.Muon`; the head, and the narrow maps that
make the gates, stay with AdamW: their scale means something, and Muon's steps have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from atlas_lm.models.lm import LanguageModel
from atlas_lm.nn.gates import GateMaps
from atlas_lm.nn.memory import MemoryLayer


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Learning rates are those at the peak of the schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: the matrices of blocks by Muon, all else by AdamW."""
    lr: float = 1e-3
    """Learning rate of AdamW."""
    lr_muon: float | None = None
    """Of Muon, whose steps are made as long as AdamW's; None: as lr."""
    lr_embedding: float | None = None
    """Of the embedding; None: as lr."""
    lr_memory: float | None = None
    """Of the initial memories; None: as lr."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW: how long gradients, and their squares, are averaged."""
    eps: float = 1e-8
    """Of AdamW: added to the root of the squares."""
    momentum: float = 0.95
    """Of Muon."""
    weight_decay: float = 0.1
    """Of matrices; of a step, times the learning rate."""

    def __post_init__(self) -> None:
        for name in ("lr", "lr_muon", "lr_embedding", "lr_memory", "eps", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"optimizer.{name}: {value}; expected 0 or more")
        if not all(0 <= value < 1 for value in (*self.betas, self.momentum)):
            raise ValueError(
                f"optimizer: betas {self.betas}, momentum {self.momentum}; expected 0 or more, "
                "less than 1"
            )


class Optimizers:
    """All of them as one, each group at its own peak."""

    def __init__(self, config: OptimizerConfig, model: LanguageModel):
        self.config = config
        rates = {
            "matrices": config.lr,
            "hidden": config.lr if config.lr_muon is None else config.lr_muon,
            "embedding": config.lr if config.lr_embedding is None else config.lr_embedding,
            "memory": config.lr if config.lr_memory is None else config.lr_memory,
            "vectors": config.lr,
        }
        groups: dict[str, list[nn.Parameter]] = {}
        for group, parameter in grouped(model, config.name):
            groups.setdefault(group, []).append(parameter)
        hidden = groups.pop("hidden", None)
        self.all: list[Optimizer] = [_adamw(config, groups)]
        self._peaks = [rates[name] for name in groups]
        if hidden:
            self.all.append(_muon(config, hidden))
            self._peaks.append(rates["hidden"])

    def set_rate(self, factor: float) -> float:
        """All learning rates at this part of their peaks; gives back that of AdamW."""
        groups = [group for optimizer in self.all for group in optimizer.param_groups]
        for group, peak in zip(groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return self.config.lr * factor

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)


def grouped(model: LanguageModel, name: str = "adamw") -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter that is learned, once, with the name of its group."""
    kinds: dict[int, str] = {}
    for part in model.modules():
        if isinstance(part, nn.Linear):
            kinds[id(part.weight)] = "matrices"
    for block in model.blocks if name == "muon" else ():
        gates = {m for g in block.modules() if isinstance(g, GateMaps) for m in g.modules()}
        for part in block.modules():
            if isinstance(part, nn.Linear) and part not in gates:
                kinds[id(part.weight)] = "hidden"
    for part in model.modules():
        if isinstance(part, MemoryLayer):
            kinds |= {id(w): "memory" for w in part.memory.values() if w.ndim == 3}
    kinds[id(model.embedding.weight)] = "embedding"
    for parameter in model.parameters():
        if parameter.requires_grad:
            yield kinds.get(id(parameter), "vectors"), parameter


def _adamw(config: OptimizerConfig, groups: dict[str, list[nn.Parameter]]) -> AdamW:
    made: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": config.weight_decay if name == "matrices" else 0.0}
        for name, parameters in groups.items()
    ]
    fused = torch.cuda.is_available() and all(p.is_cuda for ps in groups.values() for p in ps)
    return AdamW(made, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)


def _muon(config: OptimizerConfig, parameters: list[nn.Parameter]) -> Muon:
    return Muon(
        parameters,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )

"""What is made small: the surprise of a model at every next token."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from atlas_lm.models.lm import NO_TARGET, LanguageModel, ModelState
from atlas_lm.nn.gates import GateMaps
from atlas_lm.nn.linear_cross_entropy import linear_cross_entropy
from atlas_lm.shapes import TokenFlag, TokenIds


class NextToken(nn.Module):
    """The loss as a module, which is what DDP and FSDP wrap.

    dense    every token has a target, so that nobody looks, for which a GPU would have to be waited
    price    nats a target, while it learns, for memories whose gates are one unit from closed at
             every token: they then close wherever nothing is worth it; `charge` takes a part of it
    """

    def __init__(self, model: LanguageModel, dense: bool = False, price: float = 0.0):
        super().__init__()
        self.model = model
        self.dense, self.price = dense, price
        self._charged = torch.tensor(price, device=model.embedding.weight.device)
        """Stays where it is, for graphs that read it."""
        self._to_pay: list[Tensor] = []
        """How far the gates of every layer of the pass that is under way are astray."""
        self._plain: TokenFlag | None = None
        for part in model.modules() if price else ():
            if isinstance(part, GateMaps):
                part.up.register_forward_hook(partial(self._note, part))

    def charge(self, part: float) -> None:
        """From now on, this part of the price."""
        if self.price:
            self._charged.fill_(self.price * part)

    def _note(self, maps: GateMaps, _up: nn.Module, _inputs: tuple, raw: Tensor) -> None:
        if torch.is_grad_enabled():
            self._to_pay.append(maps.astray(raw, self._plain).mean())

    def forward(
        self,
        tokens: TokenIds,
        targets: TokenIds | None,
        state: ModelState | None = None,
        reset: TokenFlag | None = None,
        judge: bool = False,
        places: Tensor | None = None,
        plain: TokenFlag | None = None,
    ) -> tuple[Tensor, Tensor, ModelState] | tuple[Tensor, Tensor, ModelState, Tensor]:
        """Sum of the losses in nats, number of targets, state; with `judge`, also which targets
        `[b t]` are not what the model holds for the likeliest.

        targets   None: it is read, and no more
        places    `[n]`, where the targets are known to stand among all tokens of the batch: then
                  targets are `[n]` too, and nobody looks for them
        plain     tokens at which open gates have their price; at others they have little of it.
                  None: they have it at all tokens
        """
        self._to_pay.clear()
        self._plain = plain
        x, state = self.model.encode(tokens, state, reset=reset)
        if targets is None:
            return x.new_zeros(()), x.new_zeros((), dtype=torch.int64), state
        if places is not None:
            x, wanted = x.flatten(0, 1).index_select(0, places), targets
        elif self.dense:
            x, wanted = x.flatten(0, 1), targets.flatten()
        else:
            asked = targets != NO_TARGET
            x, wanted = x[asked], targets[asked]
        nats = linear_cross_entropy(x, self.model.head_weight, wanted)
        count = (wanted >= 0).sum()
        if self._to_pay:
            nats = nats + self._charged * count * torch.stack(self._to_pay).mean()
        if not judge:
            return nats, count, state
        wrong = torch.zeros_like(targets, dtype=torch.bool)
        wrong[targets != NO_TARGET] = self.model.logits(x).argmax(-1) != wanted
        return nats, count, state, wrong

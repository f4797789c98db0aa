"""Any layer of flash-linear-attention as a mixer of our models: `rule="fla:GatedDeltaNet"`.

Settings follow with colons between, `fla:GatedDeltaNet:head_dim=32:expand_v=1`. Without them a
layer gets the model's width, its heads, and dim / heads for their width, as far as it takes any.

    y, state = FlaMixer(config)(x, state, mask, reset)

What a layer keeps in its cache becomes a state like any other: carried, cut anywhere, saved.
Padding and packed documents are handed on as sequences of their own (`cu_seqlens`) to layers that
take them; others refuse. Layers that keep every token (attention of all kinds) are refused, ours
stand in for them. Kernels need a CUDA GPU, the chunked delta rule bfloat16 (`--precision bf16`).
"""

from __future__ import annotations

import inspect
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atlas_lm.nn.packing import Packing
from atlas_lm.nn.stream import checked, expect_count
from atlas_lm.ops.carried import Carried
from atlas_lm.ops.host import capturing, on_host, remember, to_device
from atlas_lm.ops.precision import state_dtype
from atlas_lm.shapes import Embeddings, TokenFlag

PREFIX = "fla:"
DEVICES = ("cuda",)
"""Where its kernels run."""
ONE_BY_ONE = ("Mamba", "Mamba2", "Mamba3")
"""Layers that go on from a state by one token at a time."""


@dataclass(frozen=True, kw_only=True)
class FlaConfig:
    """A layer by its name in `fla.layers`, and what it is made with."""

    name: str
    dim: int
    heads: int = 4
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("dim", "heads"):
            expect_count(name, getattr(self, name))

    @staticmethod
    def parsed(rule: str, dim: int, heads: int) -> FlaConfig:
        """`fla:NAME[:SETTING=VALUE...]`; whether there is such a layer, `fla` has to tell."""
        name, *said = rule.removeprefix(PREFIX).split(":")
        settings = []
        for part in said:
            setting, equals, value = part.partition("=")
            if not equals or not setting.isidentifier():
                raise ValueError(f"rule: {rule!r}: {part!r} is no setting; expected NAME=VALUE")
            settings.append((setting, _value(value)))
        if not name.isidentifier():
            raise ValueError(
                f"rule: {rule!r} names no layer; expected {PREFIX}NAME[:SETTING=VALUE...], such as "
                f"{PREFIX}GatedDeltaNet"
            )
        return FlaConfig(name=name, dim=dim, heads=heads, settings=tuple(settings))

    @property
    def rule(self) -> str:
        return PREFIX + ":".join([self.name, *(f"{n}={v}" for n, v in self.settings)])


def _value(said: str) -> Any:
    try:
        return literal_eval(said)
    except (ValueError, SyntaxError):
        return said


# The layer


@dataclass(frozen=True, eq=False)
class FlaState(Carried):
    """What a layer keeps, by the names that its cache has for it, and how far each row is."""

    kept: dict[str, Tensor]
    position: Tensor
    """Tokens read since the row's document began, int64 `[b]`."""

    @property
    def batch(self) -> int:
        return self.position.shape[0]


class FlaMixer(nn.Module):
    """Embeddings `[b t dim]` in, embeddings out; `y, state = mixer(x, state)`."""

    def __init__(self, config: FlaConfig):
        super().__init__()
        self.config = config
        self.layer = made_layer(config)
        # the name of a variable of its own: layers without one swallow the argument in silence
        code = inspect.unwrap(type(self.layer).forward).__code__
        self.takes_sequences = "cu_seqlens" in code.co_varnames and config.name not in ONE_BY_ONE

    def begin(self, batch: int) -> FlaState:
        """The state before the first token: zeros, which is what layers take for none."""
        weight = next(self.parameters())
        device, position = weight.device, torch.zeros(batch, dtype=torch.int64)
        kept = {
            name: torch.zeros(batch, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in _blank(self.config, device, weight.dtype).items()
        }
        return FlaState(kept=kept, position=to_device(position, device))

    def recurrent_numbers(self, state: Any) -> int:
        """Numbers of one row's recurrent state."""
        kept = {n: t for n, t in state.kept.items() if n.startswith("recurrent_state")}
        return sum(t[0].numel() for t in kept.values())

    def forward(
        self,
        x: Embeddings,
        state: FlaState | None = None,
        mask: TokenFlag | None = None,
        reset: TokenFlag | None = None,
    ) -> tuple[Embeddings, FlaState]:
        """x `[b t dim]`; mask False: no such token; reset True: a document begins here."""
        _require_device(self.config, x.device)
        state = checked(self, state, x)
        before = None if capturing(state.position) else on_host(state.position)
        if mask is not None or reset is not None:
            return self._packed(x, state, on_host(state.position), mask, reset)
        y, kept = self._read(x, state.kept, before)
        position = state.position + x.shape[1]
        if before is not None:
            remember(position, before + x.shape[1])
        return y, FlaState(kept=kept, position=position)

    def _read(
        self, x: Tensor, kept: dict[str, Tensor], before: Tensor | None, **options: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The layer over rows of which each goes on from what it kept; before: how much each has
        read, on the host. None: nobody may ask, since this goes into a CUDA graph."""
        goes_on = before is None or bool((before > 0).any())
        if goes_on and self.config.name in ONE_BY_ONE and x.shape[1] > 1:
            return self._one_by_one(x, kept, before)
        cache = _Cache(self.config, _unflat(kept, x) if goes_on else None, before, bool(options))
        return _called(self.layer, x, cache, **options), dict(_flat(self.config, cache.state))

    def _one_by_one(self, x: Tensor, kept: dict[str, Tensor], before: Tensor | None):
        out = []
        for t in range(x.shape[1]):
            y, kept = self._read(x[:, t : t + 1], kept, None if before is None else before + t)
            out.append(y)
        return torch.cat(out, 1), kept

    def _packed(self, x: Tensor, state: FlaState, before: Tensor, mask, reset):
        """Every document a sequence of its own, all of them behind one another in one row."""
        if not self.takes_sequences:
            raise ValueError(
                f"{self.config.rule}: the layer takes no padding and no packed documents (mask, "
                "reset); give whole rows of one document each, or choose another layer"
            )
        cuts = _Cuts.of(before, mask, reset)
        if not cuts.rows.numel():
            return torch.zeros_like(x), state
        place, rows, goes_on, ends = (
            to_device(part, x.device) for part in (cuts.place, cuts.rows, cuts.goes_on, cuts.ends)
        )

        def entering(old: Tensor) -> Tensor:
            return torch.where(_beside(goes_on, old), old[rows], 0)

        flat = x.flatten(0, 1)
        y, kept = self._read(
            flat[place][None],
            {name: entering(old) for name, old in state.kept.items()},
            torch.where(cuts.goes_on, before[cuts.rows], 0),
            cu_seqlens=to_device(cuts.borders, x.device),
        )
        there = ends >= 0
        after = {
            name: torch.where(_beside(there, old), kept[name][ends.clamp(min=0)], old)
            for name, old in state.kept.items()
        }
        y = torch.zeros_like(flat, dtype=y.dtype).index_copy(0, place, y[0]).view(*x.shape)
        return y, FlaState(kept=after, position=to_device(cuts.after, x.device))


def _called(layer: nn.Module, x: Tensor, cache: _Cache, **options: Any) -> Tensor:
    try:
        return layer(x, past_key_values=cache, use_cache=True, **options)[0]
    except AssertionError as error:
        told = " ".join(str(error).split()) or "the layer refuses this input"
        raise ValueError(
            f"{cache.config.rule}: {told} (input in {x.dtype}; in training, --precision bf16)"
        ) from error


def _beside(flags: Tensor, x: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (x.ndim - 1))


class _Cuts(NamedTuple):
    """Rows with padding and several documents, as sequences. All on the host."""

    place: Tensor
    """Of every token in the rows behind one another."""
    borders: Tensor
    """Of the sequences among these tokens: `cu_seqlens`."""
    rows: Tensor
    """Of each sequence."""
    goes_on: Tensor
    """Whether it began before."""
    ends: Tensor
    """The last sequence of each row; -1: none."""
    after: Tensor
    """Tokens that each row has read since its document began."""

    @staticmethod
    def of(position: Tensor, mask: TokenFlag | None, reset: TokenFlag | None) -> _Cuts:
        mask = None if mask is None else on_host(mask)
        reset = None if reset is None else on_host(reset)
        packing = Packing.of(mask, reset)
        assert packing is not None
        either = mask if mask is not None else reset
        assert either is not None
        present = torch.ones_like(either) if mask is None else mask
        fresh = torch.zeros_like(either) if reset is None else reset & present
        first = present & (present.cumsum(1) == 1)
        place = present.flatten().nonzero()[:, 0]
        opens = (fresh | first).flatten()[place].nonzero()[:, 0]
        rows = place[opens] // either.shape[1]
        ends = torch.full((len(present),), -1)
        ends[rows] = torch.arange(len(rows))  # the last one of a row stays
        return _Cuts(
            place=place,
            borders=torch.cat([opens, opens.new_tensor([len(place)])]),
            rows=rows,
            goes_on=~fresh.flatten()[place][opens],
            ends=ends,
            after=packing.advanced(position),
        )


# What it keeps


class _Cache:
    """What a layer of `fla` asks a cache for, for this one layer, which is number 0."""

    def __init__(
        self, config: FlaConfig, state: dict | None, position: Tensor | None, packed: bool
    ):
        self.config, self.state = config, state
        self._position, self._packed = position, packed

    def __len__(self) -> int:
        return 0 if self.state is None else 1

    def __getitem__(self, layer: int) -> dict[str, Any] | None:
        return self.state

    def get_seq_length(self, layer: int | None = 0, *_: object) -> int:
        """Asked by layers that turn keys by their position, which is one number for all rows."""
        if self._position is None or self._packed or len(self._position.unique()) > 1:
            raise ValueError(
                f"{self.config.rule}: the layer counts positions of all rows alike; give rows that "
                "have read equally much, without padding, packed documents and CUDA graphs"
            )
        return int(self._position[0])

    def update(self, *_: object, **said: Any) -> dict[str, Any]:
        new = {n: v for n, v in said.items() if n.endswith("_state") and v is not None}
        self.state = (self.state or {}) | new
        return self.state


def _flat(config: FlaConfig, state: dict[str, Any] | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a cache under one name, float32 or better."""
    for name, value in (state or {}).items():
        many = isinstance(value, tuple | list)
        for number, part in enumerate(value if many else [value]):
            if part is None:
                continue
            if name == "attn_state" or not isinstance(part, Tensor):
                raise ValueError(
                    f"{config.rule}: the layer keeps {name}, which grows or has no fixed form; "
                    "expected a layer with a recurrent state (for attention there are the rules "
                    "attention and swa)"
                )
            key = f"{name}.{number}" if many else name
            yield key, part.to(state_dtype(part.dtype)) if part.is_floating_point() else part


def _unflat(kept: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
    """As a cache has it. Convolutions go on in the precision of their input; copies, since layers
    write into what they are given."""
    kind = x.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    found: dict[str, Any] = {}
    for key, tensor in kept.items():
        name, dot, _ = key.partition(".")
        exact = name == "recurrent_state" or not tensor.is_floating_point()
        tensor = tensor.clone() if exact else tensor.to(low, copy=True)
        if dot:
            found[name] = (*found.get(name, ()), tensor)
        else:
            found[name] = tensor
    return found


@lru_cache(maxsize=64)
def _blank(
    config: FlaConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of what a row keeps: only reading tells. A layer made for that reads a few
    tokens, so that no weights of a model have to be there."""
    if device.type == "meta":
        device = torch.device(DEVICES[0])
    _require_device(config, device)
    gpus = [device] if device.type == "cuda" else []
    # in bfloat16, which all kernels take; what is kept is kept in float32 anyway
    low = torch.autocast(device.type, torch.bfloat16)
    with torch.random.fork_rng(devices=gpus), low, torch.no_grad():
        layer = made_layer(config).to(device, dtype).eval()
        cache = _Cache(config, None, torch.zeros(2, dtype=torch.int64), packed=False)
        x = torch.zeros(2, 4, config.dim, device=device, dtype=dtype)
        _called(layer, x, cache)
    found = dict(_flat(config, cache.state))
    wrong = [name for name, tensor in found.items() if tensor.shape[:1] != (2,)]
    if wrong or not found:
        what = f"{wrong[0]} without an axis of rows" if wrong else "nothing"
        raise ValueError(f"{config.rule}: the layer keeps {what}; expected a recurrent state")
    return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in found.items()}


# Where layers come from


def made_layer(config: FlaConfig) -> nn.Module:
    """A new layer, with the settings that were given and the model's sizes for the rest."""
    made = _layer_class(config)
    takes = inspect.signature(made).parameters
    values: dict[str, Any] = {"hidden_size": config.dim, "layer_idx": 0}
    # where the number of heads is None, it follows from their width
    if "num_heads" in takes and takes["num_heads"].default is not None:
        values["num_heads"] = config.heads
    if "head_dim" in takes and config.dim % config.heads == 0:
        values["head_dim"] = config.dim // config.heads
    wrong = [name for name, _ in config.settings if name not in takes]
    if wrong:
        known = ", ".join(n for n in takes if n not in ("hidden_size", "layer_idx", "kwargs"))
        raise ValueError(f"{config.rule}: the layer has no setting {wrong[0]!r}; it has {known}")
    try:
        return made(**values | dict(config.settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{config.rule}: the layer cannot be made: {error}") from error


def _layer_class(config: FlaConfig) -> type[nn.Module]:
    try:
        layers = import_module("fla.layers")
    except ImportError as error:
        raise ImportError(
            f"{config.rule}: needs the layers of flash-linear-attention ({error}); pip install "
            "flash-linear-attention"
        ) from error
    found = getattr(layers, config.name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        known = [n for n in dir(layers) if isinstance(getattr(layers, n), type)]
        raise ValueError(
            f"{config.rule}: fla.layers has no {config.name!r}; it has {', '.join(known)}"
        )
    return found


def _require_device(config: FlaConfig, device: torch.device) -> None:
    if device.type in DEVICES:
        return
    raise ValueError(
        f"{config.rule}: its kernels run on a CUDA GPU only, and this is {device.type}; move the "
        "model to a GPU, or choose a rule of our own (gated_delta_net, ...), which run anywhere"
    )

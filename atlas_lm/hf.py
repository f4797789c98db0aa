"""The models in Hugging Face transformers: Auto classes, `generate`, Trainer.

    import atlas_lm.hf
    model = AutoModelForCausalLM.from_pretrained(folder)

Folders are the same on both sides: what `save_model` wrote, `from_pretrained` reads, and what
`save_pretrained` wrote, `load_model` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atlas_lm.models import LanguageModel, ModelConfig, ModelState
from atlas_lm.nn.initialise import initialise

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise ImportError(
        "atlas_lm.hf needs the package transformers; pip install 'atlas-lm[hf]'"
    ) from error

DERIVED = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "tie_word_embeddings": "tied",
}
"""What transformers calls the fields of `ModelConfig`."""


class AtlasLMConfig(PreTrainedConfig):
    """`AtlasLMConfig(dim=256, depth=4, rule="titans")`, or of a `ModelConfig` given as `model`."""

    model_type = "atlas_lm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    model: ModelConfig

    def __init__(self, model: ModelConfig | dict[str, Any] | None = None, **kwargs: Any):
        for theirs, ours in DERIVED.items():
            if theirs in kwargs:
                raise TypeError(f"AtlasLMConfig: {theirs} is called {ours} here")
        given = {f.name: kwargs.pop(f.name) for f in fields(ModelConfig) if f.name in kwargs}
        if isinstance(model, dict):
            model = ModelConfig.from_dict(model)
        self.model = replace(model or ModelConfig(), **given)
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.model = replace(self.model, vocab=size)

    @property
    def hidden_size(self) -> int:
        return self.model.dim

    @property
    def num_hidden_layers(self) -> int:
        return self.model.depth

    @property
    def num_attention_heads(self) -> int:
        return self.model.heads

    @property
    def tie_word_embeddings(self) -> bool:
        return self.model.tied

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"model": self.model.to_dict()}


class AtlasLMCache(Cache):
    """What a model has read, as `past_key_values`: of one size, however much that was.

    A call returns a new cache and leaves the one passed in as it was, so that any number of texts
    may go on from it. The state may also come from elsewhere, such as a memory file: the prompt is
    then read after it and need not repeat what is in it.
    """

    def __init__(self, state: ModelState | None = None, length: int = 0):
        """length: how many columns of the prompt, padding too, were read; `generate` skips them."""
        super().__init__(layers=[])
        self.state, self.length = state, length

    def __repr__(self) -> str:
        return f"AtlasLMCache(length={self.length}, batch_size={self.batch_size})"

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> AtlasLMCache:
        # tensors with a graph behind them can be cloned but not copied
        return AtlasLMCache(None if self.state is None else self.state.clone(), self.length)

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.batch

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reset(self) -> None:
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda state: state[beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda state: state.expand(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda state: state[indices])

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(
            "AtlasLMCache.crop: a memory cannot unread a token, so there is no assisted decoding; "
            "keep the cache from before (no call changes it) and go on from that"
        )

    def _change(self, function: Callable[[ModelState], ModelState]) -> None:
        if self.state is not None:
            self.state = function(self.state)


class AtlasLMForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LanguageModel`, in `model`, as transformers wants it."""

    config_class = AtlasLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True

    config: AtlasLMConfig

    def __init__(self, config: AtlasLMConfig):
        super().__init__(config)
        self.model = LanguageModel(config.model)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AtlasLMCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the token after each, the loss if there are labels, and the cache to go on.

        attention_mask 0: there is no such token; with a cache, its last columns are the new tokens.
        position_ids: where they are 0, another document begins. use_cache None: not in training.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("AtlasLMForCausalLM reads input_ids; inputs_embeds are not supported")
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise ValueError(f"{name}: AtlasLMForCausalLM does not return them")
        cache = _checked_cache(past_key_values, input_ids)
        mask = _mask_of_new(attention_mask, input_ids, cache.length)
        reset = _beginnings(position_ids, input_ids, cache)
        x, state = self.model.encode(input_ids, cache.state, mask, reset)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        read = AtlasLMCache(state, cache.length + input_ids.shape[1])
        wanted = not self.training if use_cache is None else use_cache
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,  # pyright: ignore[reportArgumentType] (their word for any float tensor)
            past_key_values=read if wanted else None,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    # Generation

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward begins its own

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: AtlasLMCache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `forward` takes for the next tokens of `generate`."""
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"input_ids: {input_ids.shape[1]} tokens, of which the cache has read "
                f"{input_ids.shape[1] - next_sequence_length}; expected all of the text so far and "
                "at least one token after what was read"
            )
        if past_key_values is not None and next_sequence_length == 1 and not is_first_iteration:
            # a token that was just generated is there: no need to make a GPU wait to look at it
            attention_mask = None
        # one row is one document, whatever was in the cache before
        kwargs.pop("position_ids", None)
        return super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    # Weights

    def init_weights(self) -> None:
        """Nothing: `LanguageModel` has initialised itself, and has no weights to tie."""

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """After loading: what no file gave is as in a new model, and what is not learned, fixed."""
        ours = dict(self.model.named_parameters())
        missing = [n for n, p in ours.items() if not getattr(p, "_is_hf_initialized", False)]
        with torch.device("cpu" if missing else "meta"):
            new = LanguageModel(self.config.model)
        for name, parameter in new.named_parameters():
            if name in missing:
                ours[name].copy_(parameter)
            elif ours[name].device.type == "cpu":
                # numbers in a mapped file are aligned otherwise, which changes bits
                ours[name].data = ours[name].clone()
            ours[name].requires_grad_(parameter.requires_grad)

    def _init_weights(self, module: nn.Module) -> None:
        """Of an embedding or head that was resized."""
        initialise(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """None where the head reads with the embedding's weights."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.config.model
        return embedding

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Every block or none; how torch checkpoints is not a choice here."""
        self.model.checkpointing = enable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.checkpointing


def _checked_cache(cache: AtlasLMCache | None, input_ids: Tensor) -> AtlasLMCache:
    if cache is None:
        return AtlasLMCache()
    if not isinstance(cache, AtlasLMCache):
        raise TypeError(
            f"past_key_values: expected the AtlasLMCache that this model returned, "
            f"got {type(cache).__name__}"
        )
    if cache.state is not None and cache.batch_size != input_ids.shape[0]:
        raise ValueError(
            f"past_key_values: holds {cache.batch_size} rows, input_ids {input_ids.shape[0]}; "
            "cache.batch_repeat_interleave(n) repeats them, cache.batch_select_indices takes some"
        )
    return cache


def _mask_of_new(attention_mask: Tensor | None, input_ids: Tensor, read: int) -> Tensor | None:
    """The mask of these tokens alone; None where all of them are there."""
    if attention_mask is None:
        return None
    batch, new = input_ids.shape
    if tuple(attention_mask.shape) not in ((batch, new), (batch, read + new)):
        raise ValueError(
            f"attention_mask: shape {tuple(attention_mask.shape)}, expected {(batch, read + new)}: "
            f"{read} columns in the cache and {new} of input_ids"
        )
    mask = attention_mask[:, attention_mask.shape[1] - new :].bool()
    return None if bool(mask.all()) else mask


def _beginnings(
    position_ids: Tensor | None, input_ids: Tensor, cache: AtlasLMCache
) -> Tensor | None:
    """Where documents begin that are packed into one row; None where there is only one."""
    if position_ids is None:
        return None
    if position_ids.ndim != 2 or position_ids.shape[1] != input_ids.shape[1]:
        raise ValueError(
            f"position_ids: shape {tuple(position_ids.shape)}, expected {tuple(input_ids.shape)}"
        )
    begins = (position_ids == 0).expand(input_ids.shape).clone()
    if cache.state is None:
        begins[:, :1] = False  # where there is no state, one begins anyway
    return begins if bool(begins.any()) else None


AutoConfig.register("atlas_lm", AtlasLMConfig, exist_ok=True)
AutoModelForCausalLM.register(AtlasLMConfig, AtlasLMForCausalLM, exist_ok=True)

"""Hugging Face: the same model behind their config, cache, generate, Trainer and folders."""

import copy
import importlib
import json
import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)

from atlas_lm import RULES, LanguageModel, ModelConfig, ModelState, Rule, load_model, save_model
from atlas_lm.hf import AtlasLMCache, AtlasLMConfig, AtlasLMForCausalLM

VOCAB = 31
SMALL = {
    name: replace(rule, chunk=min(rule.chunk, 8), window=min(rule.window, 5))
    for name, rule in RULES.items()
}
TINY = ModelConfig(vocab=VOCAB, dim=16, depth=2, heads=2, rule=SMALL["atlas"], tied=False)
MODELS = {
    "delta_net": replace(TINY, rule=SMALL["delta_net"]),
    "titans": replace(TINY, rule=SMALL["titans"]),
    "atlas": TINY,
    "mac": replace(TINY, block="mac", segment=4),
    "hybrid": replace(TINY, rule=(SMALL["dot"], "attention")),
}
every_model = pytest.mark.parametrize("name", MODELS)
PROMPT = 11


def made(name: str = "atlas", **changes) -> Any:
    """Any, since `generate` asks for a kind of model that type checkers cannot find here."""
    torch.manual_seed(0)
    config = AtlasLMConfig(model=MODELS[name], **changes)
    model = AtlasLMForCausalLM(config).double().eval()
    with torch.no_grad():
        # what was read must matter more than the last token, or that is repeated for ever
        model.model.embedding.weight *= 0.05
    return model


def tokens(batch: int = 2, length: int = PROMPT, seed: int = 1) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=noise)


def left_padding(*absent: int, length: int = PROMPT) -> torch.Tensor:
    """One row for each number of columns without a token."""
    return (torch.arange(length) >= torch.tensor(absent)[:, None]).long()


def close(found: torch.Tensor, expected: torch.Tensor, most: float = 1e-9) -> bool:
    return found.shape == expected.shape and float((found - expected).detach().abs().max()) < most


@pytest.fixture
def said(caplog):
    """What transformers logs as a warning."""
    theirs = logging.getLogger("transformers")
    theirs.addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    theirs.removeHandler(caplog.handler)


# Config


@pytest.mark.parametrize("rule", ["titans", SMALL["atlas"], ("swa", SMALL["dot"])], ids=str)
def test_a_config_comes_back(rule, tmp_path):
    config = AtlasLMConfig(dim=32, depth=2, rule=rule, window=7)
    assert config.model == ModelConfig(dim=32, depth=2, rule=rule, window=7)
    config.save_pretrained(tmp_path)
    for again in (
        AtlasLMConfig.from_dict(config.to_dict()),
        AtlasLMConfig(**json.loads(config.to_json_string())),
        AtlasLMConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        copy.deepcopy(config),
    ):
        assert again.model == config.model
        assert again.to_json_string() == config.to_json_string()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "atlas_lm"
    assert ModelConfig.from_dict(written["model"]) == config.model


def test_a_config_is_known_by_its_model():
    assert AtlasLMConfig(dim=32) == AtlasLMConfig(model=ModelConfig(dim=32))
    assert AtlasLMConfig(dim=32) != AtlasLMConfig(dim=64)
    assert AtlasLMConfig().model == ModelConfig()
    assert AtlasLMConfig(model=TINY, dim=32).model == replace(TINY, dim=32)


def test_a_config_has_the_usual_names():
    config = AtlasLMConfig(vocab=99, dim=48, depth=3, heads=6, tied=False)
    assert (config.vocab_size, config.hidden_size) == (99, 48)
    assert (config.num_hidden_layers, config.num_attention_heads) == (3, 6)
    assert config.tie_word_embeddings is False
    assert AtlasLMConfig(tied=True).tie_word_embeddings is True
    with pytest.raises(TypeError, match=r"^AtlasLMConfig: hidden_size is called dim here$"):
        AtlasLMConfig(hidden_size=64)


# Forward and cache


@torch.no_grad()
@every_model
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_cached_steps_of_any_length_equal_one_pass(name, padded):
    model, ids = made(name), tokens(3, 17)
    mask = None
    if padded:
        mask = left_padding(0, 4, 9, length=17)
        mask[0, 5:8] = mask[2, -1] = 0  # and holes, and an end that is not there
    whole = model(ids, attention_mask=mask)
    cache, found = None, []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 16), (16, 17)):
        seen = None if mask is None else mask[:, :stop]
        step = model(ids[:, start:stop], attention_mask=seen, past_key_values=cache)
        cache = step.past_key_values
        found.append(step.logits)
    assert cache.get_seq_length() == 17
    there = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert close(torch.cat(found, 1)[there], whole.logits[there])
    native, state = model.model(ids, mask=None if mask is None else mask.bool())
    assert torch.equal(native, whole.logits)
    assert torch.equal(state.position, cache.state.position)


@torch.no_grad()
@every_model
def test_padding_changes_nothing(name):
    model, ids = made(name), tokens(3)
    mask = left_padding(0, 4, 9)
    both = model(ids, attention_mask=mask).logits
    for row, absent in enumerate((0, 4, 9)):
        assert close(both[row, absent:], model(ids[row : row + 1, absent:]).logits[0])
    assert torch.equal(model(ids).logits, model(ids, attention_mask=torch.ones_like(ids)).logits)


@torch.no_grad()
def test_the_mask_of_new_tokens_alone_is_enough():
    model, ids, mask = made(), tokens(), left_padding(0, 4)
    cache = model(ids, attention_mask=mask).past_key_values
    new = torch.tensor([[1, 1, 1], [0, 1, 1]])
    alone = model(tokens(2, 3), attention_mask=new, past_key_values=cache)
    whole = torch.cat([mask, new], 1)
    assert torch.equal(
        alone.logits, model(tokens(2, 3), attention_mask=whole, past_key_values=cache).logits
    )


@torch.no_grad()
def test_many_texts_go_on_from_one_cache():
    model, ids = made(), tokens()
    cache = model(ids).past_key_values
    before = cache.state.clone()
    first = model(tokens(2, 5, seed=2), past_key_values=cache).logits
    model.generate(torch.cat([ids, tokens(2, 1)], 1), past_key_values=cache, max_new_tokens=3)
    assert torch.equal(model(tokens(2, 5, seed=2), past_key_values=cache).logits, first)
    assert cache.get_seq_length() == PROMPT
    assert all(torch.equal(t, before.tensors()[n]) for n, t in cache.state.tensors().items())


def test_a_cache_copies_and_forgets_though_it_has_a_graph():
    cache = made()(tokens()).past_key_values
    assert any(t.requires_grad for t in cache.state.tensors().values())
    copied = copy.deepcopy(cache)
    assert copied.state.position is not cache.state.position
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, len(cache), cache.batch_size) == (0, 0, 0, -1)
    assert (copied.get_seq_length(), len(copied), copied.batch_size) == (PROMPT, 2, 2)
    assert copy.deepcopy(cache).state is None
    assert repr(copied) == f"AtlasLMCache(length={PROMPT}, batch_size=2)"


@torch.no_grad()
def test_a_cache_is_of_one_size():
    model = made()
    short, long = (model(tokens(2, n)).past_key_values for n in (3, 40))
    assert short.nbytes == long.nbytes == long.state.nbytes > 0
    assert not long.is_compileable
    assert not long.is_croppable


@torch.no_grad()
def test_rows_of_a_cache_move():
    model, ids, more = made(), tokens(3), tokens(1, 4)
    cache = model(ids).past_key_values
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 1, 5]))
    found = model(more.expand(3, -1), past_key_values=cache).logits
    for row, origin in enumerate((2, 2, 0)):
        whole = model(torch.cat([ids[origin : origin + 1], more], 1)).logits
        assert close(found[row], whole[0, PROMPT:])


def test_a_memory_cannot_unread():
    with pytest.raises(NotImplementedError, match=r"cannot unread a token.*go on from that$"):
        made()(tokens()).past_key_values.crop(1)


@torch.no_grad()
def test_only_the_logits_that_are_wanted():
    model, ids = made(), tokens()
    whole = model(ids).logits
    assert close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    kept = torch.tensor([0, 5])
    assert close(model(ids, logits_to_keep=kept).logits, whole[:, kept])


@torch.no_grad()
def test_a_tuple_and_no_cache_if_asked_for():
    model, ids = made(), tokens()
    logits, cache = model(ids, return_dict=False)
    assert isinstance(cache, AtlasLMCache)
    assert torch.equal(logits, model(ids).logits)
    assert model(ids, use_cache=False).past_key_values is None
    model.train()
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("name", ["titans", "mac"])
def test_packed_documents_do_not_see_each_other(name):
    model = made(name)
    documents = [tokens(1, n, seed=n)[0] for n in (5, 9, 3)]
    packed = DataCollatorWithFlattening(return_tensors="pt")(
        [{"input_ids": d.tolist()} for d in documents]
    )
    output = model(**packed)
    alone = [model(d[None], labels=d[None]) for d in documents]
    assert close(output.logits[0], torch.cat([a.logits[0] for a in alone]))
    counts = torch.tensor([len(d) - 1.0 for d in documents])
    losses = torch.stack([a.loss for a in alone])
    assert close(output.loss, (losses * counts).sum() / counts.sum(), 1e-6)


@torch.no_grad()
def test_usual_position_ids_change_nothing():
    model, ids, mask = made(), tokens(), left_padding(0, 4)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(ids, attention_mask=mask, position_ids=places)
    expected = model(ids, attention_mask=mask)
    assert close(found.logits[mask.bool()], expected.logits[mask.bool()])
    assert torch.equal(found.past_key_values.state.position, torch.tensor([11, 7]))
    more, after = tokens(2, 2), torch.tensor([[11, 12]])
    assert torch.equal(
        model(more, position_ids=after, past_key_values=expected.past_key_values).logits,
        model(more, past_key_values=expected.past_key_values).logits,
    )


def test_the_loss_is_cross_entropy_of_the_next_token():
    model, ids = made(), tokens(3)
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels)
    scores, targets = output.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    assert close(output.loss, cross_entropy(scores, targets), 1e-6)
    total = cross_entropy(scores, targets, reduction="sum")
    found = model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    assert close(found, total / 50, 1e-6)


@pytest.mark.parametrize("name", ["titans", "mac"])
def test_checkpointing_gives_the_same_gradients(name):
    model, ids = made(name).train(), tokens()
    found = []
    for on in (False, True):
        (model.gradient_checkpointing_enable if on else model.gradient_checkpointing_disable)()
        assert model.is_gradient_checkpointing is model.model.checkpointing is on
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 20
    assert all(close(a, b, 1e-12) for a, b in zip(*found, strict=True) if a.numel())


# What is refused


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        ({"input_ids": tokens() + 30}, ValueError, "^tokens: id .* vocabulary, 0 to 30; use the"),
        (
            {"attention_mask": torch.ones(2, 12)},
            ValueError,
            r"^attention_mask: shape \(2, 12\), expected \(2, 11\): 0 columns in the cache and 11",
        ),
        (
            {"attention_mask": torch.ones(2, 1, 11, 11)},
            ValueError,
            r"^attention_mask: shape \(2, 1, 11, 11\), expected \(2, 11\)",
        ),
        (
            {"past_key_values": AtlasLMCache(made().model.begin(3))},
            ValueError,
            "^past_key_values: holds 3 rows, input_ids 2; cache.batch_repeat_interleave",
        ),
        ({"past_key_values": DynamicCache()}, TypeError, "^past_key_values: .* got DynamicCache$"),
        ({"position_ids": torch.arange(5)[None]}, ValueError, r"^position_ids: shape \(1, 5\), ex"),
        ({"inputs_embeds": torch.ones(2, 11, 16)}, ValueError, "inputs_embeds are not supported$"),
        ({"input_ids": None}, ValueError, "^AtlasLMForCausalLM reads input_ids; "),
        ({"output_hidden_states": True}, ValueError, "^output_hidden_states: .* does not return"),
    ],
    ids=["id", "mask", "mask_4d", "rows", "kind", "places", "embeds", "nothing", "hidden"],
)
def test_bad_input_gets_one_clear_message(inputs, error, match):
    with pytest.raises(error, match=match):
        made()(**{"input_ids": tokens()} | inputs)


# Generation


@torch.no_grad()
def greedy_from_scratch(model, ids: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@every_model
def test_greedy_with_a_cache_is_greedy_from_scratch(name):
    model, ids = made(name), tokens()
    found = model.generate(ids, max_new_tokens=12)
    assert len(found[:, PROMPT:].unique()) > 5
    assert torch.equal(found, greedy_from_scratch(model, ids, 12))


@every_model
def test_a_padded_batch_generates_what_each_row_does_alone(name):
    model, ids = made(name), tokens(3)
    options = {"max_new_tokens": 8, "eos_token_id": 5, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=left_padding(0, 4, 9), **options)
    for row, absent in enumerate((0, 4, 9)):
        alone = model.generate(ids[row : row + 1, absent:], **options)[0, PROMPT - absent :]
        assert torch.equal(found[row, PROMPT:][: len(alone)], alone)
        assert not found[row, PROMPT:][len(alone) :].any()


def test_sampling_comes_back_with_its_seed():
    model, ids = made(), tokens()
    options = {"max_new_tokens": 9, "do_sample": True, "num_return_sequences": 3}

    def sampled(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(ids, **options)

    first = sampled(1)
    assert first.shape == (6, PROMPT + 9)
    assert torch.equal(first[:, :PROMPT], ids.repeat_interleave(3, 0))
    assert len(first.unique(dim=0)) == 6
    assert torch.equal(sampled(1), first)
    assert not torch.equal(sampled(2), first)


@every_model
def test_beams_with_a_cache_are_beams_without(name):
    model, ids, mask = made(name), tokens(), left_padding(0, 4)
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 7}
    options |= {"num_return_sequences": 2, "pad_token_id": 0, "eos_token_id": 5}
    found = model.generate(ids, **options)
    assert torch.equal(found, model.generate(ids, **options, use_cache=False))
    assert len(found.unique(dim=0)) == 4


@pytest.mark.parametrize("absent", [0, 4])
def test_generation_goes_on_from_its_cache(absent):
    """The prompt is the whole text so far; only what is new in it is read."""
    model, ids, mask = made(), tokens(), left_padding(0, absent)
    first = model.generate(ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == PROMPT + 4
    text = torch.cat([first.sequences, tokens(2, 3, seed=3)], 1)
    seen = torch.cat([mask, torch.ones(2, 8, dtype=torch.int64)], 1)
    lengths = []
    hook = model.model.embedding.register_forward_hook(lambda _, x, y: lengths.append(y.shape[1]))
    found = model.generate(
        text, attention_mask=seen, past_key_values=first.past_key_values, max_new_tokens=5
    )
    hook.remove()
    assert lengths == [4, 1, 1, 1, 1]
    assert torch.equal(found, model.generate(text, attention_mask=seen, max_new_tokens=5))


def test_a_prompt_without_anything_new_is_refused():
    model, ids = made(), tokens()
    with pytest.raises(ValueError, match=r"^input_ids: 11 tokens, of which the cache has read 11;"):
        model.generate(ids, past_key_values=model(ids).past_key_values, max_new_tokens=2)


def test_a_saved_memory_comes_before_the_prompt(tmp_path):
    model, book, question = made(), tokens(1, 40), tokens(1, 4, seed=2)
    with torch.no_grad():
        model.model(book)[1].save(tmp_path / "memory.safetensors")
    memory = ModelState.load(tmp_path / "memory.safetensors")
    found = model.generate(question, past_key_values=AtlasLMCache(memory), max_new_tokens=6)
    whole = model.generate(torch.cat([book, question], 1), max_new_tokens=6)
    assert torch.equal(found, whole[:, 40:])
    cache = AtlasLMCache(memory)
    cache.batch_repeat_interleave(3)
    beams = model.generate(question, past_key_values=cache, max_new_tokens=6, num_beams=3)
    whole = model.generate(torch.cat([book, question], 1), max_new_tokens=6, num_beams=3)
    assert torch.equal(beams, whole[:, 40:])


def test_a_long_prompt_is_read_in_pieces():
    model, ids, mask = made(), tokens(), left_padding(0, 4)
    options = {"attention_mask": mask, "max_new_tokens": 5}
    found = model.generate(ids, **options, prefill_chunk_size=3, past_key_values=AtlasLMCache())
    assert torch.equal(found, model.generate(ids, **options))


def test_assisted_generation_is_refused():
    with pytest.raises(ValueError, match="not supported with stateful models, such as AtlasLM"):
        made().generate(tokens(1), prompt_lookup_num_tokens=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="inputs_embeds"):
        made().generate(inputs_embeds=torch.ones(1, 3, 16), max_new_tokens=2)


def test_a_generation_config_is_kept(tmp_path):
    model = made()
    model.generation_config = GenerationConfig(max_new_tokens=3, eos_token_id=5, pad_token_id=0)
    model.save_pretrained(tmp_path)
    again: Any = AtlasLMForCausalLM.from_pretrained(tmp_path)
    assert again.generation_config.eos_token_id == 5
    assert again.generate(tokens()).shape[1] <= PROMPT + 3


# Weights and folders


def assert_same_weights(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    assert {n for n, _ in found.named_parameters()} == theirs.keys()
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        assert parameter.dtype == theirs[name].dtype
        assert parameter.requires_grad == theirs[name].requires_grad, name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["atlas", "mac"])
def test_a_model_comes_back_without_a_word(name, tied, tmp_path, said):
    model = made(name, tied=tied)
    model.save_pretrained(tmp_path)
    again = AtlasLMForCausalLM.from_pretrained(tmp_path)
    assert again.config.model == model.config.model
    assert_same_weights(again, model)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert said() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folders_are_the_same_on_both_sides(dtype, tmp_path, said):
    model = made().to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    save_model(model.model, tmp_path / "ours")
    assert_same_weights(load_model(tmp_path / "theirs"), model.model)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same_weights(again, model)
    assert again.generate(tokens(), max_new_tokens=3).shape == (2, PROMPT + 3)
    assert type(again) is AtlasLMForCausalLM
    assert said() == []


def test_a_model_is_loaded_in_another_dtype(tmp_path):
    save_model(made().float().model, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    output = model(tokens(), labels=tokens())
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.isfinite()


def test_weights_in_several_files(tmp_path):
    model = made()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: missing"):
        load_model(tmp_path)


@pytest.mark.parametrize("make", [AtlasLMForCausalLM, AutoModelForCausalLM.from_config])
def test_a_new_model_begins_as_the_native_one(make):
    torch.manual_seed(3)
    model = make(AtlasLMConfig(model=MODELS["mac"]))
    torch.manual_seed(3)
    assert_same_weights(model.model, LanguageModel(MODELS["mac"]))


def test_a_new_model_may_be_bfloat16():
    model = AutoModelForCausalLM.from_config(AtlasLMConfig(model=TINY), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model(tokens()).logits.isfinite().all()


def test_what_a_file_lacks_begins_as_in_a_new_model(tmp_path, said):
    model = made().float()
    save_model(model.model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = {n for n in weights if "blocks.1" in n} - {"model.blocks.1.mixer.out.weight"}
    kept = {n: w for n, w in weights.items() if n not in lost}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    torch.manual_seed(5)
    found = dict(AtlasLMForCausalLM.from_pretrained(tmp_path).named_parameters())
    torch.manual_seed(5)
    new = AtlasLMForCausalLM(model.config)
    assert "model.blocks.1.mixer.gates.up.bias" in "\n".join(said())
    for name, parameter in new.named_parameters():
        assert torch.equal(found[name], parameter if name in lost else weights[name]), name


def test_what_is_not_learned_stays_so(tmp_path):
    """A memory that divides by its sum of weights begins at zero, and must."""
    softmax = Rule(features="exponential", objective="dot", normalize=True, chunk=8)
    model = AtlasLMForCausalLM(AtlasLMConfig(model=replace(TINY, rule=softmax)))
    model.save_pretrained(tmp_path)
    fixed = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert fixed == ["model.blocks.0.mixer.memory.w", "model.blocks.1.mixer.memory.w"]
    assert_same_weights(AtlasLMForCausalLM.from_pretrained(tmp_path), model)


@torch.no_grad()
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "new"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_vocabulary_grows_and_shrinks(tied, mean, tmp_path):
    model, ids = made(tied=tied), tokens()
    before = model(ids).logits
    assert model.resize_token_embeddings(40, mean_resizing=mean) is model.get_input_embeddings()
    assert model.config.vocab_size == model.model.config.vocab == 40
    assert (model.get_output_embeddings() is None) == tied
    found = model(torch.cat([ids, ids + 9], 1)).logits
    assert close(found[:, :PROMPT, :VOCAB], before)
    assert found.shape[-1] == 40
    added = model.get_input_embeddings().weight[VOCAB:].float()
    assert added.std() < 3 * 16**-0.5
    model.save_pretrained(tmp_path)
    assert_same_weights(load_model(tmp_path), model.model)
    model.resize_token_embeddings(VOCAB)
    assert close(model(ids).logits, before)
    with pytest.raises(ValueError, match="vocabulary, 0 to 30"):
        model(ids + 9)


def test_embeddings_are_where_they_are_looked_for():
    model = made()
    assert model.get_input_embeddings() is model.model.embedding
    assert model.get_output_embeddings() is model.model.head
    head, embedding = torch.nn.Linear(16, VOCAB, bias=False), torch.nn.Embedding(VOCAB, 16)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    assert model.model.embedding is embedding
    assert model.model.head is head


def test_a_new_process_reads_both_folders(tmp_path):
    model, ids = made(), tokens()
    model.save_pretrained(tmp_path / "theirs")
    save_model(model.model, tmp_path / "ours")
    code = f"""
import sys, torch, atlas_lm.hf
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(model.generate(torch.tensor({ids.tolist()}), max_new_tokens=5).tolist())
"""
    folders = [str(tmp_path / "theirs"), str(tmp_path / "ours")]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(model.generate(ids, max_new_tokens=5).tolist())] * 2


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "atlas_lm.hf")
    with pytest.raises(ImportError, match=r"; pip install 'atlas-lm\[hf\]'$"):
        importlib.import_module("atlas_lm.hf")


# Trainer


def trained(folder, **options) -> tuple[Any, Trainer]:
    model = made().float()
    rows = [(torch.arange(12) * (i % 3 + 1) + i) % VOCAB for i in range(16)]
    data = [{"input_ids": r, "labels": r, "attention_mask": torch.ones_like(r)} for r in rows]
    data[1]["attention_mask"][:5] = 0
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    return model, trainer


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_trains(tmp_path):
    start = dict(made().float().named_parameters())
    model, trainer = trained(tmp_path)
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] - 0.5
    assert [n for n, p in model.named_parameters() if p.numel() and p.equal(start[n])] == []
    assert trainer.evaluate()["eval_loss"] < losses[0]
    trainer.save_model(str(tmp_path))
    assert_same_weights(load_model(tmp_path), model.model)
    model, trainer = trained(tmp_path, gradient_checkpointing=True)
    assert model.model.checkpointing
    assert losses_of(trainer) == pytest.approx(losses, rel=1e-4)


def test_a_trainer_trains_in_mixed_precision(tmp_path):
    _, trainer = trained(tmp_path, bf16=True)
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] - 0.5

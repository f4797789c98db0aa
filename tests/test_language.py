"""Perplexity and bits per byte: against plain logits, by position, by length, however it is cut."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from atlas_lm import RULES, LanguageModel, ModelConfig, save_model
from atlas_lm.data.prepare import Options, prepare
from atlas_lm.eval.language import score_lengths, score_text
from atlas_lm.eval.readers import LanguageModelReader, TransformersReader, open_reader
from atlas_lm.text import ByteTokenizer, FileTokenizer, save_tokenizer

VOCAB = 257
TEXT = "Käse für 3 €, naïve façade 🙂; und so weiter, immer weiter.\n"
TITANS = replace(RULES["titans"], chunk=8)
CONFIGS = {
    "titans": ModelConfig(vocab=VOCAB, dim=16, depth=2, heads=2, rule=TITANS),
    "hybrid": ModelConfig(vocab=VOCAB, dim=16, depth=2, heads=2, rule=(TITANS, "attention")),
}


def made(name: str = "titans", vocab: int = VOCAB) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIGS[name], vocab=vocab)).double().eval()
    with torch.no_grad():
        # a new model knows next to nothing: make it say something
        model.head_weight.mul_(4)
    return model


def byte_reader(name: str = "titans") -> LanguageModelReader:
    return LanguageModelReader(made(name), ByteTokenizer())


def tiny_llama(vocab: int = 64, context: int = 32) -> Any:
    """A causal model of transformers with rotary positions and shared keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).double().eval()


def letters(begins: bool = True) -> Any:
    """Characters as tokens, with a beginning before every text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *" abcdefghijklmnopqrstuvwxyz.,\nQA:?"]
    library: Any = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    if begins:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    from tokenizers import decoders

    library.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def written(folder, *texts: str):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


@torch.no_grad()
def plain_nats(model: LanguageModel, ids: list[int]) -> np.ndarray:
    """Of all tokens but the first, from one plain pass."""
    logits, _ = model(torch.tensor([ids]))
    return cross_entropy(logits[0, :-1], torch.tensor(ids[1:]).long(), reduction="none").numpy()


# Against plain logits


@pytest.mark.parametrize("segment", [37, 64, None])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_cross_entropy_of_plain_logits(name, segment, tmp_path):
    texts = [TEXT * 5, "x", TEXT, "€uro " * 40]
    reader = byte_reader(name)
    found = score_text(reader, written(tmp_path / "texts", *texts), segment=segment)
    losses = [plain_nats(reader.model, list(text.encode())) for text in texts]
    sizes = [len(text.encode()) for text in texts]
    assert (found.documents, found.tokens, found.bytes) == (4, sum(sizes), sum(sizes))
    assert found.score.tokens == found.bytes - found.given_bytes == sum(sizes) - 4
    total = sum(each.sum() for each in losses)
    assert found.score.nats == pytest.approx(total, rel=1e-11)
    assert found.score.perplexity == pytest.approx(math.exp(total / (sum(sizes) - 4)), rel=1e-9)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / (sum(sizes) - 4), rel=1e-9)
    for place in found.positions:
        # the loss of token i is at i - 1
        inside = [each[max(place.first - 1, 0) : place.last] for each in losses]
        assert place.score.tokens == sum(map(len, inside))
        assert place.score.nats == pytest.approx(sum(map(np.sum, inside)), rel=1e-9)
    bounds = [(p.first, p.last) for p in found.positions]
    assert bounds == [(0, 63), (64, 127), (128, 255), (256, 511)]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_pass_is_any_segments(name, tmp_path):
    folder = written(tmp_path / "texts", TEXT * 9)
    reader = byte_reader(name)
    whole, *parts = (score_text(reader, folder, segment=n) for n in (10**6, 29, 500))
    for part in parts:
        assert abs(part.score.nats_per_token - whole.score.nats_per_token) < 1e-9
        pairs = zip(part.positions, whole.positions, strict=True)
        assert all(abs(a.score.nats - b.score.nats) < 1e-9 * b.score.nats for a, b in pairs)


def test_a_uniform_guess_has_the_perplexity_of_its_vocabulary(tmp_path):
    reader = byte_reader()
    with torch.no_grad():
        reader.model.norm.weight.zero_()
    found = score_text(reader, written(tmp_path / "texts", TEXT * 30, TEXT))
    assert found.score.perplexity == pytest.approx(VOCAB)
    assert found.bits_per_byte == pytest.approx(math.log2(VOCAB))
    assert found.score.error == pytest.approx(0, abs=1e-9)
    lengths = score_lengths(reader, tmp_path / "texts", [8, 64], 16).lengths
    assert [length.gain for length in lengths] == pytest.approx([0, 0], abs=1e-12)


# Errors


def test_the_error_is_over_documents(tmp_path):
    texts = [TEXT * n for n in (1, 5, 2)]
    reader = byte_reader()
    found = score_text(reader, written(tmp_path / "texts", *texts))
    losses = [plain_nats(reader.model, list(text.encode())) for text in texts]
    sums, counts = np.array([each.sum() for each in losses]), np.array([*map(len, losses)])
    left = sums - counts * sums.sum() / counts.sum()
    expected = math.sqrt(3 / 2 * (left**2).sum()) / counts.sum()
    assert found.score.error == pytest.approx(expected, rel=1e-6)
    assert (found.score.unit, found.score.units) == ("documents", 3)
    last = found.positions[-1].score
    assert (last.units, last.unit, last.error) == (1, "blocks", None)  # only one is so long


def test_the_error_of_one_document_is_over_its_blocks(tmp_path):
    text = TEXT * 50
    reader = byte_reader()
    found = score_text(reader, written(tmp_path / "texts", text), segment=300)
    losses = plain_nats(reader.model, list(text.encode()))
    blocks = [losses[i : i + 1024] for i in range(0, len(losses), 1024)]
    sums, counts = np.array([b.sum() for b in blocks]), np.array([*map(len, blocks)])
    left = sums - counts * losses.mean()
    expected = math.sqrt(len(blocks) / (len(blocks) - 1) * (left**2).sum()) / len(losses)
    assert found.score.error == pytest.approx(expected, rel=1e-5)
    assert (found.score.unit, found.score.units) == ("blocks", len(blocks))


def test_equal_documents_have_no_error(tmp_path):
    found = score_text(byte_reader(), written(tmp_path / "texts", TEXT, TEXT, TEXT))
    assert found.score.error == pytest.approx(0, abs=1e-8)


# Context


@pytest.mark.parametrize("context", [5, 64, 100])
def test_a_limited_context_is_blocks_that_know_nothing_of_each_other(context, tmp_path):
    text = TEXT * 6
    reader = byte_reader()
    found = score_text(reader, written(tmp_path / "texts", text), context=context, segment=17)
    ids, total, near = list(text.encode()), 0.0, []
    for begin in range(0, len(ids) - 1, context):
        losses = plain_nats(reader.model, ids[begin : begin + context + 1])
        total += losses.sum()
        near += [*losses[: min(63, context)]]
    assert found.context == context
    assert found.score.tokens == len(ids) - 1
    assert found.score.nats == pytest.approx(total, rel=1e-10)
    assert found.positions[0].score.nats == pytest.approx(sum(near), rel=1e-10)
    assert found.positions[0].score.tokens == len(near)
    assert found.positions[-1].first <= context


def test_tokens_of_a_document_can_be_limited(tmp_path):
    reader = byte_reader()
    folder = written(tmp_path / "texts", TEXT * 3, "short")
    found = score_text(reader, folder, limit=40, segment=16)
    assert (found.tokens, found.bytes) == (45, 45)
    losses = [plain_nats(reader.model, list(t.encode())[:40]) for t in (TEXT * 3, "short")]
    assert found.score.nats == pytest.approx(sum(each.sum() for each in losses), rel=1e-10)


def test_more_context_is_compared_on_the_same_tokens(tmp_path):
    reader = byte_reader()
    texts = [TEXT * 6, "short", TEXT[5:] * 4]
    folder = written(tmp_path / "texts", *texts)
    lengths, last = (100, 1, 30), 20
    told = []
    found = score_lengths(reader, folder, lengths, last, progress=told.append)
    pieces = []
    for text in texts:
        ids = list(text.encode())
        pieces += [ids[i : i + 120] for i in range(0, len(ids) - 119, 120)]
    assert (found.pieces, found.too_short) == (len(pieces), 1)
    assert told[-1] == 120 * len(pieces)
    assert [each.length for each in found.lengths] == [1, 30, 100]
    expected = {}
    for each in found.lengths:
        cut = [plain_nats(reader.model, ids[-(each.length + last) :])[-last:] for ids in pieces]
        expected[each.length] = np.mean(cut)
        assert each.score.nats_per_token == pytest.approx(np.mean(cut), rel=1e-10)
        assert each.gain == pytest.approx(expected[1] - np.mean(cut), abs=1e-10)
        assert (each.score.unit, each.score.units) == ("documents", 2)
    assert found.lengths[0].gain_error is None
    assert found.lengths[1].gain_error is not None


# Tokenizers and shards


@pytest.mark.parametrize("trained", [None, 300], ids=["bytes", "bpe"])
def test_shards_give_what_their_texts_give(trained, tmp_path):
    folder = written(tmp_path / "texts", TEXT * 40, "🙂" * 30, TEXT)
    prepare(Options(sources=(str(folder),), out=tmp_path / "data", train_tokenizer=trained))
    tokenizer: Any = ByteTokenizer()
    if trained is not None:
        tokenizer = FileTokenizer(tmp_path / "data" / "tokenizer.json")
    reader = LanguageModelReader(made(vocab=tokenizer.vocab), tokenizer)
    texts, shards = (score_text(reader, path) for path in (folder, tmp_path / "data"))
    assert texts == shards
    assert texts.bytes == sum(file.stat().st_size for file in folder.iterdir())
    if trained is not None:
        assert texts.tokens < texts.bytes
        with pytest.raises(ValueError, match="prepared with another tokenizer than the model's"):
            score_text(byte_reader(), tmp_path / "data")


def test_bits_per_byte_do_not_count_what_was_given(tmp_path):
    text = "und " + TEXT * 9
    folder = written(tmp_path / "texts", text)
    prepare(Options(sources=(str(folder),), out=tmp_path / "data", train_tokenizer=290))
    tokenizer = FileTokenizer(tmp_path / "data" / "tokenizer.json")
    reader = LanguageModelReader(made(vocab=tokenizer.vocab), tokenizer)
    found = score_text(reader, folder)
    ids = tokenizer.encode(text)
    first = tokenizer.decode(ids[:1])
    assert found.given_bytes == len(first.encode()) > 0
    nats = plain_nats(reader.model, ids).sum()
    assert found.bits_per_byte == pytest.approx(
        nats / math.log(2) / (len(text.encode()) - len(first.encode())), rel=1e-9
    )
    (tmp_path / "smile.txt").write_text("🙂 hm", encoding="utf-8")
    assert score_text(reader, tmp_path / "smile.txt").given_bytes == 1


def test_a_beginning_is_read_but_not_counted(tmp_path):
    model = tiny_llama(context=64)
    reader = TransformersReader(model, letters())
    (tmp_path / "a.txt").write_text("the cat, the hat and the bat.")
    found = score_text(reader, tmp_path / "a.txt", segment=4)
    ids = [1, *reader.tokenizer.encode("the cat, the hat and the bat.")]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    expected = cross_entropy(logits[1:-1], torch.tensor(ids[2:]), reduction="sum")
    assert found.score.nats == pytest.approx(float(expected), rel=1e-10)
    assert (found.tokens, found.bytes, found.given_bytes) == (29, 29, 1)


@torch.no_grad()
def test_a_model_of_transformers_goes_on_in_blocks(tmp_path):
    model = tiny_llama(context=16)
    reader = TransformersReader(model, letters(begins=False))
    text = "a cat sat on a mat. the bat ate the hat, and the rat ran."
    (tmp_path / "a.txt").write_text(text)
    found = score_text(reader, tmp_path / "a.txt", segment=5)
    ids, total = reader.tokenizer.encode(text), 0.0
    for begin in range(0, len(ids) - 1, 16):
        part = torch.tensor(ids[begin : begin + 17])
        logits = model(part[None, :-1]).logits[0]
        total += float(cross_entropy(logits, part[1:], reduction="sum"))
    assert found.context == 16
    assert found.score.tokens == len(ids) - 1
    assert found.score.nats == pytest.approx(total, rel=1e-10)
    with pytest.raises(ValueError, match=r"^context: 17; the model reads 16 tokens at most$"):
        score_text(reader, tmp_path / "a.txt", context=17)
    with pytest.raises(ValueError, match=r"10 to predict are 17 tokens to read.* 16 at most$"):
        score_lengths(reader, tmp_path / "a.txt", [8], 10)


# Files


def test_a_folder_is_opened_and_the_result_is_json(tmp_path):
    save_model(made().float(), tmp_path / "model")
    save_tokenizer(ByteTokenizer(), tmp_path / "model")
    folder = written(tmp_path / "texts", TEXT, TEXT * 2)
    reader = open_reader(tmp_path / "model", "cpu", torch.float64)
    told = []
    found = score_text(reader, [folder / "0.txt", folder], progress=told.append)
    assert found.documents == 3
    assert told[-1] == found.tokens
    again = json.loads(json.dumps(found.to_dict()))
    assert again["bits_per_byte"] == found.bits_per_byte
    assert again["score"]["nats_per_token"] == found.score.nats_per_token
    assert again["positions"][1]["first"] == 64
    lengths = json.loads(json.dumps(score_lengths(reader, folder, [3, 9], 5).to_dict()))
    assert [each["length"] for each in lengths["lengths"]] == [3, 9]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"context": 0}, r"^context: 0; expected 1 tokens or more$"),
        ({"limit": 1}, r"^limit: 1; expected 2 tokens or more of each document$"),
    ],
    ids=["context", "limit"],
)
def test_bad_options_get_one_clear_line(options, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        score_text(byte_reader(), written(tmp_path / "texts", TEXT), **options)


def test_bad_texts_get_one_clear_line(tmp_path):
    reader = byte_reader()
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such text file$"):
        score_text(reader, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"a folder without \*\.txt; expected texts or prepared"):
        score_text(reader, tmp_path / "empty")
    with pytest.raises(ValueError, match=r"no token to predict; expected documents of two or more"):
        score_text(reader, written(tmp_path / "one", "x"))
    with pytest.raises(ValueError, match=r"no document of 70 tokens \(60 of context and 10 to pre"):
        score_lengths(reader, tmp_path / "one", [60], 10)
    with pytest.raises(ValueError, match=r"^lengths: \[0\] before the last 1 tokens; expected 1 t"):
        score_lengths(reader, tmp_path / "one", [0], 1)
    with torch.no_grad():
        reader.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"0\.txt: the loss of some tokens is not finite; the mod"):
        score_text(reader, written(tmp_path / "two", "xy"))

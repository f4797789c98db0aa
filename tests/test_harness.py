"""lm-eval: readers, the adapter's arithmetic, local tasks; the same scores through its own `hf`."""

import gzip
import importlib.util
import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_language import ByteTokenizer, byte_reader, letters, made, tiny_llama

from atlas_lm import save_model
from atlas_lm.eval import harness
from atlas_lm.eval.harness import (
    Wish,
    continue_texts,
    encode_pair,
    rolling_windows,
    score_pairs,
    score_rolling,
)
from atlas_lm.eval.local_tasks import LOCAL_TASKS, read_rows
from atlas_lm.eval.readers import LanguageModelReader, TransformersReader, is_ours, open_reader
from atlas_lm.generate import LIKELIEST, Sampling
from atlas_lm.text import FileTokenizer

DATA = Path(os.environ.get("ATLAS_LM_DATA", Path(__file__).parents[2] / "shared" / "data"))
STORIES = DATA / "stories260K"
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs the extra eval: pip install 'atlas-lm[eval]'",
)
needs_tasks = pytest.mark.skipif(
    not (DATA / "eval").is_dir(), reason="needs the evaluation files; set ATLAS_LM_DATA"
)
needs_stories = pytest.mark.skipif(
    not STORIES.is_dir(), reason="needs the model stories260K; set ATLAS_LM_DATA"
)
loud = pytest.mark.filterwarnings("ignore")
"""lm-eval and what it imports warn of things that are theirs."""


# A public model that is not ours


def stories_folder(folder: Path) -> Path:
    """The files of llama2.c as a folder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = (STORIES / "stories260K.bin").read_bytes()
    dim, hidden, layers, heads, shared, vocab, context = struct.unpack("<7i", data[:28])
    numbers, size = torch.from_numpy(np.frombuffer(data, "<f4", offset=28).copy()), dim // heads

    def take(*shape: int) -> torch.Tensor:
        nonlocal numbers
        part, numbers = numbers[: math.prod(shape)], numbers[math.prod(shape) :]
        return part.view(shape)

    def rotated(weight: torch.Tensor) -> torch.Tensor:
        """Pairs of neighbours are turned there, the two halves of a head here."""
        return weight.view(-1, size // 2, 2, dim).transpose(1, 2).reshape(-1, dim)

    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    names = {"input_layernorm": (dim,), "self_attn.q_proj": (dim, dim)}
    names |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (shared * size, dim))
    names |= {"self_attn.o_proj": (dim, dim), "post_attention_layernorm": (dim,)}
    names |= {"mlp.gate_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}
    names |= {"mlp.up_proj": (hidden, dim)}
    for name, shape in names.items():
        for layer, weight in enumerate(take(layers, *shape)):
            turned = rotated(weight) if name.endswith(("q_proj", "k_proj")) else weight
            weights[f"model.layers.{layer}.{name}.weight"] = turned
    weights["model.norm.weight"] = take(dim)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    left = model.load_state_dict(weights, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    model.save_pretrained(folder)
    stories_tokenizer().save_pretrained(folder)
    return folder


def stories_tokenizer() -> Any:
    """Pieces with scores: of two neighbours, those are joined first that make the best piece."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    data, at, pieces, scores = (STORIES / "tok512.bin").read_bytes(), 4, [], []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        pieces.append(data[at + 8 : at + 8 + length].decode().replace(" ", "▁"))
        scores.append(score)
        at += 8 + length
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (-scores[vocab[piece]], vocab[piece[:i]], vocab[piece[i:]], piece[:i], piece[i:])
        for piece in pieces[259:]
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]
    library: Any = Tokenizer(
        models.BPE(
            vocab,
            [(left, right) for *_, left, right in sorted(merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def stories(tmp_path_factory) -> Path:
    return stories_folder(tmp_path_factory.mktemp("stories"))


# Readers


def transformers_reader(context: int = 64, begins: bool = True) -> TransformersReader:
    return TransformersReader(tiny_llama(38, context), letters(begins))


def wrapped_reader() -> TransformersReader:
    """One of our models behind the interface of transformers."""
    from atlas_lm.hf import AtlasLMConfig, AtlasLMForCausalLM

    ours = made("hybrid", vocab=38)
    model = AtlasLMForCausalLM(AtlasLMConfig(model=ours.config)).double()
    model.model.load_state_dict(ours.state_dict())
    return TransformersReader(model, letters(begins=False))


READERS = {"ours": byte_reader, "transformers": transformers_reader, "wrapped": wrapped_reader}
every_reader = pytest.mark.parametrize("name", READERS)


def plain(reader: Any, ids: list[int]) -> torch.Tensor:
    """Logits after every token, from one pass without a state."""
    with torch.no_grad():
        found = reader.model(torch.tensor([ids]))
    return (found[0] if isinstance(found, tuple) else found.logits)[0]


def ids_of(length: int, seed: int = 0) -> list[int]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(3, 38, (length,), generator=noise).tolist()


@every_reader
def test_a_reader_goes_on_from_any_state_again_and_again(name):
    reader = READERS[name]()
    first, second, third = (ids_of(n, n) for n in (9, 4, 7))
    logits, state = reader.read(torch.tensor([first]), reader.begin(1))
    assert torch.allclose(logits[0], plain(reader, first)[-1], atol=1e-10)
    for more in (second, third, second):
        logits, after = reader.read(torch.tensor([more]), state, every=True)
        assert torch.allclose(logits[0], plain(reader, first + more)[len(first) :], atol=1e-10)
        again, _ = reader.read(torch.tensor([third]), reader.expand(after, 1))
        assert torch.allclose(again[0], plain(reader, first + more + third)[-1], atol=1e-10)


@every_reader
def test_rows_of_any_length_are_read_side_by_side(name):
    reader = READERS[name]()
    rows = [ids_of(n, n) for n in (3, 8, 5)]
    padded = torch.tensor([[0] * (8 - len(row)) + row for row in rows])
    mask = torch.arange(8) >= torch.tensor([[5], [0], [3]])
    state = reader.begin(3)
    for part in (slice(0, 4), slice(4, 8)):  # one row has no token in the first
        logits, state = reader.read(padded[:, part], state, mask[:, part])
    expected = torch.stack([plain(reader, row)[-1] for row in rows])
    assert torch.allclose(logits, expected, atol=1e-10)
    state = reader.select(state, [2, 0, 0])
    more = [ids_of(n, 10 + n) for n in (2, 4, 3)]
    right = torch.tensor([row + [0] * (4 - len(row)) for row in more])
    there = torch.arange(4) < torch.tensor([[2], [4], [3]])
    logits, state = reader.read(right, state, there)
    texts = [rows[i] + row for i, row in zip((2, 0, 0), more, strict=True)]
    expected = torch.stack([plain(reader, text)[-1] for text in texts])
    assert torch.allclose(logits, expected, atol=1e-10)
    state = reader.expand(state, 2)
    logits, _ = reader.read(torch.tensor([[7]] * 6), state)
    expected = torch.stack([plain(reader, [*text, 7])[-1] for text in texts])
    assert torch.allclose(logits, expected.repeat_interleave(2, 0), atol=1e-10)


def test_a_folder_is_opened_whatever_model_it_is(tmp_path):
    model = made()
    save_model(model, tmp_path / "ours")
    ours = open_reader(tmp_path / "ours", "cpu")
    assert isinstance(ours, LanguageModelReader)
    assert (ours.vocab, ours.context, ours.prefix) == (257, None, 256)
    ids = list(b"some text")
    assert torch.equal(plain(ours, ids), plain(LanguageModelReader(model, ByteTokenizer()), ids))
    tiny_llama().save_pretrained(tmp_path / "theirs")
    letters().save_pretrained(tmp_path / "theirs")
    theirs = open_reader(tmp_path / "theirs", "cpu", torch.float32)
    assert isinstance(theirs, TransformersReader)
    assert (theirs.vocab, theirs.context, theirs.prefix) == (64, 32, 1)
    assert theirs.prompt("a cat") == [1, *theirs.tokenizer.encode("a cat")]
    assert theirs.prompt("<s>a cat") == theirs.prompt("a cat")
    assert theirs.model.dtype == torch.float32
    assert [is_ours(tmp_path / name) for name in ("ours", "theirs")] == [True, False]


def test_a_folder_that_is_no_model_gets_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such model folder$"):
        open_reader(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json: missing; expected the folder of a"):
        open_reader(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json: no model_type in it; expected the config"):
        open_reader(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(
        ValueError, match=r"^[^\n]*: transformers cannot read it \([^\n]*tokenizer$"
    ):
        open_reader(tmp_path)
    save_model(made(), tmp_path)
    with pytest.raises(ValueError, match=r"^device moon: cannot be used here \("):
        open_reader(tmp_path, "moon")
    save_model(made(vocab=99), tmp_path)
    with pytest.raises(ValueError, match=r"^tokenizer: it has 257 ids, the model 99; use the"):
        open_reader(tmp_path)


# Contexts and continuations


def test_a_pair_is_split_as_lm_eval_splits_it():
    reader = byte_reader()
    assert encode_pair(reader, "a ", "b") == ([97], [32, 98])
    assert encode_pair(reader, "a", " b") == ([97], [32, 98])
    assert encode_pair(reader, "", "b") == ([256], [98])
    assert encode_pair(reader, " \n", "b") == ([256], [32, 10, 98])
    with pytest.raises(ValueError, match=r"^'': no token of this tokenizer is left of it to be"):
        encode_pair(reader, "a", "")
    begun = transformers_reader()
    a, b, space = begun.tokenizer.encode("ab ")
    assert encode_pair(begun, "a ", "b") == ([1, a], [space, b])
    assert encode_pair(begun, "", "b") == ([1], [b])
    assert encode_pair(begun, "", "<s>b") == ([1], [b])


def test_tokens_across_the_border_belong_to_the_continuation(tmp_path):
    """`whole[len(context):]`, although the context alone ends otherwise than in the whole."""
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "c": 3}, [("a", "b")]))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    reader = LanguageModelReader(made(vocab=4), tokenizer)
    assert encode_pair(reader, "ca", "bc") == ([3, 0], [3])
    with pytest.raises(ValueError, match=r"^a text with nothing before it: the tokenizer has no"):
        encode_pair(reader, "", "c")


def expected_score(reader: Any, context: list[int], ids: list[int]) -> tuple[float, bool]:
    after = plain(reader, context + ids)[len(context) - 1 : -1].log_softmax(-1)
    total = after.gather(1, torch.tensor(ids)[:, None]).sum()
    return float(total), after.argmax(-1).tolist() == ids


def some_pairs(reader: Any) -> list[tuple[list[int], list[int]]]:
    """Choices after one context, contexts that begin alike, others; and a likeliest one."""
    long = ids_of(40, 1)
    contexts = [long, long + ids_of(6, 2), ids_of(5, 3), long + ids_of(2, 4), ids_of(3, 5)]
    pairs = [(c, ids_of(n, n)) for c in contexts for n in (1, 4, 2)]
    best = list(contexts[2])
    for _ in range(3):
        best.append(int(plain(reader, best)[-1].argmax()))
    return [*pairs, (contexts[2], best[5:])]


@every_reader
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_continuations_score_as_in_plain_passes(name, rows, monkeypatch):
    monkeypatch.setattr(harness, "SHARED", 20)
    reader = READERS[name]()
    pairs = some_pairs(reader)
    found = score_pairs(reader, pairs, rows)
    expected = [expected_score(reader, *pair) for pair in pairs]
    assert [score for score, _ in found] == pytest.approx([e for e, _ in expected], rel=1e-9)
    assert [best for _, best in found] == [best for _, best in expected]
    assert found[-1][1]


class CountingReader(LanguageModelReader):
    """Knows how many tokens it has read."""

    def __init__(self):
        super().__init__(made(), ByteTokenizer())
        self.tokens = 0

    def read(self, tokens, state, mask=None, *, every=False):
        self.tokens += tokens.numel() if mask is None else int(mask.sum())
        return super().read(tokens, state, mask, every=every)


def test_what_is_shared_is_read_once():
    reader, passage = CountingReader(), ids_of(200, 1)
    questions = [passage + ids_of(9, n) for n in range(5)]
    answers = [ids_of(4, 50 + n) for n in range(4)]
    pairs = [(question, answer) for question in questions for answer in answers]
    found = score_pairs(reader, pairs, rows=3)
    # the passage (it is known to be shared only up to its last token), 5 questions, 20 answers
    assert reader.tokens <= 199 + 5 * 10 + 20 * 3
    assert [score for score, _ in found] == pytest.approx(
        [expected_score(reader, *pair)[0] for pair in pairs], rel=1e-9
    )


def test_what_a_model_cannot_read_is_cut_from_the_left():
    reader = transformers_reader(context=16)
    context, choices = ids_of(30), [ids_of(1, 1), ids_of(5, 2), ids_of(16, 3)]
    found = score_pairs(reader, [(context, ids) for ids in choices])
    expected = [expected_score(reader, context[-(17 - len(ids)) :], ids)[0] for ids in choices]
    assert [score for score, _ in found] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match=r"^a continuation of 17 tokens; the model reads 16$"):
        score_pairs(reader, [(context, ids_of(17))])


# Whole texts


def test_windows_predict_every_token_once():
    ids = list(range(10))
    assert list(rolling_windows(ids, 99, 4)) == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(rolling_windows(ids[:3], 99, 4)) == [([99], [0, 1, 2])]
    assert list(rolling_windows([], 99, 4)) == []


def test_a_text_is_scored_after_the_prefix(monkeypatch):
    reader, text = byte_reader(), "Käse für alle"
    ids = list(text.encode())
    assert score_rolling(reader, text) == pytest.approx(expected_score(reader, [256], ids)[0])
    monkeypatch.setattr(harness, "SEGMENT", 3)
    assert score_rolling(reader, text) == pytest.approx(expected_score(reader, [256], ids)[0])
    limited = transformers_reader(context=8)
    ids = limited.prompt("a cat sat on a mat")
    windows = rolling_windows(ids, 1, 8)
    expected = sum(expected_score(limited, *window)[0] for window in windows)
    assert score_rolling(limited, "a cat sat on a mat") == pytest.approx(expected)


# Generating


def test_wishes_are_read_or_refused():
    found = Wish.of({"until": ["\n", ""], "max_gen_toks": 5, "do_sample": False})
    assert found == Wish(("\n",), 5, LIKELIEST)
    assert Wish.of({}) == Wish((), 256, LIKELIEST)
    assert Wish.of({"until": ".", "temperature": 0.0}) == Wish((".",), 256, LIKELIEST)
    assert Wish.of({"max_new_tokens": 3, "max_gen_toks": None}).most == 3
    warm = Wish.of({"do_sample": True, "temperature": 0.5, "top_p": 0.9})
    assert warm.sampling == Sampling(temperature=0.5, top_p=0.9)
    with pytest.raises(ValueError, match=r"^num_beams: not known to the adapter atlas-lm; expect"):
        Wish.of({"num_beams": 4})


def greedy(reader: Any, ids: list[int], steps: int) -> list[int]:
    drawn: list[int] = []
    for _ in range(steps):
        token = int(plain(reader, ids + drawn)[-1].argmax())
        if token == reader.tokenizer.end:
            break
        drawn.append(token)
    return drawn


@every_reader
def test_texts_go_on_with_the_likeliest_tokens(name):
    reader = READERS[name]()
    prompts = ["a cat sat on a", "the", "a cat, the", "the"]
    expected = [
        reader.tokenizer.decode(greedy(reader, reader.prompt(prompt), 9)) for prompt in prompts
    ]
    assert continue_texts(reader, prompts, Wish((), 9, LIKELIEST), rows=2) == expected
    drawn = [letter for letter in "".join(expected) if letter.isascii()]
    stop = drawn[len(drawn) // 2]
    stopped = continue_texts(reader, prompts, Wish((stop,), 9, LIKELIEST))
    assert stopped == [text.split(stop)[0] for text in expected]


def test_prompts_leave_room_for_what_is_generated():
    reader = transformers_reader(context=16)
    prompt = "the cat sat on the mat and ate"
    ids = reader.prompt(prompt)[-11:]
    expected = reader.tokenizer.decode(greedy(reader, ids, 5))
    assert continue_texts(reader, [prompt], Wish((), 5, LIKELIEST)) == [expected]
    with pytest.raises(ValueError, match=r"^max_gen_toks: 16; the model reads 16 tokens in all$"):
        continue_texts(reader, [prompt], Wish((), 16, LIKELIEST))


def test_drawing_comes_back_with_its_seed():
    reader = byte_reader()
    wish = Wish((), 12, Sampling(temperature=3.0))
    first = continue_texts(reader, ["a", "b"], wish)
    assert continue_texts(reader, ["a", "b"], wish) == first
    assert first[0] != first[1]
    other = replace(wish, sampling=Sampling(temperature=3.0, seed=1))
    assert continue_texts(reader, ["a", "b"], other) != first


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_the_adapter_answers_requests_in_their_order(capsys):
    reader = byte_reader()
    model = harness.Adapter(reader=reader, batch_size=2)
    pairs = [("a cat", " sat"), ("the mat of", " x"), ("a cat", " ran away"), ("", "then")]
    found = model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    encoded = [encode_pair(reader, *pair) for pair in pairs]
    expected = [expected_score(reader, *pair) for pair in encoded]
    assert [s for s, _ in found] == pytest.approx([s for s, _ in expected])
    assert [b for _, b in found] == [b for _, b in expected]
    texts = ["one", "another one"]
    rolled = model.loglikelihood_rolling([asked(text) for text in texts], disable_tqdm=True)
    assert rolled == pytest.approx([score_rolling(reader, text) for text in texts])
    wishes = [{"max_gen_toks": 3}, {"max_gen_toks": 6}, {"max_gen_toks": 3}]
    prompts = ["a cat", "a cat", "the"]
    requests = [asked(*each) for each in zip(prompts, wishes, strict=True)]
    expected = [
        continue_texts(reader, [prompt], Wish.of(wish))[0]
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    assert model.generate_until(requests, disable_tqdm=True) == expected
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match=r"^atlas-lm: expected either a folder \(pretrained\) or"):
        harness.Adapter()


# Local tasks


def task_rows() -> dict[str, list[dict[str, Any]]]:
    """Rows as the published files have them, four of each, by the names of the tasks."""
    four = range(4)
    texts = ["cat", "hat", "mat", "bat"]
    lettered = {"label": list("ABCD"), "text": texts}
    passage = "the cat sat on the mat. the bat ate the hat."
    query = "Question: what ate {}?\n A. cat\n B. hat\n C. mat\n D. bat\nAnswer:"
    return {
        "lambada_openai": [{"text": f"the {t} sat on the {t}"} for t in texts],
        "hellaswag": [
            {
                "ind": i,
                "activity_label": "sitting",
                "ctx_a": "a cat sat.",
                "ctx_b": "it",
                "endings": [f"ate a {t}. [step]" for t in texts],
                "label": str(i),
            }
            for i in four
        ],
        "arc_easy": [
            {
                "id": str(i),
                "query": query.format(texts[i]),
                "choices": list("ABCD"),
                "gold": i,
                "label": i,
            }
            for i in four
        ],
        "arc_challenge": [
            {"id": str(i), "question": "what sat?", "choices": lettered, "answerKey": "ABCD"[i]}
            for i in four
        ],
        "boolq": [
            {"question": f"is {t} a cat", "answer": t == "cat", "passage": passage} for t in texts
        ],
        "social_iqa": [
            {
                "context": "a cat sat.",
                "question": f"what did the {t} do?",
                "answerA": "ran",
                "answerB": "sat",
                "answerC": "ate",
                "label": str(i % 3 + 1),
            }
            for i, t in enumerate(texts)
        ],
        "openbookqa": [
            {"id": t, "question_stem": f"a {t} is", "choices": lettered, "answerKey": "ABCD"[i]}
            for i, t in enumerate(texts)
        ],
        "commonsense_qa": [
            {
                "id": t,
                "question": f"where is the {t}?",
                "choices": {"label": list("ABCDE"), "text": [*texts, "rat"]},
                "answerKey": "ABCDE"[i],
            }
            for i, t in enumerate(texts)
        ],
        "copa": [
            {
                "premise": f"The {t} sat.",
                "choice1": "It ate.",
                "choice2": "It ran.",
                "question": ["cause", "effect"][i % 2],
                "idx": i,
                "label": i % 2,
            }
            for i, t in enumerate(texts)
        ],
        "squad_completion": [
            {
                "id": t,
                "title": "cats",
                "query": f"Title: cats\nBackground: {passage}\nQuestion: what {t}?\nAnswer:",
                "choices": [t],
            }
            for t in texts
        ],
        "drop": [
            {"query_id": t, "passage": passage, "question": f"which {t}?", "answers": [[t], ["9"]]}
            for t in texts
        ],
        "nq_open": [{"question": f"who is the {t}", "answer": [f"the {t}", t]} for t in texts],
    }


@pytest.fixture(scope="module")
def made_data(tmp_path_factory) -> Path:
    """Files as they are published, made here."""
    folder = tmp_path_factory.mktemp("data") / "eval"
    folder.mkdir()
    for name, rows in task_rows().items():
        path = folder / LOCAL_TASKS[name].file
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return folder.parent


def test_fields_become_those_of_the_published_data(made_data):
    rows = {name: read_rows(name, made_data) for name in LOCAL_TASKS}
    assert {len(each) for each in rows.values()} == {4}
    assert rows["arc_easy"][3] == {
        "id": "3",
        "question": "what ate bat?",
        "choices": {"text": ["cat", "hat", "mat", "bat"], "label": list("ABCD")},
        "answerKey": "D",
    }
    assert [row["label"] for row in rows["boolq"]] == [1, 0, 0, 0]
    assert rows["drop"][1]["answer"]["spans"] == ["hat"]
    assert rows["drop"][1]["validated_answers"]["spans"] == [["9"]]
    assert rows["squad_completion"][2]["value"] == "mat"


@needs_tasks
def test_the_published_files_are_read_whole():
    counts = json.loads((DATA / "eval" / "COUNTS.json").read_text())
    for name, task in LOCAL_TASKS.items():
        assert len(read_rows(name, DATA)) == counts[task.file.split(".")[0]], name
    letters_of = [
        row["answerKey"] in row["choices"]["label"] for row in read_rows("arc_easy", DATA)
    ]
    assert all(letters_of)


def test_bad_files_get_one_clear_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"copa_val\.jsonl\.gz: missing, and copa reads it"):
        read_rows("copa", tmp_path)
    path = tmp_path / "boolq_val.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "is it", "passage": "no"}'))
    with pytest.raises(
        ValueError, match=r"gz: line 1 is no row of boolq \(KeyError: 'answer'\); e"
    ):
        read_rows("boolq", tmp_path)
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"gz: damaged \(.*\); expected lines of JSON, compressed"):
        read_rows("boolq", tmp_path)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=r"gz: empty; expected the rows of boolq$"):
        read_rows("boolq", tmp_path)


# The real harness


@pytest.fixture(scope="module")
def our_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    save_model(made().float(), folder)
    return folder


def through(model: Any, tasks: list[str], data: Path, limit: int | None = None) -> dict[str, Any]:
    """Numbers of each task, from lm-eval, by a model of its interface."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    with harness.quiet_offline():
        found: Any = simple_evaluate(
            model=model,
            tasks=harness.load_tasks(tasks, data),
            task_manager=TaskManager(include_defaults=False),
            limit=limit,
            gen_kwargs={"max_gen_toks": 12},
            bootstrap_iters=0,
            log_samples=True,
        )
    return {task: numbers(found["results"][task]) for task in tasks} | {
        f"{task}, answers": [each["filtered_resps"] for each in found["samples"][task]]
        for task in tasks
    }


def numbers(results: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in results.items() if isinstance(value, float)}


@loud
@needs_harness
def test_every_task_runs_end_to_end_offline(our_folder, made_data, capsys):
    before = [os.environ.get(name) for name in harness.SETTINGS]
    options: Any = {"device": "cpu", "new_tokens": 12, "resamples": 20}
    found = harness.evaluate(our_folder, list(LOCAL_TASKS), made_data, **options)
    assert [os.environ.get(name) for name in harness.SETTINGS] == before
    assert capsys.readouterr().out == ""
    assert found["results"]["copa"]["acc_stderr,none"] > 0
    assert found["results"]["lambada_openai"]["perplexity_stderr,none"] > 0
    assert json.loads(json.dumps(found)) == found
    assert list(found["results"]) == list(found["data"]) == list(LOCAL_TASKS)
    assert all(found["n-samples"][task]["effective"] == 4 for task in LOCAL_TASKS)
    assert found["harness"]["model"] == "atlas-lm"
    assert found["data"]["arc_challenge"]["differs"].startswith("the 299 questions of the valid")
    reader = open_reader(our_folder, "cpu")
    rows = task_rows()["lambada_openai"]
    pairs = [encode_pair(reader, *row["text"].rsplit(" ", 1)) for row in rows]
    scores = [expected_score(reader, [*c, 32], w)[0] for c, w in pairs]
    spaces = [expected_score(reader, c, [32])[0] for c, _ in pairs]
    perplexity = math.exp(-(sum(scores) + sum(spaces)) / 4)
    assert found["results"]["lambada_openai"]["perplexity,none"] == pytest.approx(perplexity)
    arc = []
    for row in read_rows("arc_easy", made_data):
        context = f"Question: {row['question']}\nAnswer:"
        each = [encode_pair(reader, context, f" {text}") for text in row["choices"]["text"]]
        likeliest = max(range(4), key=lambda i: expected_score(reader, *each[i])[0])
        arc.append("ABCD"[likeliest] == row["answerKey"])
    assert found["results"]["arc_easy"]["acc,none"] == np.mean(arc)


@loud
@needs_harness
def test_who_knows_the_answers_scores_all(made_data):
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class Oracle(LM):
        """Is told the task and the row of every request."""

        def loglikelihood(self, requests, **_):
            return [(0.0, True) if self.right(r) else (-99.0, False) for r in requests]

        def right(self, request) -> bool:
            task = tasks[request.task_name]
            if task.OUTPUT_TYPE == "loglikelihood":
                return True
            target, choices = task.doc_to_target(request.doc), task.doc_to_choice(request.doc)
            return (
                choices[target] == choices[request.idx]
                if isinstance(target, int)
                else (choices[request.idx] == target)
            )

        def generate_until(self, requests, **_):
            return [self.answer(request) for request in requests]

        def answer(self, request) -> str:
            doc = request.doc
            if request.task_name == "drop":
                return doc["answers"][0][0]
            return doc["answer"][0] if "answer" in doc else doc["value"]

        def loglikelihood_rolling(self, requests, **_):
            raise NotImplementedError

    names = list(LOCAL_TASKS)
    with harness.quiet_offline():
        tasks = dict(zip(names, harness.load_tasks(names, made_data), strict=True))
    found = through(Oracle(), names, made_data)
    for name in names:
        values = found[name]
        values.pop("perplexity,none", None)
        values.pop("acc_norm,none", None)  # by the length of a choice, which says nothing here
        assert set(values.values()) == {1.0}, name


@loud
@needs_harness
def test_hugging_face_and_the_adapter_score_alike(made_data, tmp_path):
    """A model of transformers, and one of ours behind its interface."""
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    names = ["lambada_openai", "arc_challenge", "copa", "boolq", "nq_open", "drop"]
    for reader in (transformers_reader(context=512), wrapped_reader()):
        tokenizer = reader.tokenizer.library
        tokenizer.pad_token = tokenizer.eos_token
        theirs = HFLM(pretrained=reader.model, tokenizer=tokenizer, batch_size=3, max_length=512)
        readers: list[Any] = [reader]
        if reader.context is None:
            readers.append(OwnReader(reader))
        expected = through(theirs, names, made_data)
        for each in readers:
            ours = harness.adapter()(reader=each, batch_size=3)
            assert_alike(through(ours, names, made_data), expected)
            longest = 12 if each.context is None else 30  # there in two windows
            texts = [asked("the cat sat on the mat. " * n) for n in (1, 3, longest)]
            both = (m.loglikelihood_rolling(texts, disable_tqdm=True) for m in (ours, theirs))
            assert_alike(*map(list, both))


class OwnReader(LanguageModelReader):
    """The model within a wrapper of transformers, with that one's tokenizer."""

    def __init__(self, wrapped: TransformersReader):
        self.model, self.tokenizer = wrapped.model.model, wrapped.tokenizer
        self.vocab, self.prefix = wrapped.vocab, wrapped.prefix


def assert_alike(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_alike(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_alike(a, b)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5)
    else:
        assert found == expected


@loud
@needs_harness
@pytest.mark.parametrize("name", ["arc_easy", "openbookqa", "lambada_openai", "nq_open"])
def test_no_question_is_among_its_examples(name, made_data):
    with harness.quiet_offline():
        (task,) = harness.load_tasks([name], made_data)
    task.set_fewshot_seed(1)
    for doc in task.eval_docs:
        question = task.doc_to_text(doc)
        assert task.fewshot_context(doc, num_fewshot=3).count(question) == 1


@loud
@needs_harness
def test_windows_are_those_of_lm_eval():
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )

    for length in range(12):
        ids = list(range(length))
        theirs = get_rolling_token_windows(ids, 99, max_seq_len=4, context_len=1)
        assert list(rolling_windows(ids, 99, 4)) == list(map(make_disjoint_window, theirs))


@loud
@needs_harness
def test_what_is_not_at_hand_gets_one_clear_line(our_folder, made_data, tmp_path):
    with pytest.raises(ValueError, match=r"^tasks: winogrande: no local file is known for it, and"):
        harness.evaluate(our_folder, ["copa", "winogrande"], made_data)
    with pytest.raises(ValueError, match=r"^shots: 2; squad_completion takes no examples in lm-ev"):
        harness.evaluate(our_folder, ["squad_completion"], made_data, shots=2)
    with pytest.raises(FileNotFoundError, match=r"copa_val\.jsonl\.gz: missing, and copa reads it"):
        harness.evaluate(our_folder, ["copa"], tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ValueError, match=r"^[^\n]*: lm-eval cannot read it \([^\n]*tokenizer$"):
        harness.evaluate(tmp_path, ["copa"], made_data)


def test_without_lm_eval_it_says_what_to_install(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"not installed; pip install 'atlas-lm\[eval\]'$"):
        harness.evaluate(tmp_path, ["copa"], tmp_path)


# A public model


@needs_stories
def test_the_public_model_writes_what_its_authors_print(stories):
    reader = open_reader(stories, "cpu")
    printed = (STORIES / "stories260K.md").read_text().split("-t 0.0\n", 1)[1].split("\n```")[0]
    (found,) = continue_texts(reader, [""], Wish((), 120, LIKELIEST))
    assert len(found) > 200
    assert printed.startswith(found)


@loud
@needs_harness
@needs_stories
@needs_tasks
def test_the_public_model_scores_alike_through_both(stories):
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    names, limit = ["lambada_openai", "arc_easy", "copa"], 8
    expected = through(HFLM(str(stories), device="cpu", batch_size=8), names, DATA, limit)
    found = through(harness.adapter()(stories, device="cpu", batch_size=8), names, DATA, limit)
    assert_alike(found, expected)
    ran = harness.evaluate(stories, names, DATA, limit=limit, device="cpu", resamples=0)
    assert ran["harness"]["model"] == "hf"
    assert {name: numbers(ran["results"][name]) for name in names} == {
        name: expected[name] for name in names
    }

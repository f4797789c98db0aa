"""Reading prompts, drawing tokens, streaming text."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atlas_lm import RULES, LanguageModel, ModelConfig, ModelState
from atlas_lm.generate import Generation, Sampling, generate, read, stream_text
from atlas_lm.testing import assert_close
from atlas_lm.text import ByteTokenizer, FileTokenizer

SMALL = {
    "titans": {"rule": replace(RULES["titans"], chunk=8)},
    "atlas": {"rule": replace(RULES["atlas"], chunk=8, window=3)},
    "delta_net": {"rule": "delta_net"},
    "swa": {"rule": "swa", "window": 5},
    "mac": {"rule": replace(RULES["titans"], chunk=8), "block": "mac", "segment": 6},
}
every_model = pytest.mark.parametrize("name", SMALL)
bytes_ = ByteTokenizer()


def tiny(name: str = "titans", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    settings = {"dim": 16, "depth": 2, "heads": 2, **SMALL[name], **changes}
    return LanguageModel(ModelConfig(**settings)).double().eval()


def tokens_of(count: int, vocab: int = 257) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(1)).tolist()


class Writes(LanguageModel):
    """Writes these ids one after the other once it has read `after` tokens; repeats the last."""

    def __init__(self, ids: list[int], after: int, vocab: int = 257, sure: float = 50.0):
        super().__init__(ModelConfig(vocab=vocab, dim=16, depth=1, heads=2, rule="delta_net"))
        self.ids, self.after, self.sure = ids, after, sure
        self.calls: list[int] = []

    def encode(self, tokens, state=None, mask=None, reset=None):
        state = self.begin(tokens.shape[0]) if state is None else state
        self.calls.append(tokens.shape[1])
        places = state.position[:, None] + torch.arange(tokens.shape[1])
        return places[..., None], replace(state, position=state.position + tokens.shape[1])

    def logits(self, x):
        place = (x[..., 0] + 1 - self.after).clamp(0, len(self.ids) - 1)
        return self.sure * torch.eye(self.config.vocab)[torch.tensor(self.ids)[place]]


class Says(Writes):
    """The same logits after every token."""

    def __init__(self, logits: list[float]):
        super().__init__([0], 0, len(logits))
        self.said = torch.tensor(logits)

    def logits(self, x):
        return self.said.expand(*x.shape[:-1], -1)


def assert_same(found: ModelState, expected: ModelState) -> None:
    assert_close(found.tensors(), expected.tensors(), "the state")


# Reading


@every_model
def test_segments_read_what_one_pass_reads(name):
    model, ids = tiny(name), tokens_of(45)
    expected, state = model(torch.tensor([ids]))
    for tokens in (ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)):
        found, after = read(model, tokens, segment=16)
        assert_close({"logits": found}, {"logits": expected[0, -1].detach()}, "segments")
        assert_same(after, state.detach())


def test_segments_end_at_multiples_of_the_position():
    model = Writes([0], 0)
    state = read(model, tokens_of(10), segment=16)[1]
    read(model, tokens_of(30), state, segment=16)
    assert model.calls == [10, 6, 16, 8]


def test_a_reading_resumed_between_segments_is_the_same_to_the_last_bit():
    model, ids = tiny().float(), tokens_of(61)
    expected, whole = read(model, ids, segment=16)
    _, half = read(model, ids[:32], segment=16)
    found, state = read(model, ids[32:], half, segment=16)
    assert torch.equal(found, expected)
    theirs = whole.tensors()
    assert all(torch.equal(t, theirs[n]) for n, t in state.tensors().items())


def test_progress_counts_the_tokens_of_this_reading():
    model, seen = Writes([0], 0), []
    _, state = read(model, tokens_of(5), segment=8)
    read(model, tokens_of(20), state, segment=8, progress=seen.append)
    assert seen == [3, 11, 19, 20]


def test_only_the_last_token_is_worth_logits():
    model, shapes = tiny(), []
    head = model.logits
    model.logits = lambda x: (shapes.append(tuple(x.shape)), head(x))[1]
    read(model, tokens_of(50), segment=16)
    assert shapes == [(16,)]


def test_what_was_read_can_be_trained_on():
    model, ids = tiny(), tokens_of(20)
    logits, state = read(model, ids)
    assert not logits.requires_grad
    assert not any(t.requires_grad for t in state.tensors().values())
    part = torch.tensor([ids[:8]])
    model.loss(part, part, state)[0].backward()


def test_reading_leaves_the_state_as_it_was():
    model = tiny()
    state = read(model, tokens_of(13))[1]
    before = state.clone()
    read(model, tokens_of(9), state)
    assert_same(state, before)


def test_memory_stays_flat_over_fifty_thousand_tokens():
    """In one pass they would take 250 MiB more than the first 10,000."""
    code = """
import resource
from atlas_lm import LanguageModel, ModelConfig
from atlas_lm.generate import read
model = LanguageModel(ModelConfig(dim=64, depth=1, heads=2, rule="delta_net")).eval()
peak = []
for count in (10_000, 50_000):
    read(model, [7] * count)
    peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peak[1] - peak[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 * 1024  # KiB


# Generation


def from_scratch(model: LanguageModel, prompt: list[int], count: int, sampling: Sampling):
    """Ids and their log-probability, every one from all the tokens before it, in one pass."""
    ids, logprob, random = list(prompt), 0.0, torch.Generator().manual_seed(sampling.seed)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0][0, -1]
        ids.append(
            int(torch.multinomial(sampling.probabilities(logits), 1, generator=random).item())
        )
        logprob += float(logits.log_softmax(0)[ids[-1]])
    return ids[len(prompt) :], logprob


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(temperature=2.0, top_k=99, top_p=0.9, seed=3)],
    ids=["greedy", "drawn"],
)
@every_model
def test_generation_is_that_from_scratch(name, sampling):
    model, prompt = tiny(name), tokens_of(11)
    drawn = generate(model, prompt, max_tokens=14, sampling=sampling)
    ids, logprob = from_scratch(model, prompt, 14, sampling)
    assert list(drawn) == ids
    assert drawn.logprob == pytest.approx(logprob, rel=1e-9)


def test_the_state_is_that_of_prompt_and_tokens_at_any_moment():
    model, prompt = tiny(), tokens_of(11)
    drawn, ids = generate(model, prompt, max_tokens=8), []
    while True:
        assert_same(drawn.state, read(model, prompt + ids)[1])
        token = next(drawn, None)
        if token is None:
            break
        ids.append(token)
    assert int(drawn.state.position) == 11 + 8


def test_looking_at_the_state_changes_no_token():
    model, prompt = tiny(), tokens_of(11)
    looked = generate(model, prompt, max_tokens=12)
    ids = [(token, looked.state)[0] for token in looked]
    assert ids == list(generate(model, prompt, max_tokens=12))


def test_generation_goes_on_from_a_state():
    model, prompt = tiny(), tokens_of(30)
    state = read(model, prompt[:17])[1]
    before = state.clone()
    found = list(generate(model, prompt[17:], state, max_tokens=9))
    assert found == list(generate(model, prompt, max_tokens=9))
    assert_same(state, before)


def test_every_token_costs_the_same():
    """One token in, and a state that does not grow: nothing else is kept."""
    model = tiny(depth=1)
    drawn, lengths = generate(model, tokens_of(20), max_tokens=10_000), []
    model.embedding.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    next(drawn)
    size = drawn.state.nbytes
    for _ in islice(drawn, 300):
        pass
    assert set(lengths) == {1}
    assert drawn.state.nbytes == size
    assert not [v for v in vars(drawn).values() if isinstance(v, list)]


def test_a_last_token_is_not_read_unless_the_state_is_wanted():
    model = Writes([5, 6, 7], after=2)
    drawn = generate(model, [1, 2], max_tokens=3)
    assert list(drawn) == [5, 6, 7]
    assert model.calls == [2, 1, 1]
    assert int(drawn.state.position) == 5
    assert model.calls == [2, 1, 1, 1]


def test_a_stop_ends_and_is_neither_given_out_nor_read():
    model = Writes([5, 6, 9, 7], after=2)
    drawn = generate(model, [1, 2], max_tokens=10, stop={8, 9})
    assert list(drawn) == [5, 6]
    assert list(drawn) == []
    assert int(drawn.state.position) == 4


def test_the_stop_counts_in_the_logprob():
    model = Writes([5, 9], after=1, sure=3.0)
    drawn = generate(model, [1], max_tokens=4, sampling=Sampling(temperature=0.0), stop=[9])
    assert list(drawn) == [5]
    one = torch.tensor([3.0] + [0.0] * 256).double().log_softmax(0)[0]
    assert drawn.logprob == pytest.approx(2 * float(one))


def test_no_tokens_may_be_wanted():
    drawn = generate(tiny(), tokens_of(3), max_tokens=0)
    assert list(drawn) == []
    assert drawn.logprob == 0
    assert int(drawn.state.position) == 3


def test_generation_works_where_gradients_are_on_and_leaves_them_on():
    drawn = generate(tiny(), tokens_of(3), max_tokens=2)
    for _ in drawn:
        assert torch.is_grad_enabled()
    assert not any(t.requires_grad for t in drawn.state.tensors().values())


# Sampling


def draws(logits: list[float], count: int, sampling: Sampling) -> list[int]:
    return list(generate(Says(logits), [0], max_tokens=count, sampling=sampling))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_softmax_says(temperature):
    logits, count = [0.0, 1.0, -1.0, 2.0], 3000
    seen = Counter(draws(logits, count, Sampling(temperature=temperature)))
    for token, p in enumerate((torch.tensor(logits).double() / temperature).softmax(0).tolist()):
        assert abs(seen[token] - count * p) < 4 * (count * p * (1 - p)) ** 0.5


def slow_probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    likeliest = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = [2.718281828459045 ** (x / sampling.temperature) for x in logits]
    kept = likeliest[: sampling.top_k]
    total, reached, chosen = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if reached >= sampling.top_p * total:
            break
        chosen.append(i)
        reached += weights[i]
    return [weights[i] / reached if i in chosen else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 4, 50])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.95, 1.0])
def test_probabilities_are_those_of_a_slow_loop(temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = sampling.probabilities(logits)
    expected = torch.tensor(slow_probabilities(logits.tolist(), sampling), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


LOGITS = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(top_k=1), {3}),
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_k=9), {0, 1, 2, 3}),
        (Sampling(top_p=0.39), {3}),
        (Sampling(top_p=0.41), {1, 3}),
        (Sampling(top_p=0.71), {0, 1, 3}),
        (Sampling(top_k=2, top_p=0.56), {3}),  # 0.4 of 0.7 is 0.57
        (Sampling(top_k=2, top_p=0.58), {1, 3}),
        (Sampling(temperature=0.0), {3}),
        (Sampling(temperature=1e-300), {3}),
    ],
    ids=str,
)
def test_exactly_these_tokens_can_be_drawn(sampling, tokens):
    found = sampling.probabilities(LOGITS)
    assert set(found.nonzero().flatten().tolist()) == tokens
    assert float(found.sum()) == pytest.approx(1)
    assert set(draws(LOGITS.tolist(), 200, sampling)) == tokens


def test_of_equals_the_lower_ids_are_kept():
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.4)):
        assert sampling.probabilities(torch.zeros(5)).tolist() == [0.5, 0.5, 0, 0, 0]


def test_a_seed_draws_the_same_again():
    first = draws([0.0] * 50, 40, Sampling(seed=1))
    assert first == draws([0.0] * 50, 40, Sampling(seed=1))
    assert first != draws([0.0] * 50, 40, Sampling(seed=2))


# Text


def saved(library: Tokenizer, folder: Path) -> FileTokenizer:
    library.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder / "tokenizer.json")


def byte_level(*special: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat said yes and the dog said no"] * 9, trainer)
    return made


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request, tmp_path) -> ByteTokenizer | FileTokenizer:
    return bytes_ if request.param == "bytes" else saved(byte_level("<|endoftext|>"), tmp_path)


def test_pieces_together_are_what_was_drawn(tokenizer):
    model, text = tiny(vocab=tokenizer.vocab, depth=1), "the cat é"
    for seed in range(4):
        chosen = Sampling(seed=seed)
        prompt = tokenizer.encode(text)
        ids = list(generate(model, prompt, max_tokens=40, sampling=chosen, stop=[tokenizer.end]))
        pieces = list(stream_text(model, tokenizer, text, max_tokens=40, sampling=chosen))
        assert "".join(pieces) == tokenizer.decode(ids)
        assert all(pieces)


def test_text_comes_in_whole_characters_until_the_end(tokenizer):
    written = "é漢字 😀!"
    ids = [*tokenizer.encode(written), tokenizer.end, *tokenizer.encode("more")]
    model = Writes(ids, len(tokenizer.encode("so")), tokenizer.vocab)
    pieces = list(stream_text(model, tokenizer, "so", max_tokens=99))
    assert "".join(pieces) == written
    assert len(pieces) > 4
    assert "\ufffd" not in written


def test_a_character_that_is_never_completed_is_shown_as_such():
    model = Writes([*b"a\xe6\xbc", 256], after=1)
    assert list(stream_text(model, bytes_, "x", max_tokens=9)) == ["a", "\ufffd"]


def test_a_space_between_the_text_and_what_comes_after_is_kept(tmp_path):
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(["the cat said yes and the dog said no"] * 9, trainer)
    tokenizer = saved(made, tmp_path)
    before, whole = tokenizer.encode("the cat"), tokenizer.encode("the cat said yes")
    model = Writes(whole[len(before) :], len(before), tokenizer.vocab)
    pieces = stream_text(model, tokenizer, "the cat", max_tokens=len(whole) - len(before))
    assert "".join(pieces) == " said yes"


def test_without_text_a_new_document_begins(tokenizer):
    model = tiny(vocab=tokenizer.vocab)
    assert tokenizer.end is not None
    ids = list(generate(model, [tokenizer.end], max_tokens=9, stop=[tokenizer.end]))
    assert "".join(stream_text(model, tokenizer, "", max_tokens=9)) == tokenizer.decode(ids)


def test_text_goes_on_from_a_state():
    model = tiny()
    state = read(model, bytes_.encode("once upon "))[1]
    found = "".join(stream_text(model, bytes_, "a time", state, max_tokens=20))
    assert found == "".join(stream_text(model, bytes_, "once upon a time", max_tokens=20))


# What is refused


def test_without_text_there_must_be_a_beginning(tmp_path):
    with pytest.raises(ValueError, match=r"^text: '' has no tokens to go on from; give a text"):
        stream_text(tiny(), bytes_, "", tiny().begin(1), max_tokens=3)
    endless = saved(byte_level(), tmp_path)
    with pytest.raises(ValueError, match=r"^text: '' has no tokens to go on from; give a text"):
        stream_text(tiny(vocab=endless.vocab), endless, "", max_tokens=3)


def test_another_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"^tokenizer: it has 257 ids, the model 300; use the "):
        stream_text(tiny(vocab=300), bytes_, "a", max_tokens=3)


@pytest.mark.parametrize("state", [False, True])
def test_a_prompt_without_tokens_is_refused(state):
    model = tiny()
    with pytest.raises(ValueError, match=r"^read: no tokens.*give one token or more$"):
        read(model, [], model.begin(1) if state else None)
    with pytest.raises(ValueError, match=r"^read: no tokens"):
        generate(model, [], max_tokens=3)


@pytest.mark.parametrize(
    ("error", "tokens", "match"),
    [
        (TypeError, [1.5], r"^read: tokens are torch.float32; expected whole numbers$"),
        (TypeError, [True], r"^read: tokens are torch.bool; expected whole numbers$"),
        (ValueError, [[1, 2]], r"^read: tokens of shape \(1, 2\); expected one row, \[time\]$"),
        (ValueError, [1, 300], r"^tokens: id 300 is not in this model's vocabulary, 0 to 256"),
    ],
    ids=["floats", "flags", "rows", "vocabulary"],
)
def test_tokens_that_are_none_are_refused(error, tokens, match):
    with pytest.raises(error, match=match):
        read(tiny(), tokens)


def test_other_wrong_input_is_refused():
    model: Any = tiny()
    with pytest.raises(ValueError, match=r"^read: segment 0; expected 1 token or more$"):
        read(model, [1], segment=0)
    with pytest.raises(ValueError, match=r"^state: 3 rows; expected one: state\[i\] takes row i$"):
        read(model, [1], model.begin(3))
    with pytest.raises(TypeError, match=r"^state: LayerState; expected the ModelState that"):
        read(model, [1], model.begin(1).layers[0])
    with pytest.raises(ValueError, match=r"^generate: max_tokens -1; expected 0 or more$"):
        generate(model, [1], max_tokens=-1)


def test_a_damaged_model_is_noticed():
    model = tiny()
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(
        ValueError, match=r"^read: the logits after token 2 are not all finite; the "
    ):
        generate(model, [1, 2], max_tokens=1)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"temperature": -0.1}, r"^temperature: -0.1; expected 0 \(the likeliest\) or more$"),
        ({"temperature": float("inf")}, r"^temperature: inf; "),
        ({"temperature": float("nan")}, r"^temperature: nan; "),
        ({"top_k": 0}, r"^top_k: 0; expected 1 or more, or None for all tokens$"),
        ({"top_p": 0.0}, r"^top_p: 0.0; expected more than 0 and at most 1 \(all\)$"),
        ({"top_p": 1.1}, r"^top_p: 1.1; "),
        ({"seed": -1}, r"^seed: -1; expected a whole number from 0 to "),
    ],
    ids=str,
)
def test_sampling_says_what_is_wrong(wrong, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**wrong)


def test_a_generation_is_an_iterator():
    drawn = generate(Writes([4], 1), [1], max_tokens=2)
    assert isinstance(drawn, Generation)
    assert iter(drawn) is drawn

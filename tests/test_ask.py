"""Asking a memory: closed sets, free answers, and what task.json may say."""

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from atlas_lm import RULES, LanguageModel, ModelConfig, ModelState
from atlas_lm.ask import ROWS, Answer, Task, ask, ask_both, continuation, weigh
from atlas_lm.generate import read
from atlas_lm.text import ByteTokenizer, FileTokenizer

BYTES = ByteTokenizer()
ANSWERS = ("yes", "no", "perhaps", "not told")
CLOSED = Task(
    templates={"plain": "Q: {question}\nA: ", "short": "?{question}="},
    stop=("\n", "."),
    max_tokens=12,
    answers=ANSWERS,
    not_told="not told",
)
FREE = replace(CLOSED, answers=None)
STORY = "The cat sat on the mat, and the dog said nothing at all."


def tiny(vocab: int = 257) -> LanguageModel:
    torch.manual_seed(0)
    rule = replace(RULES["titans"], chunk=8)
    config = ModelConfig(vocab=vocab, dim=16, depth=2, heads=2, rule=rule)
    return LanguageModel(config).double().eval()


class Writes(LanguageModel):
    """Writes this text of bytes after the prompt, whatever it is, and nearly surely."""

    def __init__(self, text: bytes | list[int], prompt: str):
        super().__init__(ModelConfig(dim=16, depth=1, heads=2, rule="delta_net"))
        self.ids, self.after = list(text), len(BYTES.encode(prompt))

    def encode(self, tokens, state=None, mask=None, reset=None):
        state = self.begin(tokens.shape[0]) if state is None else state
        places = state.position[:, None] + torch.arange(tokens.shape[1])
        return places[..., None], replace(state, position=state.position + tokens.shape[1])

    def logits(self, x):
        place = (x[..., 0] + 1 - self.after).clamp(0, len(self.ids) - 1)
        return 9.0 * torch.eye(257)[torch.tensor(self.ids)[place]]


SURE = float(torch.tensor([9.0] + [0.0] * 256).double().softmax(0)[0])


def memory(model: LanguageModel, tokenizer=BYTES) -> ModelState:
    return read(model, tokenizer.encode(STORY))[1]


def trained(made: Tokenizer, folder: Path, size: int = 300, **options: Any) -> FileTokenizer:
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
    made.train_from_iterator([STORY, "Q: yes or no? A: perhaps, not told"] * 9, trainer)
    return saved(made, folder)


def saved(made: Tokenizer, folder: Path) -> FileTokenizer:
    made.save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder / "tokenizer.json")


def byte_level(folder: Path) -> FileTokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return trained(made, folder, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def prepending(folder: Path) -> FileTokenizer:
    """As Llama's: puts a space before whatever comes first, even before a space."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # while it is trained: merges stay in words
    trained(made, folder, 90, special_tokens=["<unk>"])
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Metaspace()
    return saved(made, folder)


def words(folder: Path) -> FileTokenizer:
    """Every word a token, white space and strange letters none."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return trained(made, folder)


# Closed sets


def slowly(model, tokenizer, task: Task, story: list[int], question: str, template=None):
    """Each answer alone, with everything before it, in one pass; log-probabilities summed."""
    prompt, scores = task.prompt(question, template), []
    for answer in task.answers or ():
        before = story + tokenizer.encode(prompt)
        ids = continuation(tokenizer, prompt, task.completion(answer, template))
        with torch.no_grad():
            after = model(torch.tensor([before + ids]))[0][0].log_softmax(-1)
        scores.append(sum(float(after[len(before) + i - 1, t]) for i, t in enumerate(ids)))
    return torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()


@pytest.mark.parametrize("template", [None, "short"])
@pytest.mark.parametrize("kind", [None, byte_level, prepending])
def test_answers_weigh_what_a_slow_loop_finds(kind, template, tmp_path):
    tokenizer = BYTES if kind is None else kind(tmp_path)
    model, story = tiny(tokenizer.vocab), tokenizer.encode(STORY)
    state = read(model, story)[1]
    found = weigh(model, tokenizer, CLOSED, "the cat", state, template)
    assert list(found) == list(ANSWERS)
    expected = slowly(model, tokenizer, CLOSED, story, "the cat", template)
    assert list(found.values()) == pytest.approx(expected, rel=1e-9)
    assert sum(found.values()) == pytest.approx(1)
    answer = ask(model, tokenizer, CLOSED, "the cat", state, template)
    assert answer.text == max(found, key=lambda text: found[text])
    assert answer.probability == max(found.values())


def test_more_answers_than_are_scored_at_once():
    model = tiny()
    task = replace(CLOSED, answers=tuple(str(2**n) for n in range(2 * ROWS + 1)), not_told=None)
    found = weigh(model, BYTES, task, "how many", memory(model))
    expected = slowly(model, BYTES, task, BYTES.encode(STORY), "how many")
    assert list(found.values()) == pytest.approx(expected, rel=1e-9)


def test_an_answer_of_one_token(tmp_path):
    tokenizer = words(tmp_path)
    model = tiny(tokenizer.vocab)
    task = replace(CLOSED, answers=("yes", "no"), not_told=None)
    assert len(continuation(tokenizer, task.prompt("cat"), task.completion("no"))) == 1
    found = weigh(model, tokenizer, task, "cat sat", None)
    assert list(found.values()) == pytest.approx(slowly(model, tokenizer, task, [], "cat sat"))


def test_an_answer_of_which_no_token_is_left_is_refused(tmp_path):
    tokenizer = words(tmp_path)
    task = replace(CLOSED, answers=("yes", "漢字"), not_told=None)
    with pytest.raises(ValueError, match=r"^' 漢字\\n': no token of this tokenizer is left"):
        weigh(tiny(tokenizer.vocab), tokenizer, task, "cat", None)


@pytest.mark.parametrize(("best", "told"), [("no", True), ("not told", False)])
def test_the_likeliest_answer_is_given(best, told):
    model = Writes(f" {best}\n".encode(), CLOSED.prompt("why"))
    answer = ask(model, BYTES, CLOSED, "why", None)
    assert (answer.text, answer.told) == (best, told)
    assert answer.probability > 0.99


def test_the_stop_tells_an_answer_from_its_beginning():
    task = replace(CLOSED, answers=("1", "12", "123"), not_told=None)
    for number in task.answers or ():
        model = Writes(f" {number}\n".encode(), task.prompt("why"))
        assert ask(model, BYTES, task, "why", None).text == number


# Prompts


def test_spaces_at_the_end_of_a_template_belong_to_the_answer():
    assert CLOSED.prompt("Who?") == "Q: Who?\nA:"
    assert CLOSED.completion("no") == " no\n"
    assert CLOSED.prompt("Who?", "short") == "?Who?="
    assert CLOSED.completion("no", "short") == "no\n"


@pytest.mark.parametrize("kind", [byte_level, prepending])
def test_prompt_and_continuation_together_are_the_ids_of_the_text(kind, tmp_path):
    tokenizer = kind(tmp_path)
    prompt, completion = CLOSED.prompt("the cat"), CLOSED.completion("yes")
    ids = tokenizer.encode(prompt) + continuation(tokenizer, prompt, completion)
    assert ids == tokenizer.encode(prompt + completion)


def test_a_prompt_keeps_its_ids_where_the_text_would_merge_with_it(tmp_path):
    tokenizer = byte_level(tmp_path)
    assert len(tokenizer.encode(" the")) == 1
    assert continuation(tokenizer, " t", "he") == tokenizer.encode("he")


@pytest.mark.parametrize("question", ["{question}", "{0} {} }{ {question!r}", "%s $x \\1", "漢字?"])
def test_a_question_is_never_taken_for_a_template(question):
    assert CLOSED.prompt(question) == f"Q: {question}\nA:"
    model = tiny()
    assert ask(model, BYTES, CLOSED, question, memory(model)).text in ANSWERS


def test_white_space_around_a_question_does_not_count():
    assert CLOSED.prompt("  who \n") == CLOSED.prompt("who")


@pytest.mark.parametrize("task", [CLOSED, FREE], ids=["closed", "free"])
@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused(task, question):
    with pytest.raises(ValueError, match=r"^question: empty; ask something$"):
        ask(tiny(), BYTES, task, question, None)


# Free answers


def free(text: bytes | list[int], **changes: Any) -> Answer:
    task = replace(FREE, **changes)
    return ask(Writes(text, task.prompt("why")), BYTES, task, "why", None)


@pytest.mark.parametrize(
    ("written", "text", "tokens"),
    [
        (b" Paris\nQ: more", "Paris", 7),
        (b" Paris. It", "Paris", 7),
        (b"Paris .\n", "Paris", 7),
        ("漢字.".encode(), "漢字", 7),
        (b"\nParis", "", 1),
        ([*b"Pa", 256], "Pa", 3),
        (b"Paris, Rome and more", "Paris, Rome", 12),
        (b"Paris, Rome\xe6\xbc", "Paris, Rome\ufffd", 12),
    ],
    ids=["line", "earliest", "stripped", "bytes", "empty", "end", "most", "unfinished"],
)
def test_a_free_answer_ends_at_the_first_stop(written, text, tokens):
    answer = free(written)
    assert answer.text == text
    assert answer.probability == pytest.approx(SURE**tokens)


def test_a_stop_may_take_several_tokens():
    assert free(b"a<b<end>c", stop=("<end>",)).text == "a<b"


def test_spaces_in_front_are_no_stop():
    assert free(b"  Paris Rome", stop=(" ",), not_told=None).text == "Paris"


@pytest.mark.parametrize(("written", "told"), [(b" not told\n", False), (b" not\n", True)])
def test_a_free_answer_may_be_that_nothing_was_told(written, told):
    assert free(written).told is told
    assert free(written, not_told=None).told


def test_a_free_answer_is_what_the_likeliest_tokens_spell():
    model, ids, logprob = tiny(), BYTES.encode(STORY + FREE.prompt("why")), 0.0
    start = len(ids)
    while len(ids) < start + FREE.max_tokens:
        with torch.no_grad():
            after = model(torch.tensor([ids]))[0][0, -1].log_softmax(0)
        ids.append(int(after.argmax()))
        logprob += float(after.max())
    answer = ask(model, BYTES, FREE, "why", memory(model))
    assert not {10, 46, 256} & set(ids[start:])
    assert answer.text == BYTES.decode(ids[start:]).strip()
    assert answer.probability == pytest.approx(torch.tensor(logprob).double().exp().item())


# Memories


@pytest.mark.parametrize("task", [CLOSED, FREE], ids=["closed", "free"])
def test_asking_changes_nothing(task):
    model = tiny()
    state = memory(model)
    before = state.clone()
    first = ask(model, BYTES, task, "why", state)
    assert ask(model, BYTES, task, "why", state) == first
    after = state.tensors()
    assert all(torch.equal(after[n], t) for n, t in before.tensors().items())


@pytest.mark.parametrize("task", [CLOSED, FREE], ids=["closed", "free"])
def test_both_are_the_answers_with_and_without_the_memory(task):
    model = tiny()
    state = memory(model)
    told, guessed = ask_both(model, BYTES, task, "why", state, "short")
    assert told == ask(model, BYTES, task, "why", state, "short")
    assert guessed == ask(model, BYTES, task, "why", model.begin(1), "short")
    assert told.probability != guessed.probability


def pairs(number: random.Random) -> tuple[str, str, str]:
    """Two facts, a letter to ask for, and the answer: one of three letters was not told."""
    facts = dict(zip(number.sample("abc", 2), number.choices("0123", k=2), strict=True))
    asked = number.choice("abc")
    return "".join(f"{k}={v};" for k, v in facts.items()), asked, facts.get(asked, "-")


TOY = Task(
    templates={"ask": "?{question}"},
    stop=("\n",),
    max_tokens=3,
    answers=(*"0123", "-"),
    not_told="-",
)


@cache
def toy_model() -> LanguageModel:
    """Trained until it is right ten times over: in 100 to 420 steps with each of eight seeds."""
    torch.manual_seed(6)
    model = LanguageModel(ModelConfig(dim=32, depth=1, heads=2, rule="delta_net"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    number, right = random.Random(6), 0
    for _ in range(1000):
        rows = [pairs(number) for _ in range(64)]
        ids = [BYTES.encode(f + TOY.prompt(q) + TOY.completion(a)) for f, q, a in rows]
        tokens = torch.tensor(ids)
        targets = tokens[:, 1:].clone()
        targets[:, :-2] = -100
        loss, _ = model.loss(tokens[:, :-1], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = right + 1 if loss < 0.003 else 0
        if right == 10:
            break
    return model.eval()


@pytest.mark.parametrize("task", [TOY, replace(TOY, answers=None)], ids=["closed", "free"])
def test_a_trained_memory_is_asked_what_it_read(task):
    model, number = toy_model(), random.Random(1)
    for _ in range(30):
        facts, asked, expected = pairs(number)
        state = read(model, BYTES.encode(facts))[1]
        answer = ask(model, BYTES, task, asked, state)
        assert (answer.text, answer.told) == (expected, expected != "-"), facts
        assert answer.probability > 0.8


# What is refused


def test_other_input_that_does_not_fit_is_refused(tmp_path):
    model = tiny()
    with pytest.raises(ValueError, match=r"^template: 'long' is not one of plain, short$"):
        ask(model, BYTES, CLOSED, "why", None, "long")
    with pytest.raises(ValueError, match=r"^state: 3 rows; expected one: state\[i\] takes row i$"):
        ask(model, BYTES, CLOSED, "why", memory(model).expand(3))
    with pytest.raises(ValueError, match=r"^weigh: any text may be an answer of this task; ask "):
        weigh(model, BYTES, FREE, "why", None)
    for task in (CLOSED, FREE):
        with pytest.raises(ValueError, match=r"^tokenizer: it has 300 ids, the model 257; use "):
            ask(model, byte_level(tmp_path), task, "why", None)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"templates": {}}, r"^templates: \{\}; expected prompts by name, one or more$"),
        ({"templates": ["{question}"]}, r"^templates: \['\{question\}'\]; expected prompts by"),
        ({"templates": {"a": "Who?"}}, r"^templates: 'a' is 'Who\?'; expected a text with \{ques"),
        ({"templates": {"a": "{question}{question}"}}, r"^templates: 'a' is .* in it once$"),
        ({"templates": {"a": 3}}, r"^templates: 'a' is 3; expected a text"),
        ({"stop": ()}, r"^stop: \(\); expected a list of one text or more, none empty$"),
        ({"stop": "\n"}, r"^stop: '\\n'; expected a list"),
        ({"stop": ("",)}, r"^stop: \(''\,\); expected a list"),
        ({"stop": (3,)}, r"^stop: \(3,\); expected a list"),
        ({"max_tokens": 0}, r"^max_tokens: 0; expected a number, 1 or more$"),
        ({"max_tokens": True}, r"^max_tokens: True; "),
        ({"max_tokens": "9"}, r"^max_tokens: '9'; "),
        ({"answers": ()}, r"^answers: \(\); expected a list of different texts"),
        ({"answers": ("a", "a")}, r"^answers: \('a', 'a'\); expected a list of different texts"),
        ({"answers": (" a",)}, r"^answers: .* without white space around them, or null"),
        ({"answers": ("",)}, r"^answers: "),
        ({"answers": "yes"}, r"^answers: 'yes'; "),
        ({"answers": (1,)}, r"^answers: \(1,\); "),
        ({"not_told": "unknown"}, r"^not_told: 'unknown' is not one of the answers; add it"),
        ({"not_told": "a "}, r"^not_told: 'a '; expected a text without white space around it"),
        ({"not_told": 0}, r"^not_told: 0; expected a text"),
        ({"answers": None, "not_told": "No. Not."}, r"^not_told: 'No. Not.' is never the answer"),
        ({"version": 2}, r"^version: 2; this atlas-lm knows 1: update it$"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named_in_python_and_in_the_file(wrong, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        replace(CLOSED, **wrong)
    CLOSED.save(tmp_path)
    path = tmp_path / "task.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ValueError, match=match.replace("^", f"^{path}: ")):
        Task.load(tmp_path)


# Files


@pytest.mark.parametrize("task", [CLOSED, FREE, TOY], ids=["closed", "free", "toy"])
def test_a_saved_task_comes_back(task, tmp_path):
    task.save(tmp_path / "model")
    assert Task.load(tmp_path / "model") == task
    assert list(Task.load(str(tmp_path / "model")).templates) == list(task.templates)
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["task.json"]


def test_a_task_written_by_hand_needs_little(tmp_path):
    said = {"templates": {"a": "{question} "}, "stop": ["\n"], "max_tokens": 5}
    (tmp_path / "task.json").write_text(json.dumps(said))
    assert Task.load(tmp_path) == Task(templates={"a": "{question} "}, stop=("\n",), max_tokens=5)


def test_a_model_without_a_task_says_what_it_can_do(tmp_path):
    match = r"task.json: missing: this model was not trained to be asked; `atlas-lm generate` cont"
    with pytest.raises(FileNotFoundError, match=match):
        Task.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such model folder$"):
        Task.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"{", r"task.json: not a JSON file \("),
        (b"\xff", r"task.json: not a JSON file \("),
        (b"[]", r"task.json: a list; expected an object with the fields of a task$"),
        (b'{"colour": 1}', r"task.json: colour: unknown; known are templates, stop, max_tokens,"),
        (b'{"stop": []}', r"task.json: templates, max_tokens: missing; a task has templates, stop"),
    ],
    ids=["cut", "binary", "list", "unknown", "missing"],
)
def test_a_broken_file_is_named(content, match, tmp_path):
    (tmp_path / "task.json").write_bytes(content)
    with pytest.raises(ValueError, match=match):
        Task.load(tmp_path)

"""Evaluation: the metric is right, a stopped one goes on, and what may be chance has no rank."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from atlas_lm import LanguageModel, ModelConfig, load_model, save_model
from atlas_lm.cli import main
from atlas_lm.eval.answers import answers, row_share
from atlas_lm.eval.compare import read_evaluations, table
from atlas_lm.eval.language import score_text
from atlas_lm.eval.language_tasks import _metrics
from atlas_lm.eval.readers import open_reader, segment_of
from atlas_lm.eval.results import FORMAT, RESULTS, read_results, write_results
from atlas_lm.eval.run import Plan, evaluate
from atlas_lm.eval.score import Share
from atlas_lm.models.costs import costs
from atlas_lm.tasks.babi import ANSWERS, SOLVERS, solve
from atlas_lm.tasks.haystack import sentences
from atlas_lm.tasks.rows import EVALUATE, ROW_TASKS, rows
from atlas_lm.tasks.table import TEXT_TASKS, Folders, Materials
from atlas_lm.text import ByteTokenizer

ASKED = [*(f"babilong/{qa}" for qa in SOLVERS), "niah/pass-key", "niah/number", "niah/uuid"]


# Shares


def test_intervals_are_wilsons():
    """Against values printed in Brown, Cai and DasGupta's terms, by the closed formula in exact
    fractions: the bounds solve (value - p)^2 = z^2 p (1 - p) / n."""
    for right, count in ((8, 10), (1, 3), (500, 1000), (0, 12), (12, 12)):
        share = Share(right, count)
        for p in share.interval:
            z = 1.959963984540054
            assert (share.value - p) ** 2 == pytest.approx(z * z * p * (1 - p) / count, abs=1e-12)
    assert Share(0, 12).interval[0] == 0
    assert Share(12, 12).interval[1] == 1


def test_chance_has_no_rank():
    assert Share(20, 100, 1 / 6).at_chance
    assert str(Share(20, 100, 1 / 6)).startswith("at chance: 20.0 %")
    assert not Share(40, 100, 1 / 6).at_chance
    assert Share(2, 100, 1 / 6).at_chance  # less than guessing is no better
    assert str(Share(40, 100, 1 / 6)) == "40.0 % (30.9 to 49.8, n = 100)"
    assert Share(0, 10, 0.0).at_chance
    assert Share(1, 2, 0.5) + Share(2, 2, 0.5) == Share(3, 4, 0.5)
    with pytest.raises(ValueError, match="share: 3 of 2"):
        Share(3, 2)


# Who knows the answer, and who guesses


@dataclass
class Thinker:
    """A reader that has the whole text before it and says what `think(task, text)` says."""

    task: str
    think: object
    vocab: int = 257
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    prefix: int | None = None
    context: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def begin(self, batch: int = 1) -> list[list[int]]:
        return [[] for _ in range(batch)]

    def read(self, tokens: Tensor, state, mask=None, *, every: bool = False):
        state = [[*row, *more] for row, more in zip(state, tokens.tolist(), strict=True)]
        logits = torch.zeros(len(state), self.vocab)
        for row, read in enumerate(state):
            text = bytes(i for i in read if i < 256).decode(errors="replace")
            logits[row, self._next(text)] = 1
        return logits, state

    def _next(self, text: str) -> int:
        mark = (
            "Answer:" if self.task.startswith("babilong") else "mentioned in the provided text is"
        )
        before, found, said = text.rpartition(mark)
        if not found:
            return 0
        answer = f" {self.think(self.task, before)}."  # pyright: ignore[reportCallIssue]
        return answer.encode()[len(said)] if len(said) < len(answer) else 256

    def select(self, state, rows):
        return [state[i] for i in rows]

    def expand(self, state, n):
        return [row for row in state for _ in range(n)]

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def solved(task: str, text: str) -> str:
    """By rules alone, from everything that was read."""
    family, _, kind = task.partition("/")
    if family == "babilong":
        story, _, question = text.rpartition("\nQuestion: ")
        return solve(kind, sentences(story), question.strip())
    key = re.findall(r"special magic \w+ for ([\w-]+) mentioned", text)[-1]
    return re.findall(rf"for {key} is: ([0-9a-f-]+)\.", text)[0]


class Guesser:
    """One of all possible answers, drawn blindly."""

    def __init__(self):
        self.drawn = np.random.default_rng(0)
        self.kept: dict[str, str] = {}

    def __call__(self, task: str, text: str) -> str:
        if text not in self.kept:
            kind = task.partition("/")[2]
            self.kept[text] = str(self.drawn.choice(ANSWERS[kind]))
        return self.kept[text]


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    book = "It was a long and rainy day in the old town by the sea, and nobody came. "
    (folder / "book.txt").write_text(book * 300)
    return folder


@pytest.fixture(scope="module")
def materials(books, tmp_path_factory) -> Materials:
    return Materials(Folders(books=books), ByteTokenizer(), tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", ASKED)
def test_who_knows_the_answer_is_always_right(name, materials):
    task = TEXT_TASKS[name]
    samples = [materials.sample(task, 4000, number, 0) for number in range(4)]
    for answer, sample in zip(answers(Thinker(name, solved), task, samples), samples, strict=True):
        assert (answer.exact, answer.named) == (1, 1)
        assert answer.said.strip() == f"{sample.answer_text}."
        assert 0 <= answer.depth <= 1


@pytest.mark.parametrize(("count", "most"), [(1, 1024), (3, 1024), (16, 256), (100, 64)])
def test_many_texts_are_read_in_short_pieces_on_a_cpu(count, most, materials, monkeypatch):
    """4,096 tokens of all of them together, if that is 64 of each."""
    task, read = TEXT_TASKS["babilong/qa1"], []
    plain = Thinker.read

    def recorded(self, tokens, state, mask=None, *, every=False):
        read.append(tokens.shape)
        return plain(self, tokens, state, mask, every=every)

    monkeypatch.setattr(Thinker, "read", recorded)
    samples = [materials.sample(task, 1100, number, 0) for number in range(count)]
    answers(Thinker(task.name, Guesser()), task, samples)
    pieces = [length for _, length in read if length > 1]
    assert set(pieces[:-1]) == {most}
    assert sum(pieces) == 1100
    assert segment_of(torch.device("cuda"), count) == 4096


@pytest.mark.parametrize("name", [f"babilong/{qa}" for qa in SOLVERS])
def test_who_guesses_is_at_chance(name, materials):
    task = TEXT_TASKS[name]
    samples = [materials.sample(task, 1200, number, 1) for number in range(150)]
    made = answers(Thinker(name, Guesser()), task, samples)
    low, high = Share(sum(each.exact for each in made), len(made)).interval
    assert low <= task.chance <= high


@pytest.fixture(scope="module")
def all_twenty(books, tmp_path_factory) -> Materials:
    """Files in the form of bAbI's, with every possible answer of every task."""
    folder = tmp_path_factory.mktemp("babi")
    for qa, choices in ANSWERS.items():
        lines = [
            f"1 Something number {n} happened.\n2 What of number {n}?\t{choice}\t1"
            for n, choice in enumerate(choices)
        ]
        (folder / f"{qa}_made_test.txt").write_text("\n".join(lines) + "\n")
    cache = tmp_path_factory.mktemp("cache")
    return Materials(Folders(books=books, babi=folder), ByteTokenizer(), cache)


@pytest.mark.parametrize("qa", ANSWERS)
def test_every_possible_answer_can_be_right_and_wrong(qa, all_twenty):
    task, choices = TEXT_TASKS[f"babilong/{qa}"], ANSWERS[qa]
    samples = [all_twenty.sample(task, 600, number, 0) for number in range(len(choices))]
    assert {sample.answer_text for sample in samples} == set(choices)
    truth = {sample.about["asked"]: sample.answer_text for sample in samples}
    following = dict(zip(choices, choices[1:] + choices[:1], strict=True))

    def known(_: str, text: str) -> str:
        return truth[text.rpartition("Question: ")[2].strip()]

    for answer in answers(Thinker(task.name, known), task, samples):
        assert (answer.exact, answer.named) == (1, 1)
    wrong = Thinker(task.name, lambda name, text: following[known(name, text)])
    for answer in answers(wrong, task, samples):
        assert (answer.exact, answer.named) == (0, 0)


class Labels(LanguageModel):
    """Says what a table says: the right label, or a wrong one."""

    def __init__(self, vocab: int, said: Tensor):
        super().__init__(ModelConfig(vocab=vocab, dim=8, depth=1, heads=1, rule="delta_net"))
        self.said = said

    def encode(self, tokens, state=None, mask=None, reset=None):
        return self.said.clamp(min=0)[..., None].double(), self.begin(len(tokens))

    def logits(self, x):
        return -(torch.arange(self.config.vocab) - x).abs()


@pytest.mark.parametrize("name", ROW_TASKS)
def test_rows_are_scored_by_their_labels(name):
    task = ROW_TASKS[name]
    length = 0 if "-" in name else task.length
    targets = rows(task, 4, length, 0, EVALUATE, 0).targets
    assert row_share(Labels(task.vocab, targets), task, 4, task.length, 0, 0).value == 1
    wrong = torch.where(targets >= 0, (targets + 1) % task.vocab, targets)
    assert row_share(Labels(task.vocab, wrong), task, 4, task.length, 0, 0).value == 0
    # a quarter of the rows right, and labels alone count
    mixed = torch.cat([targets[:1], wrong[1:]])
    share = row_share(Labels(task.vocab, mixed), task, 4, task.length, 0, 0)
    labels = (targets >= 0).sum(1)
    assert share.value == pytest.approx(float(labels[0] / labels.sum()))
    assert share.count == 4


# Running it


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save_model(LanguageModel(ModelConfig(dim=16, depth=1, heads=1, rule="delta_net")), folder)
    return folder


@pytest.fixture(scope="module")
def plan(books) -> Plan:
    tasks = ("babilong/qa1", "niah/pass-key")
    return Plan(tasks=tasks, lengths=(600, 1100), samples=5, batch=2, folders=Folders(books=books))


def found(out: Path) -> list[dict]:
    clock = ("seconds", "tokens_per_second", "peak_bytes")
    results = read_results(out)["results"]
    return [{name: each[name] for name in each if name not in clock} for each in results]


@pytest.fixture(scope="module")
def whole(model, plan, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    evaluate(model, plan, out)
    return out


def test_results_name_model_plan_and_versions(model, whole):
    said = read_results(whole)
    assert said["format"] == FORMAT
    assert said["model"]["parameters"] == sum(p.numel() for p in load_model(model).parameters())
    assert said["model"]["flops_per_token"] == costs(load_model(model).config).flops_per_token
    assert [(each["task"], each["length"]) for each in said["results"]] == [
        ("babilong/qa1", 600),
        ("babilong/qa1", 1100),
        ("niah/pass-key", 600),
        ("niah/pass-key", 1100),
    ]
    for each in said["results"]:
        assert each["count"] == 5
        assert each["tokens"] == 5 * each["length"]
        assert each["plan"]["seed"] == 0
        assert sum(part["count"] for part in each["by_depth"]) == 5


def test_stopped_anywhere_it_ends_in_the_same_results(model, plan, whole, tmp_path):
    asked: list[str] = []
    for stop in (1, 4, 9):

        def watch(finding, tokens, stop=stop):
            asked.append(finding.name)
            if len(asked) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            evaluate(model, plan, tmp_path, watch=watch)
    evaluate(model, plan, tmp_path)
    assert found(tmp_path) == found(whole)


def test_what_is_done_is_not_asked_again_unless_the_plan_is_another(model, plan, whole):
    before = found(whole)

    def never(finding, tokens):
        raise AssertionError("asked again")

    evaluate(model, plan, whole, watch=never)
    assert found(whole) == before
    with pytest.raises(AssertionError, match="asked again"):
        evaluate(model, replace(plan, seed=1), whole, watch=never)
    evaluate(model, plan, whole)
    assert found(whole) == before


def test_rows_are_asked_of_a_model_without_a_tokenizer(tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(vocab=47, dim=16, depth=1, heads=1, rule="delta_net")
    save_model(LanguageModel(config), tmp_path / "model")
    made = evaluate(
        tmp_path / "model", Plan(tasks=("mad/compression",), samples=6, batch=4), tmp_path / "out"
    )
    assert [each.done for each in made.recall] == [6]
    assert made.recall[0].length == ROW_TASKS["mad/compression"].length


# Language


def test_text_is_a_task_too(model, tmp_path, capsys):
    text = tmp_path / "book.txt"
    text.write_text("Everybody went home before the rain, and nobody came back. " * 30)
    out = tmp_path / "out"
    command = ["eval", str(model), "--tasks", "text", "--text", str(text), "--out", str(out)]
    assert main([*command, "--lengths", "64,256"]) == 0
    expected = score_text(open_reader(model, "cpu"), text)
    said = capsys.readouterr().out
    assert f"text, bits per byte             {expected.bits_per_byte:.4f}" in said
    (figures,) = read_results(out)["language"]
    assert figures["score"]["nats_per_token"] == expected.score.nats_per_token
    assert [each["length"] for each in figures["by_length"]["lengths"]] == [64, 256]
    rows = table(read_evaluations([out]))
    assert ["text, bits per byte", f"{expected.bits_per_byte:.4f}"] in rows
    # what is done is not done again
    (out / "answers" / "text.json").write_text(
        (out / "answers" / "text.json").read_text().replace('"documents": 1', '"documents": 7')
    )
    assert main([*command, "--lengths", "64,256"]) == 0
    assert read_results(out)["language"][0]["documents"] == 7
    assert main(["eval", "--compare", str(out), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "loss-by-position.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_lm_eval_have_a_value_and_an_error():
    found = {"alias": "x", "acc,none": 0.25, "acc_stderr,none": 0.01, "f1,none": 1, " ": 2}
    assert _metrics(found) == {
        "acc": {"value": 0.25, "error": 0.01},
        "f1": {"value": 1.0, "error": None},
    }


# Comparing


def results(folder: Path, right: dict[tuple[str, int], int], **about) -> Path:
    """100 questions each; of babilong/qa1, chance is 1/6."""
    listed = [
        {"task": task, "length": length, "zero_shot": about.get("zero_shot", False)}
        | {"tokens": 100 * length, "seconds": 0.5 * length}
        | Share(count, 100, 1 / 6).to_dict()
        | {"by_depth": [{"depth": 0.25} | Share(count, 100, 1 / 6).to_dict()]}
        for (task, length), count in right.items()
    ]
    write_results(folder, {"parameters": 1000, "state_bytes": 2048}, listed)
    return folder


def test_the_best_has_a_star_and_chance_has_none(tmp_path):
    qa = "babilong/qa1"
    one = results(tmp_path / "one", {(qa, 1000): 90, (qa, 4000): 18})
    two = results(tmp_path / "two", {(qa, 1000): 80, (qa, 4000): 30, (qa, 8000): 10})
    header, *prices = table(read_evaluations([one, two]))[:5]
    rows = table(read_evaluations([one, two]))[5:]
    assert header == ["", "one", "two"]
    assert [row[1] for row in prices] == ["1,000", "2.0 kB", "-", "200"]
    assert rows[0] == ["babilong/qa1 at 1,000", "90.0* (82.6 to 94.5)", "80.0 (71.1 to 86.7)"]
    assert rows[1][1].startswith("at chance")
    assert rows[1][2] == "30.0 (21.9 to 39.6)"  # nobody to be better than
    assert rows[2][1] == "-"


def test_zero_shot_is_never_ranked_beside_training(tmp_path):
    one = results(tmp_path / "one", {("babilong/qa1", 1000): 90})
    two = results(tmp_path / "two", {("babilong/qa1", 1000): 80}, zero_shot=True)
    rows = table(read_evaluations([one, two]))[5:]
    assert [row[0] for row in rows] == [
        "babilong/qa1 at 1,000",
        "babilong/qa1 at 1,000, zero-shot",
    ]
    assert not any("*" in cell for row in rows for cell in row)


def test_other_versions_of_the_tasks_are_refused(tmp_path):
    one, two = (results(tmp_path / n, {("babilong/qa1", 1000): 90}) for n in ("one", "two"))
    said = json.loads((two / RESULTS).read_text())
    (two / RESULTS).write_text(json.dumps(said | {"tasks_version": 0}))
    with pytest.raises(ValueError, match=r"versions \[0, 1\] of the tasks"):
        read_evaluations([one, two])


def test_compare_writes_table_pictures_and_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    qa = "babilong/qa1"
    one = results(tmp_path / "<one>", {(qa, 1000): 90, (qa, 4000): 18})
    two = results(tmp_path / "two", {(qa, 1000): 80, (qa, 4000): 30})
    out = tmp_path / "out"
    assert main(["eval", "--compare", str(one), str(two), "--out", str(out)]) == 0
    assert "90.0* (82.6 to 94.5)" in capsys.readouterr().out
    page = (out / "compare.html").read_text()
    assert "&lt;one&gt;" in page
    assert page.count("data:image/png;base64,") == 2
    assert '<td class="best">90.0* (82.6 to 94.5)</td>' in page
    for name in ("accuracy-by-length.png", "accuracy-by-depth.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


# The command


def test_the_command_prints_shares_with_intervals(model, books, tmp_path, capsys):
    command = ["eval", str(model), "--tasks", "babilong/qa2", "--lengths", "0.8k,1k"]
    options = ["--samples", "3", "--books", str(books), "--out", str(tmp_path / "out")]
    assert main([*command, *options]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("babilong/qa2@800   at chance: ")
    assert said[1].startswith("babilong/qa2@1000  at chance: ")
    assert said[2].endswith("results.json: all of it")


BAD = {
    "no model": ([], "eval: no model; expected `atlas-lm eval MODEL --out DIR`"),
    "no such folder": (["nowhere"], "nowhere: no such model folder"),
    "typo": (["MODEL", "--tasks", "babilong/q1"], "no task 'babilong/q1' (did you mean"),
    "length": (["MODEL", "--lengths", "4q"], "--lengths: '4q'; expected tokens, such as 512"),
    "too short": (
        ["MODEL", "--tasks", "babilong/qa1", "--lengths", "9", "--books", "BOOKS"],
        "fits 9 tokens",
    ),
    "rows of other ids": (["MODEL", "--tasks", "mqar"], "the model a vocabulary of 257"),
    "no books": (["MODEL", "--books", "nowhere"], "nowhere: no such folder of books"),
    "no babi": (["MODEL", "--tasks", "babilong/qa1", "--babi", "nowhere"], "nowhere"),
    "no words": (["MODEL", "--tasks", "niah/pass-key", "--words", "nowhere"], "no such list"),
    "no text": (["MODEL", "--tasks", "text"], "tasks: text without one; expected --text"),
    "no questions": (["MODEL", "--tasks", "lm/copa"], "lm/copa without its questions"),
    "no such file": (["MODEL", "--tasks", "lm/copa", "--lm-data", "BOOKS"], "copa_val.jsonl.gz"),
    "no such question": (["MODEL", "--tasks", "lm/coba"], "(did you mean 'lm/copa'?)"),
    "samples": (["MODEL", "--samples", "0"], "samples: 0; expected 1 or more"),
    "both": (["MODEL", "--compare", "a", "b"], "beside --compare; give one or the other"),
    "nothing to compare": (["--compare", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line(name, model, books, tmp_path, capsys):
    words, expected = BAD[name]
    folders = {"MODEL": str(model), "BOOKS": str(books)}
    words = [folders.get(word, word) for word in words]
    assert main(["eval", *words, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out" / RESULTS).exists()


@pytest.mark.parametrize("content", ["", "{}", '{"format": "other"}', "[1]"])
def test_a_file_that_is_no_result_is_refused(content, tmp_path):
    (tmp_path / RESULTS).write_text(content)
    with pytest.raises(ValueError, match="not the results of an evaluation"):
        read_results(tmp_path)


def test_of_long_texts_fewer_are_asked():
    plan = Plan(tasks=("babilong",), samples=100, tokens=160_000_000)
    lengths = (1_000, 1_000_000, 10_000_000, 10**9)
    assert [plan.samples_at(length) for length in lengths] == [100, 100, 16, 1]
    assert Plan(tasks=("babilong",), samples=7).samples_at(10**9) == 7
    with pytest.raises(ValueError, match="tokens: 0; expected 1 or more"):
        Plan(tasks=("babilong",), tokens=0)

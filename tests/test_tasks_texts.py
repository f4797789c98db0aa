"""Texts with questions: exact lengths, facts where they are said to be, ten million tokens."""

import json
import os
import re
import shutil
import time
import tracemalloc
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from pydoc_data.topics import topics
from uuid import UUID

import numpy as np
import pytest

from atlas_lm.data.prepare import Options, prepare
from atlas_lm.models.lm import NO_TARGET
from atlas_lm.tasks import haystack as haystack_module
from atlas_lm.tasks.babi import (
    ANSWERS,
    GIVE,
    LEAVE,
    MOVE,
    RELATION,
    TAKE,
    Question,
    Questions,
    solve,
)
from atlas_lm.tasks.babi_world import MAKERS, generated_questions
from atlas_lm.tasks.babilong import (
    QUESTION_FIRST,
    Prompt,
    babilong,
    exact,
    fitting_questions,
    open_questions,
    score,
)
from atlas_lm.tasks.haystack import Haystack, book_files, sentences
from atlas_lm.tasks.niah import DEPTHS, KINDS, NOISE, WORDS, contains, niah, read_words
from atlas_lm.tasks.samples import PARTS, STOP, Part, Sample, Slice, generator_of, part_of
from atlas_lm.text import ByteTokenizer, FileTokenizer, Tokenizer

DATA = Path(os.environ.get("ATLAS_LM_DATA", Path(__file__).parents[2] / "shared" / "data"))
BOOKS = DATA / "pg19_test_subset"
needs_books = pytest.mark.skipif(
    not (BOOKS.is_dir() and (DATA / "babi").is_dir()),
    reason="needs books and bAbI's files in pg19_test_subset/ and babi/; set ATLAS_LM_DATA",
)


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    for name in ("assert", "class", "for", "import", "typesseq", "strings"):
        (folder / f"{name}.txt").write_text(topics[name], "utf-8")
    (folder / "INDEX.csv").write_text("no,book\n" * 99)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request, books, tmp_path_factory) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    out = tmp_path_factory.mktemp("tokenizer")
    prepare(Options(sources=(str(books),), out=out, train_tokenizer=400))
    return FileTokenizer(out / "tokenizer.json")


@pytest.fixture(scope="module")
def haystack(books, tokenizer, cache) -> Haystack:
    return Haystack.of_books(books, tokenizer, cache)


@pytest.fixture(scope="module")
def questions() -> dict[str, Questions]:
    return {qa: generated_questions(qa, "eval", count=40) for qa in MAKERS}


def whole(sample: Sample) -> np.ndarray:
    """The slow way: everything at once."""
    found: list[int] = []
    for piece in (*sample.pieces, sample.question):
        if isinstance(piece, Slice):
            places = range(piece.begin, piece.begin + piece.length)
            found += [int(piece.tokens[place % len(piece.tokens)]) for place in places]
        else:
            found += piece.tolist()
    return np.asarray(found)


def check_facts(sample: Sample, haystack: Haystack, tokenizer: Tokenizer, head: int = 0) -> None:
    """Every fact is where `about` says, between whole sentences of one stretch of haystack."""
    tokens, about = sample.tokens(), sample.about
    assert json.loads(json.dumps(about))["positions"] == list(about["positions"])
    background, at = [], head
    for fact, position, depth in zip(
        about["facts"], about["positions"], about["depths"], strict=True
    ):
        ids = tokenizer.encode(haystack.separator + fact)
        assert tokens[position : position + len(ids)].tolist() == ids
        assert tokenizer.decode(tokens[position : position + len(ids)]).strip() == fact
        background.append(tokens[at:position])
        at = position + len(ids)
        before = sum(map(len, background))
        room = sample.length - len(sample.question) - head
        room -= sum(len(tokenizer.encode(haystack.separator + fact)) for fact in about["facts"])
        assert depth == (before / room if room else 0)
    background.append(tokens[at : sample.length - len(sample.question)])
    flat = np.concatenate(background)
    if not len(flat):
        return
    first = next(piece for piece in sample.pieces if isinstance(piece, Slice)).begin
    assert first in haystack.bounds
    circle = np.arange(first, first + len(flat)) % len(haystack.tokens)
    assert np.array_equal(flat, haystack.tokens[circle])
    for cut in np.cumsum([len(part) for part in background])[:-1]:
        if cut < len(flat):
            assert (first + cut) % len(haystack.tokens) in haystack.bounds


# Samples


def test_any_range_is_that_of_the_whole(haystack, tokenizer, questions):
    generator = np.random.default_rng(0)
    length = 3 * len(haystack.tokens) + 17
    for sample in (
        babilong("qa2", length, 3, 0, questions["qa2"], haystack, tokenizer),
        niah("uuid", 2000, 1, 0, haystack, tokenizer, needles=3),
        niah("pass-key", 3000, 1, 0, None, tokenizer),
    ):
        expected = whole(sample)
        assert sample.length == len(expected) == sample.about["length"]
        assert sample.tokens().dtype == np.int64
        assert np.array_equal(sample.tokens(), expected)
        for begin, end in np.sort(generator.integers(0, sample.length + 1, (60, 2))):
            assert np.array_equal(sample.tokens(int(begin), int(end)), expected[begin:end])
        for cut in sample._ends[:-1].tolist():
            assert sample.tokens(cut - 1, cut + 1).tolist() == expected[cut - 1 : cut + 1].tolist()
        assert np.array_equal(np.concatenate(list(sample.segments(777))), expected)
        assert len(sample.tokens(5, 5)) == 0
        for begin, end in ((-1, 3), (4, 3), (0, sample.length + 1)):
            with pytest.raises(ValueError, match=rf"tokens: {begin} to {end}; expected a range of"):
                sample.tokens(begin, end)
        with pytest.raises(ValueError, match=r"segments: size 0; expected 1 token or more"):
            next(sample.segments(0))


def test_a_row_asks_for_the_answer_alone(haystack, tokenizer, questions):
    sample = babilong("qa1", 700, 0, 0, questions["qa1"], haystack, tokenizer)
    size = len(sample.answer)
    assert tokenizer.decode(sample.answer) == f" {sample.answer_text}{STOP}"
    assert tokenizer.decode(sample.answer[-1:]) == STOP
    tokens, targets = sample.row(700 + size + 4, pad=9)
    assert tokens[:700].tolist() == sample.tokens().tolist()
    assert tokens[700:].tolist() == [*sample.answer[:-1], *[9] * 5]
    assert targets.tolist() == [NO_TARGET] * 699 + sample.answer.tolist() + [NO_TARGET] * 5
    tokens, targets = sample.row(700 + size - 1)
    assert (len(tokens), targets[-1]) == (700 + size - 1, sample.answer[-1])
    with pytest.raises(ValueError, match=rf"row: 700 tokens; .* expected {700 + size - 1} or more"):
        sample.row(700)


def test_random_numbers_depend_on_all_keys():
    keys = [("a", 0, 1), ("a", 1, 0), ("b", 0, 1), ("a", 0), ("a", 0, 1, 0)]
    found = [int(generator_of(*key).integers(2**60)) for key in keys]
    assert len(set(found)) == len(keys)
    assert found[0] == int(generator_of("a", 0, 1).integers(2**60))
    with pytest.raises(ValueError, match=r"seed and number: .*-1.*; expected 0 or more"):
        generator_of("a", -1)
    parts = Counter(part_of(("text", str(i))) for i in range(2000))
    assert abs(parts["train"] - 1000) < 120


# Haystacks


def test_sentences():
    text = (
        'He came. She said "Go!" and went.\n"Why?" Mr. J. Smith asked No. 5 (at\nhome.) Then\n\n'
        "A HEADING\n\n\nIt cost 3.50 dollars... or so! _Really?_ Dr. Who. I, e.g. This."
    )
    assert list(sentences(text)) == [
        "He came.",
        'She said "Go!" and went.',
        '"Why?"',
        "Mr. J. Smith asked No. 5 (at\nhome.)",
        "Then",
        "A HEADING",
        "It cost 3.50 dollars... or so!",
        "_Really?_",
        "Dr. Who.",
        "I, e.g. This.",
    ]
    assert list(sentences(" \n\n \n")) == []
    for topic in ("class", "strings"):  # nothing is lost but white space
        assert "".join("".join(sentences(topics[topic])).split()) == "".join(topics[topic].split())


def test_a_haystack_holds_all_long_sentences(books, tokenizer, haystack):
    texts = [path.read_text("utf-8") for path in book_files(books)]
    encoded = [tokenizer.encode(f" {s}") for text in texts for s in sentences(text)]
    kept = [ids for ids in encoded if len(ids) >= 10]
    assert len(kept) < len(encoded)
    assert haystack.tokens.tolist() == [i for ids in kept for i in ids]
    assert np.diff(haystack.bounds).tolist() == [len(ids) for ids in kept]
    assert isinstance(haystack.tokens, np.memmap)
    assert haystack.source == f"6 files of {books.name}"


def test_a_haystack_is_made_once(books, cache, haystack, tokenizer, monkeypatch):
    def never(text):
        raise AssertionError("made again")

    monkeypatch.setattr(haystack_module, "sentences", never)
    again = Haystack.of_books(books, tokenizer, cache)
    assert np.array_equal(again.tokens, haystack.tokens)
    assert np.array_equal(again.bounds, haystack.bounds)


def test_another_text_field_or_tokenizer_is_another_haystack(tmp_path):
    def of(field="text") -> Haystack:
        return Haystack.of_books(tmp_path / "in", ByteTokenizer(), tmp_path / "cache", field=field)

    (tmp_path / "in").mkdir()
    line = {"text": "Here is the first of them.", "other": "And another one, a long one."}
    (tmp_path / "in/a.jsonl").write_text(json.dumps(line))
    assert bytes(of().tokens.astype(np.uint8)).decode() == " Here is the first of them."
    assert bytes(of("other").tokens.astype(np.uint8)).decode() == " And another one, a long one."
    (tmp_path / "in/a.jsonl").write_text(json.dumps({"text": "Here is the second of them."}))
    assert bytes(of().tokens.astype(np.uint8)).decode() == " Here is the second of them."
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_an_unfinished_haystack_leaves_nothing(books, tmp_path, monkeypatch):
    def broken(text):
        yield "This is a sentence that is long enough."
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(haystack_module, "sentences", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            Haystack.of_books(books, ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    made = Haystack.of_books(books, ByteTokenizer(), tmp_path)
    folder = next(tmp_path.iterdir())
    expected = np.array(made.tokens)

    def slower(text):  # another process is done first
        shutil.copytree(tmp_path / "first", folder, dirs_exist_ok=True)
        return sentences(text)

    folder.rename(tmp_path / "first")
    monkeypatch.setattr(haystack_module, "sentences", slower)
    assert np.array_equal(Haystack.of_books(books, ByteTokenizer(), tmp_path).tokens, expected)
    assert {path.name for path in tmp_path.iterdir()} == {"first", folder.name}
    monkeypatch.undo()
    data = (folder / "tokens.bin").read_bytes()
    for damaged in (data[:-1], b"x" + data[1:]):
        (folder / "tokens.bin").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"haystack-\w+: damaged .*; remove it, it is made"):
            Haystack.of_books(books, ByteTokenizer(), tmp_path)
    (folder / "haystack.json").unlink()
    with pytest.raises(OSError, match=r"haystack-\w+: in the way of a haystack; remove it"):
        Haystack.of_books(books, ByteTokenizer(), tmp_path)


class Letters:
    """A tokenizer that is neither of ours: words with and without capitals are the same."""

    vocab: int = 70_000
    end: int | None = None
    special: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text.lower()]

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


def test_any_tokenizer_will_do(books, cache):
    ours = Haystack.of_books(books, ByteTokenizer(), cache)
    other = Haystack.of_books(books, Letters(), cache)
    assert (ours.tokens.dtype, other.tokens.dtype) == (np.dtype("<u2"), np.dtype("<u4"))
    assert Letters().decode(other.tokens[:200]) == ByteTokenizer().decode(ours.tokens[:200]).lower()
    sample = niah("number", 1500, 0, 0, other, Letters())
    position, fact = sample.about["positions"][0], sample.about["facts"][0]
    found = sample.tokens(position, position + len(fact) + 1)
    assert Letters().decode(found) == f" {fact.lower()}"


def test_what_is_no_haystack(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder of books"):
        Haystack.of_books(tmp_path / "nowhere", ByteTokenizer(), tmp_path)
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match=r"in: no books in it; expected files ending in \.txt"):
        Haystack.of_books(tmp_path / "in", ByteTokenizer(), tmp_path)
    (tmp_path / "in/a.txt").write_text("Short. Yes.")
    with pytest.raises(ValueError, match=r"1 files of in: no sentence of 10 tokens"):
        Haystack.of_books(tmp_path / "in", ByteTokenizer(), tmp_path)
    (tmp_path / "in/a.txt").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 at byte 0"):
        Haystack.of_books(tmp_path / "in", ByteTokenizer(), tmp_path)


def test_python_itself_is_a_haystack(tmp_path):
    made = Haystack.of_python(ByteTokenizer(), tmp_path, "eval")
    text = bytes(made.tokens.astype(np.uint8)).decode()
    assert len(text) > 200_000
    assert next(s for s in sentences(topics["assert"]) if len(s) > 20) in text
    assert made.source.endswith("own text: manual")


@pytest.mark.slow
def test_python_has_other_text_for_training(tmp_path):
    train, asked, both = (
        Haystack.of_python(ByteTokenizer(), tmp_path, part) for part in ("train", "eval", None)
    )
    assert len(both.tokens) == len(train.tokens) + len(asked.tokens)
    cut = [{bytes(h.tokens[a:b]) for a, b in pairwise(h.bounds.tolist())} for h in (train, asked)]
    assert len(cut[0] & cut[1]) < 0.02 * len(cut[1])


def test_gaps_are_uniform_and_sorted(haystack, tokenizer):
    """Gap 0 to n of n sentences, each as likely as the others, for facts of one token."""
    generator, fact = np.random.default_rng(0), np.array([7])
    room = int(haystack.bounds[8])
    places, counts = Counter(), Counter()
    for _ in range(3000):
        filled = haystack.fill([fact, fact], room + 2, generator)
        assert filled.positions[0] < filled.positions[1]
        begin = next(piece for piece in filled.pieces if isinstance(piece, Slice)).begin
        first = haystack.bounds.tolist().index(begin)
        count = haystack._sentences_in(first, room)
        offsets = [haystack._offset(first, i) for i in range(count)] + [room]
        gaps = [offsets.index(filled.positions[i] - i) for i in range(2)]
        places.update(gap / count for gap in gaps)
        counts.update(gap == 0 for gap in gaps)
        counts["expected"] += 2 / (count + 1)
    mean = sum(place * n for place, n in places.items()) / 6000
    assert abs(mean - 0.5) < 0.03
    assert abs(counts[True] - counts["expected"]) < 4 * counts["expected"] ** 0.5


def test_gaps_of_a_small_haystack():
    """Three sentences of 2, 3 and 5 tokens: `gaps` lists where a fact may stand in 7 of them."""
    small = Haystack(np.arange(10), np.array([0, 2, 5, 10]), " ", "three")
    gaps = {0: {0, 2, 5, 7}, 2: {0, 3, 7}, 5: {0, 5, 7}}
    found: dict[int, set[int]] = {begin: set() for begin in gaps}
    counts = Counter()
    generator = np.random.default_rng(0)
    for _ in range(3000):
        filled = small.fill([np.array([99])], 8, generator)
        begin = next(piece for piece in filled.pieces if isinstance(piece, Slice)).begin
        found[begin].add(filled.positions[0])
        counts[begin, filled.positions[0]] += 1
    assert found == gaps
    for begin, places in gaps.items():
        assert all(abs(counts[begin, at] - 1000 / len(places)) < 110 for at in places)


def test_a_text_of_facts_alone_and_one_too_short(haystack):
    facts = [np.array([1, 2, 3]), np.array([4, 5])]
    filled = haystack.fill(facts, 5, np.random.default_rng(0))
    assert (filled.positions, filled.depths) == ((0, 3), (0.0, 0.0))
    assert [np.asarray(piece).tolist() for piece in filled.pieces] == [[1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"fill: 4 tokens; its 2 facts alone have 5"):
        haystack.fill(facts, 4, np.random.default_rng(0))
    for depths in ([0.5], [0.5, 0.2], [0.5, 1.2]):
        with pytest.raises(
            ValueError, match=r"depths: .* expected one each, from 0 to 1, ascending"
        ):
            haystack.fill(facts, 50, np.random.default_rng(0), depths)


# BABILong


@pytest.mark.parametrize("qa", MAKERS)
def test_babilong_lengths_are_exact_and_facts_are_there(qa, haystack, tokenizer, questions):
    needed = int(questions[qa].sizes(tokenizer, " ", Prompt())[:, 1].min())
    for length in (max(needed, 200) + 201, 3001, 2 * len(haystack.tokens) + 5):
        for number in range(2):
            sample = babilong(qa, length, number, 5, questions[qa], haystack, tokenizer)
            assert len(sample.tokens()) == sample.length == length
            check_facts(sample, haystack, tokenizer)
            item = questions[qa].items[sample.about["question"]]
            assert sample.about["facts"] == item.facts
            assert tokenizer.decode(sample.question) == f"\nQuestion: {item.text}\nAnswer:"
            assert sample.answer_text == item.answer
            assert item.answer in sample.choices


def test_a_reader_of_the_whole_text_answers_all(haystack, tokenizer, questions):
    """Facts are found by their form, in the text as it is; the rest is noise."""
    patterns = "|".join(form.pattern for form in (MOVE, TAKE, LEAVE, GIVE, RELATION))
    for qa, asked in questions.items():
        for number in range(4):
            sample = babilong(qa, 4000, number, 1, asked, haystack, tokenizer)
            text = tokenizer.decode(sample.tokens())
            facts = [found[0] for found in re.finditer(rf"\b(?:{patterns})", text)]
            answer = solve(qa, facts, sample.about["asked"])
            assert exact(f" {answer}{STOP}", sample.answer_text)
            assert score(answer, sample.answer_text, sample.choices, sample.about["asked"])


def test_a_uniform_guess_is_at_chance():
    generator = np.random.default_rng(0)
    for qa in ("qa1", "qa5"):
        asked = generated_questions(qa, "eval", count=600).items
        choices = ANSWERS[qa]
        right = sum(
            exact(f"{choices[int(generator.integers(len(choices)))]}.", q.answer) for q in asked
        )
        chance = 1 / len(choices)
        assert abs(right / 600 - chance) < 4 * (chance * (1 - chance) / 600) ** 0.5


def test_questions_with_too_many_facts_are_left_out(haystack, tokenizer):
    def asked(facts: int) -> Question:
        return Question(("Mary moved to the office.",) * facts, "Where is Mary?", "office", (0,))

    questions = Questions("qa1", "eval", tuple(asked(n) for n in (5, 61, 2, 59, 60, 1)), "six")
    shortest = questions.sizes(tokenizer, " ", Prompt())[:, 1].tolist()
    for length in (60 * 8 - 1, 60 * 8, 61 * 8, max(shortest)):
        expected = [
            i
            for i, q in enumerate(questions.items)
            if len(q.facts) + 1 <= length // 8 and shortest[i] <= length
        ]
        assert fitting_questions(length, questions, haystack, tokenizer).tolist() == expected
        numbers = range(2 * len(expected))
        found = [babilong("qa1", length, n, 0, questions, haystack, tokenizer) for n in numbers]
        assert [sample.about["question"] for sample in found] == 2 * expected
    with pytest.raises(
        ValueError, match=r"babilong/qa1: none of its 6 questions fits 9 tokens; the"
    ):
        babilong("qa1", 9, 0, 0, questions, haystack, tokenizer)
    with pytest.raises(ValueError, match=r"babilong: qa2, but the questions are of qa1"):
        babilong("qa2", 900, 0, 0, questions, haystack, tokenizer)
    with pytest.raises(ValueError, match=r"babilong: number -1; expected 0 or more"):
        babilong("qa1", 900, -1, 0, questions, haystack, tokenizer)
    empty = Questions("qa1", "eval", (), "none")
    with pytest.raises(ValueError, match=r"none of its 0 questions fits 900 tokens; there is none"):
        babilong("qa1", 900, 0, 0, empty, haystack, tokenizer)


class Syllables(Letters):
    """A tokenizer of few tokens, the lengths of words."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_eight_tokens_for_every_fact_and_the_question():
    fact = "Mary moved to the office."
    items = tuple(Question((fact,) * n, "Where is Mary?", "office", (0,)) for n in (9, 10, 11))
    questions, noise = Questions("qa1", "eval", items, "x"), Haystack.of_text(NOISE, Syllables())
    found = [fitting_questions(n, questions, noise, Syllables()).tolist() for n in (87, 88, 96)]
    assert found == [[0], [0, 1], [0, 1, 2]]
    with pytest.raises(ValueError, match=r"none of its 3 questions fits 79 tokens; .* needs 80$"):
        fitting_questions(79, questions, noise, Syllables())


def test_the_question_may_come_first(haystack, tokenizer, questions):
    sample = babilong("qa1", 1500, 0, 0, questions["qa1"], haystack, tokenizer, QUESTION_FIRST)
    asked = sample.about["asked"]
    assert sample.length == 1500
    assert tokenizer.decode(sample.tokens()).startswith(f"Question: {asked}\n")
    head = len(tokenizer.encode(f"Question: {asked}\n"))
    check_facts(sample, haystack, tokenizer, head)


def test_samples_are_what_seed_and_number_say(haystack, tokenizer, questions):
    def made(
        number: int, seed: int, part: Part = "eval", length: int = 1500
    ) -> dict[str, tuple[int, ...]]:
        asked = Questions("qa1", part, questions["qa1"].items, "")
        samples = {
            "babilong": babilong("qa1", length, number, seed, asked, haystack, tokenizer),
            "niah": niah("uuid", length, number, seed, haystack, tokenizer, part=part),
        }
        return {task: tuple(sample.tokens().tolist()) for task, sample in samples.items()}

    first = made(0, 0)
    assert made(0, 0) == first
    others = [made(1, 0), made(0, 1), made(0, 0, "train"), made(40, 0), made(0, 0, length=1501)]
    for task, tokens in first.items():
        found = {other[task] for other in others}
        assert len(found) == 5
        assert tokens not in found


SCORES = [
    ("The most recent location of Mary is the Kitchen. Not the office.", "kitchen", "qa1", True),
    ("kitchen or office", "kitchen", "qa1", False),
    ("nowhere", "kitchen", "qa1", False),
    ("kitchen<example> office", "kitchen", "qa1", True),
    ("Before the office the apple was in the garden", "garden", "qa3 before the office?", True),
    ("Before the office the apple was in the office", "garden", "qa3 before the office?", False),
    ("none", "none", "qa7", True),
    ("none or one", "none", "qa7", False),
    ("one", "none", "qa7", False),
    ("apple, milk", "milk,apple", "qa8", True),
    ("apple", "milk,apple", "qa8", False),
    ("apple,milk", "apple", "qa8", False),
    ("s,w", "s,w", "qa19", True),
]


@pytest.mark.parametrize(("output", "target", "question", "right"), SCORES)
def test_the_authors_score(output, target, question, right):
    assert score(output, target, ANSWERS[question.split()[0]], question) is right


def test_exact_match():
    assert exact(" kitchen. And so on", "kitchen")
    for output in ("kitchen", "the kitchen.", "kitchens.", " Kitchen.", "kitchen, garden.", ""):
        assert not exact(output, "kitchen")


# Needles


@pytest.mark.parametrize("kind", KINDS)
def test_needle_lengths_are_exact_and_needles_are_there(kind, haystack, tokenizer):
    for length in (1000, 1001, 5003):
        for number in range(3):
            sample = niah(kind, length, number, 2, haystack, tokenizer)
            stack = Haystack.of_text(NOISE, tokenizer) if kind == "pass-key" else haystack
            assert len(sample.tokens()) == sample.length == length
            check_facts(sample, stack, tokenizer, len(sample.pieces[0]))
            (value,) = sample.references
            text = tokenizer.decode(sample.tokens())
            what = KINDS[kind]
            found = re.findall(rf"special magic {what}s for ([\w-]+) is: ([\w-]+)\.", text)
            assert [v for _, v in found] == [value]
            asked = f"for {found[0][0]} mentioned in the provided text"
            assert f"\nWhat is the special magic {what} {asked}? " in text
            assert text.endswith(f"The special magic {what} {asked} is")
            assert text.startswith(f"A special magic {what} is hidden within the following text.")
            if what == "uuid":
                assert UUID(value).version == 4
            else:
                assert re.fullmatch(r"[1-9]\d{6}", value)
            assert sample.about["depth"] in DEPTHS
            assert contains(sample.references, tokenizer.decode(sample.answer)) == 1


def test_a_needle_stands_at_its_depth(haystack, tokenizer):
    for depth in (0.0, 0.25, 0.5, 1.0):
        sample = niah("number", 4000, 0, 0, haystack, tokenizer, depth=depth, needles=4)
        about = sample.about
        (asked,) = about["supporting"]
        assert sample.references[0] in about["facts"][asked]
        assert about["depth"] == depth
        assert abs(about["depths"][asked] - depth) < 0.25
        check_facts(sample, haystack, tokenizer, len(sample.pieces[0]))
    ends = [niah("number", 4000, 0, 0, haystack, tokenizer, depth=d) for d in (0.0, 1.0)]
    assert ends[0].about["positions"][0] == len(ends[0].pieces[0])
    assert isinstance(ends[1].pieces[-1], np.ndarray)
    found = Counter(niah("pass-key", 600, n, 0, None, tokenizer).about["depth"] for n in range(200))
    assert len(found) > 30


def test_several_needles_values_and_queries(haystack, tokenizer):
    sample = niah("number", 4000, 0, 0, haystack, tokenizer, needles=4, values=2, queries=2)
    text = tokenizer.decode(sample.tokens())
    told = re.findall(r"special magic numbers for ([\w-]+) is: (\d+)\.", text)
    assert len(told) == len(set(told)) == 8
    assert len({key for key, _ in told}) == 4
    asked = re.search(
        r"are all the special magic numbers for ([\w-]+), and ([\w-]+) mentioned", text
    )
    assert asked is not None
    expected = [value for query in asked.groups() for key, value in told if key == query]
    assert list(sample.references) == expected
    assert tokenizer.decode(sample.answer) == f" {', '.join(expected)}{STOP}"
    assert text.startswith("Some special magic numbers are hidden within")
    supporting = tuple(i for i, (_, value) in enumerate(told) if value in expected)
    assert sample.about["supporting"] == supporting
    many = niah("number", 9000, 0, 0, haystack, tokenizer, needles=60)
    assert len(set(many.about["facts"])) == 60
    check_facts(many, haystack, tokenizer, len(many.pieces[0]))


def test_needles_for_training_are_never_those_of_evaluation():
    needles: dict[Part, set[tuple[str, str]]] = {"train": set(), "eval": set()}
    for part, seed, number in product(PARTS, range(3), range(100)):
        sample = niah("pass-key", 700, number, seed, None, ByteTokenizer(), part=part)
        needles[part].update(re.findall(r"for (\S+) is: (\w+)", sample.about["facts"][0]))
    assert len(needles["train"]) == len(needles["eval"]) == 300
    assert not needles["train"] & needles["eval"]
    assert all(part_of(pair) == part for part, pairs in needles.items() for pair in pairs)


def test_words_of_a_folder(tmp_path, haystack, tokenizer):
    assert min(map(len, WORDS)) >= 60
    assert all(len(set(words)) == len(words) for words in WORDS)
    (tmp_path / "adjectivelist.txt").write_text("odd\n\nred\n")
    with pytest.raises(FileNotFoundError, match=r"nounlist\.txt: no such list of words"):
        read_words(tmp_path)
    (tmp_path / "nounlist.txt").write_text("hat\n")
    words = read_words(tmp_path)
    sample = niah("number", 3000, 0, 0, haystack, tokenizer, words=words, needles=2)
    keys = {fact.split(" for ")[1].split(" is: ")[0] for fact in sample.about["facts"]}
    assert keys == {"odd-hat", "red-hat"}
    with pytest.raises(ValueError, match=r"niah: 3 needles .* expected 1 to 2 needles"):
        niah("number", 3000, 0, 0, haystack, tokenizer, words=words, needles=3)
    (tmp_path / "nounlist.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"nounlist\.txt: no words in it; expected one a line"):
        read_words(tmp_path)


def test_needles_that_cannot_be(haystack, tokenizer):
    cases = [
        ({"kind": "word"}, r"niah: 'word'; expected pass-key, number, uuid"),
        ({"haystack": None}, r"niah/number: no haystack; expected one of books"),
        ({"queries": 2}, r"niah: 1 needles with 1 values, 2 asked for; expected"),
        ({"depth": 1.5}, r"niah: depth 1\.5; expected 0 to 1"),
        ({"depth": 0.5, "values": 2}, r"niah: depth 0\.5; expected 0 to 1, and one value"),
        ({"length": 30}, r"niah/number: 30 tokens; its facts and its question alone have \d+"),
        ({"part": "test"}, r"part: 'test'; expected train or eval"),
        ({"number": -1}, r"expected 0 or more"),
    ]
    usual = {"kind": "number", "length": 2000, "number": 0, "seed": 0, "haystack": haystack}
    for changed, message in cases:
        with pytest.raises(ValueError, match=message):
            niah(tokenizer=tokenizer, **(usual | changed))


def test_contains():
    assert contains(["ab", "CD"], "xx AB cd") == 1
    assert contains(["ab", "cd"], "xx ab") == 0.5
    assert contains(["1234567"], "123456") == 0
    with pytest.raises(ValueError, match="contains: no references"):
        contains([], "x")


# Ten million tokens


def test_ten_million_tokens_in_the_memory_of_one_segment(haystack, tokenizer, questions):
    """Streamed once; the peak is that of a few segments, however long the text is."""
    length, size = 10_000_000, 65_536
    sample = babilong("qa3", length, 0, 0, questions["qa3"], haystack, tokenizer)
    assert sample.length == length
    for position, fact in zip(sample.about["positions"], sample.about["facts"], strict=True):
        ids = tokenizer.encode(f" {fact}")
        assert sample.tokens(position, position + len(ids)).tolist() == ids
    next(sample.segments(size))
    tracemalloc.start()
    begun, count = time.perf_counter(), 0
    for segment in sample.segments(size):
        count += len(segment)
    seconds, peak = time.perf_counter() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == length
    assert peak < 8 * size * 8
    assert seconds < 20
    assert sample.tokens(length - 7, length).tolist() == tokenizer.encode(sample.question_text)[-7:]


# Real books


@needs_books
def test_real_questions_in_real_books(tmp_path):
    (tmp_path / "books").mkdir()
    for name in ("8197.txt", "49078.txt"):
        shutil.copy(BOOKS / name, tmp_path / "books" / name)
    tokenizer = ByteTokenizer()
    haystack = Haystack.of_books(tmp_path / "books", tokenizer, tmp_path / "cache")
    for qa in ("qa1", "qa2", "qa3", "qa4", "qa5", "qa8", "qa19"):
        asked = open_questions(DATA / "babi", qa, "eval")
        for length in (8_000, 64_000):
            sample = babilong(qa, length, 11, 0, asked, haystack, tokenizer)
            assert sample.length == length
            check_facts(sample, haystack, tokenizer)
            assert sample.about["questions"].startswith("bAbI: qa")
            if qa in MAKERS:
                assert solve(qa, sample.about["facts"], sample.about["asked"]) == sample.answer_text
    words = read_words(DATA / "ruler") if (DATA / "ruler").is_dir() else WORDS
    check = niah("uuid", 20_000, 0, 0, haystack, tokenizer, words=words)
    check_facts(check, haystack, tokenizer, len(check.pieces[0]))

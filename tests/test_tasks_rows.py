"""Rows of ids with labels: each task against a slow solver, plain Python and its own chance."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from atlas_lm.models.lm import NO_TARGET
from atlas_lm.tasks import mad
from atlas_lm.tasks.mqar import distinct, mqar, power_law_gaps
from atlas_lm.tasks.rows import (
    EVALUATE,
    MQAR_TESTS,
    MQAR_TRAINING,
    ROW_TASKS,
    TRAIN,
    RowTask,
    _seed,
    row_task,
    rows,
)

# Small enough to be read by plain Python, and each with something else changed
VARIED = [
    ("mqar:vocab=40:pairs=3", 16),
    ("mqar:vocab=18:pairs=8", 33),
    ("mad/in-context-recall:vocab=9", 30),
    ("mad/noisy-recall:noise=0.9", 20),
    ("mad/noisy-recall:noise=1", 8),
    ("mad/fuzzy-recall:vocab=12", 40),
    ("mad/fuzzy-recall:key=2:value=4:shortest_key=1", 60),
    ("mad/fuzzy-recall:key=1:value=1:shortest_key=1", 5),
    ("mad/selective-copying:copied=5:vocab=4", 30),
    ("mad/selective-copying:copied=4", 9),
    ("mad/compression:symbols=3", 21),
    ("mad/memorisation:vocab=10:facts=3", 12),
]
ALL = [(name, task.length) for name, task in ROW_TASKS.items()] + VARIED


def listed(task: RowTask, count: int, length: int, part: int = EVALUATE, number: int = 0):
    made = rows(task, count, length, 0, part, number)
    assert made.tokens.shape == made.targets.shape == (count, length)
    assert made.tokens.dtype == made.targets.dtype == torch.int64
    return list(zip(made.tokens.tolist(), made.targets.tolist(), strict=True))


# Solvers: they see a row up to a question, and say the answer


def solve_mqar(row: list[int], task: RowTask) -> int:
    values = range(task.vocab // 2, task.vocab)
    told = {}
    for key, value in zip(row[::2], row[1::2], strict=False):
        if key in values or value not in values or key in told:
            break  # the pairs end where something else begins, at the latest
        told[key] = value
    return told[row[-1]]


def solve_recall(row: list[int], task: RowTask) -> int:
    return row[row.index(row[-1]) + 1]


def solve_fuzzy(row: list[int], task: RowTask) -> int:
    half = (task.vocab - 1) // 2
    pairs: list[tuple[list[int], list[int]]] = []
    value = True
    for token in row:
        if token == task.vocab - 1:
            continue
        if token < half and value:
            pairs.append(([], []))
        value = token >= half
        pairs[-1][value].append(token)
    key, begun = pairs[-1]
    return next(value for other, value in pairs if other == key)[len(begun)]


def solve_copying(row: list[int], task: RowTask) -> int:
    copy, blank = task.vocab - 1, task.vocab - 2
    told = [token for token in row[: row.index(copy)] if token != blank]
    return told[len(row) - row.index(copy) - 2]


def solve_compression(row: list[int], task: RowTask) -> int:
    return row[row[-1] - int(task.settings["symbols"])]


def solve_memorisation(row: list[int], task: RowTask) -> int:
    return int(mad.fact_values(task.vocab, int(task.settings["facts"]))[row[-2]])


SOLVERS = {
    "mqar": solve_mqar,
    "mad/in-context-recall": solve_recall,
    "mad/noisy-recall": solve_recall,
    "mad/fuzzy-recall": solve_fuzzy,
    "mad/selective-copying": solve_copying,
    "mad/compression": solve_compression,
    "mad/memorisation": solve_memorisation,
}


def family(name: str) -> str:
    name = name.split(":")[0]
    return "mqar" if name.startswith("mqar") else name


@pytest.mark.parametrize(("name", "length"), ALL)
def test_a_solver_that_reads_only_the_tokens_answers_everything(name, length):
    task = row_task(name)
    asked = 0
    for tokens, targets in listed(task, 4 if length > 200 else 20, length):
        assert all(0 <= token < task.vocab for token in tokens)
        for place, wanted in enumerate(targets):
            if wanted != NO_TARGET:
                assert SOLVERS[family(name)](tokens[: place + 1], task) == wanted
                asked += 1
    assert asked >= 4


@pytest.mark.parametrize(("name", "length"), ALL)
def test_a_blind_guess_among_the_answers_scores_chance(name, length):
    task = row_task(name)
    targets = torch.cat([rows(name, 64, length, 0, EVALUATE, i).targets for i in range(4)])
    targets = targets[targets != NO_TARGET]
    count = task.answers(**task.settings)
    assert task.chance == 1 / count
    low = int(targets.min()) if len(targets) > 20 * count else None
    begin = {"mad/selective-copying": 0, "mad/compression": 0}.get(family(name))
    end = task.vocab - int(task.settings.get("noise_vocab", 0))
    end -= family(name) in ("mad/fuzzy-recall", "mad/memorisation")
    begin = end - count if begin is None else begin
    assert low in (None, begin)
    assert begin <= int(targets.min())
    assert int(targets.max()) < begin + count
    guesses = torch.randint(
        begin, begin + count, targets.shape, generator=torch.Generator().manual_seed(1)
    )
    right, n = int((guesses == targets).sum()), len(targets)
    # more than five standard deviations, or five hits, are no accident
    assert abs(right - n / count) < 5 * math.sqrt(n / count) + 5


def test_the_table_is_what_was_published():
    lines = {
        name: (task.length, task.vocab, task.train_examples, task.test_examples)
        for name, task in ROW_TASKS.items()
    }
    assert lines == {
        "mqar": (256, 8192, 20_000, 1000),
        "mqar/64-4": (64, 8192, 100_000, 1000),
        "mqar/64-8": (64, 8192, 0, 1000),
        "mqar/64-16": (64, 8192, 0, 1000),
        "mqar/128-8": (128, 8192, 20_000, 0),
        "mqar/128-32": (128, 8192, 0, 1000),
        "mqar/256-16": (256, 8192, 20_000, 0),
        "mqar/256-32": (256, 8192, 20_000, 0),
        "mqar/256-64": (256, 8192, 20_000, 1000),
        "mqar/512-128": (512, 8192, 0, 1000),
        "mqar/1024-256": (1024, 8192, 0, 1000),
        "mad/in-context-recall": (128, 16, 12_800, 1280),
        "mad/fuzzy-recall": (128, 16, 12_800, 1280),
        "mad/noisy-recall": (128, 32, 12_800, 1280),
        "mad/selective-copying": (256, 16, 12_800, 1280),
        "mad/compression": (63, 47, 12_800, 1280),
        "mad/memorisation": (32, 256, 256, 1280),
    }
    chances = {name: round(1 / task.chance) for name, task in ROW_TASKS.items()}
    assert {n for name, n in chances.items() if name.startswith("mqar")} == {4096}
    assert [n for name, n in chances.items() if "mad" in name] == [8, 8, 8, 14, 15, 128]
    assert Counter(MQAR_TRAINING) == {
        "mqar/64-4": 5,
        "mqar/128-8": 1,
        "mqar/256-16": 1,
        "mqar/256-32": 1,
        "mqar/256-64": 1,
    }
    shapes = "64-4 64-8 64-16 128-32 256-64 512-128 1024-256"
    assert [name.split("/")[1] for name in MQAR_TESTS] == shapes.split()
    assert all(ROW_TASKS[name].train_examples for name in MQAR_TRAINING)


# Pure functions


@pytest.mark.parametrize(("name", "length"), VARIED)
def test_rows_follow_from_their_arguments(name, length, float64):
    first = rows(name, 3, length, 5, EVALUATE, 7)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    again = rows(row_task(name), 3, length, 5, EVALUATE, 7)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.targets, again.targets)
    assert torch.equal(state, torch.random.get_rng_state())
    for other in ((5, EVALUATE, 8), (6, EVALUATE, 7), (5, TRAIN, 7)):
        assert not torch.equal(rows(name, 3, length, *other).tokens, first.tokens)


@pytest.mark.parametrize("name", ROW_TASKS)
def test_training_and_evaluation_never_meet(name):
    task = ROW_TASKS[name]
    seeds = [
        {_seed(name, task.length, seed, part, i) for seed in range(9) for i in range(500)}
        for part in (TRAIN, EVALUATE)
    ]
    assert {seed % 2 for seed in seeds[TRAIN]} == {0}
    assert {seed % 2 for seed in seeds[EVALUATE]} == {1}
    assert all(0 <= seed < 2**32 for part in seeds for seed in part)
    assert min(map(len, seeds)) > 4495
    found = [
        {tuple(row) for i in range(4) for row in rows(task, 64, 0, 0, part, i).tokens.tolist()}
        for part in (TRAIN, EVALUATE)
    ]
    assert len(found[TRAIN]) == len(found[EVALUATE]) == 256
    assert not found[TRAIN] & found[EVALUATE]


def test_a_generator_looks_at_32_bits_only():
    """Why the last bit is the part; the day it looks at all of them, more could be drawn."""
    one, other = (torch.Generator().manual_seed(5 + more) for more in (0, 2**32))
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))


# MQAR


@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (64, 16), (256, 64), (33, 5)])
def test_mqar_places_and_labels(length, pairs):
    task = row_task(f"mqar:vocab=200:pairs={pairs}")
    for tokens, targets in listed(task, 40, length):
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < 100 for key in keys)
        assert all(100 <= value < 200 for value in values)
        asked = {place: target for place, target in enumerate(targets) if target != NO_TARGET}
        assert {tokens[place]: target for place, target in asked.items()} == dict(
            zip(keys, values, strict=True)
        )
        assert len(asked) == pairs
        assert all(place >= 2 * pairs and place % 2 == 0 for place in asked)


def test_mqar_fills_with_every_token():
    tokens, targets = mqar(400, 64, torch.Generator().manual_seed(0), vocab=20, pairs=2)
    filled = tokens[:, 4:][targets[:, 4:] == NO_TARGET]
    counts = torch.bincount(filled, minlength=20)
    assert counts.shape == (20,)
    assert chi_square(counts.tolist(), [1 / 20] * 20) < 60  # 19 degrees, one in a million


def chi_square(counts: list[int], law: list[float]) -> float:
    n = sum(counts)
    return sum((found - n * p) ** 2 / (n * p) for found, p in zip(counts, law, strict=True))


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_the_first_gap_follows_the_power_law(power):
    room, count = 12, 30_000
    gaps = power_law_gaps(count, 3, room, power, torch.Generator().manual_seed(0))
    weights = [float(gap) ** (power - 1) for gap in range(1, room + 1)]
    law = [weight / sum(weights) for weight in weights]
    assert chi_square(torch.bincount(gaps[:, 0], minlength=room).tolist(), law) < 50
    # the second, by the law of what is left after the first
    second = [
        math.fsum(law[i] * law[j] / (1 - law[i]) for i in range(room) if i != j)
        for j in range(room)
    ]
    assert chi_square(torch.bincount(gaps[:, 1], minlength=room).tolist(), second) < 50


def test_gaps_are_distributed_as_numpy_draws_them():
    """Their code calls numpy's choice with these probabilities; the means of ordered gaps agree."""
    room, size, count = 30, 6, 4000
    law = np.arange(1, room + 1) ** (0.01 - 1)
    draw = np.random.default_rng(0)
    theirs = np.stack(
        [draw.choice(room, size, replace=False, p=law / law.sum()) for _ in range(count)]
    )
    ours = power_law_gaps(20 * count, size, room, 0.01, torch.Generator().manual_seed(0)).numpy()
    assert all(len(set(row)) == size for row in ours[:1000].tolist())
    error = theirs.std(0) / math.sqrt(count)
    assert (abs(ours.mean(0) - theirs.mean(0)) < 5 * error).all()


@pytest.mark.parametrize(("size", "most"), [(3, 4), (2, 9), (1, 5), (4, 4)])
def test_distinct_numbers_are_all_equally_likely(size, most):
    made = distinct(40_000, size, most, torch.Generator().manual_seed(0))
    found = Counter(map(tuple, made.tolist()))
    possible = math.perm(most, size)
    assert len(found) == possible
    assert all(len(set(row)) == size for row in found)
    law = [1 / possible] * possible
    assert chi_square(list(found.values()), law) < possible + 6 * math.sqrt(2 * possible)


def test_mqar_takes_a_quarter_of_the_length_for_pairs():
    for length, pairs in ((64, 16), (66, 16), (1024, 256), (4096, 256)):
        asked = (rows("mqar", 2, length, 0, EVALUATE, 0).targets != NO_TARGET).sum(1)
        assert asked.tolist() == [pairs, pairs]


@pytest.mark.parametrize("name", ["mqar", "mqar/64-4"])
def test_one_of_the_values_told_is_right_as_often_as_there_are_few(name):
    task = row_task(f"{name}:vocab=400")
    right = asked = 0
    draw = np.random.default_rng(0)
    for tokens, targets in listed(task, 400, 64):
        wanted = [target for target in targets if target != NO_TARGET]
        told = tokens[1 : 2 * len(wanted) : 2]
        asked += len(wanted)
        right += sum(int(draw.choice(told)) == target for target in wanted)
    expected = task.chance_among_told(64)
    assert expected == {"mqar": 1 / 16, "mqar/64-4": 1 / 4}[name]
    assert abs(right - asked * expected) < 5 * math.sqrt(asked * expected)
    other = ROW_TASKS["mad/selective-copying"]
    assert other.chance_among_told(256) == other.chance


# MAD


@pytest.mark.parametrize("name", ["mad/in-context-recall", "mad/noisy-recall:noise=0.5"])
def test_recall_asks_for_every_key_that_comes_back_and_no_other(name):
    task = row_task(name)
    noise = 16
    for tokens, targets in listed(task, 50, 64):
        seen = set()
        expected = []
        for key, value in zip(tokens[::2], tokens[1::2], strict=True):
            assert (key < 8 <= value < noise) or (key >= noise and value >= noise)
            expected += [value if key in seen else NO_TARGET, NO_TARGET]
            seen |= {key} - set(range(noise, 32))
        assert targets == expected
        assert targets[-2] == tokens[-1]


def test_noise_is_as_frequent_as_it_says():
    tokens = rows("mad/noisy-recall", 500, 128, 0, EVALUATE, 0).tokens
    silent = (tokens[:, ::2] >= 16).float()
    assert torch.equal(silent, (tokens[:, 1::2] >= 16).float())
    # 62 of the first 63 pairs are drawn, one is told in any case, and the last one asked for
    assert float(silent[:, :-1].mean()) == pytest.approx(0.2 * 62 / 63, abs=0.01)
    assert not silent[:, -1].any()


def test_the_last_key_of_recall_is_any_that_was_told():
    made = rows("mad/in-context-recall:vocab=4", 8000, 8, 0, EVALUATE, 0).tokens
    both = made[(made[:, [0, 2, 4]].sum(1) % 3) != 0]  # both keys were told, 0 and 1
    assert float(both[:, -2].float().mean()) == pytest.approx(0.5, abs=0.03)
    one = made[(made[:, [0, 2, 4]].sum(1) % 3) == 0]
    assert torch.equal(one[:, -2], one[:, 0])


def test_training_on_recall_predicts_every_next_token():
    for name in ("mad/in-context-recall", "mad/noisy-recall", "mad/fuzzy-recall"):
        tokens, targets = rows(name, 8, 128, 0, TRAIN, 0)
        assert torch.equal(targets[:, :-1], tokens[:, 1:])
        last = targets[:, -1] != NO_TARGET
        assert last.all() if "fuzzy" in name else not last.any()
    plain = row_task("mad/in-context-recall:every=0")
    asked = rows(plain, 8, 128, 0, TRAIN, 0).targets != NO_TARGET
    assert 0 < int(asked.sum()) < 8 * 64


def test_fuzzy_recall_places_and_labels():
    task = row_task("mad/fuzzy-recall")
    sizes = Counter()
    for tokens, targets in listed(task, 300, 128):
        fill = tokens.count(15)
        assert tokens[:fill] == [15] * fill
        assert 2 <= fill <= 12
        row, labels = tokens[fill:], targets[fill:]
        place, told = 0, {}
        while place < len(row):
            key = tuple(row[place : place + 3])
            assert len(set(key)) == 3
            assert max(key) < 7
            end = place + 3
            while end < len(row) and row[end] >= 7:
                end += 1
            value = row[place + 3 : end]
            if end == len(row):  # the last token of the last value is not read any more
                value.append(labels[-1])
            assert 1 <= len(set(value)) == len(value) <= 3
            wanted = value if key in told else [NO_TARGET] * len(value)
            assert labels[place + 2 : place + 2 + len(value)] == wanted
            assert labels[place : place + 2] == [NO_TARGET] * 2
            assert told.setdefault(key, value) == value
            sizes[len(value)] += 1
            place = end
        assert labels[-1] != NO_TARGET
    assert chi_square([sizes[n] for n in (1, 2, 3)], [1 / 3] * 3) < 40


def test_fuzzy_recall_trains_on_keys_of_any_size_and_tests_on_the_longest():
    sizes = []
    for part in (TRAIN, EVALUATE):
        tokens = rows("mad/fuzzy-recall", 100, 128, 0, part, 0).tokens.tolist()
        runs = "".join("k" if t < 7 else "v" for row in tokens for t in [15, *row]).split("v")
        sizes.append({len(run) for run in runs if run})
    assert sizes == [{1, 2, 3}, {3}]


def test_copying_hides_tokens_among_blanks_evenly():
    tokens, targets = rows("mad/selective-copying", 2000, 256, 0, EVALUATE, 0)
    assert (tokens[:, 239] == 15).all()
    assert (tokens[:, 240:] == 14).all()
    assert (targets[:, :240] == NO_TARGET).all()
    told = tokens[:, :239]
    assert torch.equal(told[told != 14].view(-1, 16), targets[:, 240:])
    places = (told != 14).nonzero()[:, 1].view(-1, 16).double()
    assert (places[:, -1] == 238).all()
    # each of 223 blanks stands before one of 16 tokens: the j-th has j/16 of them before it
    expected = torch.tensor([j + 223 * (j + 1) / 16 for j in range(16)], dtype=torch.float64)
    assert torch.allclose(places.mean(0), expected, atol=1.0)


def test_compression_asks_for_every_place_once_in_any_order():
    orders = set()
    for tokens, targets in listed(ROW_TASKS["mad/compression"], 100, 63):
        assert max(tokens[:31]) < 15 == tokens[31]
        assert sorted(tokens[32:]) == list(range(16, 47))
        assert targets[:32] == [NO_TARGET] * 32
        assert targets[32:] == [tokens[name - 16] for name in tokens[32:]]
        orders.add(tuple(tokens[32:]))
    assert len(orders) == 100


def test_facts_are_the_same_in_training_and_evaluation():
    known = {}
    for part in (TRAIN, EVALUATE):
        for i in range(8):
            tokens, targets = rows("mad/memorisation", 64, 32, i, part, i)
            assert (tokens[:, 1::2] == 255).all()
            assert (tokens[:, ::2] < 127).all()
            for key, value in zip(
                tokens[:, ::2].flatten().tolist(), targets[:, 1::2].flatten().tolist(), strict=True
            ):
                assert known.setdefault(key, value) == value
                assert 127 <= value < 255
    assert len(known) == len(set(known.values())) == 127
    other = mad.fact_values(256, 1)
    assert sum(int(other[key]) == value for key, value in known.items()) < 10


# What is refused


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("mqr", 0, r"task: 'mqr' \(did you mean 'mqar'\?\) is not one of mqar, mqar/64-4"),
        ("mqar:pair=3", 0, r"no setting 'pair' \(did you mean 'pairs'\?\); expected vocab, pairs"),
        ("mqar:pairs=x", 0, "'pairs=x'; expected SETTING=NUMBER"),
        ("mqar:pairs", 0, "'pairs'; expected SETTING=NUMBER"),
        ("mqar:pairs=1.5", 0, "pairs=1.5; expected a whole number"),
        ("mqar:pairs=65", 0, "65 pairs in 256 tokens with 4095 keys; expected at least 4 tokens"),
        ("mqar:vocab=128", 0, "64 pairs in 256 tokens with 63 keys"),
        ("mqar", 3, "0 pairs in 3 tokens"),
        ("mad/in-context-recall", 7, "recall: 7 tokens with 16 ids .* expected an even number"),
        ("mad/fuzzy-recall", 12, "in 12 tokens; expected more than 12"),
        ("mad/fuzzy-recall:vocab=6", 0, "of 2 different ones each"),
        ("mad/selective-copying", 32, "expected at least 33 tokens"),
        ("mad/compression", 127, "127 tokens ask for 63 places.* vocab=79"),
        ("mad/compression", 32, "expected an odd number"),
        ("mad/memorisation", 5, "5 tokens of 256 ids; expected an even number"),
    ],
)
def test_what_cannot_be_made_is_refused(name, length, message):
    with pytest.raises(ValueError, match=message):
        rows(name, 1, length, 0, EVALUATE, 0)

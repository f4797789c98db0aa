"""The state of a memory: carried, taken apart, put together, saved."""

import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu

import atlas_lm
from atlas_lm import RULES, MemoryState, Rule
from atlas_lm.ops.files import fingerprint
from atlas_lm.testing import Example, assert_close, example

# Chunks and windows short enough that 13 tokens are past a border of each, and inside a chunk.
SMALL = {
    name: replace(rule, chunk=min(rule.chunk, 8), window=min(rule.window, 5))
    for name, rule in RULES.items()
}
EXTRA = {
    "softmax": Rule(features="exponential", objective="dot", normalize=True, chunk=8, window=3),
    "gated_exponential": replace(SMALL["dot"], network="gated_mlp"),
    "window_over_chunks": replace(SMALL["omeganet"], window=11),
    "huber_window": replace(SMALL["yaad"], window=5),
    "muon_stride": replace(SMALL["atlas"], stride=3),
}
EVERY = SMALL | EXTRA
every_rule = pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY.keys())


def read(rule: Rule, tokens: int = 13, batch: int = 3, **sizes) -> MemoryState:
    return example(rule, tokens, batch=batch, **sizes).run()[1]


def assert_same(found: MemoryState, expected: MemoryState) -> None:
    assert found.rule == expected.rule
    mine, theirs = found.tensors(), expected.tensors()
    assert {n: t.dtype for n, t in mine.items()} == {n: t.dtype for n, t in theirs.items()}
    assert [n for n, t in theirs.items() if not torch.equal(mine[n], t)] == []


def alone(state: MemoryState) -> MemoryState:
    """One row, without the zeros that longer rows beside it bring."""
    length = int(state.position)
    return replace(state, past={n: p[:, :length] for n, p in state.past.items()})


# Rows


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (1, [1]),
        (-1, [2]),
        (slice(1, None), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([2, 0], [2, 0]),
        ([-1, -3], [2, 0]),
        ([True, False, True], [0, 2]),
        (torch.tensor([False, False, True]), [2]),
        (torch.tensor([1, 1, 0]), [1, 1, 0]),
        (torch.tensor(1), [1]),
    ],
    ids=str,
)
def test_an_index_takes_rows_in_its_order_and_keeps_a_batch(index, rows):
    state = read(SMALL["dot"])
    found = state[index]
    assert found.batch == len(rows)
    assert_same(found, MemoryState.stack([state[row : row + 1] for row in rows]))


@pytest.mark.parametrize("none", [[], [False] * 3, slice(3, None)], ids=str)
def test_no_rows_are_an_empty_batch(none):
    found = read(SMALL["atlas"])[none]
    assert found.position.tolist() == []
    assert found.row_shapes() == read(SMALL["atlas"]).row_shapes()


@pytest.mark.parametrize("rows", [3, -4, [0, 3], [True], [[0]], 0.5, [1.0]], ids=str)
def test_rows_that_do_not_exist_are_refused(rows):
    state = read(SMALL["titans"])
    with pytest.raises(IndexError, match=r"rows .* of a batch of 3; expected their numbers"):
        state[rows]
    with pytest.raises(IndexError, match=r"rows .* of a batch of 3; expected their numbers"):
        state.reset(rows, example(SMALL["titans"], 1).weights)


@every_rule
def test_expanding_repeats_every_row_in_succession(rule):
    state = read(rule, batch=2)
    assert_same(state.expand(3), state[[0, 0, 0, 1, 1, 1]])


RESETS = {"numbers": [2, 0], "flags": [True, False, True], "tensor": torch.tensor([0, -1])}


@pytest.mark.parametrize("rows", RESETS.values(), ids=RESETS.keys())
@every_rule
def test_reset_rows_begin_anew_and_others_go_on(rule, rows):
    made = replace(example(rule, 22, batch=3), weights=example(rule, 1, seed=1).weights)
    state = read(rule)
    after = state.reset(rows, made.weights)
    y, _ = made.cut(13, 22).run(state=after)
    for row in range(3):
        here = made.rows(slice(row, row + 1))
        expected = state[row] if row == 1 else here.cut(0, 0).run()[1]
        assert_same(alone(after[row]), alone(expected))
        assert_close({"y": y[[row]]}, {"y": here.cut(13, 22).run(state=expected)[0]}, f"row {row}")


def test_a_reset_to_weights_of_another_memory_is_refused():
    weights = example(SMALL["titans"], 1, heads=1).weights
    with pytest.raises(ValueError, match=r"reset.*has .*w1 \(1, 3, 16\).*expected .*\(2, 3, 16\)"):
        read(SMALL["titans"]).reset([0], weights)


# Several states as one batch


@every_rule
def test_stacked_states_of_any_length_go_on_as_each_row_alone(rule):
    starts, more = [0, 3, 8, 13, 16], 11
    made = example(rule, max(starts) + more, batch=len(starts))
    rows = [made.rows(slice(i, i + 1)) for i in range(len(starts))]
    state = MemoryState.stack(
        [row.cut(0, start).run()[1] for row, start in zip(rows, starts, strict=True)]
    )
    next_tokens = made.over_tokens(
        lambda x: torch.stack([x[i, start : start + more] for i, start in enumerate(starts)])
    )
    y, state = next_tokens.run(state=state)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        expected, own = row.cut(0, start + more).run()
        found = {"y": y[[i]]} | alone(state[i]).tensors()
        assert_close(found, {"y": expected[:, start:]} | own.tensors(), f"row read to {start}")


@every_rule
def test_stacking_is_the_inverse_of_taking_apart(rule):
    state = read(rule)
    assert_same(MemoryState.stack([state[:1], state[1:]]), state)


def test_stacking_refuses_what_does_not_belong_together():
    state = read(SMALL["atlas"])
    with pytest.raises(ValueError, match="no states"):
        MemoryState.stack([])
    with pytest.raises(ValueError, match=r"state has .*optimizer='momentum'.*expected .*'muon'"):
        MemoryState.stack([state, read(SMALL["titans"])])
    with pytest.raises(ValueError, match=r"state has .*keys \(4, 2, 5\).*expected .*\(4, 2, 4\)"):
        MemoryState.stack([state, read(SMALL["atlas"], d_k=5)])
    with pytest.raises(TypeError, match=r"torch.float32 beside torch.float64.*state\.to"):
        MemoryState.stack([state, state.to(torch.float32)])


# Copies, precision, the graph


def test_a_clone_shares_nothing():
    state = read(SMALL["dot"])
    before, clone = state.map(lambda t: t + 0), state.clone()
    assert_same(clone, state)
    for tensor in clone.tensors().values():
        tensor.zero_()
    assert_same(state, before)


def test_precision_changes_every_float_and_no_position():
    state = read(SMALL["swdt"])
    single = state.to(torch.float32)
    assert_same(single, state.map(lambda t: t.float() if t.is_floating_point() else t))
    assert_same(single.to(torch.float64).to(dtype=torch.float32), single)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_a_precision_that_loses_the_memory_is_refused(dtype):
    with pytest.raises(TypeError, match=f"{dtype} loses the memory; use float32 or float64"):
        read(SMALL["titans"]).to(dtype)


@every_rule
def test_every_tensor_moves(rule):
    moved = read(rule).to("meta").tensors()
    assert [n for n, t in moved.items() if t.device.type != "meta"] == []


def test_nbytes_counts_every_tensor_once():
    # 3 rows, 2 heads, widths 4 -> 16 -> 3; weights, anchor and momentum; one position a row
    assert read(SMALL["titans"]).nbytes == 3 * (3 * 2 * (16 * 4 + 3 * 16) * 8 + 8)
    # weights and anchor, and 4 pairs of the window
    single = read(SMALL["swla"], dtype=torch.float32)
    assert single.nbytes == 3 * (2 * 2 * (3 * 4) * 4 + 4 * 2 * (4 + 3) * 4 + 8)


CARRIES = {
    "as_it_is": lambda state: state,
    "cloned": MemoryState.clone,
    "in_float64": lambda state: state.to(torch.float64),
    "row_by_row": lambda state: MemoryState.stack([state[0], state[1:]]),
    "from_more_rows": lambda state: state.expand(2)[[1, 2]],
}


def gradients_of_the_second_part(made: Example, carry=None, at: int = 13) -> dict:
    """Of every input; in one pass, or with the state carried so."""
    inputs = {n: x.clone().requires_grad_() for n, x in made.inputs().items()}
    made = made.with_inputs(inputs)
    if carry is None:
        y = made.run()[0][:, at:]
    else:
        y, _ = made.cut(at, made.tokens).run(state=carry(made.cut(0, at).run()[1]))
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    grads = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    return dict(zip(inputs, grads, strict=True))


@pytest.mark.parametrize("carry", CARRIES.values(), ids=CARRIES.keys())
@pytest.mark.parametrize("name", ["atlas", "dot", "gated_delta_net", "huber_window"])
def test_a_carried_state_passes_the_gradient_of_one_pass(name, carry):
    made = example(EVERY[name], 22)
    found = gradients_of_the_second_part(made, carry)
    assert_close(found, gradients_of_the_second_part(made), "cut against one pass")
    assert found["k"][:, :13].abs().max() > 1e-6


@every_rule
def test_detaching_cuts_the_gradient_and_nothing_else(rule):
    made = example(rule, 22)
    found = gradients_of_the_second_part(made, MemoryState.detach)
    first_weight = next(n for n in found if n.startswith("weights."))
    assert not found["k"][:, :13].any()
    assert not found["gates.rate"][:, :13].any()
    assert not found[first_weight].any()
    assert found["k"][:, 13:].abs().max() > 1e-6
    state = made.run()[1]
    assert_same(state.detach(), state)


# What a call leaves alone


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@every_rule
def test_a_call_leaves_the_state_passed_in_as_it_was(rule, impl):
    made = example(rule, 22)
    state = made.cut(0, 13).run()[1]
    before = state.clone()
    _, after = made.cut(13, 22).run(impl, state)
    assert_same(state, before)
    assert after.position.tolist() == [22, 22]


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_call_that_fails_half_way_leaves_the_state_as_it_was(impl):
    calls = []

    def fails_in_the_end(prediction, target):
        calls.append(0)
        if len(calls) > allowed:
            raise ArithmeticError("no more")
        return (prediction - target).square().sum(-1)

    allowed = 10**6
    made = example(Rule(objective=fails_in_the_end, window=3, chunk=4), 22)
    state = made.cut(0, 5).run()[1]
    before = state.clone()
    allowed = len(calls) + 3
    with pytest.raises(ArithmeticError, match="no more"):
        made.cut(5, 22).run(impl, state)
    assert_same(state, before)


def test_a_refused_call_leaves_the_state_as_it_was():
    made = example(SMALL["atlas"], 13)
    state = made.run()[1]
    before = state.clone()
    with pytest.raises(ValueError, match="v: holds nan"):
        replace(made, v=made.v * float("nan")).run(state=state)
    assert_same(state, before)


@every_rule
def test_an_optimiser_that_moves_the_weights_in_place_leaves_a_state_alone(rule):
    """Mid-chunk the anchor still is the initial memory, but not the parameter itself."""
    made = example(rule, 5)
    states = [made.run()[1], made.cut(0, 0).run()[1]]
    before = [state.clone() for state in states]
    for x in made.inputs().values():
        x.add_(1)
    for state, old in zip(states, before, strict=True):
        assert_same(state, old)


# States that do not belong


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"optimizer": "momentum"}, r"state has optimizer='momentum'; expected optimizer='muon'"),
        ({"window": 2}, r"state has window=2; expected window=5"),
    ],
    ids=["optimizer", "window"],
)
def test_a_state_of_another_rule_is_refused_naming_both_sides(change, match):
    state = read(replace(SMALL["atlas"], **change))
    with pytest.raises(ValueError, match=f"^state: the state is of another rule: {match}$"):
        example(SMALL["atlas"], 3, batch=3).run(state=state)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"heads": 1}, r"has .*keys \(4, 1, 4\).*; expected .*keys \(4, 2, 4\)"),
        ({"d_k": 5}, r"has .*keys \(4, 2, 5\).*; expected .*keys \(4, 2, 4\)"),
        ({"d_v": 5}, r"has .*values \(4, 2, 5\).*; expected .*values \(4, 2, 3\)"),
        ({"hidden": 7}, r"has .*anchor.w1 \(2, 3, 7\).*; expected .*anchor.w1 \(2, 3, 16\)"),
        ({"batch": 2}, r"holds 2 rows, q has a batch of 3"),
    ],
    ids=["heads", "d_k", "d_v", "hidden", "batch"],
)
def test_a_state_of_other_sizes_is_refused_naming_both_sides(sizes, match):
    with pytest.raises(ValueError, match=f"^state: .*{match}"):
        example(SMALL["atlas"], 3, batch=3).run(state=read(SMALL["atlas"], **sizes))


# Files


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@every_rule
def test_a_saved_state_comes_back_bit_for_bit(rule, dtype, tmp_path):
    state = read(rule, dtype=dtype)
    state.save(tmp_path / "memory.safetensors")
    assert_same(MemoryState.load(tmp_path / "memory.safetensors"), state)
    assert_same(MemoryState.load(str(tmp_path / "memory.safetensors"), rule=rule), state)


@every_rule
def test_a_loaded_state_goes_on_as_if_it_had_never_been_away(rule, tmp_path):
    made = example(rule, 22)
    learned = made.with_inputs({n: x.clone().requires_grad_() for n, x in made.inputs().items()})
    state = learned.cut(0, 13).run()[1]
    state.save(tmp_path / "memory")
    found, _ = made.cut(13, 22).run(state=MemoryState.load(tmp_path / "memory"))
    expected, _ = made.cut(13, 22).run(state=state)
    assert_close({"y": found}, {"y": expected.detach()}, "loaded against carried")


@pytest.mark.parametrize(
    ("rule", "tokens", "once"),
    [("delta_net", 13, True), ("titans", 16, True), ("titans", 13, False)],
)
def test_a_memory_that_is_its_own_anchor_is_saved_once(rule, tokens, once, tmp_path):
    state = read(SMALL[rule], tokens)
    state.save(tmp_path / "m")
    with safe_open(tmp_path / "m", "pt") as file:
        names = set(file.keys())
    assert ("anchor.w" in names or "anchor.w1" in names) != once
    back = MemoryState.load(tmp_path / "m")
    assert_same(back, state)
    for name, anchor in back.anchor.items():
        assert anchor.data_ptr() != back.weights[name].data_ptr()


def test_rows_at_different_positions_are_saved_together(tmp_path):
    state = MemoryState.stack([read(SMALL["dot"], n, batch=1) for n in (3, 13, 0)])
    state.save(tmp_path / "memory")
    assert_same(MemoryState.load(tmp_path / "memory"), state)


def test_a_file_says_what_is_in_it(tmp_path):
    state = MemoryState.stack([read(SMALL["swdt"], n, batch=1) for n in (3, 13)])
    state.to(torch.float32).save(tmp_path / "memory")
    with safe_open(tmp_path / "memory", "pt") as file:
        said = file.metadata()
    assert json.loads(said["layout"])["rule"] == {"rule": SMALL["swdt"].describe()}
    assert json.loads(said["shapes"]) == {n: list(t.shape) for n, t in state.tensors().items()}
    assert said["library"] == f"atlas-lm {atlas_lm.__version__}"


def test_a_file_of_another_rule_is_refused_naming_both_sides(tmp_path):
    read(SMALL["atlas"]).save(tmp_path / "memory")
    other = replace(SMALL["atlas"], chunk=16, window=1)
    with pytest.raises(ValueError, match=r"memory: .*window=5, chunk=8; .*window=1, chunk=16$"):
        MemoryState.load(tmp_path / "memory", rule=other)


@pytest.mark.parametrize(
    "field", [{"colour": "red"}, {"network": "conv"}], ids=["unknown", "invalid"]
)
def test_a_file_of_another_version_is_refused(field, tmp_path, monkeypatch):
    rule = SMALL["titans"]
    description = rule.describe() | field
    with monkeypatch.context() as patch:
        patch.setattr(Rule, "describe", lambda self: description)
        read(rule).save(tmp_path / "memory")
    name, value = next(iter(field.items()))
    with pytest.raises(ValueError, match=f"memory: written by another version .*{name}"):
        MemoryState.load(tmp_path / "memory")
    with pytest.raises(ValueError, match=f"memory: .*file has {name}='{value}'; expected {name}="):
        MemoryState.load(tmp_path / "memory", rule=rule)


def two_layers(lin, x, f):
    return lin("w1", gelu(lin("first", f)))


def absolute(prediction, target):
    return (prediction - target).abs().sum(-1)


class Quartic:
    def __call__(self, prediction, target):
        return (prediction - target).pow(4).sum(-1)


@pytest.mark.parametrize("loss", [absolute, Quartic()], ids=["function", "object"])
def test_a_rule_made_of_functions_is_asked_for(loss, tmp_path):
    state = read(Rule(network=two_layers, objective=loss, chunk=8))
    state.save(tmp_path / "memory")
    with pytest.raises(ValueError, match=r"memory: .*two_layers.*pass the same rule: .*rule=rule"):
        MemoryState.load(tmp_path / "memory")
    assert_same(MemoryState.load(tmp_path / "memory", rule=state.rule), state)
    with pytest.raises(ValueError, match=r"file has network='function .*two_layers'.*'linear'"):
        MemoryState.load(tmp_path / "memory", rule=replace(state.rule, network="linear"))


def test_the_description_of_a_rule_is_the_same_in_every_process():
    said = Rule(network=two_layers, objective=Quartic()).describe()
    assert said["network"] == f"function {__name__}.two_layers"
    assert said["objective"] == f"function {__name__}.Quartic"


# Damaged files


def bytes_of_a_small_memory(path) -> bytes:
    read(SMALL["atlas"], 5, batch=1, heads=1, d_k=2, d_v=2, hidden=2).save(path)
    return path.read_bytes()


def test_a_change_of_any_byte_is_refused(tmp_path):
    """Names, sizes, numbers, metadata, checksum: every byte of the file in turn."""
    whole, path = bytes_of_a_small_memory(tmp_path / "memory"), tmp_path / "changed"
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=f"^{path}: (the file was changed|not a )"):
            MemoryState.load(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole, path = bytes_of_a_small_memory(tmp_path / "memory"), tmp_path / "cut"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^{path}: not a whole safetensors file"):
            MemoryState.load(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"dtype":"F64","shape":[1,1,2,6]', b'{"dtype":"I64","shape":[1,1,2,6]'),
        (b'{"dtype":"F64","shape":[1,1,2,6]', b'{"dtype":"F64","shape":[1,1,6,2]'),
        (b"anchor.w1", b"anchor.w7"),
        (b'\\"window\\": 5', b'\\"window\\": 4'),
        (b"atlas-lm 0.", b"atlas-lm 1."),
    ],
    ids=["dtype", "shape", "name", "rule", "version"],
)
def test_a_header_changed_with_care_is_refused(old, new, tmp_path):
    """The same bytes of the same tensors, but said to be something else."""
    whole = bytes_of_a_small_memory(tmp_path / "memory")
    assert old in whole
    (tmp_path / "memory").write_bytes(whole.replace(old, new))
    with pytest.raises(ValueError, match="memory: the file was changed after it was written"):
        MemoryState.load(tmp_path / "memory")


FORGERIES = {
    "no_keys": {"keys": None},
    "no_weight": {"weights.w1": None},
    "no_anchor": {"anchor.w1": None},
    "a_tensor_too_many": {"strange": torch.ones(1)},
    "a_group_too_many": {"strange.w": torch.ones(1)},
    "another_window": {"keys": torch.zeros(1, 3, 2, 4)},
    "a_fractional_position": {"position": torch.ones(1)},
    "a_position_for_all": {"position": torch.tensor(13)},
    "a_position_past_the_past": {"position": torch.tensor([14])},
    "a_past_of_more_rows": {"past.keys": torch.zeros(2, 13, 2, 4)},
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_file_with_the_right_checksum_is_refused(change, tmp_path):
    path = tmp_path / "memory"
    read(SMALL["dot"], batch=1).save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {n: t for n, t in (load_file(path) | change).items() if t is not None}
    metadata["sha256"] = fingerprint(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"memory: (not the tensors|the tensors of the memory)"):
        MemoryState.load(path)


def test_a_forged_file_whose_tensors_are_others_that_are_none_is_refused(tmp_path):
    path = tmp_path / "memory"
    read(SMALL["delta_net"], batch=1).save(path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), load_file(path)
    metadata["same"] = json.dumps({"anchor.w": "weights.v"})
    metadata["sha256"] = fingerprint(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"anchor\.w is weights\.v, which is none"):
        MemoryState.load(path)


class Trap:
    """Pickled, it makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_never_opened(tmp_path):
    for name, dump in {"pickle": pickle.dump, "torch": torch.save}.items():
        path, sprung = tmp_path / name, tmp_path / "sprung"
        with path.open("wb") as file:
            dump({"weights": Trap(sprung)}, file)
        with pytest.raises(ValueError, match=f"^{path}: not a whole safetensors file"):
            MemoryState.load(path)
        assert not sprung.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"It was a dark and stormy night.", bytes(64)], ids=str
)
def test_a_file_that_is_no_safetensors_is_refused(content, tmp_path):
    (tmp_path / "memory").write_bytes(content)
    with pytest.raises(ValueError, match="memory: not a whole safetensors file"):
        MemoryState.load(tmp_path / "memory")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=str)
def test_a_safetensors_file_of_something_else_is_refused(metadata, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model", metadata)
    with pytest.raises(ValueError, match=r"model: not a memory file: .*expected 'atlas-lm memory"):
        MemoryState.load(tmp_path / "model")


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"^{path}: no such memory file"):
            MemoryState.load(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(at, error, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    old, path = read(SMALL["titans"], 5), tmp_path / "memory"
    old.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, at, fail)
        with pytest.raises(type(error)):
            read(SMALL["titans"], 9).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["memory"]
    assert_same(MemoryState.load(path), old)


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    """When the new file takes the place of the old one, it can already be read."""
    replace_file, seen = os.replace, []

    def look_and_replace(temporary, path):
        seen.append(MemoryState.load(temporary).position.tolist())
        assert not path.exists()
        replace_file(temporary, path)

    monkeypatch.setattr(os, "replace", look_and_replace)
    read(SMALL["titans"], 5).save(tmp_path / "memory")
    assert seen == [[5, 5, 5]]

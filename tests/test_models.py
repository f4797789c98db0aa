"""Blocks and language models: the contract, folders, segments, memory, numbers."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from atlas_lm import (
    RULES,
    LanguageModel,
    MemoryState,
    ModelConfig,
    ModelState,
    Rule,
    load_model,
    save_model,
)
from atlas_lm.models import fingerprint_of
from atlas_lm.testing import assert_close, check_stream
from atlas_lm.trace import trace, watch_retention

SMALL = {
    name: replace(rule, chunk=min(rule.chunk, 8), window=min(rule.window, 4))
    for name, rule in RULES.items()
}
BLOCKS = ("plain", "mac", "mag", "mag_sum", "mal")
DEFAULT = ("delta_net", "titans", "atlas")


pytestmark = pytest.mark.usefixtures("float64")


def model_of(rule, **changes) -> LanguageModel:
    sizes: dict[str, Any] = {
        "vocab": 19,
        "dim": 12,
        "depth": 2,
        "heads": 2,
        "d_k": 3,
        "expansion": 2,
    }
    sizes |= {"gate_rank": 4, "window": 7, "segment": 6, "persistent": 2, "mlp": 16}
    return LanguageModel(ModelConfig(**sizes | {"rule": rule} | changes))


def tokens(batch: int = 2, length: int = 21) -> torch.Tensor:
    return torch.randint(0, 19, (batch, length))


def gradients_of(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", DEFAULT)
def test_a_model_keeps_the_contract(name, block):
    check_stream(model_of(SMALL[name], block=block), tokens())


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_alone_keeps_the_contract(block):
    """On embeddings, of which those that are no tokens may be anything."""
    made = model_of(SMALL["titans"], block=block).blocks[0]
    check_stream(made, torch.randn(2, 21, 12))


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", [name for name in SMALL if name not in DEFAULT])
def test_every_rule_keeps_the_contract_in_every_block(name, block):
    check_stream(model_of(SMALL[name], block=block), tokens())


@pytest.mark.parametrize(
    "changes",
    [{"rule": ("attention", SMALL["titans"], "swa"), "depth": 3}, {"tied": True}, {"conv": 1}],
    ids=["mixed", "tied", "no_conv"],
)
def test_other_models_keep_the_contract(changes):
    check_stream(model_of(**{"rule": SMALL["titans"]} | changes), tokens())


class Leaking(torch.nn.Module):
    """A model that does one thing it must not."""

    def __init__(self, fault: str):
        super().__init__()
        self.model, self.fault = model_of(SMALL["titans"]), fault

    def forward(self, x, state=None, mask=None, reset=None):
        if self.fault == "ignores reset":
            reset = None
        if self.fault == "ignores mask":
            mask = None
        y, new = self.model(x, state, mask, reset)
        if self.fault == "sees the future":
            y = y + 1e-6 * y.mean(1, keepdim=True)
        if self.fault == "sees other rows":
            y = y + 1e-6 * y.mean(0, keepdim=True)
        if self.fault == "random in training" and self.training:
            y = y + 1e-6 * torch.randn_like(y)
        return y, new


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sees the future", "cut into|before a changed token"),
        ("sees other rows", "of a batch against the row alone"),
        ("ignores mask", "padded left"),
        ("ignores reset", "packed tokens"),
        ("random in training", "differ"),
    ],
)
def test_the_contract_notices(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_stream(Leaking(fault), tokens())


# Training


def test_activation_checkpointing_changes_nothing():
    model, x = model_of(SMALL["atlas"], block="mac"), tokens()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss, _ = model.loss(x[:, :-1], x[:, 1:])
        loss.backward()
        return gradients_of(model)

    expected = gradients()
    model.checkpointing = True
    assert_close(gradients(), expected, "checkpointed")


def test_the_loss_is_cross_entropy_over_what_is_wanted():
    model, x = model_of(SMALL["titans"]), tokens()
    targets = x.roll(-1, 1)
    targets[0, :15] = -100
    logits, _ = model(x)
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss, _ = model.loss(x, targets)
    assert loss.item() == pytest.approx(expected.item())


def test_segments_train_like_one_pass_with_the_graph_cut():
    model, x = model_of(SMALL["titans"]), tokens()
    targets = x.roll(-1, 1)
    total, state = 0.0, model.begin(2)
    for loss, carried in model.losses(x, targets, segment=5):
        loss.backward()
        total, state = total + loss.item(), carried
    whole, expected = model.loss(x, targets)
    assert total == pytest.approx(whole.item())
    assert_close(state.tensors(), expected.tensors(), "carried state")
    assert not any(t.requires_grad for t in state.tensors().values())
    assert all(p.grad is not None for p in model.parameters())


def test_a_segment_without_targets_counts_nothing():
    """What is told and what is asked may lie in different segments."""
    model, x = model_of(SMALL["titans"]), tokens()
    targets = x.roll(-1, 1)
    targets[:, :12] = -100
    found = [loss.item() for loss, _ in model.losses(x, targets, segment=5)]
    assert found[:2] == [0.0, 0.0]
    assert sum(found) == pytest.approx(model.loss(x, targets)[0].item())


def test_gradients_reach_back_through_a_state_that_is_not_cut():
    """What is told first must be learnable from what is asked later."""
    model, x = model_of(SMALL["titans"]), tokens()
    _, state = model(x[:, :10])
    logits, _ = model(x[:, 10:], state)
    logits.square().mean().backward()
    carried = gradients_of(model)
    model.zero_grad()
    model(x)[0][:, 10:].square().mean().backward()
    whole = gradients_of(model)
    assert_close(carried, whole, "gradients through the state")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("block", ["plain", pytest.param("mac", marks=pytest.mark.slow)])
def test_a_compiled_model_is_the_model(block):
    torch.set_default_dtype(torch.float32)
    model, x = model_of((SMALL["titans"], SMALL["delta_net"]), block=block), tokens()
    compiled = torch.compile(model)
    expected, state = model(x)
    found, carried = compiled(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled(x, carried)[0], model(x, state)[0], rtol=1e-4, atol=1e-4)
    found.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", DEFAULT)
def test_a_fresh_model_has_small_gradients(name):
    """Design 5.8: 2 layers, width 128, 4,096 tokens."""
    torch.set_default_dtype(torch.float32)
    rule = replace(RULES[name], stride=16) if name == "atlas" else name
    model = LanguageModel(ModelConfig(dim=128, depth=2, rule=rule))
    x = torch.randint(0, 257, (1, 4097))
    loss, _ = model.loss(x[:, :-1], x[:, 1:])
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert loss < 6
    assert norm < 10


def test_bfloat16_models_and_autocast_run():
    torch.set_default_dtype(torch.float32)
    model, x = model_of((SMALL["atlas"], "swa")), tokens()
    with torch.no_grad():
        expected, _ = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            mixed, state = model(x)
        low, carried = model.bfloat16()(x)
    for y in (mixed, low):
        assert (y.float() - expected).norm() < 0.1 * expected.norm()
    for each in (state, carried):
        assert each.layers[0].memory.weights["w1"].dtype == torch.float32


# State and files


def test_a_model_state_is_a_file(tmp_path):
    model, x = model_of((SMALL["atlas"], "swa", "attention"), depth=3), tokens()
    _, state = model(x)
    state.save(tmp_path / "memory")
    loaded = MemoryState.load(tmp_path / "memory")
    assert isinstance(loaded, ModelState)
    assert torch.equal(model(x, loaded)[0], model(x, state)[0])
    # also where nobody has spoken of a model yet
    code = "from atlas_lm import MemoryState; print(MemoryState.load('memory').position)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tensor([21, 21])"


def test_rows_can_be_taken_repeated_stacked_and_reset():
    model, x = model_of((SMALL["dot"], "attention")), tokens(3)
    mask = torch.ones(3, 21, dtype=torch.bool)
    mask[1, :9] = False
    _, state = model(x, mask=mask)
    assert state.position.tolist() == [21, 12, 21]
    more = tokens(3, 4)
    expected, _ = model(more, state)
    found, _ = model(more[[2, 1, 1]], state[[2, 1, 1]])
    assert_close({"y": found[0]}, {"y": model(more[2:], state[2])[0][0]}, "taken")
    joined = ModelState.stack([state[0], model.begin(1), state[1:]])
    found, _ = model(more[[0, 0, 1, 2]], joined)
    assert_close({"y": found[[0, 2, 3]]}, {"y": expected}, "stacked")
    assert_close({"y": found[1:2]}, {"y": model(more[:1])[0]}, "an unread row")
    found, _ = model(more, model.reset(state, [1]))
    assert_close({"y": found[[0, 2]]}, {"y": expected[[0, 2]]}, "rows beside a reset one")
    assert_close({"y": found[1:2]}, {"y": model(more[1:2])[0]}, "a reset row")
    with pytest.raises(ValueError, match=r"stack: the state does not fit: .*expected"):
        ModelState.stack([state, model_of((SMALL["dot"], "attention"), d_k=4).begin(1)])


def test_a_model_is_a_folder(tmp_path):
    model, x = model_of((SMALL["titans"], "swa"), tied=True), tokens()
    save_model(model, tmp_path / "model")
    drawn = torch.get_rng_state()
    loaded = load_model(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert loaded.config == model.config
    assert fingerprint_of(loaded) == fingerprint_of(model)
    assert torch.equal(loaded(x)[0], model(x)[0])
    with torch.no_grad():
        loaded.norm.weight[0] += 1e-9
    assert fingerprint_of(loaded) != fingerprint_of(model)


def test_a_file_may_have_half_the_bits(tmp_path):
    """The model has its own dtype again, with the numbers rounded once."""
    model = model_of(SMALL["titans"]).float()
    save_model(model, tmp_path / "model")
    save_model(model, tmp_path / "half", stored=torch.bfloat16)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("model", "half")]
    assert sizes[1] < 0.7 * sizes[0]
    found = load_model(tmp_path / "half").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16().float())
    save_model(model.bfloat16(), tmp_path / "other")
    assert {p.dtype for p in load_model(tmp_path / "other").parameters()} == {torch.bfloat16}


def test_a_broken_folder_is_refused(tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        load_model(folder)
    save_model(model_of(SMALL["titans"]), folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    said, whole = config.read_text(), weights.read_bytes()

    def refused(kind, match):
        with pytest.raises(kind, match=match):
            load_model(folder)
        config.write_text(said)
        weights.write_bytes(whole)

    weights.write_bytes(whole[:-5])
    refused(ValueError, "model.safetensors: not a whole safetensors file")
    weights.unlink()
    refused(FileNotFoundError, "model.safetensors: missing")
    config.write_text(said[:-9])
    refused(ValueError, "config.json: not a JSON file")
    config.write_text(json.dumps({"model_type": "llama"}))
    refused(ValueError, "model_type is 'llama', expected 'atlas_lm'")
    config.write_text(said.replace('"depth": 2', '"depth": 3'))
    refused(ValueError, r"does not fit config.json: blocks.2.* is missing, expected \(")
    config.write_text(said.replace('"vocab": 19', '"vocab": 0'))
    refused(ValueError, "config.json: not the config of a model.*vocab: 0")
    config.write_text(said.replace('"vocab"', '"vocabulary"'))
    refused(ValueError, "unknown vocabulary; known are block")
    assert load_model(folder).config == model_of(SMALL["titans"]).config


# Configs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "atlass"}, r"rule: 'atlass' is not one of .*atlas, .*attention, swa"),
        ({"rule": ()}, "rule: an empty tuple"),
        ({"rule": "swa", "block": "mag"}, "rule: 'swa' is for block='plain'; 'mag' has its own"),
        ({"block": "mad"}, "block: 'mad' is not one of plain, mac"),
        ({"depth": 0}, "depth: 0 must be a whole number"),
        ({"dim": 30}, "heads: 4 do not divide dim=30"),
        ({"dim": 20, "block": "mal"}, "heads: 4 heads of an even width do not make dim=20"),
        ({"coefficients": (1.0, 2.0)}, r"coefficients: \(1, 2\); expected 3 numbers above 0"),
        (
            {"rule": "titans", "coefficients": (1.0, 1.0, 1.0)},
            "coefficients: no rule here has poly",
        ),
        ({"newest": 0.0}, "newest: 0.0 is no share of a window"),
        (
            {"rule": ("titans", "swa"), "newest": 0.5},
            "newest: no rule here has a window of several",
        ),
    ],
)
def test_a_wrong_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_a_config_goes_through_json():
    for config in (
        ModelConfig(),
        ModelConfig(rule=(Rule(window=3), "swa", "titans"), tied=True),
        ModelConfig.of_size("1.3B", rule="atlas_pp", block="mag"),
        ModelConfig(rule=("swa", "titans", "atlas"), coefficients=(0.1, 1.0, 1.0), newest=0.5),
    ):
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="network given as a function cannot be written"):
        ModelConfig(rule=Rule(network=lambda lin, x, f: lin("w", f))).to_dict()


@pytest.mark.parametrize("size", ["170M", "340M", "760M", "1.3B"])
def test_the_papers_sizes(size):
    config = ModelConfig.of_size(size, rule="titans")
    with torch.device("meta"):
        model = LanguageModel(config)
    count = sum(p.numel() for p in model.parameters())
    named = float(size[:-1]) * (1e9 if size.endswith("B") else 1e6)
    assert 0.7 < count / named < 1.35, f"{count:,}"


def test_one_dial():
    config = ModelConfig.of_depth(3, rule="delta_net")
    assert (config.dim, config.heads, config.depth) == (192, 3, 3)


def test_the_summary_adds_up():
    model = model_of((SMALL["titans"], "attention"), block="plain")
    said = model.summary()
    count = sum(p.numel() for p in model.parameters())
    assert f"{count:,}" in said
    assert "1 x attention" in said
    assert "grows with the text" in said
    numbers = [int(line.split()[-1].replace(",", "")) for line in said.splitlines()[1:-2]]
    assert sum(numbers[:-1]) == numbers[-1] == count


# What a model refuses


def test_wrong_tokens_are_refused():
    model = model_of(SMALL["titans"])
    with pytest.raises(ValueError, match=r"tokens: id 19 is not in .*vocabulary, 0 to 18; use the"):
        model(torch.tensor([[3, 19]]))
    with pytest.raises(ValueError, match=r"tokens: id -1"):
        model(torch.tensor([[3, -1]]))
    with pytest.raises(TypeError, match=r"tokens: expected whole numbers .* got torch.float64"):
        model(torch.randn(1, 3))
    with pytest.raises(ValueError, match=r"tokens: shape \(3,\), expected \[batch, time\]"):
        model(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"mask: torch.int64 \(1, 2\), expected bool \(1, 2\)"):
        model(torch.tensor([[1, 2]]), mask=torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match="state: holds 3 rows, tokens have a batch of 1"):
        model(torch.tensor([[1, 2]]), model.begin(3))
    with pytest.raises(ValueError, match="state: expected the ModelState of 2 blocks"):
        model(torch.tensor([[1, 2]]), model_of(SMALL["titans"], depth=1).begin(1))


# What it did


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["delta_net", "titans", "yaad", "dot"])
def test_a_trace_is_the_same_however_it_is_cut(name, block):
    model, x = model_of(SMALL[name], block=block), tokens()
    whole, end = trace(model, x)
    parts, state = [], None
    for part in x.split([1, 7, 13], 1):
        one, state = trace(model, part, state)
        parts.append(one)
    assert state is not None
    for signal in ("surprise", "write", "retention"):
        found = torch.cat([getattr(p, signal) for p in parts], -1)
        torch.testing.assert_close(found, getattr(whole, signal), rtol=1e-5, atol=1e-6)
    assert_close(end.tensors(), model(x)[1].tensors(), "the state after a trace")
    assert_close(state.tensors(), end.tensors(), "the state after a cut trace")


def test_a_trace_says_what_happened():
    """A pair that is told again surprises less, and a closed gate writes nothing."""
    model = model_of(SMALL["delta_net"], depth=1, conv=1)
    with torch.no_grad():
        model.blocks[0].mixer.gates.up.weight.zero_()
    x = torch.tensor([[3, 7, 3, 7]])
    seen, _ = trace(model, x)
    assert seen.surprise[0, 0, 2] < seen.surprise[0, 0, 0]
    assert seen.surprise[0, 0, 3] < seen.surprise[0, 0, 1]
    assert (seen.write > 0).all()
    assert (seen.retention == 1).all()
    with torch.no_grad():
        model.blocks[0].mixer.gates.up.bias.fill_(-1)
    seen, _ = trace(model, x)
    assert seen.write.abs().max() < 1e-12


def test_half_lives_are_those_of_the_gates():
    model = model_of(SMALL["titans"], retention=0.99)
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.gates.up.weight.zero_()
    with watch_retention(model) as kept:
        model(tokens())
        model(tokens())
    expected = torch.log(torch.tensor(0.5)) / torch.log(torch.tensor(0.99))
    assert kept.half_lives() == pytest.approx([float(expected)] * 2)
    with watch_retention(model_of(SMALL["delta_net"])) as kept:
        pass
    assert kept.half_lives() == [float("inf")] * 2


def test_attention_alone_has_nothing_to_trace():
    with pytest.raises(ValueError, match="no memory, only attention"):
        trace(model_of("swa"), tokens())

"""A model as a folder: config.json and model.safetensors, as Hugging Face reads them too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from torch.overrides import TorchFunctionMode

from atlas_lm.models.config import ModelConfig
from atlas_lm.models.lm import LanguageModel
from atlas_lm.ops.files import fingerprint
from atlas_lm.whole_files import write_whole

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX = "model."
"""What Hugging Face puts before the names of the weights."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = {str(d).removeprefix("torch."): d for d in FLOATS}
"""What a model may be made of."""


def model_folder(named: str | os.PathLike) -> Path:
    """Where the model lies that is called so; there are names for those of the package."""
    from atlas_lm.demo import SHIPPED

    folder = Path(named)
    return folder if folder.exists() else SHIPPED.get(str(folder), folder)


def save_model(
    model: LanguageModel, folder: str | os.PathLike, stored: torch.dtype | None = None
) -> None:
    """Write the model; what else is in the folder (a tokenizer, a task) stays.

    stored    what numbers are in the file: bfloat16 halves it, and the model read back has its own
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "architectures": ["AtlasLMForCausalLM"],
        "model_type": "atlas_lm",
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "model": model.config.to_dict(),
    }
    weights = {
        PREFIX + n: t.detach().to("cpu", stored).contiguous() for n, t in model.state_dict().items()
    }
    write_whole(folder / WEIGHTS, save(weights, {"format": "pt"}))
    write_whole(folder / CONFIG, (json.dumps(described, indent=2) + "\n").encode())


def load_model(folder: str | os.PathLike) -> LanguageModel:
    """Read a model back, on the CPU, in the dtype it had, ready to be asked."""
    folder = Path(folder)
    config, dtype = _read_config(folder)
    weights = _read_weights(folder / WEIGHTS)
    if dtype is not None and len({t.dtype for t in weights.values()}) == 1:
        weights = {n: t.to(dtype) for n, t in weights.items()}
    with torch.random.fork_rng(devices=[]), _Undrawn():
        model = LanguageModel(config)
    expected = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    found = {n: tuple(t.shape) for n, t in weights.items()}
    wrong = [n for n in sorted(expected | found) if expected.get(n) != found.get(n)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{folder / WEIGHTS}: does not fit {CONFIG}: {name} is {found.get(name, 'missing')}, "
            f"expected {expected.get(name, 'none of that name')} ({len(wrong)} such tensors)"
        )
    model.load_state_dict(weights, assign=True)
    return model.eval()


class _Undrawn(TorchFunctionMode):
    """Initial weights are not drawn, since others will stand in their place. On the device "meta",
    which is made for that, PyTorch loads its compiler first, for seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def fingerprint_of(model: LanguageModel) -> str:
    """Of the weights and the config: a memory belongs to the model that wrote it."""
    weights = {n: t.detach().cpu() for n, t in model.state_dict().items()}
    return fingerprint(weights, {"model": json.dumps(model.config.to_dict(), sort_keys=True)})


def _read_config(folder: Path) -> tuple[ModelConfig, torch.dtype | None]:
    """What the model is made of, and of what numbers, if that is said."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; a model folder holds {CONFIG} and {WEIGHTS}")
    try:
        said = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(said, dict) or said.get("model_type") != "atlas_lm":
        kind = said.get("model_type") if isinstance(said, dict) else type(said).__name__
        raise ValueError(f"{path}: model_type is {kind!r}, expected 'atlas_lm'")
    dtype = DTYPES.get(str(said.get("dtype")))
    try:
        return ModelConfig.from_dict(said["model"]), dtype
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the config of a model of this version ({error})") from error


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        shards = path.with_suffix(".safetensors.index.json").is_file()
        several = "its weights lie in several files; save it with a larger max_shard_size"
        expected = several if shards else f"a model folder holds {CONFIG} and {WEIGHTS}"
        raise FileNotFoundError(f"{path}: missing; {expected}")
    try:
        # copies: numbers in a mapped file are aligned otherwise, which changes bits on a CPU
        loaded = {n: t.clone() for n, t in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    return {n.removeprefix(PREFIX): t for n, t in loaded.items()}

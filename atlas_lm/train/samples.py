"""What a model writes, for people to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atlas_lm.generate import Sampling, stream_text
from atlas_lm.models.lm import LanguageModel
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.sources import Material
from atlas_lm.train.watch import read_lines
from atlas_lm.whole_files import write_whole

TEMPERATURE = 0.8


def samples(
    config: TrainConfig, model: LanguageModel, material: Material, step: int
) -> list[dict[str, Any]]:
    """Continuations of texts that were not learned; nothing where there is no text."""
    found: list[dict[str, Any]] = []
    for seed, prompt in enumerate(material.prompts(config.samples)):
        assert material.tokenizer is not None
        pieces = stream_text(
            model,
            material.tokenizer,
            prompt,
            max_tokens=config.sample_tokens,
            sampling=Sampling(temperature=TEMPERATURE, seed=seed),
        )
        found.append({"step": step, "prompt": prompt, "text": "".join(pieces)})
    return found


def keep_samples(path: Path, made: list[dict[str, Any]]) -> None:
    """Add them to the file, in place of any of the same step or later."""
    if not made:
        return
    earlier = [line for line in read_lines(path) if line["step"] < made[0]["step"]]
    text = "".join(json.dumps(line) + "\n" for line in [*earlier, *made])
    write_whole(path, text.encode())

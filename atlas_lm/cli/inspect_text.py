"""What a memory does with a text: a list of its strongest writes, and a web page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from atlas_lm.cli.model import open_model
from atlas_lm.cli.show import Bar
from atlas_lm.generate import check_vocab
from atlas_lm.models import LanguageModel
from atlas_lm.models.summary import size_text
from atlas_lm.reading import Step
from atlas_lm.report.pages import Reading, Sentence, strongest, write_page
from atlas_lm.text import (
    StreamingDecoder,
    TextFile,
    Tokenizer,
    check_text,
    token_segments,
)
from atlas_lm.trace import SIGNALS, trace

SEGMENT = 1024
"""Tokens traced at once."""
SHOWN = 100
"""Characters of a sentence in the list."""


def inspect_text(
    path: Path, folder: Path, device: str | None, html: Path | None, as_json: bool
) -> None:
    """Read a text with an empty memory and show where that was written to."""
    if html is not None and not html.absolute().parent.is_dir():
        raise FileNotFoundError(f"{html.absolute().parent}: no such folder to put the page in")
    text = check_text(path)
    model, tokenizer = open_model(folder, device)
    with Bar(path.name) as bar:
        reading = read_traced(model, tokenizer, text, bar.show)
    found = strongest(reading)
    if html is not None:
        size = size_text(model.begin(1).nbytes)
        write_page(html, reading, path.name, [("Model", folder.absolute().name), ("Memory", size)])
    if as_json:
        said = {"tokens": len(reading.ends), "bytes": text.size}
        print(json.dumps(said | {"strongest": [_plain(reading, s) for s in found]}, indent=2))
        return
    print(f"{path}: {len(reading.ends):,} tokens; the strongest writes to an empty memory:")
    for sentence in found:
        said = _said(reading, sentence)
        shown = said if len(said) <= SHOWN else said[: SHOWN - 1] + "…"
        print(f"  page {sentence.page:>4}  {sentence.value:>9.4g}  {shown}")
    if html is not None:
        print(f"{html}: every word of it")


def read_traced(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: TextFile,
    progress: Callable[[Step], None],
) -> Reading:
    """What the memories of a model do with every token of a text, mean over the layers.

    The text of it is what the tokens stand for: the file's, unless the tokenizer changes some.
    """
    check_vocab(model, tokenizer)
    decoder, state, count, ends = StreamingDecoder(tokenizer), None, 0, []
    pieces: list[str] = []
    values: dict[str, list[np.ndarray]] = {name: [] for name in SIGNALS}
    device = next(model.parameters()).device
    progress(Step(0, text.size, 0))
    for segment in token_segments(text, tokenizer, SEGMENT):
        traced, state = trace(model, torch.tensor([segment.tokens], device=device), state)
        for name, parts in values.items():
            parts.append(getattr(traced, name)[:, 0].mean(0).cpu().numpy())
        for token in segment.tokens:
            pieces.append(decoder.push(token))
            count += len(pieces[-1])
            ends.append(count)
        progress(Step(segment.bytes_done, text.size, segment.place.tokens))
    pieces.append(decoder.finish())
    if not ends:
        raise ValueError(f"{text.path}: this tokenizer makes no token of it")
    ends[-1] += len(pieces[-1])
    arrays = {name: np.concatenate(parts) for name, parts in values.items()}
    return Reading(text="".join(pieces), ends=np.array(ends), **arrays)


def _said(reading: Reading, sentence: Sentence) -> str:
    return " ".join(reading.text[sentence.start : sentence.stop].split())


def _plain(reading: Reading, sentence: Sentence) -> dict[str, object]:
    words = [reading.text[start:stop] for start, stop in sentence.words]
    return {
        "page": sentence.page,
        "sentence": sentence.number,
        "write": sentence.value,
        "text": _said(reading, sentence),
        "words": words,
    }

"""What the lasting memories of a model write of books in which nothing is told.

    python -m benchmarks.evidence.quiet results/babilong-from-demo/model --books BOOKS/test

Of every head: at how many tokens it writes, how much in all (a rate of 1 puts a pair in the place
of another), and what is left of the memory when all is read, by its gates alone. Then the words
at whose end it writes most.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from atlas_lm import LanguageModel
from atlas_lm.demo.writes import lasting_memories
from atlas_lm.models.folder import load_model, model_folder
from atlas_lm.ops import Gates
from atlas_lm.tasks.haystack import Haystack
from atlas_lm.text import TOKENIZER_FILE, FileTokenizer, Tokenizer
from atlas_lm.whole_files import write_whole
from benchmarks.command import run

SEGMENT = 4096
SHOWN = 6
"""Of the strongest writes of each head."""
BEFORE = 12
"""Tokens that are shown before one at which it writes."""


@dataclass
class Head:
    """One head of a memory, after so many tokens."""

    block: int
    head: int
    writes: int = 0
    """Tokens at which its rate is not 0."""
    written: float = 0.0
    """The sum of its rates."""
    kept: float = 0.0
    """The logarithm of the part of a pair told before that is left."""
    strongest: list[tuple[float, str]] = field(default_factory=list)
    """Rates, and the text that ends there."""


@torch.no_grad()
def quiet(model: LanguageModel, tokenizer: Tokenizer, tokens: np.ndarray) -> list[Head]:
    """Read the tokens with an empty memory and watch its gates."""
    found = {}
    for segment, gates in _read(model, tokens):
        for number, (rate, retention) in gates.items():
            for i in range(rate.shape[1]):
                head = found.setdefault((number, i), Head(number, i))
                head.writes += int((rate[:, i] > 0).sum())
                head.written += float(rate[:, i].sum())
                head.kept += float(retention[:, i].log().sum())
                head.strongest += _strongest(rate[:, i], segment, tokens, tokenizer)
                head.strongest = sorted(head.strongest, reverse=True)[:SHOWN]
    return [found[key] for key in sorted(found)]


def _read(
    model: LanguageModel, tokens: np.ndarray
) -> Iterator[tuple[int, dict[int, tuple[Tensor, Tensor]]]]:
    """Where each segment begins, and rates and retentions `[t h]` by block."""
    layers, seen = lasting_memories(model), {}
    blocks = [i for i, block in enumerate(model.blocks) if set(block.modules()) & set(layers)]

    def watch(number: int):
        def note(_module, _args, gates: Gates) -> None:
            seen[number] = gates.rate[0].float(), gates.retention[0].float()

        return note

    pairs = zip(layers, blocks, strict=True)
    hooks = [layer.gates.register_forward_hook(watch(number)) for layer, number in pairs]
    try:
        state = model.begin(1)
        for begin in range(0, len(tokens), SEGMENT):
            part = torch.from_numpy(tokens[begin : begin + SEGMENT].astype(np.int64))
            _, state = model.encode(part[None], state)
            yield begin, seen
    finally:
        for hook in hooks:
            hook.remove()


def _strongest(
    rate: Tensor, begin: int, tokens: np.ndarray, tokenizer: Tokenizer
) -> list[tuple[float, str]]:
    top = rate.topk(min(SHOWN, len(rate)))
    return [
        (value, tokenizer.decode(tokens[max(begin + at - BEFORE, 0) : begin + at + 1].tolist()))
        for value, at in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        if value > 0
    ]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence.quiet", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="folder of a model and its tokenizer; demo: the package's")
    parser.add_argument("--books", type=Path, help="folder of texts; Python's manual")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of them")
    parser.add_argument("--out", type=Path, help="a file of JSON")
    said = parser.parse_args(args)
    folder = model_folder(said.model)
    model, tokenizer = load_model(folder), FileTokenizer(folder / TOKENIZER_FILE)
    with TemporaryDirectory() as cache:
        text = Haystack.of_python(tokenizer, cache, "eval")
        if said.books is not None:
            text = Haystack.of_books(said.books, tokenizer, cache)
        heads = quiet(model, tokenizer, np.asarray(text.tokens[: said.tokens]))
    print(f"{min(said.tokens, len(text.tokens)):,} tokens of {text.source}")
    for head in heads:
        left = 100 * np.exp(head.kept)
        print(
            f"block {head.block} head {head.head}: writes at {head.writes:,} tokens, "
            f"{head.written:.3g} in all; keeps {left:.6g} %"
        )
        for rate, words in head.strongest:
            print(f"    {rate:.3f}  {words!r}")
    if said.out is not None:
        write_whole(said.out, json.dumps([asdict(head) for head in heads], indent=1).encode())


if __name__ == "__main__":
    run(main, "evidence")

"""Facts that begin lines, for a model that learned them after spaces.

    python -m benchmarks.demo_lines MODEL OUT

A word has other ids at the beginning of a line than after a space, and a model that never saw a
fact begin a line (`--data.notes 0`) does not know "The" and "Courier" there. Their ids get the
embedding of the same word after a space, and nothing else changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from atlas_lm.ask import Task
from atlas_lm.demo.words import MARKS
from atlas_lm.models import LanguageModel
from atlas_lm.models.folder import load_model, save_model
from atlas_lm.text import Tokenizer, load_tokenizer, save_tokenizer
from benchmarks.command import run


def twins(tokenizer: Tokenizer) -> dict[int, int]:
    """Ids that begin a line, and those of the same letters after a space.

    Capitals alone, and of these none of one letter: others stand in the middle of words, too. A
    word that a fact is known by may be in pieces without its space: then the last one says it.
    """
    texts = {tokenizer.decode([i]): i for i in range(tokenizer.vocab)}
    words = {text: i for text, i in texts.items() if len(text) > 1 and text[0].isupper()}
    found = {i: texts[f" {word}"] for word, i in words.items() if f" {word}" in texts}
    for word in map(str.capitalize, sorted(MARKS)):
        pieces, after = tokenizer.encode(word), tokenizer.encode(f" {word}")
        if len(after) == 1 < len(pieces):
            found[pieces[-1]] = after[0]
    return found


@torch.no_grad()
def know_lines(model: LanguageModel, tokenizer: Tokenizer) -> int:
    """How many embeddings became others."""
    same = twins(tokenizer)
    weight = model.embedding.weight
    weight[list(same)] = weight[list(same.values())]
    return len(same)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_lines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path, help="folder of a model of the demo")
    parser.add_argument("out", type=Path, help="folder to write, in bfloat16 as the package has it")
    said = parser.parse_args(args)
    model, tokenizer = load_model(said.model), load_tokenizer(said.model)
    changed = know_lines(model, tokenizer)
    save_model(model, said.out, stored=torch.bfloat16)
    save_tokenizer(tokenizer, said.out)
    Task.load(said.model).save(said.out)
    print(f"{said.out}: {changed} of {tokenizer.vocab:,} embeddings are those after a space")


if __name__ == "__main__":
    run(main, "demo_lines")

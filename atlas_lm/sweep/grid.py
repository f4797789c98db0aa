"""Which runs a sweep consists of: the product of all values that were listed, times seeds.

--rule.window 1,4,16 --optimizer.lr 1e-3,3e-3       six settings
--model.rule titans,[atlas,attention]               two: the second takes turns over the blocks
--data.longer 192 384                               one value of two words
--data.longer [192,384],[768]                       two values
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

from atlas_lm.names import nearest
from atlas_lm.rules import RULES, Rule, rule_of
from atlas_lm.train.config import TrainConfig

RULE = "rule."
"""Before the name of a field of the memory rule."""


class Value(NamedTuple):
    """One of the values of an option."""

    text: str
    """As a table shows it."""
    words: tuple[str, ...]
    """As the command line takes it."""


Options = Mapping[str, Sequence[Value]]
"""By name, with underscores: `optimizer.lr`, `rule.window`."""
Settings = dict[str, str]
"""What a run was told, by option."""


@dataclass(frozen=True)
class Planned:
    """A run that is to be made."""

    name: str
    """Of its folder."""
    config: TrainConfig
    settings: Settings
    """All that was said, listed or not; the seed is not one of them."""

    @property
    def seed(self) -> int:
        return self.config.seed


# What was said


def values_of(words: Sequence[str]) -> list[Value]:
    """The values in the words after an option: several with commas between, or one of some words,
    which in a list stands in brackets."""
    if len(words) != 1:
        return [Value(" ".join(words), tuple(words))]
    parts = re.findall(r"\[[^\]]*\]|[^,\[\]]+", words[0])
    if ",".join(parts) != words[0] or len(set(parts)) < len(parts):
        raise ValueError(
            f"{words[0]}: expected different values with commas between, one of several words or "
            "rules in brackets: 1,4,16 or titans,[atlas,attention]"
        )
    return [_value(part) for part in parts]


def _value(part: str) -> Value:
    if part.startswith("["):
        return Value(part, tuple(part[1:-1].split(",")))
    return Value(part, (part,))


def check_rule_fields(options: Options) -> None:
    """Refuse names after `rule.` that no rule has."""
    known = [field.name for field in fields(Rule)]
    for name in options:
        field = name.removeprefix(RULE)
        if name.startswith(RULE) and field not in known:
            raise ValueError(
                f"--{name}: a rule has no such field{nearest(field, known)}; it has "
                f"{', '.join(known)}"
            )


# What follows from it


def plan(
    options: Options, seeds: Sequence[int], configured: Callable[[dict[str, Value]], TrainConfig]
) -> list[Planned]:
    """All runs: every setting with the first seed, then with the next.

    `configured` makes a config of one value for each option that is none of the rule's.
    """
    check_rule_fields(options)
    settings = []
    for chosen in product(*options.values()):
        said = dict(zip(options, chosen, strict=True))
        config = configured({n: v for n, v in said.items() if not n.startswith(RULE)})
        changes = {n.removeprefix(RULE): v.text for n, v in said.items() if n.startswith(RULE)}
        settings.append((said, with_rule_fields(config, changes)))
    listed = [name for name, values in options.items() if len(values) > 1]
    runs = []
    for seed, (said, config) in product(seeds, settings):
        name = run_name({n: said[n].text for n in listed}, seed)
        told = {n: v.text for n, v in said.items()}
        runs.append(Planned(name, replace(config, seed=seed), told))
    return runs


def run_name(settings: Settings, seed: int) -> str:
    """`window=4_lr=1e-3_seed=0`: short names where they differ, and no letters that shells read."""
    short = [name.rpartition(".")[2] for name in settings]
    parts = []
    for (name, text), last in zip(settings.items(), short, strict=True):
        shown = last if short.count(last) == 1 else name
        value = re.sub(r"[^\w.+=-]+", "+", text).strip("+")
        parts.append(f"{shown}={value}")
    return "_".join([*parts, f"seed={seed}"])


def with_rule_fields(config: TrainConfig, changes: Mapping[str, str]) -> TrainConfig:
    """The config with these fields of its memory rules changed: of several rules that take turns,
    in every one that can have such a value."""
    rules: list[Any] = list(config.model.rules)
    for field, text in changes.items():
        rules = _changed(rules, field, _plain(text))
    if not changes:
        return config
    rule = tuple(rules) if isinstance(config.model.rule, tuple) else rules[0]
    return replace(config, model=replace(config.model, rule=rule))


def _changed(rules: list[Any], field: str, value: Any) -> list[Any]:
    changed, refusals = [], []
    for rule in rules:
        known = rule_of(rule)
        if known is None:
            refusals.append(f"{rule} has no fields")
            changed.append(rule)
            continue
        try:
            made = replace(known, **{field: value})
        except ValueError as error:
            refusals.append(str(error))
            changed.append(rule)
            continue
        # under its name again where it is that: the same run by whatever words
        names = [name for name, row in RULES.items() if row == made]
        changed.append(rule if made == known else names[0] if names else made)
    if len(refusals) == len(rules):
        raise ValueError(
            f"--rule.{field} {value}: {refusals[0]}; leave that combination to a second sweep into "
            "the same --out, which adds its runs"
        )
    return changed


def _plain(said: str) -> Any:
    try:
        return literal_eval(said)
    except (ValueError, SyntaxError):
        return said

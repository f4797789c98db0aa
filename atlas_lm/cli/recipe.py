"""A recipe changed on the command line: `--model.dim 256 --model.rule titans`, and then run.

Options and their help come from the dataclasses. A rule is written `NAME[:FIELD=VALUE...]`, several
that take turns over the blocks with commas between: `atlas:chunk=16:stride=16,attention`.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import AvoidSubcommands, FlagCreatePairsOff, Suppress, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from atlas_lm.models.config import MIXERS
from atlas_lm.names import nearest
from atlas_lm.nn.fla import PREFIX, FlaConfig
from atlas_lm.rules import RULES, Rule
from atlas_lm.train.config import TrainConfig

RuleType = str | Rule | tuple[str | Rule, ...]
"""As `ModelConfig.rule` is."""


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """Train a model by this recipe, with any field of it changed."""

    out: Annotated[Path, arg(metavar="DIR")]
    """Folder of the run: configuration, metrics, checkpoints, and in the end the model."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on with the run in DIR as it was begun, or begin it; --steps may be more than before."""
    device: Annotated[str | None, arg(metavar="NAME")] = None
    """cpu or cuda; without it, on a GPU if there is one."""
    tensorboard: FlagCreatePairsOff[bool] = False
    """Write the metrics for TensorBoard too, into DIR."""
    config: Annotated[TrainConfig, arg(name="")]
    recipe: Suppress[str] = ""

    def run(self) -> None:
        from atlas_lm.report.runs import read_runs, write_report
        from atlas_lm.train.loop import train
        from atlas_lm.train.watch import Board, Screen, Watch

        watches: list[Watch] = [Screen(self.out.name)]
        if self.tensorboard:
            watches.append(Board(self.out))
        made = train(
            self.config, self.out, self.resume, watches, device=self.device, recipe=self.recipe
        )
        if made is not None:
            page = self.out / "report.html"
            write_report(page, read_runs([self.out]))
            print(f"{made}: a model trained for {self.config.steps:,} steps")
            print(f"{page}: the run as a page; open it in a browser")


def parsed(recipe: str, config: TrainConfig, args: Sequence[str]) -> RecipeRun:
    """The command with this config where nothing else is said; help and mistakes exit, as tyro
    does, but for names that are wrong, which are answered here."""
    default = RecipeRun(out=tyro.MISSING, config=config, recipe=recipe)
    _check_names(default, args)
    return tyro.cli(
        AvoidSubcommands[RecipeRun],
        default=default,
        args=list(args),
        prog=f"atlas-lm train {recipe}",
        registry=_registry(),
    )


def _check_names(default: RecipeRun, args: Sequence[str]) -> None:
    known = {name.replace("_", "-") for name in _names(default)} | {"help"}
    for word in args:
        if not word.startswith("--"):
            continue
        name = word[2:].split("=")[0].replace("_", "-")
        if name in known or name.replace("no-", "", 1) in known:
            continue
        # what is meant may stand in a group: --lr for --optimizer.lr
        inside = [option for option in known if option.rpartition(".")[2] == name]
        hint = nearest(f"--{inside[0] if inside else name}", [f"--{option}" for option in known])
        raise ValueError(f"{word}: no such option{hint}; --help lists them all")


def _names(value: Any, before: str = "") -> Iterator[str]:
    """Of all options, as `model.dim`."""
    for field in fields(value):
        inside = getattr(value, field.name)
        if field.name == "config":
            yield from _names(inside)
        elif is_dataclass(inside) and not isinstance(inside, Rule):
            yield from _names(inside, f"{before}{field.name}.")
        else:
            yield before + field.name


# Rules


def _registry() -> ConstructorRegistry:
    """How a rule is written: tyro would make a subcommand of it."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type != RuleType:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="NAME[:FIELD=VALUE...][,...]",
            instance_from_str=lambda words: rule_from(words[0]),
            is_instance=lambda value: isinstance(value, str | Rule | tuple),
            str_from_instance=lambda value: [rule_text(value)],
        )

    return registry


def rule_from(text: str) -> RuleType:
    """`atlas`, `atlas:chunk=16:stride=16`, `titans,attention`."""
    made = tuple(_one_rule(part) for part in text.split(","))
    return made[0] if len(made) == 1 else made


def _one_rule(text: str) -> str | Rule:
    if text.startswith(PREFIX):
        return FlaConfig.parsed(text, dim=1, heads=1).rule
    name, *changes = text.split(":")
    names = (*RULES, *MIXERS)
    if name not in names:
        raise ValueError(f"rule: {name!r}{nearest(name, names)} is not one of {', '.join(names)}")
    if not changes:
        return name
    if name in MIXERS:
        raise ValueError(f"rule: {text!r}: {name} has no fields; see --model.window")
    values: dict[str, Any] = {}
    known = [field.name for field in fields(Rule)]
    for change in changes:
        field, _, said = change.partition("=")
        if field not in known:
            raise ValueError(f"rule: {text!r}: no field {field!r}{nearest(field, known)}")
        values[field] = _value(said)
    return replace(RULES[name], **values)


def _value(said: str) -> Any:
    try:
        return literal_eval(said)
    except (ValueError, SyntaxError):
        return said


def rule_text(rule: RuleType) -> str:
    """The other way: a rule by the row of RULES that differs least from it."""
    if isinstance(rule, tuple):
        return ",".join(rule_text(part) for part in rule)
    if isinstance(rule, str):
        return rule
    mine = rule.describe()

    def changes(name: str) -> list[str]:
        theirs = RULES[name].describe()
        return [f"{field}={value}" for field, value in mine.items() if value != theirs[field]]

    name = min(RULES, key=lambda each: len(changes(each)))
    return ":".join([name, *changes(name)])

"""`atlas-lm train`: a recipe into a model, any field of it changed on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from atlas_lm.names import nearest
from atlas_lm.recipes import LINES

if TYPE_CHECKING:
    from atlas_lm.cli.recipe import RecipeRun
    from atlas_lm.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model by a recipe. A run that was stopped or killed goes on by --resume."""

    recipe: Positional[Annotated[str, arg(metavar="RECIPE")]]
    """One of those above, or FILE.py:FUNCTION, a function of yours that returns a TrainConfig."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder of the run: configuration, metrics, checkpoints, and in the end the model."""
    steps: Annotated[int | None, arg(metavar="N")] = None
    """Steps of the optimiser; as many as the recipe says."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on with the run in DIR as it was begun, or begin it; --steps may be more than before."""
    device: Annotated[str | None, arg(metavar="NAME")] = None
    """cpu or cuda; without it, on a GPU if there is one."""
    tensorboard: FlagCreatePairsOff[bool] = False
    """Write the metrics for TensorBoard too, into DIR."""

    def run(self) -> None:
        raise AssertionError("`atlas-lm train RECIPE` is parsed by `parse_train`")


_RECIPES = "\n".join(f"  {name:<12} {line}" for name, line in LINES.items())
TrainHelp = Annotated[
    Train,
    subcommand(
        "train",
        description=f"{Train.__doc__}\n\nRecipes; `atlas-lm train RECIPE --help` tells what can "
        f"be changed:\n{_RECIPES}",
    ),
]
"""For `atlas-lm --help` and `atlas-lm train --help`, which come without PyTorch."""


def parse_train(args: Sequence[str]) -> RecipeRun:
    """`RECIPE --out DIR ...`, as it is after `train`."""
    from atlas_lm.cli.recipe import parsed

    name = args[0]
    if name.startswith("-"):
        raise ValueError(
            f"train: {name} before the recipe; expected `atlas-lm train RECIPE --out DIR ...` "
            f"with one of {', '.join(LINES)}"
        )
    default = recipe_called(name)()
    out = _out(args)
    if "--resume" in args and out is not None:
        default = _as_begun(name, default, out)
    return parsed(name, default, args[1:])


def _out(args: Sequence[str]) -> Path | None:
    """What --out says, before anything is parsed: the defaults may lie there."""
    for word, after in zip(args, [*args[1:], None], strict=True):
        if word == "--out" and after is not None:
            return Path(after)
        if word.startswith("--out="):
            return Path(word.removeprefix("--out="))
    return None


def recipe_called(name: str) -> Callable[[], TrainConfig]:
    """A recipe by its name, or a function in a file."""
    from atlas_lm.recipes import RECIPES

    if name in RECIPES:
        return RECIPES[name]
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _function_in(Path(file), function)
    raise ValueError(
        f"train: no recipe {name!r}{nearest(name, LINES)}; there are {', '.join(LINES)}, and "
        "FILE.py:FUNCTION"
    )


def _function_in(file: Path, function: str) -> Callable[[], TrainConfig]:
    """A recipe of the user's own; its file is run."""
    from runpy import run_path

    from atlas_lm.train.config import TrainConfig

    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file of recipes")
    found = run_path(str(file))
    if not callable(found.get(function)):
        raise ValueError(f"{file}: no function {function!r}{nearest(function, found)}")

    def recipe() -> TrainConfig:
        config = found[function]()
        if not isinstance(config, TrainConfig):
            raise ValueError(
                f"{file}: {function} returned a {type(config).__name__}; expected a TrainConfig"
            )
        return config

    return recipe


def _as_begun(name: str, default: TrainConfig, out: Path) -> TrainConfig:
    """What the run in the folder was begun with: nobody has to say it all again."""
    from atlas_lm.train.run_folder import CONFIG, read_config, recipe_of

    if not (out / CONFIG).exists():
        return default
    begun = recipe_of(out)
    if begun not in (None, name):
        raise ValueError(
            f"{out}: the run was begun by the recipe {begun}, not {name}; go on by `atlas-lm train "
            f"{begun} --out {out} --resume`, or choose another --out"
        )
    return read_config(out)

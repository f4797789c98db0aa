"""Language as tasks of an evaluation: `text`, files of the user's; `lm/hellaswag`, of lm-eval."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from atlas_lm.eval import harness
from atlas_lm.eval.language import score_lengths, score_text
from atlas_lm.eval.local_tasks import LOCAL_TASKS, file_of
from atlas_lm.eval.readers import Reader
from atlas_lm.eval.results import ANSWERS
from atlas_lm.whole_files import write_whole

TEXT, HARNESS = "text", "lm"
LAST = 256
"""Tokens that are predicted after contexts of several lengths."""


def is_language(name: str) -> bool:
    return name in (TEXT, HARNESS) or name.startswith(f"{HARNESS}/")


def language_tasks(names: Sequence[str], texts: Sequence[Path], data: Path | None) -> list[str]:
    """`text`, and tasks of lm-eval by their own names; `lm` is all whose files are there."""
    found: dict[str, None] = {}
    for name in names:
        found |= dict.fromkeys(_resolved(name, data))
    if TEXT in found and not texts:
        raise ValueError("tasks: text without one; expected --text FILE or a folder of .txt files")
    for name in found.keys() - {TEXT}:
        if data is None:
            raise ValueError(
                f"tasks: lm/{name} without its questions; expected --lm-data DIR, a folder with "
                f"{LOCAL_TASKS[name].file}"
            )
        file_of(name, data)
    return list(found)


def _resolved(name: str, data: Path | None) -> list[str]:
    if name == HARNESS:
        there = [task for task in LOCAL_TASKS if data and (data / LOCAL_TASKS[task].file).exists()]
        return there or list(LOCAL_TASKS)
    task = name.removeprefix(f"{HARNESS}/")
    if task not in (TEXT, *LOCAL_TASKS):
        near = get_close_matches(task, LOCAL_TASKS, n=1)
        hint = f" (did you mean 'lm/{near[0]}'?)" if near else ""
        raise ValueError(f"tasks: no task {name!r}{hint}; there are {', '.join(LOCAL_TASKS)}")
    return [task]


def text_figures(
    reader: Callable[[], Reader],
    texts: Sequence[Path],
    lengths: Sequence[int],
    plan: dict[str, Any],
    out: Path,
) -> dict[str, Any]:
    """Bits per byte, nats per token and perplexity, all in all and by position; with lengths, also
    of the same tokens after so much context."""
    plan = plan | {"texts": [str(path) for path in texts], "lengths": list(lengths)}

    def measure() -> dict[str, Any]:
        found = score_text(reader(), texts).to_dict()
        if lengths:
            found["by_length"] = score_lengths(reader(), texts, lengths, LAST).to_dict()
        return found

    return {"task": TEXT} | _once(out / ANSWERS / "text.json", plan, measure)


def harness_figures(
    folder: Path, tasks: Sequence[str], data: Path, limit: int | None, plan: dict, out: Path,
    device: str | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Every task of lm-eval on its own, so that what is done is not done again."""
    for task in tasks:
        asked = plan | {"lm_data": str(data), "limit": limit}

        def measure(task: str = task) -> dict[str, Any]:
            found = harness.evaluate(folder, [task], data, limit=limit, device=device)
            return {"metrics": _metrics(found["results"][task])} | {
                name: value for name, value in found.items() if name != "results"
            }

        path = out / ANSWERS / f"lm-{task}.json"
        yield {"task": f"{HARNESS}/{task}"} | _once(path, asked, measure)


def _metrics(found: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """`{"acc": {"value": 0.31, "error": 0.02}}` of lm-eval's `acc,none` and `acc_stderr,none`."""
    made: dict[str, dict[str, float | None]] = {}
    for key, value in found.items():
        name, _, kind = key.partition(",")
        if not isinstance(value, int | float) or not kind or name.endswith("_stderr"):
            continue
        error = found.get(f"{name}_stderr,{kind}")
        known = isinstance(error, int | float)
        made[name] = {"value": float(value), "error": float(error) if known else None}
    return made


def _once(path: Path, plan: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict:
    """What was measured by the same plan before; else measured now, and kept."""
    if path.is_file():
        try:
            kept = json.loads(path.read_text("utf-8"))
            same = kept["plan"] == plan
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: not a file of figures ({error}); remove it, or choose another --out"
            ) from error
        if same:
            return kept
    found = measure() | {"plan": plan}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(found) + "\n").encode())
    return found

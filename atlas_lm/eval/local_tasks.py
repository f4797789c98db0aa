"""The tasks of lm-eval that are at hand as local files, with nothing to download.

    tasks = load_tasks(["arc_easy", "boolq"], "DATA")

Prompts, choices, filters and metrics are lm-eval's own, from the files it ships; only where the
rows come from is changed. `LOCAL_TASKS` says which file, which split of the published data it is,
how its fields become those of the published data, and where a score differs from published ones.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SUBFOLDER = "eval"
"""Where in the folder of the data the files lie, if not in itself."""
GROUP = "atlas_lm_local"
"""lm-eval changes a task's settings where a group names it; the group itself is not used."""


def _as_it_is(row: Row) -> Row:
    return row


def _lettered(row: Row) -> Row:
    """`Question: Q\\n A. x\\n B. y\\nAnswer:` with letters as choices -> question and choices."""
    text = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    question, *answers = re.split(r"\n [A-E]\. ", text)
    if len(answers) != len(row["choices"]):
        raise ValueError(f"{len(answers)} answers in its query, {len(row['choices'])} choices")
    choices = {"text": answers, "label": row["choices"]}
    key = row["choices"][row["gold"]]
    return {"id": row["id"], "question": question, "choices": choices, "answerKey": key}


def _boolean(row: Row) -> Row:
    kept = {"question": row["question"], "passage": row["passage"]}
    return kept | {"label": int(row["answer"])}


def _passage_answers(row: Row) -> Row:
    """Answers of DROP as spans, which lm-eval compares as it does numbers and dates."""
    date = {"day": "", "month": "", "year": ""}
    first, *others = row["answers"]
    return {
        "query_id": row["query_id"],
        "passage": row["passage"],
        "question": row["question"],
        "answer": {"number": "", "date": date, "spans": first},
        "validated_answers": {
            "number": [""] * len(others),
            "date": [date] * len(others),
            "spans": others,
        },
    }


def _completion(row: Row) -> Row:
    return {"doc_id": row["id"], "text": row["query"], "value": row["choices"][0]}


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task of lm-eval and the file that it reads here."""

    file: str
    folder: str
    """Of lm-eval's tasks, where its definition is; looking through all of them takes long."""
    split: str
    convert: Callable[[Row], Row] = _as_it_is
    differs: str | None = None
    """From what is published under this name."""


LOCAL_TASKS: dict[str, LocalTask] = {
    "lambada_openai": LocalTask(file="lambada_test_openai.jsonl", folder="lambada", split="test"),
    "hellaswag": LocalTask(file="hellaswag_val.jsonl.gz", folder="hellaswag", split="validation"),
    "arc_easy": LocalTask(
        file="arc_easy_test.jsonl.gz", folder="arc", split="test", convert=_lettered
    ),
    "arc_challenge": LocalTask(
        file="arc_challenge_val.jsonl.gz",
        folder="arc",
        split="validation",
        differs="the 299 questions of the validation split; published scores are of the test split",
    ),
    "boolq": LocalTask(
        file="boolq_val.jsonl.gz", folder="super_glue", split="validation", convert=_boolean
    ),
    "social_iqa": LocalTask(file="socialiqa_val.jsonl.gz", folder="siqa", split="validation"),
    "openbookqa": LocalTask(
        file="openbookqa_val.jsonl.gz",
        folder="openbookqa",
        split="validation",
        differs="the validation split; published scores are of the test split",
    ),
    "commonsense_qa": LocalTask(
        file="commonsense_qa_val.jsonl.gz", folder="commonsense_qa", split="validation"
    ),
    "copa": LocalTask(file="copa_val.jsonl.gz", folder="super_glue", split="validation"),
    "squad_completion": LocalTask(
        file="squad_dev1000.jsonl.gz",
        folder="squad_completion",
        split="validation",
        convert=_completion,
        differs="1,000 questions of SQuAD after their passages, scored as lm-eval scores "
        "squad_completion; published scores are of texts to be completed",
    ),
    "drop": LocalTask(
        file="drop_1000.jsonl.gz",
        folder="drop",
        split="validation",
        convert=_passage_answers,
        differs="1,000 questions of the validation split",
    ),
    "nq_open": LocalTask(file="nq_open_val.jsonl.gz", folder="nq_open", split="validation"),
}


# Files


def read_rows(name: str, data: str | os.PathLike) -> list[Row]:
    """The rows of a task in the fields that lm-eval expects."""
    task, path = LOCAL_TASKS[name], file_of(name, data)
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            rows.append(task.convert(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path}: line {number} is no row of {name} ({type(error).__name__}: {error}); "
                "expected the file as its authors publish it"
            ) from error
    if not rows:
        raise ValueError(f"{path}: empty; expected the rows of {name}")
    return rows


def file_of(name: str, data: str | os.PathLike) -> Path:
    """Where the task's file lies in the folder of the data."""
    task = LOCAL_TASKS[name]
    for folder in (Path(data), Path(data) / SUBFOLDER):
        if (folder / task.file).is_file():
            return folder / task.file
    raise FileNotFoundError(
        f"{Path(data) / task.file}: missing, and {name} reads it; name the folder it lies in "
        f"(or the one with {SUBFOLDER}/{task.file})"
    )


def about(name: str, data: str | os.PathLike) -> dict[str, Any]:
    """What was read: for the record of a run."""
    path, task = file_of(name, data), LOCAL_TASKS[name]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "sha256": digest, "split": task.split, "differs": task.differs}


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: damaged ({error}); expected lines of JSON, compressed if it ends in .gz"
        ) from error


# lm-eval


def load_tasks(names: Sequence[str], data: str | os.PathLike) -> list[Any]:
    """Task objects of lm-eval that read the local files."""
    import lm_eval.tasks  # pyright: ignore[reportMissingImports]

    folders = {LOCAL_TASKS[name].folder for name in names}
    root = Path(lm_eval.tasks.__file__).parent
    manager = lm_eval.tasks.TaskManager(
        include_defaults=False, include_path=[root / folder for folder in sorted(folders)]
    )
    plain = [name for name in names if name != "squad_completion"]
    listed = [{"task": name} | _settings(name, data) for name in plain]
    loaded: dict[str, Any] = {}
    if listed:
        loaded |= manager.load({"group": GROUP, "task": listed})["tasks"]
    if "squad_completion" in names:
        loaded["squad_completion"] = _squad_completion(data)
    return [loaded[name] for name in names]


def _settings(name: str, data: str | os.PathLike) -> dict[str, Any]:
    """What replaces the settings of lm-eval: the rows, and where they come from."""
    split = LOCAL_TASKS[name].split
    return {
        "custom_dataset": partial(_datasets, name, data),
        "training_split": None,
        "validation_split": None,
        # examples before a question come from the same rows, and this keeps the question out
        "test_split": split,
        "fewshot_split": split,
    }


def _datasets(name: str, data: str | os.PathLike, **_: object) -> dict[str, Any]:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    return {LOCAL_TASKS[name].split: Dataset.from_list(read_rows(name, data))}


def _squad_completion(data: str | os.PathLike) -> Any:
    """Its definition is a class, which knows where to download; ours knows where to read."""
    from lm_eval.tasks.squad_completion.task import SQUADCompletion  # pyright: ignore[reportMissingImports]

    class LocalCompletion(SQUADCompletion):
        def download(self, *_: object, **__: object) -> None:
            self.dataset = _datasets("squad_completion", data)

    task = LocalCompletion()
    task.config.task = "squad_completion"
    return task

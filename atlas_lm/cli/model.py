"""The model that a command works with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

if TYPE_CHECKING:
    from atlas_lm.models import LanguageModel
    from atlas_lm.text import ByteTokenizer, FileTokenizer

Device = Annotated[
    str | None,
    arg(
        metavar="NAME",
        help="Where to run it, such as cpu or cuda:1; without it, on a GPU if there is one.",
    ),
]
"""None: on a GPU if there is one."""


def open_model(
    folder: Path, device: str | None
) -> tuple[LanguageModel, ByteTokenizer | FileTokenizer]:
    """The model that is called so, on this device, and its tokenizer."""
    import torch

    from atlas_lm.models import load_model, model_folder
    from atlas_lm.text import load_tokenizer

    folder = model_folder(folder)
    model = load_model(folder)
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = model.to(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name}: cannot be used here ({reason})") from error
    return model, load_tokenizer(folder)

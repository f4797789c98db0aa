"""Who watches a run and does something at a step."""

from collections.abc import Callable
from typing import Any


class At:
    """Right after the step, before anything of it is written."""

    def __init__(self, step: int, does: Callable[[], object]):
        self.step, self.does = step, does

    def begin(self, step: int, steps: int) -> None: ...
    def record(self, line: dict[str, Any]) -> None: ...
    def close(self) -> None: ...

    def stepped(self, step: int) -> None:
        if step == self.step:
            self.does()


def interrupt() -> None:
    raise KeyboardInterrupt

"""Batches made ahead of their step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from atlas_lm.train.sources import Source, Work


@runtime_checkable
class Closes(Protocol):
    """A source that has processes of its own."""

    def close(self) -> None: ...


class OneAhead:
    """A source whose next batch can be made before it is asked for, while a GPU is busy with this
    one. It is saved as if it had not been."""

    def __init__(self, source: Source):
        self._source = source
        self._before: dict[str, int] = {}
        self._made: Work | None = None

    def make(self) -> None:
        """The next batch."""
        if self._made is None:
            self._before = dict(self._source.state_dict())
            self._made = self._source.next()

    def next(self) -> Work:
        self.make()
        made, self._made = self._made, None
        assert made is not None
        return made

    def state_dict(self) -> dict[str, int]:
        return self._source.state_dict() if self._made is None else self._before

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._made = None
        self._source.load_state_dict(state)

    def close(self) -> None:
        if isinstance(self._source, Closes):
            self._source.close()

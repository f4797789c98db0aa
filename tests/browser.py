"""Pages in a real browser, where there is one: playwright's own or Debian's, or that of PyQt6."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROBE = r"""
(() => {
  const every = (query) => [...document.querySelectorAll(query)];
  const boxes = (svg) => [...svg.querySelectorAll("text")].map((t) => t.getBoundingClientRect());
  const meet = (a, b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const over = every("svg").flatMap((svg) => boxes(svg).flatMap((a, i, all) =>
    all.slice(i + 1).filter((b) => meet(a, b))));
  const curves = every(".curve").filter((path) => path.getTotalLength() > 20).length;
  const found = { curves, over: over.length, figures: every("figure").length,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth };
  every("button, input[type=checkbox]").forEach((element) => element.click());
  every("svg").forEach((svg) => {
    const { left, top } = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: left + 200, clientY: top + 90 }));
  });
  return JSON.stringify(found);
})()
"""
QT = """
import json, os, sys
os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"
from PyQt6.QtWidgets import QApplication
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtCore import QTimer, QUrl
said = []
class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):
        said.append(f"{message} (line {line})")
def told(found):
    print(json.dumps({**json.loads(found or "{}"), "console": said}), flush=True)
    os._exit(0)  # some versions crash while they close
application, view = QApplication(sys.argv[:1]), QWebEngineView()
page = Page(view)
view.setPage(page)
view.resize(int(sys.argv[3]), 900)
look = lambda: page.runJavaScript(sys.argv[2], told)
page.loadFinished.connect(lambda _: QTimer.singleShot(300, look))
page.load(QUrl.fromLocalFile(sys.argv[1]))
view.show()
application.exec()
"""
PLAYWRIGHT = """
import json, shutil, sys
from playwright.sync_api import sync_playwright
said = []
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox"]
    )
    page = browser.new_page(viewport={"width": int(sys.argv[3]), "height": 900})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto("file://" + sys.argv[1])
    print(json.dumps({**json.loads(page.evaluate(sys.argv[2])), "console": said}))
"""


def seen_in_a_browser(page: Path, width: int) -> dict:
    """What the probe finds in a page that is so wide, and all that the browser's console says."""
    command = [sys.executable, "-c", _program(), str(page), PROBE, str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _program() -> str:
    """One that opens a page in a browser that is here."""
    for package, module, program in (
        ("playwright", "playwright.sync_api", PLAYWRIGHT),
        ("PyQt6", "PyQt6.QtWebEngineWidgets", QT),
    ):
        if find_spec(package) and find_spec(module):
            return program
    pytest.skip("needs a browser: playwright or PyQt6-WebEngine, neither is installed")

"""What a browser would find in a page."""

from html.parser import HTMLParser
from pathlib import Path


def scripts(path: Path) -> list[str]:
    """What a parser of HTML finds in the script elements: the content, then the code."""
    found = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag == "script":
                found.append("")

        def handle_data(self, data):
            if self.cdata_elem == "script":
                found[-1] += data

    parser = Parser()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    return found

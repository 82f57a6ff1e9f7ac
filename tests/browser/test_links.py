"""The built files: heads say what a page is. Links are checked by the build, which is strict."""

import functools
import re
from html.parser import HTMLParser


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.lang, self.meta = None, {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "html":
            self.lang = found.get("lang")
        if tag == "meta" and "content" in found:
            self.meta[found.get("name") or found.get("property")] = found["content"]


@functools.cache
def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_the_head_says_language_and_content(folder, where):
    page = read(folder / where / "index.html")
    assert page.lang == (where[:2] if where.split("/")[0] in ("ko", "ja") else "en")
    said = page.meta["description"]
    assert len(said) > 15
    assert "<" not in said
    assert page.meta["og:description"] == said
    assert page.meta["og:title"]


def test_pages_have_descriptions_of_their_own(folder):
    pages = [path for path in folder.rglob("index.html") if "tests" not in path.parts]
    said = [read(path).meta["description"] for path in pages]
    assert len(said) > 70
    assert sorted(set(said)) == sorted(said)


def test_the_files_for_language_models_name_every_english_page(folder):
    short = (folder / "llms.txt").read_text(encoding="utf-8")
    whole = (folder / "llms-full.txt").read_text(encoding="utf-8")
    pages = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html")}
    english = {page for page in pages if page.split("/")[0] not in ("ko", "ja", "tests", ".")}
    linked = {target.rstrip("/") for target in re.findall(r"\]\(([^)]+)\)", short)}
    assert {
        page for page in english if not any(f"{each}/".endswith(f"{page}/") for each in linked)
    } == set()
    assert "# Quickstart" in whole
    assert "calibrate(" in whole
    assert "--8<--" not in whole

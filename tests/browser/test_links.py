"""The built files: heads say what a page is. Links are checked by the build, which is strict."""

import html
import re


def head(path):
    """The language of a page, and what its head says of it by name."""
    text = path.read_text(encoding="utf-8")
    said = re.findall(r'<meta (?:name|property)="?([\w:]+)"? content="([^"]*)"', text)
    return re.search(r'<html lang="?(\w+)', text)[1], {k: html.unescape(v) for k, v in said}


def test_the_head_says_language_and_content(folder, where):
    language, said = head(folder / where / "index.html")
    assert language == (where[:2] if where.split("/")[0] in ("ko", "ja") else "en")
    assert len(said["description"]) > 15
    assert "<" not in said["description"]
    assert said["og:description"] == said["description"]
    assert said["og:title"]


def test_pages_have_descriptions_of_their_own(folder):
    pages = [path for path in folder.rglob("index.html") if "tests" not in path.parts]
    said = [head(path)[1]["description"] for path in pages]
    assert len(said) > 70
    assert sorted(set(said)) == sorted(said)


def test_the_files_for_language_models_name_every_english_page(folder):
    short, whole = ((folder / name).read_text("utf-8") for name in ("llms.txt", "llms-full.txt"))
    pages = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html")}
    english = {page for page in pages if page.split("/")[0] not in ("ko", "ja", "tests", ".")}
    linked = [f"/{target.strip('/')}/" for target in re.findall(r"\]\(([^)]+)\)", short)]
    assert [page for page in english if not any(x.endswith(f"/{page}/") for x in linked)] == []
    assert "# Quickstart" in whole
    assert "calibrate(" in whole
    assert "--8<--" not in whole

"""Translated pages belong to the present English ones, and share their formulas and figures."""

import ast
import os
import re
from pathlib import Path

import pytest

from tools import translations
from tools.translations import DOCS, Structure, body, expand, pages, split_code, structure

ROOT = DOCS.parent
STEMS = sorted(
    p.stem for p in (ROOT / "sparse_losses/losses").glob("*.py") if not p.stem.startswith("_")
)
PAGES = pages()


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def both(page: Path) -> tuple[Structure, Structure]:
    """Return the structures of a translation and of its English page."""
    english = translations.original(page)
    return tuple(structure(expand(p.read_text(encoding="utf-8"))) for p in (page, english))


def slug(heading: str) -> str:
    """Return the id that MkDocs gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def prose_of(page: Path) -> str:
    """Return a page's text, snippets in place, without its code."""
    return split_code(body(expand(page.read_text(encoding="utf-8"))))[0]


def headings(page: Path) -> list[str]:
    return re.findall(r"^[ \t]*#{1,6} (.*?)[ \t]*$", prose_of(page), re.MULTILINE)


def sections(page: Path) -> list[str]:
    """Split a page at its headings; the text before the first one is a section too."""
    return re.split(r"^(?=[ \t]*#{1,6} )", prose_of(page), flags=re.MULTILINE)


def of_both(page: Path) -> list[tuple[str, str, str]]:
    """Return of each section its English heading, the translation and the English text."""
    english = sections(translations.original(page))
    own = sections(page)
    return [
        (text.partition("\n")[0].strip(), one, text) for one, text in zip(own, english, strict=True)
    ]


def rows(text: str) -> list[str]:
    return re.findall(r"^[ \t]*\|(.*)\|[ \t]*$", text, re.MULTILINE)


def references(text: str) -> list[str]:
    """Return what the cross-references lead to: tests and public names."""
    return re.findall(r"\]\[((?:tests|sparse_losses)\.[\w.]+)\]", text)


def links(text: str, page: Path) -> set[str]:
    """Return where links lead; a translated page counts as its English one."""
    found = set()
    for target in re.findall(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)", text):
        if "://" in target:
            found.add(target)
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file in PAGES:
            file = translations.original(file)
        found.add(os.path.relpath(file, DOCS) + "#" * bool(anchor) + anchor)
    itself = page if page not in PAGES else translations.original(page)
    return found - {name(itself)}  # it leads to its translations, and they to it


ITEM = re.compile(r"[ \t]*(?:[-*+]|\d+\.)[ \t]")


def blocks(section: str) -> list[str]:
    """Return the kinds of a section's blocks in order, with the number of items of each list."""
    kinds = []
    for block in re.split(r"\n[ \t]*\n", re.sub(r"\$\$.+?\$\$", "$$", section, flags=re.DOTALL)):
        lines = [
            line
            for line in block.splitlines()
            if line.strip() and not re.match(r"[ \t]*(?:#+|!!!|\?\?\?\+?|===) ", line)
        ]
        if not lines:
            continue
        first = lines[0].strip()
        if ITEM.match(lines[0]):
            kinds.append(f"list of {sum(bool(ITEM.match(line)) for line in lines)}")
        elif first == "$$":
            kinds.append("formula")
        else:
            kinds.append({"|": "table", "<": "element"}.get(first[0], "paragraph"))
    return kinds


@pytest.mark.parametrize(
    "page",
    [
        *(f"ko/losses/{stem}.md" for stem in STEMS),
        *(f"ko/{stem}.md" for stem in ("index", "choose", "notation")),
        "ja/losses/nws.md",
    ],
)
def test_the_page_is_translated(page):
    assert (DOCS / page).is_file()
    assert name(translations.original(DOCS / page)) == page.partition("/")[2]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_it_is_of_the_english_page_as_it_stands(page):
    assert not translations.behind(page), "bring it up to date, then tools.translations --accept"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_it_has_the_structure_and_the_code_of_the_english_page(page):
    own, english = both(page)
    assert own.levels == english.levels
    assert own.table_rows == english.table_rows
    assert own.figures == english.figures
    wanted = [slug(heading) for heading in headings(translations.original(page))]
    assert own.ids[1:] == wanted[1:], "write them: ## 수식 { #formula }"
    assert [language for language, _ in own.code] == [language for language, _ in english.code]
    for (language, one), (_, other) in zip(own.code, english.code, strict=True):
        if language == "python":  # comments are translated
            assert ast.unparse(ast.parse(one)) == ast.unparse(ast.parse(other))
    for heading, text, original in of_both(page):
        assert blocks(text) == blocks(original), heading


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_its_formulas_are_those_of_the_english_page_and_not_copied(page):
    own, english = both(page)
    assert own.display == english.display
    assert set(own.inline) <= set(english.inline)
    prose, _ = split_code(body(page.read_text(encoding="utf-8")))
    for mark in ("$$", r"\[", r"\(", r"\begin{"):
        assert mark not in prose, 'include the English page\'s: --8<-- "losses/x.md:formula"'


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_its_references_and_links_lead_where_those_of_the_english_page_do(page):
    """In a sentence they stand in the order of its language, in a table in that of the row."""
    original = translations.original(page)
    for heading, own, english in of_both(page):
        assert sorted(references(own)) == sorted(references(english)), heading
        assert links(own, page) == links(english, original), heading
        for one, other in zip(rows(own), rows(english), strict=True):
            assert references(one) == references(other), f"{heading}: {one}"
            assert links(one, page) == links(other, original), f"{heading}: {one}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "losses"], ids=name)
def test_its_types_and_defaults_are_those_of_the_english_page(page):
    """The columns are parameter, meaning, type, default, typical range."""
    (pair,) = (texts for heading, *texts in of_both(page) if heading == "## Parameters")
    own, english = (
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows(text)[2:]]
        for text in pair
    )
    assert own
    assert [len(row) for row in own] == [5] * len(english)
    assert [(row[0], row[2:4]) for row in own] == [(row[0], row[2:4]) for row in english]


# The tool.

ENGLISH = """# Title

<!-- --8<-- [start:formula] -->

$$x = 1$$

<!-- --8<-- [end:formula] -->

| a |
|---|
| $b$ |

=== "Tab"

    ```python
    x = 1  # one
    ```

![seen](figures/x-light.svg#only-light)
"""
KOREAN = """---
translation_of: page.md
source_sha256: 0
---
# 제목

--8<-- "page.md:formula"

| a |
|---|
| $b$ |

=== "탭"

    ```python
    x = 1  # 하나
    ```

![보이는 것](../figures/x-light.svg#only-light)
"""


@pytest.fixture
def docs(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "DOCS", docs)
    (docs / "ko").mkdir(parents=True)
    (docs / "page.md").write_text(ENGLISH, encoding="utf-8")
    (docs / "ko" / "page.md").write_text(KOREAN, encoding="utf-8")
    return docs


def test_a_page_is_behind_until_it_is_accepted(docs, capsys):
    (page,) = pages()
    assert translations.main([]) == 1
    assert capsys.readouterr().out == "docs/ko/page.md: docs/page.md has changed since\n"
    assert translations.main(["--accept", str(page)]) == 0
    assert not translations.behind(page)
    text = page.read_text(encoding="utf-8")
    assert body(text) == body(KOREAN)
    assert text.startswith("---\ntranslation_of: page.md\nsource_sha256: ")
    (docs / "page.md").write_text(ENGLISH + "\nMore.\n", encoding="utf-8")
    assert translations.behind(page)
    page.write_text(KOREAN.replace("page.md", "none.md"), encoding="utf-8")
    with pytest.raises(ValueError, match="expected a page of docs/ in translation_of"):
        translations.behind(page)


def test_snippets_are_read_as_the_site_reads_them(docs):
    one, other = (
        structure(expand(path.read_text(encoding="utf-8")))
        for path in (docs / "page.md", docs / "ko" / "page.md")
    )
    assert one.display == other.display == ["x=1"]
    assert one.inline == ["b"]
    assert one.table_rows == [3]
    assert one.levels == [1]
    assert one.figures == other.figures == ["x-light.svg#only-light"]
    assert one.code == [("python", "x = 1  # one\n")]
    assert other.code == [("python", "x = 1  # 하나\n")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('--8<-- "none.md"', "expected a file none.md"),
        ('--8<-- "page.md:none"', "expected a section none in page.md"),
    ],
)
def test_what_is_not_there_is_an_error(docs, line, message):
    with pytest.raises(ValueError, match=message):
        expand(line)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_and_its_translations_lead_to_one_another(page):
    original = translations.original(page)
    assert f"]({os.path.relpath(original, page.parent)})" in page.read_text(encoding="utf-8")
    assert f"]({os.path.relpath(page, original.parent)})" in original.read_text(encoding="utf-8")

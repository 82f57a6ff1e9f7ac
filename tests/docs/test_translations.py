"""Translated pages name their English page and version, and include its formulas."""

import os
import re

import pytest

from tools.markdown import DOCS, LANGUAGES, body, expand, front_matter, split_code

PAGES = sorted(page for language in LANGUAGES for page in DOCS.glob(f"{language}/**/*.md"))
FOLLOWS = {
    "ko": "이 번역은 {} 영어 페이지를 따른다.",
    "ja": "この翻訳は {} の英語ページに従います。",
}


def name(page):
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_says_what_it_follows_and_includes_its_formulas(page):
    text = page.read_text(encoding="utf-8")
    about = front_matter(text)
    assert re.fullmatch(r"[0-9a-f]{7}, \d{4}-\d\d-\d\d", about["follows"])
    assert FOLLOWS[name(page).partition("/")[0]].format(about["follows"].partition(", ")[2]) in text
    english = DOCS / about["translation_of"]
    assert f"]({os.path.relpath(english, page.parent)})" in text
    assert f"]({os.path.relpath(page, english.parent)})" in english.read_text(encoding="utf-8")
    expand(text)  # a missing section is an error
    for mark in ("$$", r"\[", r"\(", r"\begin{"):
        assert mark not in split_code(body(text))[0]


@pytest.mark.parametrize("named", ["none.md", "index.md:none"])
def test_a_missing_file_or_section_is_an_error(named):
    with pytest.raises(ValueError, match=r"expected a .* none"):
        expand(f'--8<-- "{named}"')


def sections(page):
    """Return the ids of a page's sections, given or made of their words."""
    prose = split_code(page.read_text(encoding="utf-8"))[0]
    headings = re.findall(r"^ *##+ (.+?) *(?:\{ #([\w-]+) \})?$", prose, re.MULTILINE)
    return [given or re.sub(r"\W+", "-", words.lower()) for words, given in headings]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*/losses/*.md")), ids=name)
def test_a_translated_loss_has_the_sections_of_the_english_page_without_the_api(page):
    assert sections(page) == [x for x in sections(DOCS / "losses" / page.name) if x != "api"]

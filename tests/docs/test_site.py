"""The docs site without a browser: what is where, and that links, names and figures hold."""

import functools
import importlib
import inspect
import os
import re
from itertools import chain
from pathlib import Path

import pytest

import sparse_losses
import sparse_losses.functional as F
from tests.test_house import STEMS
from tools.markdown import DOCS, LANGUAGES, body, expand, front_matter, split_code

ROOT = DOCS.parent
PAGES = sorted(DOCS.rglob("*.md"))
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
HEADINGS = ["Formula", "When to use it", "When not to use it", "Picture", "Details", "API"]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", split_code(read(page))[0])


# Links and names. The links of docs/ are checked by both builders, which are strict.


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the ids of a page's headings, given or made of their words."""
    found = set()
    for heading in re.findall(r"^[ \t]*#+ (.+)$", split_code(expand(read(page)))[0], re.MULTILINE):
        given = re.search(r"\{.*#([\w.-]+).*\}\s*$", heading)
        plain = re.sub(r"\]\([^)]*\)|\]\[[^]]*\]", "]", heading)
        words = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        found.add(given[1] if given else re.sub(r"[-\s]+", "-", words))
    return found


@pytest.mark.parametrize("page", FRONT, ids=name)
def test_local_links_pictures_and_anchors_exist(page):
    prose, _ = split_code(read(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    for path, _, anchor in (target.partition("#") for target in targets if "://" not in target):
        where = page.parent / path if path else page
        assert where.exists(), path
        if anchor and where.suffix == ".md":
            assert anchor in anchors(where), f"{path}#{anchor}"


@functools.cache
def words_of_the_code() -> set[str]:
    """Return every word of the sources, the results and the settings."""
    folders = ("sparse_losses", "examples", "benchmarks", "tests", "tools", "docs/results")
    files = [*chain(*(ROOT.joinpath(folder).rglob("*.*") for folder in folders)), *ROOT.glob("*")]
    kinds = {".py", ".csv", ".toml", ".txt", ".sh", ".cff", ".yml"}
    texts = [read(file) for file in files if file.suffix in kinds or file.name == "Makefile"]
    texts += [file.stem for file in files]
    return set(chain(*(re.findall(r"[A-Za-z_]\w+", text) for text in texts)))


# What pages name of others' and no file of ours uses.
OTHERS = """
SparseAdam TEST_INDEX TEST_INDEX_UPLOAD XyzLoss assign callback_handler callbacks
clear_autocast_cache corpus_active_dims foreign_top gather_across_devices guide_scores
keep_fp32_wrapper negative_1 negative_50 negative_columns set_sync_debug_mode similarity_fn_name
special_top stopword_top testpypi topological_generations xyz_loss
"""


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=name)
def test_names_in_backticks_exist_in_the_code(page):
    """A name that the package loses is found on the pages that still have it."""
    if page.name == "changelog.md":
        pytest.skip("tells of names that went")
    named, (prose, blocks) = set(), split_code(body(read(page)))
    known = words_of_the_code() | set(re.findall(r"\w+", " ".join(code for _, code in blocks)))
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose):
        if re.fullmatch(r"[\w.]+(\(.*\))?=?", code):
            named |= set(re.findall(r"(?<![\"'\w/-])[A-Za-z_]\w{3,}(?![\"'\w/-])", code))
    assert sorted(named - known - {*OTHERS.split()}) == []


# What a host of repositories shows, plain GitHub Markdown and pictures that git holds: what else
# the site's Markdown has would be shown as it is written.
SITE_ONLY = r"""(?mx) \]\[sparse_losses\. | ^(?:\?\?\?|!!!|===\ "|:::) | --8<-- | \{\ ?[#.:][^}]*\}
    | <div | !\[[^]]*\]\([^)]*figures"""


@pytest.mark.parametrize("page", [*FRONT, DOCS / "quickstart.md", DOCS / "install.md"], ids=name)
def test_what_the_readme_links_to_is_plain_github_markdown(page):
    assert page.name == "README.md" or f"({name(page)})" in read(ROOT / "README.md")
    prose = re.sub(r"<!--.*?-->", "", without_code(page), flags=re.DOTALL)
    assert re.findall(SITE_ONLY, body(prose)) == []


def test_every_public_name_is_in_the_reference_once():
    names = {f"sparse_losses.{name}" for name in {*sparse_losses.__all__, *F.__all__}}
    for each in ("transformers", "sentence_transformers"):
        module = importlib.import_module(f"sparse_losses.integrations.{each}")
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    pages = [*(DOCS / "api").rglob("*.md"), *(DOCS / "losses").glob("*.md")]
    written = chain(*(re.findall(r"^::: (\S+)", read(page), re.MULTILINE) for page in pages))
    of_modules = {f"sparse_losses.{name}" for name in ("__version__", "functional")}
    assert sorted(written) == sorted(names - of_modules | {"sparse_losses.objective.terms"})


# The pages on losses.


@pytest.mark.parametrize("stem", STEMS)
def test_a_loss_page_has_the_order_of_all_and_the_docstrings_formulas(stem):
    page = DOCS / "losses" / f"{stem}.md"
    assert page.exists(), f"{stem} has no page: write docs/losses/{stem}.md"
    prose = split_code(expand(read(page)))[0]
    found = re.findall(r"^## (.*?)[ \t]*$", prose, re.MULTILINE)
    assert [each for each in HEADINGS if each in found or each != "Picture"] == found
    doc = inspect.getdoc(getattr(F, f"{stem}_loss"))
    promised, written = (
        {"".join(f.split()) for f in re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)}
        for text in (doc, prose)
    )
    assert promised
    assert promised <= written
    assert re.search(r"^description: \S.{40,}$", read(page), re.MULTILINE)


LISTS = {"losses/index.md": "]({}.md", "formulas.md": '"losses/{}.md:formula"'}
LISTS |= dict.fromkeys(("choose.md", "ko/choose.md"), "losses/{}.md")  # the English page will do


@pytest.mark.parametrize("page", LISTS)
def test_a_page_that_helps_to_choose_has_every_loss(page):
    missing = [stem for stem in STEMS if LISTS[page].format(stem) not in read(DOCS / page)]
    assert missing == [], f"expected a line on each loss in docs/{page}, got none on {missing}"


EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in sorted((DOCS / "losses").glob("*.md"))
    for number, (language, code) in enumerate(split_code(expand(read(page)))[1])
    if language == "python"
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_a_block_of_a_loss_page_runs_alone_when_copied(code):
    exec(compile(code, "<copied>", "exec"), {"__name__": "__main__"})


# Figures.


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_are_there_for_light_and_dark_and_told_in_words(page):
    assert [
        words for words in re.findall(r"!\[([^\]]*)\]", without_code(page)) if not words.strip()
    ] == []
    linked = re.findall(r"figures/([\w-]+)-(light|dark)\.svg#only-(light|dark)\)", read(page))
    light, dark = (sorted(n for n, p, _ in linked if p == each) for each in ("light", "dark"))
    assert light == dark


# Translations name their English page and its version, and include its formulas.

TRANSLATED = sorted(page for language in LANGUAGES for page in DOCS.glob(f"{language}/**/*.md"))
FOLLOWS = {
    "ko": "이 번역은 {} 영어 페이지를 따른다.",
    "ja": "この翻訳は {} の英語ページに従います。",
}


@pytest.mark.parametrize("page", TRANSLATED, ids=name)
def test_a_page_says_what_it_follows_and_includes_its_formulas(page):
    text = read(page)
    about = front_matter(text)
    assert re.fullmatch(r"[0-9a-f]{7}, \d{4}-\d\d-\d\d", about["follows"])
    language, day = page.relative_to(DOCS).parts[0], about["follows"].partition(", ")[2]
    assert FOLLOWS[language].format(day) in text
    english = DOCS / about["translation_of"]
    assert f"]({os.path.relpath(english, page.parent)})" in text
    assert f"]({os.path.relpath(page, english.parent)})" in read(english)
    expand(text)  # a missing section is an error
    for mark in ("$$", r"\[", r"\(", r"\begin{"):
        assert mark not in split_code(body(text))[0]

"""The docs site without a browser: what is where, and that links, names and figures hold."""

import ast
import functools
import inspect
import re
from itertools import chain
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import sparse_losses
import sparse_losses.functional as F
from tests.test_house import STEMS
from tools.figures import __main__ as drawing
from tools.figures import curves, results
from tools.markdown import DOCS, LANGUAGES, body, expand, split_code

ROOT = DOCS.parent
PAGES = sorted(DOCS.rglob("*.md"))
ENGLISH = [page for page in PAGES if page.relative_to(DOCS).parts[0] not in LANGUAGES]
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
HEADINGS = ["Formula", "When to use it", "When not to use it", "Picture", "Details", "API"]
# Papers, packages that are named and what this site is built with.
HOSTS = """arxiv.org doi.org download.pytorch.org hypothesis.readthedocs.io keepachangelog.com
papers.nips.cc pypi.org sbert.net"""
REPOSITORIES = {"KevinMusgrave/pytorch-metric-learning", "naver/splade"}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", split_code(read(page))[0])


def loss_page(stem: str) -> str:
    """Return a loss page's text, snippets in place, without its code."""
    page = DOCS / "losses" / f"{stem}.md"
    assert page.is_file(), f"{name(page)} is not written"
    return split_code(expand(read(page)))[0]


# Links and names.

FIGURES = sorted({**curves.FIGURES, **results.FIGURES})
DRAWN = {f"{figure}-{palette}.svg" for figure in FIGURES for palette in ("light", "dark")}


def is_there(path: Path) -> bool:
    """Say whether a file is there, or will be once the figures are drawn."""
    path = path.resolve()
    return path.name in DRAWN if path.parent == DOCS / "figures" else path.exists()


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


@pytest.mark.parametrize("page", [*FRONT, *PAGES], ids=name)
def test_local_links_pictures_and_anchors_exist(page):
    prose, _ = split_code(read(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    local = [target.partition("#") for target in targets if "://" not in target]
    assert [path for path, *_ in local if path and not is_there(page.parent / path)] == []
    for path, _, anchor in local:
        where = (page.parent / path).resolve() if path else page
        if anchor and where.suffix == ".md" and not anchor.startswith("sparse_losses."):
            assert anchor in anchors(where), f"{path}#{anchor}"
    if DOCS in page.parents:
        outside = [p for p, *_ in local if p and DOCS not in (page.parent / p).resolve().parents]
        assert outside == [], "the site holds docs/ alone: name the file in backticks"
        assert [p for p, *_ in local if p and (page.parent / p).is_dir()] == []


@pytest.mark.parametrize("page", [ROOT / "mkdocs.yml", *FRONT, *PAGES], ids=name)
def test_only_known_hosts_are_named(page):
    for host, path in re.findall(r"https?://([^/\s\"'`)>\]]+)([^\s\"'`)>\]]*)", read(page)):
        if host == "github.com":
            assert "/".join(path.split("/")[1:3]) in REPOSITORIES, path
        else:
            assert host in HOSTS.split() or host.startswith("localhost"), host


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
clear_autocast_cache corpus_active_dims csr_matrix false_negative_share foreign_top special_top
stopword_top gather_across_devices guide_scores
negative_1 negative_50 negative_columns set_sync_debug_mode similarity_fn_name testpypi
topological_generations xyz_loss
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


# What a host of repositories shows: plain GitHub Markdown.

SITE_ONLY = re.compile(
    r"\]\[sparse_losses\.|^(?:\?\?\?|!!!|=== \"|:::)|--8<--|\{ ?[#.:][^}]*\}|<div", re.MULTILINE
)


def not_plain(page: Path, text: str) -> list[str]:
    """Return what GitHub would show as it is written, and pictures that git does not hold."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(body(text))
    inline = list(chain(*(token.children for token in tokens if token.type == "inline")))
    kinds = ("text", "softbreak", "html_inline")
    seen = "".join(each.content or "\n" for each in inline if each.type in kinds)
    blocks = (token.content for token in tokens if token.type == "html_block")
    seen += "\n".join(block for block in blocks if not block.startswith("<!--"))
    pictures = [str(each.attrs["src"]) for each in inline if each.type == "image"]
    ignored = [src for src in pictures if "figures" in src or not (page.parent / src).is_file()]
    return SITE_ONLY.findall(seen) + ignored


def test_what_the_readme_links_to_is_plain_github_markdown():
    readme = ROOT / "README.md"
    linked = set(re.findall(r"\]\(([^)\s#:]+\.md)", read(readme)))
    plain = {"CONTRIBUTING.md", "CHANGELOG.md", "docs/quickstart.md", "docs/install.md"}
    assert plain <= linked
    for page in (readme, *(ROOT / link for link in sorted(plain))):
        assert not_plain(page, read(page)) == [], name(page)
    assert len(not_plain(readme, "[`f`][sparse_losses.f]\n\n## A { #b }\n\n![a](none.svg)")) == 3
    assert not_plain(readme, "`???`\n\n```\n!!! a\n```\n\n<!-- --8<-- -->\n\n$a_1$") == []


# Nothing is fetched from elsewhere.

HOST = re.compile(r"\b(?:https?|wss?|ftp):|//(?=[\w\[])", re.IGNORECASE)
REQUEST = re.compile(
    r"@import|\bfetch\s*\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts"
)
OWN = [
    path
    for path in sorted((DOCS / "assets").rglob("*.*"))
    if path.suffix in {".css", ".js"} and not {"katex", "uplot"} & set(path.parts)
]
TEMPLATES = sorted((ROOT / "overrides").rglob("*.html"))


@pytest.mark.parametrize("path", [ROOT / "mkdocs.yml", *TEMPLATES, *OWN], ids=name)
def test_scripts_styles_and_settings_name_no_host(path):
    assert HOST.search(read(path)) is None
    assert REQUEST.search(read(path)) is None


def test_the_theme_fetches_nothing():
    """Material takes fonts from a host unless it is told not to, and would count visitors."""
    settings = read(ROOT / "mkdocs.yml")
    assert re.search(r"^  font: false\b", settings, re.MULTILINE)
    assert not re.search(r"^\s*(?:analytics|hooks)\s*:", settings, re.MULTILINE)
    assert "emoji" not in settings


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_only_links_leave_the_site(page):
    """A link is followed by a reader; a picture, a script or a style would be fetched."""
    prose = without_code(page)
    for tag in re.findall(r"<[a-zA-Z][\w-]*(?:\s[^>]*)?/?>", prose):
        assert HOST.search(tag) is None, tag
        assert not re.match(r"<(?:script|style|iframe|object|embed|link|base|meta)\b", tag, re.I)
    for target, reference in re.findall(r"!\[[^\]]*\](?:\(([^)\s]+)[^)]*\)|(\[[^\]]*\]))", prose):
        assert not reference, f"write the address of the picture {reference} beside it"
        assert HOST.search(target) is None, target


# The reference and the navigation.


@functools.cache
def public_names() -> list[str]:
    """Return every public name, those of the integrations without importing them."""
    names = [
        f"sparse_losses.{each}"
        for each in {*sparse_losses.__all__, *F.__all__} - {"__version__", "functional"}
    ]
    integrations = ROOT / "sparse_losses/integrations"
    for path in (*integrations.glob("*.py"), *integrations.glob("*/__init__.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for node in ast.parse(read(path)).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                owner = module.removesuffix(".__init__")
                names += [f"{owner}.{each}" for each in ast.literal_eval(node.value)]
    return sorted(names)


def test_every_public_name_is_in_the_reference_once():
    pages = sorted([*(DOCS / "api").rglob("*.md"), *(DOCS / "losses").glob("*.md")])
    written = chain(*(re.findall(r"^::: (\S+)", read(page), re.MULTILINE) for page in pages))
    modules = {"sparse_losses.objective.terms"}
    assert sorted(set(written) - modules) == public_names()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_linked_names_exist(page):
    prose = without_code(page)
    assert "][tests." not in prose, "a test's name is no public name"
    public = set(public_names())
    for dotted in re.findall(r"\]\[(sparse_losses\.[\w.]+)\]", prose):
        owner = dotted if dotted in public else dotted.rpartition(".")[0]
        assert owner in public or owner == "sparse_losses.objective.terms", dotted
        if dotted != owner and owner in public and ".integrations." not in dotted:
            assert hasattr(getattr(sparse_losses, owner.split(".")[1]), dotted.split(".")[-1])


NAVIGATION = read(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]


@functools.cache
def title(page: Path) -> str:
    found = re.search(r"^# (.+)$", expand(read(page)), re.MULTILINE)
    assert found, f"{name(page)} has no title"
    return found[1]


def test_every_page_can_be_reached():
    listed = re.findall(r"([\w/]+\.md)\s*$", NAVIGATION, re.MULTILINE)
    assert len(set(listed)) == len(listed) > 50
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    in_menu = {page for page in pages if page.startswith("ja/")}
    assert pages - in_menu == set(listed)


def test_a_page_has_one_name():
    """Its title is its label, and a link does not call it by another page's."""
    assert re.findall(r"- .+: +\S+\.md$", NAVIGATION, re.MULTILINE) == []
    titles = {title(page).lower(): page for page in ENGLISH}
    assert len(titles) == len(ENGLISH)
    for page in ENGLISH:
        for link, target in re.findall(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+\.md)\)", read(page)):
            named = titles.get(" ".join(link.split()).lower())
            assert named in (None, (page.parent / target).resolve()), f"[{link}]({target})"


# The pages on losses.


@pytest.mark.parametrize("stem", STEMS)
def test_a_loss_page_has_the_order_of_all_and_the_docstrings_formulas(stem):
    prose = loss_page(stem)
    found = re.findall(r"^## (.*?)[ \t]*$", prose, re.MULTILINE)
    assert found in (HEADINGS, [each for each in HEADINGS if each != "Picture"])
    written = ["".join(f.split()) for f in re.findall(r"\$\$(.+?)\$\$", prose, re.DOTALL)]
    doc = inspect.getdoc(getattr(F, f"{stem}_loss"))
    formulas = ["".join(f.split()) for f in re.findall(r"\$\$(.+?)\$\$", doc, re.DOTALL)]
    assert formulas
    assert [formula for formula in formulas if formula not in written] == []
    assert re.search(r"^description: \S.{40,}$", read(DOCS / "losses" / f"{stem}.md"), re.MULTILINE)
    every = read(DOCS / "formulas.md")
    assert f'"losses/{stem}.md:formula"' in every


EXAMPLES = [
    pytest.param(code, id=f"{stem}-{number}")
    for stem in STEMS
    for number, (language, code) in enumerate(
        split_code(expand(read(DOCS / "losses" / f"{stem}.md")))[1]
    )
    if language == "python"
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_a_block_of_a_loss_page_runs_alone_when_copied(code):
    exec(compile(code, "<copied>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_formulas_are_such_as_the_page_can_hold(page):
    """A bar would cut a table's cell, a label leads nowhere; KaTeX is asked in a browser."""
    prose, _ = split_code(body(read(page)))
    assert r"\label" not in prose
    for row in re.findall(r"^[ \t]*\|.*$", prose, re.MULTILINE):
        for formula in re.findall(r"\$([^$]+)\$", re.sub(r"`[^`]*`", "", row)):
            assert "|" not in formula.replace(r"\|", ""), formula


# Figures.


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_are_there_for_light_and_dark_and_told_in_words(page):
    prose, text = without_code(page), read(page)
    assert [words for words in re.findall(r"!\[([^\]]*)\]", prose) if not words.strip()] == []
    for plot in re.findall(r'data-plot="([^"]+)"', text):
        assert (DOCS / "assets/javascripts/plots" / f"{plot}.js").is_file(), plot
        for palette in ("light", "dark"):
            assert f"figures/{plot}-{palette}.svg#only-{palette})" in text
    linked = re.findall(r"figures/([\w-]+)-(light|dark)\.svg#only-(light|dark)\)", text)
    light, dark = (sorted(n for n, p, _ in linked if p == each) for each in ("light", "dark"))
    assert light == dark


def test_every_figure_has_a_page() -> None:
    linked = chain(*(re.findall(r"figures/([\w-]+)-light\.svg", read(p)) for p in PAGES))
    assert set(linked) == set(FIGURES)
    plots = {path.stem for path in (DOCS / "assets/javascripts/plots").glob("*.js")}
    assert plots <= set(FIGURES)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_has_the_colours_of_its_page_alone(figure, tmp_path):
    """The palettes differ in their colours alone, so one of the two pictures shows it."""
    drawing.draw(figure, tmp_path, ["dark"])
    (path,) = tmp_path.iterdir()
    assert path.name in DRAWN
    svg = re.sub(r'(?:href|id)="[^"]*"|url\(#[^)]*\)', "", read(path))
    used, colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", svg)), drawing.PALETTES["dark"]
    assert colours["text"] in used
    assert used <= {colours["text"], *colours["lines"]}

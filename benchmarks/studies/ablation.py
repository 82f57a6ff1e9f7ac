"""Ablation: all losses of plain pairs, with one part switched off at a time.

The preset is `COSINE`, which has them all. Its controller keeps documents at the same number of
active dimensions in every variant but the one without FLOPS.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.studies.runs import (
    Result,
    by_variant,
    markdown,
    run_all,
    spread,
    study_parser,
    write_csv,
    write_json,
)
from sparse_losses import COSINE
from sparse_losses._core.files import replaced_file
from sparse_losses.demo.corpus import Corpus
from sparse_losses.demo.evaluation import BM25_SUBWORDS, BM25_WORDS, MODEL, UNTRAINED, measure
from sparse_losses.demo.objective import loss_of
from sparse_losses.demo.options import STEPS, guarded
from sparse_losses.demo.training import Run, Settings

TARGET = 64
OFF = (*dict.fromkeys(loss_of(term) for term in COSINE.weights), "warmup", "spelling")
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    **{f"without {name}": {"without": (name,)} for name in OFF},
    "without flops": {"without": ("flops",), "target_active": None},
    "without special_penalty": {"preset": COSINE.replace(special_penalty=1.0)},
    "without stopword_penalty": {"preset": COSINE.replace(stopword_penalty=1.0)},
    "without idf": {"preset": COSINE.replace(idf_alpha=0.0)},
}
HEADINGS = {
    "name_recall_1": "name R@1",
    "name_recall_10": "name R@10",
    "name_mrr_10": "name MRR@10",
    "summary_mrr_10": "summary MRR@10",
    "active_query": "active, query",
    "active_document": "active, document",
    "stopwords": "stopwords",
    "special": "special",
    "rare": "rare",
    "own": "own",
    "query_special": "special, query",
    "query_rare": "rare, query",
}
FORMS = ["{:.3f}"] * 4 + ["{:,.0f}"] * 2 + ["{:.1%}"] * 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the tables; return an exit code as the demo does."""
    parser = study_parser(
        "ablation",
        "Train the demo's model with one loss or ingredient of COSINE switched off at a time and "
        "write the test figures as JSON, CSV and a Markdown table.",
        list(VARIANTS),
        steps=STEPS,
    )
    return guarded(_run, parser, arguments)


def settings_of(variant: str, seed: int, steps: int) -> Settings:
    """Return the settings with one part switched off."""
    settings = Settings(steps=steps, seed=seed, preset=COSINE, target_active=TARGET)
    return dataclasses.replace(settings, **VARIANTS[variant])


def run_one(settings: Settings, corpus: Corpus) -> Result:
    """Train once and return the test figures."""
    run = Run(corpus, settings)
    run.train()
    return {
        "sources": corpus.sources,
        "seconds": round(run.seconds, 1),
        "controllers": {side: one.report() for side, one in run.controllers.items()},
        "test": [dataclasses.asdict(figures) for figures in measure(run, corpus)],
    }


def _run(options: argparse.Namespace) -> None:
    results = run_all(options, list(VARIANTS), settings_of, run_one)
    rows = [_row(result, UNTRAINED) for result in results if result["variant"] == "full"]
    rows += [_row(result, MODEL) for result in results]
    systems = {
        system: {name: _row(results[0], system)[name] for name in list(HEADINGS)[:4]}
        for system in (BM25_WORDS, BM25_SUBWORDS)
    }
    write_csv(options.output / "ablation.csv", rows)
    write_json(
        options.output / "ablation.json",
        {
            "sources": results[0]["sources"],
            "baselines": systems,
            "summary": {variant: _summary(own) for variant, own in by_variant(rows).items()},
            "runs": rows,
        },
    )
    cells = [
        [name, *map("{:.3f}".format, row.values()), *[""] * 8] for name, row in systems.items()
    ]
    for variant, own in by_variant(rows).items():
        columns = zip(HEADINGS, FORMS, strict=True)
        cells.append([variant, *(spread([row[name] for row in own], f) for name, f in columns)])
    table = markdown(["run", *HEADINGS.values()], cells)
    with replaced_file(options.output / "ablation.md", text=True) as page:
        page.write(table)
    Console().print(table, markup=False, highlight=False, soft_wrap=True)


def _row(result: Result, system: str) -> dict[str, Any]:
    """Return one run's test figures as columns; those of vectors are from the name task."""
    name, summary = result["test"]
    when = "before" if system == UNTRAINED else "after"
    query, document = name[f"query_{when}"], name[f"document_{when}"]
    return {
        "variant": UNTRAINED if system == UNTRAINED else result["variant"],
        "seed": result["seed"],
        **{f"name_{figure}": value for figure, value in name["rankings"][system].items()},
        "summary_mrr_10": summary["rankings"][system]["mrr_10"],
        "active_query": query["active"],
        "active_document": document["active"],
        **{share: document[share] for share in ("stopwords", "special", "rare", "own")},
        "query_special": query["special"],
        "query_rare": query["rare"],
    }


def _summary(rows: Sequence[Any]) -> dict[str, Any]:
    columns = {name: [row[name] for row in rows] for name in HEADINGS}
    return {"seeds": [row["seed"] for row in rows]} | {
        name: {
            "mean": statistics.mean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        }
        for name, values in columns.items()
    }


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.studies.teachers``: one dense teacher, its scores in several forms.

A masked language model (``--model``) is trained by InfoNCE and KL on the teacher's scores of the
batch. The logits are the teacher's cosines over a temperature; probabilities are their sigmoid
about the median, which saturates. Mixed scores have the mean and the spread of the student's.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.run.table import read
from benchmarks.studies.beir import UNSEEN, load, ranked
from benchmarks.studies.collection import POINTS, Task, Tower
from benchmarks.studies.learn import Results, figures_at, table, train
from sparse_losses.functional import distillation_loss, mix_teachers

TEMPERATURE = 0.05  # that the teacher was trained with
Form = Callable[[Tensor], Tensor]  # of cosines
FORMS: dict[str, Form] = {
    "cosines": lambda x: x,
    "logits": lambda x: x / TEMPERATURE,
    "probabilities": lambda x: ((x - x.median()) / TEMPERATURE).sigmoid(),
}


def distilled(
    vectors: Mapping[str, Tensor],
    drawn: Sequence[int],
    *,
    form: Form,
    is_mixed: bool,
    teacher: tuple[Tensor, Tensor],
) -> Tensor:
    """Return KL of the student's scores of a batch from the teacher's."""
    student = vectors["query"] @ vectors["document"].T
    scores = form(teacher[0][drawn] @ teacher[1][drawn].T)
    if is_mixed:
        scores = mix_teachers([scores, student], weights=[1, 0], reference=1)
    return distillation_loss(student, scores, temperature=1.0, alpha_kl=1.0, alpha_mse=0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing in the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.teachers")
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders in BEIR's format")
    add("--split", default="test", help="the judgements: qrels/SPLIT.tsv")
    add("--model", required=True, help="the student, a masked language model")
    add("--teacher", required=True, help="a bi-encoder of sentence-transformers")
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--steps", type=int, default=300)
    add("--output", type=Path, default=Path("teachers.csv"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    from sentence_transformers import SentenceTransformer

    collections = [load(folder, args.split) for folder in args.data]
    task = Task(collections, args.model)
    bi_encoder = SentenceTransformer(args.teacher, device="cpu")
    options = {"normalize_embeddings": True, "convert_to_tensor": True}
    columns = zip(*(pair for one in collections for pair in one.pairs), strict=True)
    teacher = tuple(bi_encoder.encode(list(column), **options) for column in columns)
    results = Results(args.output, "teachers", ("teacher", "seed"))
    ways = [("none", None), *itertools.product(FORMS, (False, True))]
    for seed, (form, is_mixed) in itertools.product(args.seeds, ways):
        name = f"{form}, mixed" if is_mixed else form
        if not results.missing(teacher=name, seed=seed):
            continue
        torch.manual_seed(seed)
        tower = Tower(task.make(), task.kept)
        settings = task.settings({}, seed=seed, steps=args.steps)
        how = {"form": FORMS.get(form), "is_mixed": is_mixed, "teacher": teacher}
        besides = None if form == "none" else partial(distilled, **how)
        towers = {"query": tower, "document": tower}
        about, encode = train(towers, task.pairs, settings, besides)
        rows = []
        for one, *sides in task.tests:
            q, d = encode("query", sides[0]), encode("document", sides[1])
            same = {"teacher": name, "collection": one.name, "source": one.source, **about}
            for figures in figures_at(q, d, POINTS, partial(_rank, one.relevant), every=UNSEEN):
                rows.append(same | figures)
        results.add(rows)
    print(table(read(results.path), ["teacher"], "ndcg_10"))
    return 0


def _rank(relevant: Sequence[Mapping[int, int]], q: Tensor, d: Tensor) -> dict[str, float]:
    return {key: float(np.mean(x)) for key, x in ranked(q @ d.T, relevant).items()}


if __name__ == "__main__":
    sys.exit(main())

"""``MINILM=folder python -m benchmarks.studies.from_dense``: a dense encoder ranks untrained.

``SpladeEncoder.from_dense``, whose way is ``bias by token: its mean``, and other ways to start, at
several numbers of dimensions of a document, on test collections in the format of BEIR. The
documents, without queries and judgements, set the bias; a text has at most 64 tokens. The row
``dense`` is the encoder's own ranking, by the mean of its states.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.run.table import markdown, read
from benchmarks.studies.beir import Collection, load, ranked
from benchmarks.studies.learn import Results
from sparse_losses import SpladeEncoder

LENGTH = 64  # tokens of a text
STARTS = (64, 128, 256, 512, 1024)


class Encoded(NamedTuple):
    """Pooled logits ``[N, V]`` without a bias, the same of centred embeddings, dense vectors."""

    logits: Tensor
    centred: Tensor
    dense: Tensor


@torch.no_grad()
def encode(encoder: SpladeEncoder, texts: Sequence[str], batch_size: int = 4) -> Encoded:
    """Encode texts; those of similar length share a batch."""
    weight, transform = encoder.head.weight.detach(), cast(nn.Module, encoder.head.transform)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    rows: list[tuple[Tensor, ...]] = []
    for first in range(0, len(texts), batch_size):
        batch = encoder.tokenize([texts[i] for i in order[first : first + batch_size]])
        mask = batch["attention_mask"][..., None]
        hidden = encoder.model.base_model(**batch)[0]
        states = transform(hidden)
        scores = (states @ weight.T).masked_fill_(mask == 0, -torch.inf)
        logits = scores.amax(1)
        centred = scores.sub_((states @ weight.mean(0))[..., None]).amax(1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        rows.append((logits, centred, nn.functional.normalize(mean)))
    back = torch.tensor(order).argsort()
    return Encoded(*(torch.cat(x)[back] for x in zip(*rows, strict=True)))


def ways(q: Encoded, d: Encoded, start: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield ways to start by name, with logits of queries and documents before the one shift."""
    yield "shift", q.logits, d.logits
    yield "centred embeddings", q.centred, d.centred
    yield "scale 1/4", q.logits / 4, d.logits / 4
    yield "scale 4", 4 * q.logits, 4 * d.logits
    mean = d.logits.mean(0)
    yield "bias by token: half of its mean", q.logits - mean / 2, d.logits - mean / 2
    yield "bias by token: its mean", q.logits - mean, d.logits - mean
    least = max(round(start / d.logits.shape[1] * len(d.logits)), 1)  # documents of every token
    limit = d.logits.topk(least + 1, dim=0).values[-1]
    yield "bias by token: equal document frequencies", q.logits - limit, d.logits - limit


def rows_of(encoder: SpladeEncoder, one: Collection) -> Iterator[dict[str, Any]]:
    """Yield the figures of every way and start."""
    q, d = encode(encoder, one.queries), encode(encoder, one.documents)

    def row(way: str, start: int | str, x: Tensor, y: Tensor) -> dict[str, Any]:
        figures = {k: round(float(np.mean(v)), 4) for k, v in ranked(x @ y.T, one.relevant).items()}
        counts = [round((side > 0).sum(1).double().mean().item(), 1) for side in (x, y)]
        longest = round((y > 0).double().mean(0).max().item(), 3)
        about = {"source": one.source, "way": way, "start": start}
        numbers = dict(zip(("query", "document"), counts, strict=True)) | {"longest_list": longest}
        return {"collection": one.name} | about | numbers | figures

    yield row("dense", "", q.dense, d.dense)
    for start in STARTS:
        for way, x, y in ways(q, d, start):
            t = y.flatten().topk(start * len(y) + 1).values[-1]  # as `calibrate` shifts
            yield row(way, start, (x - t).relu().log1p(), (y - t).relu().log1p())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing in the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.from_dense")
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders in BEIR's format")
    add("--split", default="test", help="the judgements: qrels/SPLIT.tsv")
    add("--output", type=Path, default=Path("from_dense.csv"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = Results(args.output, "from_dense", ("model", "collection"))
    name = os.environ["MINILM"]
    about = {"model": Path(name).parent.name}
    for one in (load(folder, args.split) for folder in args.data):
        if results.missing(**about, collection=one.name):
            encoder = SpladeEncoder.from_dense(
                name, one.documents[:64], start_active=STARTS[0], max_length=LENGTH
            )
            results.add([about | row for row in rows_of(encoder, one)])
    cells: dict[tuple[str, str], list[str]] = {}
    for found in read(results.path):
        key = found["collection"], found["way"]
        cells.setdefault(key, []).append(f"{found['start']}: {float(found['ndcg_10']):.3f}")
    print(
        markdown(("collection", "way", "nDCG@10"), [(*k, ", ".join(x)) for k, x in cells.items()])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prune a SPLADE model for an index, write vectors as search engines take them, and export it.

python examples/to_an_index.py my-retriever
"""

import sys
from pathlib import Path
from typing import Any

import data
import torch

from sparse_losses import SpladeEncoder, calibrate


def formats(encoder: SpladeEncoder, texts: list[str]) -> dict[str, list[Any]]:
    """Vectors by engine: OpenSearch, Elasticsearch, Qdrant, Vespa, Solr."""
    weights = encoder.encode_document(texts, output="tokens")
    vectors = encoder.encode_document(texts, output="dense")
    return {
        "opensearch": weights,  # `rank_features`
        # `sparse_vector` refuses dots; of tokens that become equal, the larger weight stays
        "elasticsearch": [
            {t.replace(".", "__"): w for t, w in reversed(x.items())} for x in weights
        ],
        "qdrant": [
            {"indices": x.nonzero()[:, 0].tolist(), "values": x[x > 0].tolist()} for x in vectors
        ],
        "vespa": [{"cells": x} for x in weights],  # `tensor<float>(token{})`
        "solr": [" ".join(f"{t}|{w:.4f}" for t, w in x.items()) for x in weights],  # payloads
    }


def export(encoder: SpladeEncoder, texts: list[str], side: str) -> torch.export.ExportedProgram:
    """The encoder of one side, with its threshold, for any number of texts of any length."""
    batch = encoder.tokenize(texts)
    sizes = {
        0: torch.export.Dim("batch", min=1, max=512),
        1: torch.export.Dim("length", min=2, max=encoder.max_length),
    }
    return torch.export.export(
        encoder,
        tuple(batch.values()),
        kwargs={"side": side},
        dynamic_shapes=dict.fromkeys(batch, sizes) | {"side": None},
        strict=False,
    )


def main(
    model: str = "my-retriever", products: float = 1.0, folder: str = "index"
) -> dict[str, list[Any]]:
    _, held_out = data.pairs()  # yours: texts like those of the index
    queries, documents = map(list, zip(*held_out, strict=True))
    encoder = SpladeEncoder.from_pretrained(model, max_length=128).eval()
    calibrate(encoder, documents, queries=queries, target_products=products)
    vectors = formats(encoder, documents)
    Path(folder).mkdir(exist_ok=True)
    program = export(encoder, documents[:2], "document")
    torch.export.save(program, Path(folder) / "document.pt2")
    print(f"{len(documents)} documents; the first: {vectors['solr'][0][:60]} ...")
    return vectors


if __name__ == "__main__":
    main(*sys.argv[1:2])

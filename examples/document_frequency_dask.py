r"""Count document frequencies on many machines with Dask; copy it and change what you like.

    python document_frequency_dask.py 'part-*.txt' --tokenizer tokenizer.json --output df.npz
    python document_frequency_dask.py 's3://bucket/part-*.jsonl.gz' --field text \
        --tokenizer tokenizer.json --output df.npz --scheduler tcp://HOST:8786

Files are read where the workers are. Without --scheduler, processes on this machine do the work.
"""

import argparse
import json
import os

import dask.bag
import torch
from dask.distributed import Client, LocalCluster
from tokenizers import Tokenizer

from sparse_losses import DocumentFrequency
from sparse_losses.vocabulary.document_frequency import tokenizer_sha256

BATCH = 256  # documents that are tokenized and padded together


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", help="files or patterns: .txt, .jsonl, with .gz")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--output", required=True, help="where the counts go, an .npz file")
    parser.add_argument("--field", help="of a JSONL line; without it, the line is the text")
    parser.add_argument("--scheduler", help="its address; without it, processes here")
    parser.add_argument("--blocksize", help="uncompressed files are cut into parts of, say, 64MiB")
    chosen = parser.parse_args()
    if chosen.field is None and any(".json" in name or ".ndjson" in name for name in chosen.inputs):
        parser.error("expected --field, the field of a JSON line that holds the text")
    return chosen


def count(lines, tokenizer: str, field: str | None) -> DocumentFrequency:
    """Count one partition; the tokenizer travels as the content of its file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores already
    encoder = Tokenizer.from_str(tokenizer)
    encoder.no_truncation()
    encoder.enable_padding()
    size = max(encoder.get_vocab().values()) + 1
    counter = DocumentFrequency(size, tokenizer_sha256=tokenizer_sha256(encoder))
    texts = [line.rstrip("\r\n") for line in lines if line.strip()]
    if field is not None:
        texts = [json.loads(text)[field] for text in texts]
    texts.sort(key=len)  # less padding; the order does not matter to the counts
    for start in range(0, len(texts), BATCH):
        batch = encoder.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
        ids = torch.tensor([document.ids for document in batch])
        mask = torch.tensor([document.attention_mask for document in batch])
        counter.update(ids, mask)
    return counter


def merge(counters) -> DocumentFrequency:
    first, *others = counters
    for other in others:
        first.merge(other)
    return first


def main() -> None:
    chosen = options()
    with open(chosen.tokenizer, encoding="utf-8") as file:
        tokenizer = file.read()
    lines = dask.bag.read_text(chosen.inputs, blocksize=chosen.blocksize)
    with Client(chosen.scheduler or LocalCluster(threads_per_worker=1)):
        total = lines.reduction(
            lambda part: count(part, tokenizer, chosen.field), merge, split_every=8
        ).compute()
    total.save(chosen.output)
    print(f"{total.num_documents:,} documents of {total.mean_length:.1f} tokens on average")


if __name__ == "__main__":
    main()

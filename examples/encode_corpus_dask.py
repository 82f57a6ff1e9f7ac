r"""Encode a corpus on many machines with Dask; copy it and change what you like.

    python encode_corpus_dask.py 'corpus/*.jsonl' --model my-encoder --output vectors/

Every input file is a partition of JSON lines with an ``id`` and a ``text``; its vectors are written
to a file of the same name, as JSON lines with the ``id`` and the weights by token. A worker loads
the encoder once. A finished partition is not encoded again, so an interrupted run goes on where it
stopped. Files are read and written where the workers are.
"""

import argparse
import functools
import glob
import json
import os
from pathlib import Path

from dask.distributed import Client, LocalCluster, as_completed
from tqdm.auto import tqdm

from sparse_losses import SpladeEncoder


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", help="a pattern of files with JSON lines")
    parser.add_argument("--model", required=True, help="a folder of a SpladeEncoder")
    parser.add_argument("--output", required=True, help="the folder of the vectors")
    parser.add_argument("--batch-size", type=int, default=32, help="texts per batch")
    parser.add_argument("--prune-ratio", type=float, help="as in SpladeEncoder.encode")
    parser.add_argument("--workers", type=int, help="processes on this machine")
    parser.add_argument("--scheduler", help="its address; without it, processes here")
    return parser.parse_args()


@functools.cache  # one encoder a worker
def encoder_of(model: str) -> SpladeEncoder:
    return SpladeEncoder.from_pretrained(model)


def encode(source: str, target: str, model: str, batch_size: int, prune_ratio: float | None) -> int:
    """Encode one partition; return its number of texts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores already
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    vectors = encoder_of(model).encode_document(
        [row["text"] for row in rows],
        output="tokens",
        batch_size=batch_size,
        prune_ratio=prune_ratio,
        show_progress=False,
    )
    # Under another name until it is complete: what has the right name is finished.
    unfinished = Path(f"{target}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for row, vector in zip(rows, vectors, strict=True):
            content = {"id": row["id"], "vector": vector}
            file.write(json.dumps(content, ensure_ascii=False) + "\n")
    unfinished.replace(target)
    return len(rows)


def main() -> None:
    chosen = options()
    folder = Path(chosen.output)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(name, str(folder / Path(name).name)) for name in sorted(glob.glob(chosen.inputs))]
    if not pairs:
        raise SystemExit(f"expected files {chosen.inputs}, got none")
    todo = [pair for pair in pairs if not Path(pair[1]).exists()]
    settings = chosen.model, chosen.batch_size, chosen.prune_ratio
    cluster = chosen.scheduler or LocalCluster(n_workers=chosen.workers, threads_per_worker=1)
    encoded = 0
    with Client(cluster) as client:
        futures = [client.submit(encode, *pair, *settings, pure=False) for pair in todo]
        for future in tqdm(as_completed(futures), total=len(todo), unit="partition"):
            encoded += future.result()
    print(f"{encoded:,} texts of {len(todo)} partitions; {len(pairs) - len(todo)} were finished")


if __name__ == "__main__":
    main()

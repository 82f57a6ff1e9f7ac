"""examples/document_frequency_dask.py counts as a loop does."""

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers

from sparse_losses import DocumentFrequency

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("distributed") is None, reason="needs dask[distributed]")
def test_example_for_dask_counts_like_a_loop(tmp_path):
    """Two files in two processes: one counter a partition, merged."""
    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    docs = [[1], [1, 2, 2], [3, 0], [3, 1, 2]] * 5
    for part in range(2):
        texts = [" ".join("?abc"[token] for token in doc) for doc in docs[part::2]]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"part-{part}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    options = ["--tokenizer", tmp_path / "tokenizer.json", "--output", tmp_path / "dask.npz"]
    example = ROOT / "examples" / "document_frequency_dask.py"
    ran = subprocess.run(
        [sys.executable, example, tmp_path / "part-*.jsonl.gz", "--field", "text", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "20 documents of 2.2 tokens" in ran.stdout
    loaded = DocumentFrequency.load(tmp_path / "dask.npz", tokenizer=tokenizer)
    assert loaded.df.tolist() == [sum(token in doc for doc in docs) for token in range(4)]

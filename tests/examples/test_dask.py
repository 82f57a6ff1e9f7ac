"""The examples for Dask, each on two files: they count and encode as a loop does."""

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparse_losses import DocumentFrequency
from tests.representation.tiny_models import CORPUS, make, word_level

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(find_spec("distributed") is None, reason="needs dask[distributed]")


def run(name, *arguments):
    """Run an example; return what it prints."""
    words = [sys.executable, ROOT / "examples" / name, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_document_frequencies_are_counted_like_a_loop(tmp_path):
    """One counter a partition, merged."""
    tokenizer = word_level(["a", "b", "c"]).backend_tokenizer
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    docs = ["a", "a b b", "c ?", "c a b"] * 5
    for part in range(2):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in docs[part::2])
        (tmp_path / f"part-{part}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    options = ("--tokenizer", tmp_path / "tokenizer.json", "--output", tmp_path / "dask.npz")
    files = (tmp_path / "part-*.jsonl.gz", "--field", "text")
    assert "20 documents of " in run("document_frequency_dask.py", *files, *options)
    loaded = DocumentFrequency.load(tmp_path / "dask.npz", tokenizer=tokenizer)
    assert loaded.df[5:].tolist() == [sum(word in doc for doc in docs) for word in "abc"]


def test_finished_partitions_are_kept_and_the_others_encoded(tmp_path):
    encoder = make()
    encoder.save_pretrained(tmp_path / "model")
    rows = [{"id": i, "text": text} for i, text in enumerate(CORPUS)]
    parts = [rows[0::2], rows[1::2]]
    for number, part in enumerate(parts):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"part-{number}.jsonl").write_text(lines)
    out = tmp_path / "vectors"
    out.mkdir()
    (out / "part-0.jsonl").write_text("kept")  # an earlier run finished it
    (out / "part-1.jsonl.unfinished").write_text("half a li")  # and stopped here
    files = tmp_path / "part-*.jsonl", "--model", tmp_path / "model", "--output", out
    printed = run("encode_corpus_dask.py", *files, "--workers", 1, "--prune-ratio", 0.3)
    assert f"{len(parts[1])} texts of 1 partitions; 1 were finished" in printed
    assert (out / "part-0.jsonl").read_text() == "kept"
    assert not list(out.glob("*.unfinished"))
    found = [json.loads(line) for line in (out / "part-1.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in parts[1]]
    texts = [row["text"] for row in parts[1]]
    expected = encoder.encode(texts, output="tokens", prune_ratio=0.3)
    for row, vector in zip(found, expected, strict=True):
        assert row["vector"] == pytest.approx(vector, rel=1e-5)

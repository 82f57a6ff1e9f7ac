"""The example that encodes a corpus with Dask."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.representation.tiny_models import CORPUS, make

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="needs dask[distributed]"
)


def run(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "encode_corpus_dask.py", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


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
    arguments = tmp_path / "part-*.jsonl", "--model", tmp_path / "model", "--output", out
    ran = run(*arguments, "--workers", 1, "--prune-ratio", 0.3)
    assert ran.returncode == 0, ran.stderr
    assert f"{len(parts[1])} texts of 1 partitions; 1 were finished" in ran.stdout
    assert (out / "part-0.jsonl").read_text() == "kept"
    assert not list(out.glob("*.unfinished"))
    found = [json.loads(line) for line in (out / "part-1.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in parts[1]]
    texts = [row["text"] for row in parts[1]]
    expected = encoder.encode(texts, output="tokens", prune_ratio=0.3)
    for row, vector in zip(found, expected, strict=True):
        assert row["vector"] == pytest.approx(vector, rel=1e-5)

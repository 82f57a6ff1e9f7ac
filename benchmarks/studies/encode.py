"""``python -m benchmarks.studies.encode``: texts a second, beside sentence-transformers.

``SpladeEncoder.encode`` and ``SparseEncoder.encode`` of the same folder, a BERT with random
weights, on the same texts of 5 to 200 words, on a CPU. Both give sparse vectors on the host. Times
are interleaved in one run; memory is what one call allocates at its peak.
"""

import argparse
import functools
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import memory, timing
from benchmarks.run.table import RESULTS, circumstances, markdown, write

BATCH_SIZES = (1, 8, 32, 128)
VARIANTS = ("sentence-transformers", "use_splade_head", "SpladeEncoder")
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
ACTIVE = 0.005  # share of active entries


def texts_of(number: int, vocab_size: int) -> list[str]:
    """Return random texts."""
    rng = random.Random(0)
    lengths = [rng.randint(5, 200) for _ in range(number)]
    return [" ".join(f"w{rng.randrange(2, vocab_size)}" for _ in range(n)) for n in lengths]


def encoders(folder: str, vocab_size: int, texts: Sequence[str]) -> dict[str, Any]:
    """Return the functions that encode ``texts`` in batches of a size."""
    from sentence_transformers import SparseEncoder
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    from sparse_losses import SpladeEncoder
    from sparse_losses.integrations.sentence_transformers import use_splade_head

    torch.manual_seed(0)
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, vocab_size)}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
    model = BertForMaskedLM(BertConfig(vocab_size=vocab_size, **SIZES))
    encoder = SpladeEncoder(model, tokenizer).eval()
    encoder.calibrate(texts[:32], ACTIVE * vocab_size, method="shift")  # the folder of both
    encoder.save_pretrained(folder)
    theirs, patched = (SparseEncoder(folder, device="cpu") for _ in range(2))
    use_splade_head(patched)
    options = {"save_to_cpu": True, "show_progress_bar": False}
    return {
        "sentence-transformers": lambda n: theirs.encode(list(texts), batch_size=n, **options),
        "use_splade_head": lambda n: patched.encode(list(texts), batch_size=n, **options),
        "SpladeEncoder": lambda n: encoder.encode(texts, batch_size=n, show_progress=False),
    }


def measure(calls: dict[str, Any], size: int, number: int, budget: float) -> list[dict[str, Any]]:
    """Return one row per variant at one batch size."""
    device = torch.device("cpu")
    runs = {name: functools.partial(_once, call, size) for name, call in calls.items()}
    vectors = [call(size).to_dense() for call in calls.values()]
    error = max((x - vectors[0]).abs().max().item() for x in vectors)
    del vectors
    peaks = {name: memory.peak_bytes(run, device)[0] for name, run in runs.items()}
    first = dict.fromkeys(runs, 1.0)
    seconds = timing.interleave(runs, device, budget=budget, first=first)
    return [
        {
            "batch_size": size,
            "variant": name,
            "texts": number,
            "rounds": len(seconds[name]),
            **timing.columns("texts_per_second", [number / each for each in seconds[name]]),
            "peak_mib": round(peaks[name] / 2**20, 1),
            "error": error,
        }
        for name in runs
    ]


def _once(call: Callable[[int], torch.Tensor], size: int, number: int = 0) -> list[torch.Tensor]:
    """Encode and forget the vectors: no gradient is returned."""
    call(size)
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the CSV and print the table."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.studies.encode")
    options.add_argument("--output", type=Path, default=RESULTS / "encode.csv")
    options.add_argument("--budget", type=float, default=45.0, help="seconds per batch size")
    options.add_argument("--texts", type=int, default=256)
    options.add_argument("--vocabulary", type=int, default=30_522)
    args = options.parse_args(arguments)
    common = circumstances(torch.device("cpu"), "encode")
    texts, rows = texts_of(args.texts, args.vocabulary), []
    with tempfile.TemporaryDirectory() as folder:
        calls = encoders(folder, args.vocabulary, texts)
        for size in BATCH_SIZES:
            rows += measure(calls, size, len(texts), args.budget)
    common["vocabulary"] = str(args.vocabulary)
    write(args.output, [common | row for row in rows])
    names = ("batch_size", "variant", "texts_per_second", "peak_mib")
    print(markdown(names, [[row[name] for name in names] for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

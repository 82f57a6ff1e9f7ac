"""``python -m benchmarks.studies.caching``: memory and time of gradient caching.

One training step of a small transformer with a :class:`SpladeHead` on pairs of texts, without
caching and with ``cached_backward`` at several sizes of the mini-batch.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.report import markdown
from benchmarks.run.memory import peak_bytes
from benchmarks.run.table import RESULTS, circumstances
from sparse_losses import SpladeBatch, SpladeHead, SpladeObjective, Texts
from sparse_losses._core.files import replaced_file
from sparse_losses.functional import cached_backward

__all__ = ["Case", "main", "measure"]

V, S, H, LAYERS = 30_522, 64, 256, 4


@dataclass(frozen=True)
class Case:
    """One way to compute the gradient of a batch of pairs."""

    pairs: int
    mini_batch_size: int | None  # None: without caching


CASES = (
    Case(64, None),
    Case(256, None),
    Case(256, 64),
    Case(256, 16),
)


class Encoder(nn.Module):
    """Token ids to activations."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, H)
        # No dropout, so that gradients can be compared.
        layer = nn.TransformerEncoderLayer(H, 4, 4 * H, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        # Most of the vocabulary is inactive, as in a trained model.
        bias = torch.full((vocab_size,), -1.1)
        self.head = SpladeHead(self.embedding.weight, nn.Parameter(bias))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Encode ``[B, S]`` to ``[B, V]``."""
        hidden = self.layers(self.embedding(input_ids))
        activations: Tensor = self.head(hidden, torch.ones_like(input_ids))
        return activations


def step(case: Case, vocab_size: int = V) -> Callable[[], list[Tensor | None]]:
    """Return a function that computes and returns the gradient of one batch."""
    torch.manual_seed(0)
    model = Encoder(vocab_size)
    queries, documents = torch.randint(0, vocab_size, (2, case.pairs, S))
    objective = SpladeObjective({"info_nce": 1.0, "query_flops": 0.01, "document_flops": 0.01})

    def loss(anchor: Tensor, positive: Tensor) -> Tensor:
        return objective(SpladeBatch(Texts(anchor), Texts(positive))).total

    def run() -> list[Tensor | None]:
        torch.manual_seed(1)
        if case.mini_batch_size is None:
            loss(model(queries), model(documents)).backward()
        else:
            cached_backward(model, [queries, documents], loss, mini_batch_size=case.mini_batch_size)
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    return run


@dataclass(frozen=True)
class Result:
    """The figures of a case."""

    pairs: int
    mini_batch_size: str
    cpu_seconds: float  # of all threads, without other processes
    peak_bytes: int
    peak_bytes_without_gradients: int
    gradient_difference: float  # relative to the gradient without caching


def measure(cases: Sequence[Case], *, rounds: int, vocab_size: int = V) -> list[Result]:
    """Measure every case: the median time over rounds, then the memory."""
    steps = {case: step(case, vocab_size) for case in cases}
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    gradients: dict[Case, Tensor] = {}
    for _ in range(rounds):
        for case, run in steps.items():
            start = time.process_time()
            gradient = run()
            seconds[case].append(time.process_time() - start)
            gradients[case] = torch.cat([x.flatten() for x in gradient if x is not None])
    results = []
    for case, run in steps.items():
        plain = gradients[replace(case, mini_batch_size=None)]
        difference = ((gradients[case] - plain).norm() / plain.norm()).item()
        if not difference < 1e-3:
            raise SystemExit(f"{case}: its gradient differs from the plain one by {difference:g}")
        results.append(
            Result(
                case.pairs,
                "plain" if case.mini_batch_size is None else str(case.mini_batch_size),
                round(statistics.median(seconds[case]), 3),
                *peak_bytes(run, torch.device("cpu")),
                difference,
            )
        )
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write a CSV and print a table."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.caching", description=__doc__
    )
    options.add_argument("--output", type=Path, default=RESULTS / "caching.csv")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--vocabulary", type=int, default=V)
    args = options.parse_args(arguments)
    about = {"V": args.vocabulary, "S": S, "H": H, "layers": LAYERS, "rounds": args.rounds}
    about |= circumstances(torch.device("cpu"), "caching", None)
    results = measure(CASES, rounds=args.rounds, vocab_size=args.vocabulary)
    with replaced_file(args.output, text=True) as lines:
        rows = [{**asdict(result), **about} for result in results]
        writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    heading = ("pairs", "mini-batch", "peak extra memory, MiB", "CPU time, s")
    print(
        markdown(
            heading,
            [
                (x.pairs, x.mini_batch_size, round(x.peak_bytes / 2**20), f"{x.cpu_seconds:.1f}")
                for x in results
            ],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.studies.training_step``: a training step with different heads.

The model is a masked language model of XLM-RoBERTa's shape with random weights, trained in bf16
autocast by AdamW on pairs of texts, with dot-product InfoNCE and FLOPS on both sides. The study
measures time and peak memory of a step, with all heads interleaved.
Without dropout gradients can be compared; with learning rate 0 the share of active entries is
constant.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparse_losses
from benchmarks.losses import flops, info_nce, splade_head
from benchmarks.run import memory, timing
from benchmarks.run.table import RESULTS, circumstances, markdown, write
from sparse_losses.objective import terms

FLOPS_WEIGHT = 1e-3
Head = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The shape of model and batch."""

    vocabulary: int = 250_002
    width: int = 768
    layers: int = 12
    attention_heads: int = 12
    length: int = 256
    active: float = 0.01  # share of active entries of the vectors
    pairs: tuple[int, ...] = (8, 32, 128)  # batch sizes of the timed steps


TINY = Shape(200, 32, 2, 2, 16, 0.1, (2,))


HEADS: dict[str, Head] = {"eager": splade_head.plain, "ours": sparse_losses.splade_head}


class Step:
    """A model, its optimizer and its batches."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

        torch.manual_seed(0)
        config = XLMRobertaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.attention_heads,
            intermediate_size=4 * shape.width,
            max_position_embeddings=shape.length + 2,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.shape, self.device = shape, device
        with device:
            self.model: Any = XLMRobertaForMaskedLM(config)
        self.model.train()
        head = sparse_losses.SpladeHead.from_masked_lm(self.model)
        assert head.transform is not None
        assert head.bias is not None
        self.transform, self.weight, self.bias = head.transform, head.weight, head.bias
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, weight_decay=0.0, fused=device.type != "cpu"
        )
        self._texts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._silence()

    def _silence(self) -> None:
        """Shift the bias so that the requested share of entries is active."""
        with torch.no_grad():
            vectors = self.vectors(splade_head.plain, *self.texts(2, seed=1), signed=True)
            sample = vectors.flatten()[:: max(1, vectors.numel() // 1_000_000)]
            self.bias -= sample.float().quantile(1 - self.shape.active)

    def texts(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return random tokens on two thirds of the positions on average; drawn once."""
        if (rows, seed) in self._texts:
            return self._texts[rows, seed]
        generator = torch.Generator().manual_seed(seed)
        size = (rows, self.shape.length)
        ids = torch.randint(5, self.shape.vocabulary, size, generator=generator)
        share = 0.34 + 0.66 * torch.rand(rows, 1, generator=generator)
        mask = torch.arange(self.shape.length) < (self.shape.length * share).clamp(min=1)
        self._texts[rows, seed] = ids.to(self.device), mask.long().to(self.device)
        return self._texts[rows, seed]

    def vectors(self, head: Head, ids: Tensor, mask: Tensor, *, signed: bool = False) -> Tensor:
        """Return vectors ``[B, V]``, projected in bf16 as a linear layer under autocast."""
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model.base_model(ids, attention_mask=mask).last_hidden_state
            hidden = self.transform(hidden)
            half = [x.bfloat16() for x in (hidden, self.weight, self.bias)]
            if signed:
                scores = half[0] @ half[1].T + half[2]
                return scores.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1)
            return head(*half, mask)

    def loss(self, name: str, head: Head, pairs: int, seed: int = 0) -> Tensor:
        """Return the loss of one batch; heads that are not ours use eager formulas."""
        query = self.vectors(head, *self.texts(pairs, 2 * seed))
        document = self.vectors(head, *self.texts(pairs, 2 * seed + 1))
        if not name.startswith("ours"):
            with torch.autocast(self.device.type, torch.bfloat16):
                contrast = info_nce.plain(query, document, temperature=1.0, similarity="dot")
                return contrast + FLOPS_WEIGHT * (flops.plain(query) + flops.plain(document))
        ranking = sparse_losses.InfoNCELoss(temperature=1.0, similarity="dot")
        objective = sparse_losses.SpladeObjective(
            {
                "info_nce": (1.0, terms.info_nce(ranking)),
                "query_flops": (FLOPS_WEIGHT, terms.flops("query")),
                "document_flops": (FLOPS_WEIGHT, terms.flops("document")),
            }
        )
        texts = sparse_losses.Texts(query), sparse_losses.Texts(document)
        total: Tensor = objective(sparse_losses.SpladeBatch(*texts)).total
        return total

    def run(self, name: str, head: Head, pairs: int) -> Callable[[int], Tensor]:
        """Return a training step; its argument is the number of the step."""

        def step(number: int) -> Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            value = self.loss(name, head, pairs, number % 3)
            value.backward()
            self.optimizer.step()
            return value.detach()

        return step

    def gradient(self, name: str, head: Head, pairs: int) -> tuple[float, Tensor]:
        """Return the value and the gradient of the tied embedding matrix."""
        value = self.run(name, head, pairs)(0)
        gradient = self.model.get_input_embeddings().weight.grad.detach().clone()
        self.optimizer.zero_grad(set_to_none=True)
        return value.item(), gradient

    def forget(self) -> None:
        """Free everything except weights and moments."""
        self.optimizer.zero_grad(set_to_none=True)
        self._texts.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


ALLOWED_VALUE, ALLOWED_GRADIENT = 2e-2, 0.3  # the arg-max of bf16 scores varies


def compare(step: Step, heads: Mapping[str, Head], pairs: int) -> dict[str, dict[str, Any]]:
    """Return every head's value, the relative difference of its gradient from eager's, a status."""
    found: dict[str, dict[str, Any]] = {}
    expected, expected_gradient = step.gradient("eager", heads["eager"], pairs)
    for name, head in heads.items():
        try:
            value, gradient = step.gradient(name, head, pairs)
        except Exception as error:
            line = (str(error).splitlines() or [""])[0][:150]
            found[name] = {"status": f"failed: {type(error).__name__}: {line}"}
            step.forget()
            continue
        off = abs(value - expected) / abs(expected)
        difference = ((gradient - expected_gradient).norm() / expected_gradient.norm()).item()
        status = "ok"
        if not (off <= ALLOWED_VALUE and difference <= ALLOWED_GRADIENT):
            status = f"MISMATCH: value off by {off:.1e}, gradient {difference:.1e}"
        found[name] = {"status": status, "value": value, "gradient_difference": difference}
    return found


def measure(
    step: Step,
    heads: Mapping[str, Head],
    pairs: int,
    compared: Mapping[str, Mapping[str, Any]],
    budget: float,
) -> list[dict[str, Any]]:
    """Return one row per head; the steps of those that agree are timed, interleaved."""
    rows = {name: {"pairs": pairs, "variant": name, **compared[name]} for name in heads}
    runs: dict[str, Callable[[int], Tensor]] = {}
    for name, head in heads.items():
        if rows[name]["status"] != "ok":
            continue
        run = step.run(name, head, pairs)
        try:
            run(0)
            step.optimizer.zero_grad(set_to_none=True)
            rows[name]["peak_bytes"], _ = memory.peak_bytes(lambda run=run: [run(0)], step.device)
            runs[name] = run
        except torch.OutOfMemoryError:
            rows[name]["status"] = "skipped: does not fit"
        step.forget()
    seconds = timing.interleave(runs, step.device, budget=budget, max_rounds=15)
    tokens = 2 * pairs * step.shape.length
    for name in runs:
        times = timing.columns("seconds", seconds[name])
        speed = tokens / times["seconds"]
        rows[name] |= {"rounds": len(seconds[name]), **times, "tokens_per_second": speed}
    step.forget()
    return list(rows.values())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.studies.training_step")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options.add_argument("--output", type=Path, help="default: results/DEVICE-training.csv")
    options.add_argument("--budget", type=float, default=8.0, help="seconds per batch size")
    options.add_argument("--active", type=float, help="share of active entries (default: 0.01)")
    options.add_argument("--tiny", action="store_true", help="a tiny model, as a smoke test")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the CSV, and print the table; return 1 if a head differs or failed."""
    args = parser().parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available; --device cpu --tiny runs a smoke test")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("a step of this size needs --device cuda; on a CPU use --tiny")
    shape = TINY if args.tiny else Shape()
    shape = shape if args.active is None else replace(shape, active=args.active)
    common = circumstances(device, "training_step")
    common |= {key: str(value) for key, value in asdict(shape).items() if "pairs" not in key}
    step = Step(shape, device)
    compared = compare(step, HEADS, shape.pairs[0])
    rows: list[dict[str, Any]] = []
    for pairs in shape.pairs:
        rows += [row | common for row in measure(step, HEADS, pairs, compared, args.budget)]
        write(args.output or RESULTS / f"{args.device}-training.csv", rows)
    columns = ("pairs", "variant", "seconds", "tokens_per_second", "peak_bytes", "status")
    print(markdown(columns, [[row.get(name, "") for name in columns] for row in rows]))
    return int(any(row["status"].startswith(("MISMATCH", "failed")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())

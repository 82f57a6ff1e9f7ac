"""``python -m benchmarks.studies.trainer_step``: a step of sentence-transformers with a real model.

A masked language model (or a dense encoder, which becomes one) trains in a
``SparseEncoderTrainer``: texts of random words of its vocabulary, ``SpladeLoss``, AdamW. Measured
are the trainer's own step and the optimiser's, with sentence-transformers alone, with
``use_splade_head``, and with CSR vectors and the losses of this package. Variants are interleaved.
"""

import argparse
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparse_losses as sl
from benchmarks.run import memory, timing
from benchmarks.run.table import RESULTS, circumstances, markdown, write
from sparse_losses.objective import terms

WEIGHTS: dict[terms.Side, float] = {
    "query": 5e-5,
    "document": 3e-5,
}  # of FLOPS, as sentence-transformers documents them
START = 256  # dimensions of a text of what was a dense encoder
VARIANTS = ("sentence-transformers", "use_splade_head", "use_splade_head, CSR")


def masked_lm(folder: str, texts: Sequence[str], path: str) -> str:
    """Return a folder of a masked language model, which a dense encoder becomes."""
    from transformers import AutoConfig

    if "MaskedLM" in (AutoConfig.from_pretrained(folder).architectures or [""])[0]:
        return folder
    sl.SpladeEncoder.from_dense(folder, texts, start_active=START).save_pretrained(path)
    return path


def random_texts(tokenizer: Any, number: int, length: int) -> list[str]:
    """Return texts of whole words, of a third to all of ``length`` tokens."""
    words = sorted(x for x in tokenizer.get_vocab() if x.isalpha() and len(x) > 2)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(len(words), (number, length - 2), generator=generator).tolist()
    shares = (1 + 2 * torch.rand(number, generator=generator)) / 3
    sizes = (shares * (length - 2)).long().tolist()
    return [" ".join(words[i] for i in row[:size]) for row, size in zip(index, sizes, strict=True)]


def stepper(folder: str, variant: str, pairs: int, length: int, dtype: str) -> Callable[[int], Any]:
    """Return a training step of a trainer; it returns the gradients."""
    from datasets import Dataset
    from sentence_transformers import (
        SparseEncoder,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )
    from sentence_transformers.sparse_encoder import losses
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    from sparse_losses.integrations import sentence_transformers as ours

    torch.manual_seed(0)
    options = {"max_seq_length": length, "transformer_task": "fill-mask"}
    modules = [Transformer(folder, **options), SpladePooling("max")]
    model = SparseEncoder(modules=modules, device="cpu")
    texts = random_texts(model.tokenizer, 2 * pairs, length)
    data = Dataset.from_dict({"query": texts[:pairs], "document": texts[pairs:]})
    ranking = losses.SparseMultipleNegativesRankingLoss(model)
    options = {f"{side}_regularizer_weight": weight for side, weight in WEIGHTS.items()}
    loss: Any = losses.SpladeLoss(model, ranking, **options)
    if variant != VARIANTS[0]:
        is_csr = variant == VARIANTS[2]
        ours.use_splade_head(model, layout=torch.sparse_csr if is_csr else torch.strided)
    if variant == VARIANTS[2]:
        dots = sl.InfoNCELoss(temperature=1.0, similarity="dot")
        flops = {f"{side}_flops": (x, terms.flops(side)) for side, x in WEIGHTS.items()}
        objective = sl.SpladeObjective({"info_nce": (1.0, terms.info_nce(dots)), **flops})
        loss = ours.SentenceTransformersLoss(model, objective)
    arguments = SparseEncoderTrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        bf16=dtype == "bfloat16",
        per_device_train_batch_size=pairs,
        learning_rate=0.0,
        report_to=[],
    )
    trainer = SparseEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    (batch,) = trainer.get_train_dataloader()
    trainer.current_gradient_accumulation_steps = 1  # which `train` sets
    optimizer = trainer.create_optimizer()
    trainer.accelerator.prepare_model(model).train()  # autocast

    def step(_: int) -> list[Tensor | None]:
        optimizer.zero_grad(set_to_none=True)
        trainer.training_step(model, batch)
        optimizer.step()
        return [x.grad for x in model.parameters()]

    step(0)  # creates the optimiser's state
    return step


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the CSV, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.trainer_step")
    add = parser.add_argument
    add("--models", nargs="+", required=True, help="folders of encoders")
    add("--batches", nargs="+", default=["16x128", "64x64"], help="pairs x tokens")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--budget", type=float, default=20.0, help="seconds for each model, batch and dtype")
    add("--output", type=Path, default=RESULTS / "trainer-step.csv")
    args = parser.parse_args(arguments)
    device, rows = torch.device("cpu"), list[dict[str, Any]]()
    common = circumstances(device, "trainer_step")
    for folder in args.models:
        name = next(x for x in reversed(Path(folder).parts) if x not in ("model", "0_Transformer"))
        with tempfile.TemporaryDirectory() as path:
            from transformers import AutoTokenizer

            texts = random_texts(AutoTokenizer.from_pretrained(folder), 64, 64)
            language_model = masked_lm(folder, texts, path)
            for batch, dtype in itertools.product(args.batches, args.dtypes):
                pairs, length = map(int, batch.split("x"))
                sizes = pairs, length, dtype
                runs = {x: stepper(language_model, x, *sizes) for x in VARIANTS}
                peaks = {
                    variant: memory.peak_bytes(functools.partial(run, 0), device)
                    for variant, run in runs.items()
                }
                seconds = timing.interleave(runs, device, budget=args.budget, max_rounds=15)
                for variant, own in seconds.items():
                    about = {"model": name, "batch": batch, "dtype": dtype, "variant": variant}
                    times = {"rounds": len(own), **timing.columns("seconds", own)}
                    rows.append(common | about | times | {"peak_bytes": peaks[variant][0]})
                write(args.output, rows)
    shown = ("model", "batch", "dtype", "variant", "seconds", "peak_bytes")
    print(markdown(shown, [[row[x] for x in shown] for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

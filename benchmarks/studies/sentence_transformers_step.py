"""``python -m benchmarks.studies.sentence_transformers_step``: a step of SparseEncoderTrainer.

The same tiny BERT, loss (``SpladeLoss`` of ``SparseMultipleNegativesRankingLoss``), optimiser and
batch, with sentence-transformers' own pooling and with ``use_splade_head``: forward pass, backward
pass and AdamW, as the trainer takes them. Times are interleaved in one run. Memory is what the step
allocates beside weights and moments, gradients included.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.run import memory, timing
from benchmarks.run.table import RESULTS, circumstances, markdown, write

VOCABULARIES = (30_522, 250_002)
TEXTS, LENGTH, ACTIVE = 16, 256, 0.01
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VARIANTS = ("sentence-transformers", "use_splade_head")


def trainer_of(variant: str, vocab_size: int, folder: str, texts: int, length: int) -> Any:
    """Return a trainer of a tiny model with random weights, the same for every variant."""
    from datasets import Dataset
    from sentence_transformers import (
        SparseEncoder,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )
    from sentence_transformers.sparse_encoder import losses
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    from sparse_losses.integrations.sentence_transformers import use_splade_head

    torch.manual_seed(0)
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, vocab_size)}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(folder)
    config = BertConfig(
        vocab_size=vocab_size, max_position_embeddings=length, **SIZES, **NO_DROPOUT
    )
    BertForMaskedLM(config).save_pretrained(folder)
    transformer = Transformer(folder, transformer_task="fill-mask", max_seq_length=length)
    model = SparseEncoder(modules=[transformer, SpladePooling("max")], device="cpu")
    ids = torch.randint(2, vocab_size, (texts, length)).tolist()
    columns = [" ".join(f"w{i}" for i in row) for row in ids]
    half = texts // 2
    data = Dataset.from_dict({"anchor": columns[:half], "positive": columns[half:]})
    ranking = losses.SparseMultipleNegativesRankingLoss(model)
    loss = losses.SpladeLoss(
        model, ranking, document_regularizer_weight=1e-5, query_regularizer_weight=1e-5
    )
    batch = model.tokenize(columns)
    with torch.no_grad():  # the share of active entries of a trained model
        vectors = model.eval()(batch)["sentence_embedding"].expm1()
        projection = model[0].auto_model.get_output_embeddings()
        projection.bias -= vectors.flatten()[::101].quantile(1 - ACTIVE)
    if variant == "use_splade_head":
        use_splade_head(model)
    settings = SparseEncoderTrainingArguments(
        output_dir=folder, per_device_train_batch_size=half, report_to="none", use_cpu=True
    )
    return SparseEncoderTrainer(model=model, args=settings, train_dataset=data, loss=loss)


def step_of(trainer: Any) -> Callable[[int], Sequence[Tensor | None]]:
    """Return a training step; it returns the gradients."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = 1  # `train` sets it
    optimizer = trainer.create_optimizer()
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # so that the share of active entries stays

    def step(number: int) -> Sequence[Tensor | None]:
        optimizer.zero_grad(set_to_none=True)
        trainer.training_step(trainer.model, dict(batch))
        optimizer.step()
        return [p.grad for p in parameters]

    return step


def measure(vocab_size: int, budget: float, texts: int, length: int) -> list[dict[str, Any]]:
    """Return one row per variant."""
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            name: step_of(trainer_of(name, vocab_size, f"{folder}/{i}", texts, length))
            for i, name in enumerate(VARIANTS)
        }
        peaks, sizes = {}, {}
        for name, step in steps.items():
            step(0)  # the optimiser makes its moments
            step(0)
            peaks[name], _ = memory.peak_bytes(lambda step=step: step(0), torch.device("cpu"))  # type: ignore[misc]
            sizes[name] = [float(g.norm()) for g in step(0) if g is not None]
        seconds = timing.interleave(steps, torch.device("cpu"), budget=budget)
    theirs, ours = (torch.tensor(sizes[name]) for name in VARIANTS)
    difference = ((theirs - ours).norm() / theirs.norm()).item()
    return [
        {
            "vocabulary": vocab_size,
            "texts": texts,
            "length": length,
            "variant": name,
            "rounds": len(seconds[name]),
            **timing.columns("seconds", seconds[name]),
            "peak_mib": round(peaks[name] / 2**20, 1),
            "gradient_difference": difference,
        }
        for name in VARIANTS
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the CSV and print the table."""
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.sentence_transformers_step"
    )
    options.add_argument("--output", type=Path, default=RESULTS / "sentence-transformers-step.csv")
    options.add_argument("--budget", type=float, default=90.0, help="seconds per vocabulary")
    options.add_argument("--tiny", action="store_true", help="a smoke test")
    args = options.parse_args(arguments)
    sizes = ((500,), 4, 12) if args.tiny else (VOCABULARIES, TEXTS, LENGTH)
    common = circumstances(torch.device("cpu"), "sentence_transformers_step")
    rows = [row for v in sizes[0] for row in measure(v, args.budget, sizes[1], sizes[2])]
    write(args.output, [common | row for row in rows])
    names = ("vocabulary", "variant", "seconds", "peak_mib", "gradient_difference")
    print(markdown(names, [[row[name] for name in names] for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train a SPLADE encoder on several devices, in plain PyTorch; copy it and change what you like.

    torchrun --nproc-per-node 2 examples/train_ddp.py --epochs 1
    torchrun --nproc-per-node 2 examples/train_ddp.py --data pairs.jsonl --model NAME_OR_FOLDER

pairs.jsonl has lines such as {"query": "...", "document": "..."}. Without --data it reads the
docstrings of Python's own library, without --model it makes a small model on the spot. It prints
one line of JSON a step.
"""

import argparse
import json
import os
import sysconfig
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from sparse_losses import (
    InfoNCELoss,
    ObjectiveOutput,
    SparsityController,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    Texts,
    TrainingSchedule,
    Warmup,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a JSONL file of queries and documents")
    parser.add_argument("--model", help="a masked language model: its name, or a folder")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="pairs, each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="batches an optimiser step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--target-active", type=float, default=64)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="for the checkpoint")
    parser.add_argument("--save-every", type=int, default=50, help="optimiser steps")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for a rank")
    return parser.parse_args(arguments)


def read_pairs(path: Path | None) -> list[tuple[str, str]]:
    if path is not None:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(line["query"], line["document"]) for line in lines]
    from sparse_losses.demo.docstrings import parse_folder

    texts = [text for _, text in parse_folder(Path(sysconfig.get_path("stdlib")), "")]
    pairs = [text.split("\n\n", 1) for text in texts if "\n\n" in text]
    return [(summary, body[:500]) for summary, body in pairs]


def small_encoder(texts: list[str]) -> SpladeEncoder:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    words = Counter(word for text in texts for word in text.lower().split())
    vocabulary = ["[PAD]", "[UNK]", *(word for word, _ in words.most_common(2000))]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, "[UNK]"))
    tokens.normalizer = normalizers.Lowercase()
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]"
    )
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(vocabulary), intermediate_size=256, **sizes)
    return SpladeEncoder(BertForMaskedLM(config), tokenizer, max_length=64)


class Training(torch.nn.Module):
    """Texts in, loss out: one module, so that one wrapper sees every parameter."""

    def __init__(self, encoder: SpladeEncoder, objective: SpladeObjective) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective

    def forward(self, queries: dict, documents: dict) -> ObjectiveOutput:
        sides = [Texts(self.encoder(**side), **side) for side in (queries, documents)]
        return self.objective(SpladeBatch(*sides))


def random_state() -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpu]


def set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def save(path: Path, parts: dict, epoch: int, batches: int) -> None:
    """Called by every rank, after an optimiser step: only then all ranks know the same."""
    states: list = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_state())
    if dist.get_rank() == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        torch.save(state | {"random": states, "epoch": epoch, "batches": batches}, new)
        os.replace(new, path)  # the whole of it, or the one before


def train(args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()  # then nccl, which nobody has run this script with yet
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # A rank that waits so long for another gives up with an error, and torchrun ends all of them.
    wait = timedelta(seconds=args.timeout)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=wait)
    rank, checkpoint = dist.get_rank(), args.folder / "checkpoint.pt"

    torch.manual_seed(0)
    pairs = read_pairs(args.data)
    if args.model:
        encoder = SpladeEncoder.from_pretrained(args.model)
    else:
        encoder = small_encoder([text for pair in pairs for text in pair])
    objective = SpladeObjective(
        {"info_nce": 1.0, "query_flops": 1e-3, "document_flops": 1e-3},
        info_nce=InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.05))),
        gather=True,  # candidates and means of all ranks
    )
    training = Training(encoder, objective).to(device).train()
    if args.compile:
        training.compile()
    model = DistributedDataParallel(training, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    schedule = TrainingSchedule(objective, warmups={"query_flops": Warmup(100, "quadratic")})
    schedule.attach(optimizer)
    controller = SparsityController(objective, target_active=args.target_active)
    controller.attach(optimizer)
    parts = {"training": training, "optimizer": optimizer, "scaler": scaler}
    parts |= {"schedule": schedule, "controller": controller}

    first_epoch = done = 0  # `done`: batches of that epoch
    torch.manual_seed(rank)  # dropout differs between the ranks
    if args.resume:
        state = torch.load(checkpoint, map_location="cpu")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first_epoch, done = state["epoch"], state["batches"]
        set_random_state(state["random"][rank])

    sampler = DistributedSampler(pairs, drop_last=True)  # as many batches on every rank
    a_step = args.batch_size * args.accumulate
    autocast = torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32")
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        order = order[done * args.batch_size : len(order) // a_step * a_step]
        # With its own generator: the loader draws from it, and a resumed run has one loader more.
        loader = DataLoader(
            pairs,
            args.batch_size,
            sampler=order,
            collate_fn=lambda some: [encoder.tokenize(texts) for texts in zip(*some, strict=True)],
            generator=torch.Generator(),
        )
        total = 0.0
        for batches, (queries, documents) in enumerate(loader, done + 1):
            is_step = batches % args.accumulate == 0
            with nullcontext() if is_step else model.no_sync():
                with autocast:
                    loss, terms = model(queries, documents)
                scaler.scale(loss / args.accumulate).backward()
            total += loss.item() / args.accumulate
            if not is_step:
                continue
            before = schedule.steps_taken
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step = schedule.steps_taken
            if rank == 0:
                line = {"step": step, "skipped": step == before, "total": total}
                line |= {name: term.item() for name, term in terms.items()}
                line |= {"temperature": float(objective.info_nce.temperature)}
                print(json.dumps(line | {"sparsity": str(controller)}), flush=True)
            total = 0.0
            if step > before and step % args.save_every == 0:
                save(checkpoint, parts, epoch, batches)
        done = 0
    save(checkpoint, parts, args.epochs, 0)
    if rank == 0:
        encoder.save_pretrained(args.folder / "encoder")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    try:
        train(options(arguments))
    except RuntimeError as error:
        error.add_note("If another rank ended or did not answer: go on with --resume.")
        raise


if __name__ == "__main__":
    main()

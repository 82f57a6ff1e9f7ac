"""Train a SPLADE encoder on several devices, in plain PyTorch; copy it and change what you like.

    torchrun --nproc-per-node 2 examples/train_ddp.py --epochs 1
    torchrun --nproc-per-node 2 examples/train_ddp.py --data pairs.jsonl --model NAME_OR_FOLDER

pairs.jsonl has lines such as {"query": "...", "document": "..."}. Without --data it reads the
docstrings of Python's own library, without --model it makes a small model on the spot. It prints
one line of JSON a step.
"""

import argparse
import ast
import json
import os
import sys
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
    lines = 'a JSONL file with lines {"query": "...", "document": "..."}'
    parser.add_argument("--data", type=Path, help=lines)
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
        pairs = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    pair = json.loads(line) if line.strip() else None
                    pairs += [(pair["query"], pair["document"])] if pair else []
                except (ValueError, LookupError, TypeError) as error:
                    raise SystemExit(
                        f'expected {{"query": "...", "document": "..."}} in line {number} of '
                        f"{path}, got {line.strip()[:60]!r} ({error})"
                    ) from error
        return pairs
    trees = [ast.parse(p.read_bytes()) for p in Path(sysconfig.get_path("stdlib")).glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    kinds = ast.FunctionDef, ast.ClassDef
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
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


def settings(args: argparse.Namespace, pairs: list) -> dict[str, int]:
    """What a resumed run must have alike: with it the same texts come in the same steps."""
    ranks = dist.get_world_size()
    return {
        "ranks": ranks,
        "--batch-size": args.batch_size,
        "--accumulate": args.accumulate,
        "pairs": len(pairs),
    }


def load(path: Path, parts: dict, expected: dict[str, int]) -> tuple[int, int]:
    """The epoch, and the batches of it that were done."""
    if not path.exists():
        raise SystemExit(f"expected a checkpoint to --resume from, {path} is not there")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["settings"] != expected:
        raise SystemExit(f"expected {state['settings']} as in {path}, got {expected}")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    set_random_state(state["random"][dist.get_rank()])
    return state["epoch"], state["batches"]


def save(path: Path, parts: dict, known: dict, epoch: int, batches: int) -> None:
    """Called by every rank, after an optimiser step: only then all ranks know the same."""
    states: list = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_state())
    if dist.get_rank() == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"settings": known, "random": states, "epoch": epoch, "batches": batches}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, path)  # the whole of it, or the one before


def train(args: argparse.Namespace) -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun --nproc-per-node 2, or 1 for one process")
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
    temperature = torch.nn.Parameter(torch.tensor(0.05))
    objective = SpladeObjective(
        {"info_nce": 1.0, "query_flops": 1e-3, "document_flops": 1e-3},
        info_nce=InfoNCELoss(temperature=temperature),
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

    sampler = DistributedSampler(pairs, drop_last=True)  # as many batches on every rank
    a_step = args.batch_size * args.accumulate
    if len(sampler) < a_step:
        raise SystemExit(f"expected {a_step} pairs a rank for one step, got {len(sampler)}")

    first_epoch = done = 0  # `done`: batches of that epoch
    torch.manual_seed(rank)  # dropout differs between the ranks
    known = settings(args, pairs)
    if args.resume:
        first_epoch, done = load(checkpoint, parts, known)
        if first_epoch >= args.epochs and rank == 0:
            print(f"all {args.epochs} epochs are done: more with --epochs", file=sys.stderr)

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
        line: dict = {}  # means over the batches of a step
        for batches, (queries, documents) in enumerate(loader, done + 1):
            is_step = batches % args.accumulate == 0
            with nullcontext() if is_step else model.no_sync():
                with autocast:
                    loss, terms = model(queries, documents)
                scaler.scale(loss / args.accumulate).backward()
            for name, value in {"total": loss, **terms}.items():
                line[name] = line.get(name, 0.0) + value.item() / args.accumulate
            if not is_step:
                continue
            before = schedule.steps_taken
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with torch.no_grad():
                temperature.clamp_(min=0.01)  # an optimiser knows no bounds
            step = schedule.steps_taken
            if rank == 0:
                line |= {"temperature": temperature.item(), "sparsity": str(controller)}
                print(json.dumps({"step": step, "skipped": step == before, **line}), flush=True)
            line = {}
            if step > before and step % args.save_every == 0:
                save(checkpoint, parts, known, epoch, batches)
        done = 0
    save(checkpoint, parts, known, max(args.epochs, first_epoch), 0)
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

"""What the trainers' tests train: a tiny encoder, texts, a plain loop to compare with."""

import functools

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

import sparse_losses as sl
from sparse_losses.objective import terms
from tests.distributed.ranks import example
from tests.representation.tiny_models import language_model, word_level

RATE, VOCAB_SIZE = 0.03, 120
TEXT = "서울 맛집 추천 a learned sparse retriever vectors over the vocabulary one weight"
WORDS = TEXT.split()


def tokenizer():
    """A fixed vocabulary: one that is trained on the spot differs by process."""
    return word_level(WORDS, "pad unk cls sep")


def encoder(dropout=0.0, **options):
    """The same one whenever it is called."""
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return sl.SpladeEncoder(language_model("bert", VOCAB_SIZE, **dropouts), tokenizer(), **options)


def rows(count=16):
    """Pairs that share words, and a mined negative."""
    numbers = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        a, b, c, d = (WORDS[int(k)] for k in torch.randint(0, len(WORDS), (4,), generator=numbers))
        rows.append({"anchor": f"{a} {b}", "positive": f"{a} {b} {c}", "negative": f"{c} {d} {d}"})
    return rows


def objective(gather=False):
    loss = sl.InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(1.0)))
    flops = {f"{side}_flops": (0.01, terms.flops(side)) for side in ("document", "query")}
    return sl.SpladeObjective({"info_nce": (1.0, terms.info_nce(loss)), **flops}, gather=gather)


def temperature(objective):
    return objective.terms["info_nce"].loss.temperature


def row_by_row():
    """An objective whose value over a batch is the mean over its rows."""
    others = {"query_min_activation": (0.1, terms.min_activation("query"))}
    return sl.SpladeObjective({"triplet_margin": (1.0, terms.triplet_margin()), **others})


def collate(rows):
    """The columns of texts, tokenized."""
    options = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
    words = tokenizer()
    return {name: dict(words([row[name] for row in rows], **options)) for name in rows[0]}


def loader(rows, batch_size, collate_fn=collate, **options):
    return torch.utils.data.DataLoader(rows, batch_size, collate_fn=collate_fn, **options)


def arguments(folder, kind=TrainingArguments, **settings):
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    sizes = {"learning_rate": RATE, "per_device_train_batch_size": 4, "max_steps": 4}
    return kind(str(folder), **(plain | quiet | sizes | {"logging_steps": 1} | settings))


def in_order(dataset, batch_size, drop_last, **_):
    """A ``batch_sampler`` of sentence-transformers."""
    from sentence_transformers.base.sampler import DefaultBatchSampler

    return DefaultBatchSampler(SequentialSampler(dataset), batch_size, drop_last)


class InOrder(example("train_with_transformers").ObjectiveTrainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


def forget_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# What two processes do as one with the whole batch, and in how many batches a step.
SHARED = {
    "accumulated": (row_by_row, 2),
    "gathered": (functools.partial(objective, gather=True), 1),
}


def schedule_of(objective):
    """A weight that warms up."""
    name = [*objective.weights][-1]
    return sl.TrainingSchedule(objective, warmups={name: sl.Warmup(5, "quadratic")})


def plain_loop(encoder, objective, batches, *, bf16=False):
    """PyTorch and nothing else: one step a batch; the total of each."""
    parameters = [*encoder.parameters(), *objective.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    schedule_of(objective).attach(optimizer)
    encoder.train()
    totals = []
    for inputs in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            total, _ = objective(sl.SpladeBatch.from_columns(encoder, inputs))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        totals.append(total.item())
    return totals


def weights(*modules):
    return [p.detach().clone() for module in modules for p in module.parameters()]


def assert_trained_alike(trained, objective, other, reference, tolerance):
    """Encoders and objectives have the same weights, and those of the encoder have moved."""
    mine, theirs = weights(trained, objective), weights(other, reference)
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    moved = zip(weights(trained), weights(encoder()), strict=True)
    assert max((now - was).abs().max().item() for now, was in moved) > 20 * tolerance

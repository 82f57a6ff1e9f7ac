"""Objectives by the names of their terms, and random batches."""

import functools
import inspect

import torch

from sparse_losses import LanguagePenaltyLoss, SpladeBatch, SpladeObjective, Texts
from sparse_losses.objective import terms

B, V, S, N = 5, 40, 6, 3
ON_SCORES = ("distillation", "context_distillation", "margin_mse", "ranknet")
ON_SIDES = (
    "flops",
    "min_activation",
    "language_penalty",
    "self_reconstruction",
    "positive_activation",
)
BUILDERS = {name: getattr(terms, name) for name in ("info_nce", "triplet_margin", *ON_SCORES)}
BUILDERS |= {
    f"{side}_{name}": functools.partial(getattr(terms, name), side)
    for side in ("query", "document")
    for name in ON_SIDES
}


def objective(weights, losses=None, *, vocab=V, gather=False, **settings):
    """Build terms; ``losses`` by the name of a term or of its loss, settings where known."""
    penalty = LanguagePenaltyLoss(torch.arange(vocab, dtype=torch.float64) / vocab)
    losses = {"language_penalty": penalty, **(losses or {})}
    made = {}
    for name, weight in weights.items():
        build = BUILDERS[name]
        kind = name.removeprefix("query_").removeprefix("document_")
        known = inspect.signature(build).parameters
        options = {key: value for key, value in settings.items() if key in known}
        if (loss := losses.get(name, losses.get(kind))) is not None:
            options["loss"] = loss
        made[name] = weight, build(**options)
    return SpladeObjective(made, gather=gather)


def texts(*shape, logits=False, grad=False):
    x = (torch.rand(*shape, V, dtype=torch.float64) - 0.4).relu()
    if grad:
        x.requires_grad_()
    ids = torch.randint(0, V, (*shape, S))
    mask = torch.ones(*shape, S, dtype=torch.int64)
    mask[..., -1] = 0
    return Texts(x, ids, mask, torch.randn(*shape, V, dtype=torch.float64) if logits else None)


def batch(negative=None, **options):
    """Make a batch with negatives that are ``"shared"``, each anchor's ``"one"`` or ``"own"``."""
    shape = {None: None, "shared": (N,), "one": (B,), "own": (B, N)}[negative]
    columns = B + (0 if shape is None else shape[-1])
    teacher = torch.randn(B, columns, dtype=torch.float64)
    teacher[1, -1] = -torch.inf  # no candidate
    return SpladeBatch(
        texts(B, **options),
        texts(B, **options),
        None if shape is None else texts(*shape, **options),
        positive_ids=torch.tensor([0, 1, 2, 3, 1]),
        teacher_scores=teacher,
        teacher_anchor_scores=torch.randn(B, B, dtype=torch.float64),
    )

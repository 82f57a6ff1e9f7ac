"""Objectives by the names of their terms, random batches, and the terms by their losses alone."""

import functools
import inspect

import torch

import sparse_losses as sl
from sparse_losses import LanguagePenaltyLoss, SpladeBatch, SpladeObjective, Texts
from sparse_losses.objective import terms

B, V, S, N = 5, 40, 6, 3


def objective(weights, losses=None, *, gather=False, **settings):
    """Build terms; ``losses`` by the name of a term or of its loss, settings where known."""
    penalty = LanguagePenaltyLoss(torch.arange(V, dtype=torch.float64) / V)
    losses = {"language_penalty": penalty, **(losses or {})}
    made = {}
    for name, weight in weights.items():
        side, _, kind = name.partition("_")
        kind = kind if side in ("query", "document") else name
        build = getattr(terms, kind)
        signed = terms.distillation if kind == "context_distillation" else build
        known = inspect.signature(signed).parameters
        options = {key: value for key, value in settings.items() if key in known}
        options |= {"side": side} if "side" in known else {}
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


def unit(x):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def cosines(a, b):
    """``[A, B]``, or ``[A, N]`` with each row's own ``[A, N, V]``."""
    return unit(a) @ unit(b).T if b.ndim == 2 else (unit(a)[:, None] * unit(b)).sum(-1)


def vectors(b):
    return [None if side is None else side.activations for side in b[:3]]


def scores(b):
    x, *keys = (x for x in vectors(b) if x is not None)
    return torch.cat([cosines(x, key) for key in keys], 1)


def margins(x, b):
    own = x[:, B:] if b.negative.activations.ndim == 3 else x[:, B:].diagonal()[:, None]
    return x[:, :B].diagonal(), own


def documents(b):
    if b.negative is None:
        return b.positive
    pairs = zip(b.positive[:3], b.negative[:3], strict=True)
    return Texts(*(torch.cat([x, y.flatten(0, -2)]) for x, y in pairs))


# By term: its loss, and how this is called alone with a batch.
CALLS = {
    "info_nce": (sl.InfoNCELoss, lambda f, b: f(*vectors(b), positive_ids=b.positive_ids)),
    "triplet_margin": (sl.TripletMarginLoss, lambda f, b: f(*vectors(b))),
    "distillation": (sl.DistillationLoss, lambda f, b: f(scores(b), b.teacher_scores)),
    "context_distillation": (
        sl.DistillationLoss,
        lambda f, b: f(cosines(b.anchor[0], b.anchor[0]), b.teacher_anchor_scores),
    ),
    "margin_mse": (
        sl.MarginMSELoss,
        lambda f, b: f(*margins(scores(b), b), *margins(b.teacher_scores, b)),
    ),
    "ranknet": (sl.RankNetLoss, lambda f, b: f(scores(b), b.teacher_scores)),
    "query_positive_activation": (
        sl.PositiveActivationLoss,
        lambda f, b: f(b.anchor[0], *b.positive[1:3]),
    ),
    "document_positive_activation": (
        sl.PositiveActivationLoss,
        lambda f, b: f(b.positive[0], *b.anchor[1:3]),
    ),
}
for side, one in (("query", lambda b: b.anchor), ("document", documents)):
    CALLS |= {
        f"{side}_flops": (sl.FlopsLoss, lambda f, b, one=one: f(one(b)[0])),
        f"{side}_min_activation": (
            sl.MinActivationLoss,
            lambda f, b, one=one: f(one(b)[0], one(b).attention_mask.sum(-1)),
        ),
        f"{side}_language_penalty": (
            functools.partial(sl.LanguagePenaltyLoss, torch.arange(V, dtype=torch.float64) / V),
            lambda f, b, one=one: f(one(b)[0]),
        ),
        f"{side}_self_reconstruction": (
            sl.SelfReconstructionLoss,
            lambda f, b, one=one: f(*one(b)[:3]),
        ),
    }


def alone(term, b, **options):
    """Return the value of the term's loss, by the loss alone."""
    make, call = CALLS[term]
    return call(make(**options), b)


def terms_of(b):
    """Return the terms that a batch has the inputs of."""
    has_own = b.negative is not None and b.negative.activations.shape[:-1] != (N,)
    return [name for name in CALLS if has_own or name not in ("triplet_margin", "margin_mse")]

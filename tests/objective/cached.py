"""What `cached_backward` is held against, and what it is tried with."""

import copy
from contextlib import nullcontext

import torch
from torch import nn

from sparse_losses import LanguagePenaltyLoss, ObjectiveOutput, SpladeObjective, Texts

V, H, S = 24, 8, 5


class Encoder(nn.Module):
    """Token ids to activations, or to all that `Texts` holds."""

    def __init__(self, dropout=0.0, texts=False):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(V, H), nn.Linear(H, V)
        self.dropout, self.texts = nn.Dropout(dropout), texts

    def forward(self, input_ids, attention_mask=None):
        hidden = self.dropout(self.embedding(input_ids).tanh())
        logits = self.layer(hidden).max(1).values
        activations = logits.relu().log1p()
        return Texts(activations, input_ids, attention_mask, logits) if self.texts else activations


def tokens(rows, width=S):
    ids = torch.randint(3, V, (rows, width))
    mask = (torch.arange(width) < torch.randint(1, width + 1, (rows, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def gradients(*modules):
    return [p.grad for module in modules for p in module.parameters()]


def plain(encoder, columns, loss, size=10**9, context=nullcontext):
    """What `cached_backward` replaces: mini-batches of tensors, all their graphs at once."""
    encoders = encoder if isinstance(encoder, list) else [encoder] * len(columns)
    with context():
        representations = []
        for encode, column in zip(encoders, columns, strict=True):
            if isinstance(column, torch.Tensor):
                parts = [encode(x) for x in column.split(size)]
            else:
                split = [x.split(size) for x in column.values()]
                parts = [encode(*xs) for xs in zip(*split, strict=True)]
            joined = parts[0]
            for part in parts[1:]:
                is_texts = isinstance(joined, Texts)
                joined = joined.join(part) if is_texts else torch.cat([joined, part])
            representations.append(joined)
        output = loss(*representations)
    (output.total if isinstance(output, ObjectiveOutput) else output).backward()
    return output


def close(ours, theirs, tolerance=1e-9):
    """Every gradient, by its norm; and there are some."""
    assert any(x is not None and x.norm() > 0 for x in theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert mine.dtype == other.dtype
            assert (mine - other).norm() <= tolerance * other.norm().clamp(min=1e-3)


def twins(*modules):
    return modules, copy.deepcopy(modules)


OBJECTIVE = {
    "info_nce": 1.0,
    "triplet_margin": 0.5,
    "query_flops": 0.1,
    "document_flops": 0.2,
    "query_min_activation": 0.3,
    "document_min_activation": 0.3,
    "query_language_penalty": 0.1,
    "document_language_penalty": 0.1,
    "query_self_reconstruction": 0.4,
    "document_self_reconstruction": 0.4,
    "query_positive_activation": 0.2,
    "document_positive_activation": 0.2,
}


def full_objective(penalty=None, **settings):
    penalty = torch.rand(V) if penalty is None else penalty
    return SpladeObjective(
        OBJECTIVE,
        language_penalty=LanguagePenaltyLoss(penalty),
        special_token_ids=[0, 1, 2],
        **settings,
    )

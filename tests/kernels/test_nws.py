"""NWS in Triton: against its formula, against PyTorch, and at its edges."""

import torch

from sparse_losses.functional import nws_loss

OPTIONS = (
    {},
    {"decoupled": False},
    {"eps": 0.0},
    {"eps": 0.0, "decoupled": False},
    {"eps": 0.3, "alpha": 0.5, "beta": 2.0},
    {"eps": 2.0, "alpha": 3.0, "beta": 0.5, "decoupled": False, "reduction": "sum"},
    {"alpha": 0.0, "beta": 0.0},
)


def problem(dtype, batch=7, keys=5, rows=9, labels=6, width=10, density=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def features(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    def hot(rows):
        return torch.rand(rows, labels, generator=generator) < density

    half = torch.rand(labels, labels, generator=generator)
    return {
        "query": features(batch, width),
        "query_labels": hot(batch),
        "prototype": features(labels, width),
        "label_similarity": (half + half.T) / 2,
        "key": features(keys, width),
        "key_labels": hot(keys).float(),
        "queue": features(rows, width),
        "queue_labels": hot(rows).long(),
        "queue_mask": torch.rand(rows, generator=generator) < 0.7,
        "temperature": torch.tensor(0.3),
    }


def follow(inputs, impl="triton", **options):
    """The value and the gradients by query, prototype and temperature."""
    names = ("query", "prototype", "temperature")
    leaves = [inputs[name].clone().requires_grad_() for name in names]
    value = nws_loss(**{**inputs, **dict(zip(names, leaves, strict=True))}, impl=impl, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def sample(dtype):
    """A step at the width that encoders have, and one of a query alone."""
    inputs = problem(dtype, batch=130, keys=130, rows=257, labels=512, width=256, density=0.01)
    follow(inputs)
    follow(inputs, decoupled=False)
    follow(problem(dtype, labels=768, width=768))

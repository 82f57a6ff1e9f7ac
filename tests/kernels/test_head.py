import torch
from sparse_losses.functional import splade_head


def sample(dtype):
    hidden = torch.randn(4, 40, 768).to(dtype).requires_grad_()
    weight = (torch.randn(600, 768) * 0.02).to(dtype).requires_grad_()
    bias = torch.zeros(600, dtype=dtype, requires_grad=True)
    gate = torch.rand(4, 600).to(dtype).requires_grad_()
    mask = torch.ones(4, 40)
    mask[1:, 30:] = 0
    for options in ({}, {"gate": gate, "return_logits": True}):
        out = splade_head(hidden, weight, bias, mask, impl="triton", **options)
        out = out if isinstance(out, tuple) else (out,)
        sum(o.sum() for o in out).backward()

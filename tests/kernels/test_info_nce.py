"""InfoNCE by its kernels: the PyTorch path's numbers, from half the memory traffic."""

import torch

from sparse_losses.functional import info_nce_loss


def sample(dtype):
    """Every kernel at a real width, few rows: what `tools.compile_kernels` compiles."""
    ids = torch.arange(300)
    for options in (
        {},
        {"symmetric": True},
        {"similarity": "dot", "positive_ids": ids},
        {"symmetric": True, "decoupled": True},
        {"symmetric": True, "positive_ids": ids},
    ):
        leaves = [torch.randn(300, 768).to(dtype).requires_grad_() for _ in range(3)]
        if "symmetric" in options:
            leaves.pop()
        temperature = torch.tensor(0.05, requires_grad=True)
        loss = info_nce_loss(*leaves, temperature=temperature, impl="triton", **options)
        loss.backward()

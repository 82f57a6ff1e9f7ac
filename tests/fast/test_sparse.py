"""CSR tensors of the package, for users."""

import subprocess
import sys


def test_pytorchs_notice_of_csr_is_not_for_users():
    """PyTorch shows the notice for the first CSR tensor of a process."""
    code = """
import torch, warnings
from sparse_losses.fast.sparse import csr
with warnings.catch_warnings():
    warnings.simplefilter("error")
    csr(torch.tensor([0]), torch.tensor([0]), torch.ones(1), (1, 1))
"""
    subprocess.run([sys.executable, "-c", code], check=True)

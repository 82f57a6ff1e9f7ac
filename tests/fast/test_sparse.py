"""CSR tensors of the package, for users."""

import subprocess
import sys

MAKE = "csr(torch.tensor([0]), torch.tensor([0]), torch.ones(1), (1, 1))"


def test_pytorchs_notice_of_csr_is_not_for_users():
    """PyTorch shows the notice for the first CSR tensor of a process."""
    code = f"import torch; from sparse_losses.fast.sparse import csr; {MAKE}"
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)

"""Uses the built wheel away from the sources: what a user of `pip install` gets."""

import importlib.resources
import subprocess
import sys
from pathlib import Path

import torch

import sparse_losses
from sparse_losses.functional import info_nce_loss, language_token_ids

where = Path(sparse_losses.__file__).resolve().parent
if "site" not in where.parts:
    sys.exit(f"the wheel was not used: sparse_losses came from {where}")
if not importlib.resources.files("sparse_losses").joinpath("py.typed").is_file():
    sys.exit("py.typed is missing from the wheel")
value = info_nce_loss(torch.eye(3), torch.eye(3), temperature=0.5)
torch.testing.assert_close(
    value, torch.tensor(2.0).mul(-2.0).add(4.0).sub(2.0).exp().mul(2).log1p()
)
language_token_ids(["a", "가", "я"])  # reads the Unicode table that travels with the package
help_text = subprocess.run(
    [sys.executable, "-m", "sparse_losses.demo", "--help"],
    check=True,
    capture_output=True,
    text=True,
).stdout
if "--query" not in help_text:
    sys.exit(f"the demo's help text looks wrong:\n{help_text}")
print(f"sparse-losses {sparse_losses.__version__} works from its wheel")

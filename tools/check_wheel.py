"""Check the built wheel and sdist, and use the package as installed from the wheel.

    cd FOLDER && PYTHONPATH=site python tools/check_wheel.py

FOLDER holds the wheel, the sdist, and the installed wheel in `site`.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import torch

import sparse_losses
from sparse_losses.functional import info_nce_loss, language_token_ids

ROOT = Path(__file__).resolve().parents[1]
DATA = {"py.typed", "unicode_scripts.json", "unicode_scripts.license.txt"}
NOT_SHIPPED = {".ci", ".gitignore"}


def wrong_in_wheel(names: list[str]) -> list[str]:
    """Return messages about files that do not belong in the wheel or are missing."""
    files = [name for name in names if ".dist-info/" not in name]
    ours = re.compile(rf"sparse_losses/.*(?:\.py|{'|'.join(map(re.escape, DATA))})")
    wrong = [name for name in files if not ours.fullmatch(name)]
    missing = DATA - {name.rpartition("/")[2] for name in files}
    if not any(re.search(r"\.dist-info/sboms/[^/]+\.cdx\.json$", name) for name in names):
        missing |= {"the bill of materials"}
    return [*(f"{name} is in the wheel" for name in wrong), *(f"{n} is missing" for n in missing)]


def missing_in_sdist(names: list[str], tracked: list[str]) -> list[str]:
    """Return the tracked files that the sdist lacks; the tests need all of them."""
    there = {name.partition("/")[2] for name in names}
    return [n for n in tracked if n not in there and n.partition("/")[0] not in NOT_SHIPPED]


def main() -> None:
    """Check the files, then use the package."""
    where = Path(sparse_losses.__file__).resolve().parent
    if "site" not in where.parts:
        sys.exit(f"expected sparse_losses in `site`, got it from {where}")
    (wheel,), (sdist,) = Path().glob("*.whl"), Path().glob("*.tar.gz")
    if wrong := wrong_in_wheel(zipfile.ZipFile(wheel).namelist()):
        sys.exit("\n".join(wrong))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    with tarfile.open(sdist) as archive:
        if lacks := missing_in_sdist(archive.getnames(), listed.stdout.splitlines()):
            sys.exit(f"the sdist lacks {', '.join(lacks)}")
    value = info_nce_loss(torch.eye(3), torch.eye(3), temperature=0.5)
    torch.testing.assert_close(value, (2 * torch.tensor(-2.0).exp()).log1p())
    language_token_ids(["a", "가", "я"])  # reads the Unicode table in the wheel
    print(f"sparse-losses {sparse_losses.__version__} works from its wheel")


if __name__ == "__main__":
    main()

"""The package without what its extras bring: nothing of it is imported, errors name the extra."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The missing package, which its extra is called after, and what is done without it.
MISSING = (
    ("transformers", "sparse_losses.SpladeEncoder.from_pretrained('x')"),
    ("transformers", "import sparse_losses.integrations.transformers"),
    ("sentence_transformers", "import sparse_losses.integrations.sentence_transformers"),
)
SCRIPT = """
import sys
import sparse_losses, sparse_losses.functional
print(*sorted(sys.modules))
for missing, statement in {MISSING}:
    sys.modules[missing] = None
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error)
    del sys.modules[missing]
"""


@pytest.fixture(scope="module")
def printed():
    words = [sys.executable, "-c", SCRIPT.format(MISSING=MISSING)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_importing_the_package_imports_no_optional_dependency(printed):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    optional = {re.split(r"[^\w-]", x)[0].replace("-", "_") for extra in extras for x in extra}
    # tqdm is not among them: torch imports it where it is installed
    optional |= {"lightning", "peft", "regex", "safetensors", "tokenizers"} - {"tqdm"}
    modules = printed[0].split()
    assert {"sparse_losses", "torch"} <= set(modules)
    assert not {name.split(".")[0] for name in modules} & optional
    assert not [name for name in modules if name.startswith("sparse_losses.integrations")]


def test_a_missing_package_is_named_with_the_extra_that_brings_it(printed):
    wanted = "expected the package {}: pip install 'sparse-losses[{}]'"
    names = [(missing, missing.replace("_", "-")) for missing, _ in MISSING]
    assert printed[1:] == [wanted.format(*pair) for pair in names]

"""Without the packages of an extra, an error names the extra."""

import subprocess
import sys

# The missing package, what is done without it, and the extra that brings it.
MISSING = (
    ("safetensors", "import sparse_losses.integrations.transformers", "transformers"),
    ("transformers", "sparse_losses.SpladeEncoder.from_pretrained('x')", "transformers"),
    ("transformers", "import sparse_losses.integrations.transformers", "transformers"),
    (
        "sentence_transformers",
        "import sparse_losses.integrations.sentence_transformers",
        "sentence-transformers",
    ),
)
SCRIPT = """
import sys
import sparse_losses
for missing, statement, _ in {MISSING}:
    sys.modules[missing] = None
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error)
    del sys.modules[missing]
"""


def test_a_missing_package_is_named_with_the_extra_that_brings_it():
    script = SCRIPT.format(MISSING=MISSING)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.splitlines() == [
        f"expected the package {missing}: pip install 'sparse-losses[{extra}]'"
        for missing, _, extra in MISSING
    ], run.stderr

"""Without the packages of an extra, an error names the extra."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("missing", "statement", "extra"),
    [
        ("transformers", "sparse_losses.SpladeEncoder.from_pretrained('x')", "transformers"),
        ("transformers", "import sparse_losses.integrations.transformers", "transformers"),
        ("safetensors", "import sparse_losses.integrations.transformers", "transformers"),
        (
            "sentence_transformers",
            "import sparse_losses.integrations.sentence_transformers",
            "sentence-transformers",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(missing, statement, extra):
    script = f"import sys\nsys.modules[{missing!r}] = None\nimport sparse_losses\n{statement}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = run.stderr.splitlines()[-1]
    said = f"expected the package {missing}: pip install 'sparse-losses[{extra}]'"
    assert last == f"ModuleNotFoundError: {said}"

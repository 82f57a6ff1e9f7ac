"""Without the packages of an extra, an error names the extra."""

import sys

import pytest

import sparse_losses


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
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    missing, statement, extra, monkeypatch
):
    for name in [name for name in sys.modules if name.startswith("sparse_losses.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    said = rf"^expected the package {missing}: pip install 'sparse-losses\[{extra}\]'$"
    with pytest.raises(ModuleNotFoundError, match=said):
        exec(statement, {"sparse_losses": sparse_losses})

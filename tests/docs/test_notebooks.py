"""The guides as notebooks and scripts: valid, plain Markdown, the code that the pages show."""

import ast
import importlib.util
import re
import sys

import pytest

from tools.markdown import split_code

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")

from tools import notebooks  # noqa: E402  # after importorskip

GUIDES = pytest.mark.parametrize("page", notebooks.GUIDES, ids=lambda page: page.stem)
# What an extra brings besides the package's own dependencies.
BROUGHT = {
    "peft": {"peft", "transformers"},
    "transformers": {"tokenizers", "transformers"},
    "sentence-transformers": {"datasets", "sentence_transformers", "tokenizers", "transformers"},
}


def of_kind(notebook, kind):
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@GUIDES
def test_a_notebook_is_valid_and_has_the_blocks_of_its_page(page):
    """The page's blocks run in order as tests, hence so does the notebook."""
    made = notebooks.notebook(page)
    nbformat.validate(made)
    assert of_kind(made, "markdown")[0].startswith("# ")
    install, *code = of_kind(made, "code")
    assert install.startswith('%pip install "sparse-losses')
    _, blocks = split_code(page.read_text(encoding="utf-8"))
    python = [block for language, block in blocks if language == "python"]
    assert [cell.strip() for cell in code] == [block.strip() for block in python]
    assert len(python) > 0


@GUIDES
def test_the_prose_of_a_notebook_is_plain_markdown(page):
    text = "\n".join(of_kind(notebooks.notebook(page), "markdown"))
    prose = re.sub(r"`[^`\n]*`", "", split_code(text)[0])
    assert "\n\n\n" not in notebooks.BLOCK.sub("code", text)
    assert re.findall(r"^ *(?:!!!|\?\?\?|===|--8<--|<div|</div).*", prose, re.M) == []
    assert re.findall(r"<!--|\]\[|\{:? ?[.#]|#only-", prose) == []
    targets = re.findall(r"\]\(([^)]*)\)", prose)
    assert [to for to in targets if not to.startswith("https://")] == []


@GUIDES
def test_the_script_has_the_code_of_the_notebook(page):
    made = notebooks.notebook(page)
    script = jupytext.writes(made, fmt="py:percent")
    ast.parse(script)
    assert script.startswith("# %%\n# %pip install")
    assert of_kind(jupytext.reads(script, fmt="py:percent"), "code") == of_kind(made, "code")
    name = page.stem.replace("_", "-")  # hides no module that it or torch imports
    assert name not in sys.stdlib_module_names
    assert importlib.util.find_spec(name) is None


@GUIDES
def test_the_first_cell_installs_what_the_others_import(page):
    install, *code = of_kind(notebooks.notebook(page), "code")
    named = re.search(r'install "sparse-losses(?:\[([\w,-]+)\])?"((?: \w+)*)$', install)
    extras = named[1].split(",") if named[1] else []
    brought = {"numpy", "sparse_losses", "torch"}.union(*(BROUGHT[extra] for extra in extras))
    brought |= set(named[2].split())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse("\n".join(code)))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - brought - set(sys.stdlib_module_names) == set()


PAGE = """---
description: A page
---

# A page

!!! warning "Mind *this*"
    See [the losses](../losses/flops.md#formula) and
    [the FAQ](https://example.com/faq).

=== "Function"

    ```python
    x = "{:.2f}"
    ```

- An item:

    ```python
    y = 1


    z = {"#": 2}
    ```

    and its end, see [above](#a-page).
- [`Loss`][sparse_losses.FlopsLoss], [tested][tests.losses.test_flops.test_it]

<div class="plot" markdown>
![A picture](../figures/flops-light.svg#only-light)
![A picture](../figures/flops-dark.svg#only-dark)
</div>

<!--- invisible-code-block: python
assert False
-->
[A button](../choose.md){ .md-button }

```text
!!! [not][tests.a.link]
```
"""
PLAIN = """# A page

**Mind *this***

See the losses and
[the FAQ](https://example.com/faq).

**Function**

```python
x = "{:.2f}"
```

- An item:

```python
y = 1


z = {"#": 2}
```

and its end, see above.
- `Loss`, tested

A button

```text
!!! [not][tests.a.link]
```
"""


def test_what_only_the_site_understands_is_turned_into_markdown(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert notebooks.plain(page) == PLAIN


def test_a_notebook_runs_from_top_to_bottom_in_a_fresh_namespace(tmp_path, capsys):
    """The one whole run here; `make test-notebooks` has the others."""
    notebooks.main([str(tmp_path)])
    made = nbformat.read(tmp_path / "quickstart.ipynb", as_version=4)
    _, *cells = of_kind(made, "code")
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, "quickstart.ipynb", "exec"), names)
    assert "Recall@1" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".ipynb", ".py"}
    assert len(list(tmp_path.iterdir())) == 2 * len(notebooks.GUIDES)

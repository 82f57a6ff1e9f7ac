"""Make notebooks and scripts of pages: ``python -m tools.notebooks build/notebooks``.

Each guide, and each page with `script: true` in its front matter, becomes NAME.ipynb and NAME.py,
with hyphens, so that no script hides a module that it imports: its prose as plain Markdown, where
links within the site are text, its Python blocks as cells. ``--run`` runs every script in a process
of its own, apart from those that download a model.
"""

import argparse
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jupytext

from tools.markdown import DOCS, FENCE, body, expand

GUIDES = [
    DOCS / "quickstart.md",
    *sorted(DOCS.glob("guides/*.md")),
    *(page for page in sorted(DOCS.glob("*.md")) if "\nscript: true\n" in page.read_text("utf-8")),
]
DOWNLOADS = {"real_model"}  # tests/docs/test_real_model.py runs it with tiny models instead
EXTRAS = {
    "peft": "peft",
    "sentence_transformers": "sentence-transformers",
    "transformers": "transformers",
}
TRAINERS = ("accelerate", "lightning")  # packages that no extra brings
BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\w*).*\n[\s\S]*?^ *(?P=fence)$", re.M
)
FOLDED = re.compile(
    r'^(?P<indent> *)(?:!!!|\?\?\?\+?|===[+!]?)(?: (?P<kind>\w+))?(?: "(?P<title>.*)")?$'
)
LINK = re.compile(  # to another page or to a name of the API; a picture disappears
    r"(?P<sign>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\](?:\((?!\w+://)[^)\s]+\)|\[[\w.]+\])"
)
DROPPED = re.compile(
    r"<!--[\s\S]*?-->"  # comments, the blocks that only tests run among them
    r"|^ *</?(?:div|figure)\b.*>$"
    r"|\{:? ?[.#][^}\n]*\}",  # attributes
    re.M,
)


def unfolded(text: str) -> str:
    """Return Markdown whose admonitions and tabs are a bold title and the text below it."""
    lines = text.split("\n")
    kept: list[str] = []
    fenced = False
    while lines:
        line = lines.pop(0)
        match = None if fenced else FOLDED.match(line)
        fenced ^= bool(FENCE.match(line))
        if match is None:
            kept.append(line)
            continue
        inside: list[str] = []
        indent = match["indent"] + "    "
        while lines and (not lines[0].strip() or lines[0].startswith(indent)):
            inside.append(lines.pop(0))
        title = match["title"] or (match["kind"] or "").capitalize()
        kept += [f"{match['indent']}**{title}**", "", unfolded(textwrap.dedent("\n".join(inside)))]
    return "\n".join(kept)


def plain(page: Path) -> str:
    """Return a guide as Markdown that any viewer shows, its Python blocks at the margin."""
    text = unfolded(expand(body(page.read_text(encoding="utf-8"))))
    parts: list[str] = []

    def prose(written: str) -> None:
        shown = LINK.sub(lambda x: "" if x["sign"] else x["text"], DROPPED.sub("", written))
        parts.append(re.sub(r"\n{3,}", "\n\n", shown))

    end = 0
    for block in BLOCK.finditer(text):
        prose(text[end : block.start()])
        end = block.end()
        if block["language"] != "python":
            parts.append(block[0])
            continue
        parts.append(textwrap.dedent(block[0]))
        if block["indent"]:  # the rest of a list's item would be code without its list
            rest = re.compile(r"(?:\n| +.*\n)*").match(text, end)
            assert rest is not None
            prose(textwrap.dedent(rest[0]))
            end = rest.end()
    prose(text[end:])
    return "".join(parts).strip() + "\n"


def requirements(code: str) -> str:
    """Return what pip installs for these imports."""

    def imported(module: str) -> bool:
        return re.search(rf"^(?:from|import) {module}\b", code, re.M) is not None

    extras = ",".join(extra for module, extra in EXTRAS.items() if imported(module))
    ours = f'"sparse-losses[{extras}]"' if extras else '"sparse-losses"'
    return " ".join([ours, *filter(imported, TRAINERS)])


def notebook(page: Path) -> Any:
    """Return a guide as a notebook."""
    made = jupytext.reads(plain(page), fmt="md")
    code = "\n".join(cell.source for cell in made.cells if cell.cell_type == "code")
    install = jupytext.reads(f"```python\n%pip install {requirements(code)}\n```\n", fmt="md")
    made.cells = install.cells + made.cells
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # the same in every build
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = {"kernelspec": python, "jupytext": {"notebook_metadata_filter": "-all"}}
    return made


def main(arguments: list[str]) -> int:
    """Write all notebooks and scripts, and run the scripts if requested."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true", help="run every script")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for page in GUIDES:
        made = notebook(page)
        name = page.stem.replace("_", "-")
        jupytext.write(made, options.folder / f"{name}.ipynb")
        script = options.folder / f"{name}.py"
        jupytext.write(made, script, fmt="py:percent")
        if options.run and page.stem not in DOWNLOADS:
            print(script, flush=True)
            subprocess.run([sys.executable, script], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

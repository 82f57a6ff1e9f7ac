"""Write sparse_losses/vocabulary/unicode_scripts.json from the Unicode database of ``regex``.

Run ``python tools/generate_unicode_scripts.py`` after an update of ``regex``. If a new version of
Unicode adds a script, an error names its first character: add the script's long name in
PropertyValueAliases.txt to the command.
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import regex

TARGET = Path(__file__).parents[1] / "sparse_losses" / "vocabulary" / "unicode_scripts.json"
KNOWN = tuple(json.loads(TARGET.read_text(encoding="utf-8"))["scripts"])


def script_ranges(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the first and last code point of each run of every script, in one flat list."""
    characters = "".join(map(chr, range(sys.maxunicode + 1)))
    scripts: dict[str, list[int]] = {}
    for name in [*names, "Unknown"]:
        runs = regex.finditer(rf"\p{{Script={name}}}+", characters)
        scripts[name] = [place for run in runs for place in (run.start(), run.end() - 1)]
    listed = "".join(rf"\p{{Script={name}}}" for name in scripts)
    if found := regex.search(f"[^{listed}]", characters):
        raise SystemExit(f"U+{found.start():04X} belongs to a script that is not listed")
    del scripts["Unknown"]
    return scripts


def unicode_version() -> str:
    """Return the Unicode version from the metadata of ``regex``; its module does not state it."""
    match = re.search(
        r"supports Unicode (\d+(?:\.\d+)*)", distribution("regex").read_text("METADATA") or ""
    )
    if match is None:
        raise SystemExit("expected the Unicode version in the metadata of regex, got none")
    return match[1]


def main(new: Iterable[str] = ()) -> None:
    """Write one line per script, so that a diff between versions is readable."""
    head = {
        "unicode_version": unicode_version(),
        "source": "Unicode Character Database, property Script, by way of regex "
        + regex.__version__,
        "license": "Unicode License v3, see unicode_scripts.license.txt",
        "format": "first and last code point of each range, alternating",
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    scripts = [
        f"    {json.dumps(name)}: {json.dumps(runs, separators=(',', ':'))}"
        for name, runs in sorted(script_ranges({*KNOWN, *new}).items())
    ]
    body = ",\n".join(scripts)
    TARGET.write_text(
        "{\n" + "\n".join(lines) + '\n  "scripts": {\n' + body + "\n  }\n}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

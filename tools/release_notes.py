"""Print the changelog's section of one version as the text of its release.

python -m tools.release_notes 0.1.0
"""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading.

    Raises:
        SystemExit: If there is no section, or an empty one.
    """
    heading = rf"^## \[?{re.escape(version)}\]?(?: [^\n]*)?$"
    match = re.search(heading + r"\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise SystemExit(f"expected a section `## {version}` in CHANGELOG.md, got none with text")
    return match[1].strip() + "\n"


if __name__ == "__main__":
    print(notes(CHANGELOG.read_text(encoding="utf-8"), sys.argv[1]), end="")

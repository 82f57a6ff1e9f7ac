"""Check a release and print its notes: ``python -m tools.release v1.2.0 dist/*.whl > notes.md``."""

import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from email import message_from_string
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNFINISHED = re.compile(
    r"no release\b|not yet\b|\b(?:not|nothing)\b[^.|]{0,20} released|<repository>"
    r"|아직 PyPI|PyPI へはまだ",
    re.IGNORECASE,
)
DATE = r"\d{4}-\d\d-\d\d"
# The addresses of the package's page, and the variable of the workflow that each comes from.
ADDRESSES = dict.fromkeys(("Repository", "Issues", "Changelog"), "REPO_URL")
ADDRESSES["Documentation"] = "SITE_URL"
VERSIONS = {  # where the version stands, besides the package itself
    "CITATION.cff": r"^version: (.+)$",
    "docs/cite.md": r"^ *version *= {(.+)},$",
    "tools/recipe.yaml": r'^  version: "(.+)"$',
}


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading; exit if it is missing or empty."""
    heading = rf"^## \[?{re.escape(version)}\]?(?: [^\n]*)?$"
    match = re.search(heading + r"\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise SystemExit(f"expected a section `## {version}` in CHANGELOG.md, got none with text")
    return match[1].strip() + "\n"


def sources() -> dict[str, str]:
    """Return the files that a reader of the release sees, by path."""
    paths = [
        *map(ROOT.joinpath, ("README.md", "CHANGELOG.md", *VERSIONS)),
        *ROOT.glob("docs/**/*.md"),
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def problems(tag: str, texts: Mapping[str, str], built: Message) -> Iterator[str]:
    """Yield what keeps a tagged build from being released."""
    version = str(built["Version"])
    if tag != f"v{version}":
        yield f"expected the tag v{version}, got {tag}"
    for name, pattern in VERSIONS.items():
        found = re.findall(pattern, texts[name], re.MULTILINE)
        if found != [version]:
            yield f"expected the version {version} in {name}, got {', '.join(found) or 'none'}"
    for name, text in texts.items():
        for found in UNFINISHED.finditer(text):
            yield f"{name} says {' '.join(found[0].split())!r}"
    cited = re.findall(rf"^date-released: ({DATE})$", texts["CITATION.cff"], re.MULTILINE)
    dated = re.findall(
        rf"^## {re.escape(version)} - ({DATE})$", texts["CHANGELOG.md"], re.MULTILINE
    )
    if len(cited) != 1 or cited != dated:
        yield f"expected one date in CITATION.cff and CHANGELOG.md, got {cited} and {dated}"
    for name, key in (("CITATION.cff", "repository-code"), ("tools/recipe.yaml", "homepage")):
        if not re.search(rf"^ *{key}: \"?https://", texts[name], re.MULTILINE):
            yield f"expected the repository's address, `{key}`, in {name}"
    urls = dict(url.split(", ", 1) for url in built.get_all("Project-URL", []))
    for name, variable in ADDRESSES.items():
        if not urls.get(name, "").startswith("https://"):
            yield f"expected the address of {name} in the wheel: set {variable}"


def main(tag: str, wheel: str) -> None:
    """Print the notes of a release, or what keeps it from being one."""
    texts = sources()
    if found := list(problems(tag, texts, metadata(Path(wheel)))):
        raise SystemExit("\n".join(found))
    print(notes(texts["CHANGELOG.md"], tag.removeprefix("v")), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])

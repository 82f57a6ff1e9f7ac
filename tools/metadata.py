"""Add the addresses of repository and site to the package's description at build time.

Hatch runs this for every build. Links in README.md are relative, so that they work in a clone and
on any host. A package index shows the text elsewhere: pages of docs/ are on the site, SITE_URL, in
the folder of their version, and other files in the repository, REPO_URL, at the version's tag.
What has no address is named without a link, a picture by its description.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def with_addresses(text: str, version: str, repository: str = "", site: str = "") -> str:
    """Return the README of a version as a package index shows it; the addresses end without /."""

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if target.startswith("docs/"):
            base, place = site and f"{site}/{version}/", target.removeprefix("docs/")
            page, hash_, anchor = re.sub(r"\bindex\.md", "", place).partition("#")
            target = re.sub(r"\.md$", "/", page) + hash_ + anchor
        else:
            base = repository and f"{repository}/blob/v{version}/"
        if not base:
            return match["text"]
        return f"{match['picture']}[{match['text']}]({base}{target})"

    text = LINK.sub(absolute, text)
    return text.replace("<repository>", repository) if repository else text


class Metadata(MetadataHookInterface):
    """A hook of Hatch that fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md, and the addresses from the environment."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository, site = (os.environ.get(x, "").rstrip("/") for x in ("REPO_URL", "SITE_URL"))
        version = metadata["version"]
        text = with_addresses(text, version, repository, site)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {}
        if repository:
            changelog = f"{repository}/blob/v{version}/CHANGELOG.md"
            metadata["urls"] |= {"Repository": repository, "Issues": f"{repository}/issues"}
            metadata["urls"]["Changelog"] = changelog
        if site:
            metadata["urls"]["Documentation"] = f"{site}/{version}/"

"""Add the addresses of repository and site to the package's description at build time.

Hatch runs this for every build. Links in README.md are relative, so that they work in a clone and
on any host. A package index shows the text elsewhere: if REPO_URL names the repository, links and
pictures get its address.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def with_addresses(text: str, repository: str, branch: str = "main") -> str:
    """Return Markdown whose relative links point to files of a repository on a branch."""

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        view = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{view}/{branch}/{target})"

    return LINK.sub(absolute, text)


class Metadata(MetadataHookInterface):
    """A hook of Hatch that fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md, and the addresses from the environment."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("REPO_URL", "").rstrip("/")
        site = os.environ.get("SITE_URL", "")
        if repository:
            text = with_addresses(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        addresses = {"Repository": repository, "Documentation": site}
        metadata["urls"] = {name: address for name, address in addresses.items() if address}

"""Put a bill of materials (CycloneDX) into the wheel, where PEP 770 has installers keep it.

Hatch runs this for every wheel. It lists the package, what it requires at run time, and the one
table in it that others made. The same sources give the same file.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def bill_of_materials(version: str, requirements: list[str]) -> dict[str, Any]:
    """Return the bill as CycloneDX has it; requirements are ranges, so they have no version."""
    package = f"pkg:pypi/sparse-losses@{version}"
    table = "unicode-script-property"
    components: list[dict[str, Any]] = [
        {"type": "data", "bom-ref": table, "name": "Unicode Script property"}
        | {"licenses": [{"license": {"id": "Unicode-3.0"}}]}
    ]
    for requirement in sorted(requirements):
        name = re.match(r"[\w.-]+", requirement)[0]  # type: ignore[index]  # it starts with one
        found = {"type": "library", "bom-ref": f"pkg:pypi/{name}", "name": name}
        found |= {"purl": f"pkg:pypi/{name}", "description": f"requires {requirement}"}
        components.append(found)
    root = {"type": "library", "bom-ref": package, "name": "sparse-losses", "version": version}
    root |= {"purl": package, "licenses": [{"license": {"id": "Apache-2.0"}}]}
    needed = [component["bom-ref"] for component in components]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [{"ref": package, "dependsOn": needed}],
    }


class BillOfMaterials(BuildHookInterface[Any]):
    """A hook of Hatch that adds the file to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the bill into a temporary folder; ``version`` is that of the build, not ours."""
        core = self.metadata.core
        bill = bill_of_materials(self.metadata.version, list(core.dependencies))
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name, "sparse-losses.cdx.json")
        path.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        self.folder.cleanup()

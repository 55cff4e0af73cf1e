"""Write a bill of materials: every Python package of an environment, and every Debian package of the system around it.

Usage: write_sbom.py NAME PYTHON DPKG FILE

NAME is the image's, PYTHON the interpreter of the environment, DPKG the folder with Debian's list of packages (/var/lib/dpkg,
empty or missing on other systems). The result is CycloneDX JSON, valid against its schema, and the same bytes for the same
packages. Runs with the packages of sbom.lock, in the system that it describes.

Debian's advisories are about a release and about source packages (glibc, not libc6), so the bill names both; without them a
scanner finds nothing to say about any of these packages. The qualifiers are those that syft and grype write and read:
https://github.com/anchore/syft/blob/main/syft/pkg/cataloger/debian/package.go.
"""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def debian_packages(directory: Path) -> Iterator[dict[str, str]]:
    """The fields of each installed package; distroless bases keep a file per package in `status.d`."""
    files = [directory / "status", *sorted((directory / "status.d").glob("*"))]
    for file in files:
        if not file.is_file() or file.suffix == ".md5sums":
            continue
        for paragraph in file.read_text(encoding="utf-8").split("\n\n"):
            lines = [line for line in paragraph.splitlines() if line and not line[0].isspace()]
            fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if fields.get("Package") and fields.get("Status", "install ok installed").endswith(" installed"):
                yield fields


def operating_system() -> Component | None:
    """The distribution with its release, None where the system does not say."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return None
    name, version = release["ID"], release.get("VERSION_ID")
    return Component(
        name=name,
        version=version,
        type=ComponentType.OPERATING_SYSTEM,
        bom_ref=f"os:{name}@{version}",
        description=release["PRETTY_NAME"],
    )


def debian_component(fields: dict[str, str], system: Component | None) -> Component:
    """One Debian package. system: what it is installed on."""
    name, version = fields["Package"], fields["Version"]
    qualifiers = {"arch": fields["Architecture"]}
    if system is not None and system.version is not None:
        qualifiers["distro"] = f"{system.name}-{system.version}"
    if "Source" in fields:
        # "gcc-12 (12.2.0-14)" where the version is another one than the package's.
        qualifiers["upstream"] = re.sub(r" \((.*)\)$", r"@\1", fields["Source"])
    purl = PackageURL("deb", "debian", name, version, qualifiers)
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=f"deb:{quote(name)}@{quote(version)}",
        description=fields.get("Description"),
    )


def main(name: str, python: str, dpkg: str, target: str) -> None:
    """Write the bill."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--spec-version", "1.6", "--output-format", "JSON"]
    listed = subprocess.run([*command, "--output-reproducible", python], check=True, capture_output=True, text=True)
    bom: Bom = Bom.from_json(json.loads(listed.stdout))  # type: ignore[attr-defined]
    system = operating_system()
    if system is not None:
        bom.components.add(system)
    for fields in debian_packages(Path(dpkg)):
        bom.components.add(debian_component(fields, system))
    bom.metadata.component = Component(name=name, type=ComponentType.CONTAINER, bom_ref=name)
    bom.register_dependency(bom.metadata.component, bom.components)
    # The library would take the time of day and a random number.
    bom.metadata.timestamp = datetime.fromtimestamp(0, UTC)
    packages = sorted(component.purl.to_string() for component in bom.components if component.purl is not None)
    bom.serial_number = uuid5(NAMESPACE_URL, " ".join([name, *packages]))
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        sys.exit(f"the bill of materials is not valid CycloneDX 1.6: {problem}")
    Path(target).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

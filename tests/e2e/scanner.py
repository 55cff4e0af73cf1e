"""The real scanner for vulnerabilities, with a database of advisories that a test wrote: its own cannot be fetched here.

Which of the world's vulnerabilities the images have is therefore not shown, but that a scan would tell of them.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.cluster.binaries import ensure_programs


@dataclass(frozen=True)
class Advisory:
    """A vulnerability of one package."""

    name: str
    """GHSA-... or CVE-..."""
    ecosystem: str
    """`python`, or `deb` for Debian 12."""
    package: str
    """Of Debian, a source package."""
    constraint: str = "< 99"
    """Versions that have it."""


def scan(line: str, advisories: Sequence[Advisory], folder: Path, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a line of bash that calls `grype` prints as JSON. folder: where it runs. Fails if the scanner warns of anything."""
    grype, write_database = ensure_programs("grype")
    database = folder / "grype-database" / "6"
    database.mkdir(parents=True)
    written = json.dumps([asdict(advisory) for advisory in advisories])
    subprocess.run([write_database, database], input=written, text=True, check=True)
    done = subprocess.run(
        ["bash", "-c", f"{line} --output json"],
        cwd=folder,
        env={
            **os.environ,
            **(variables or {}),
            "PATH": f"{grype.parent}:{os.environ['PATH']}",
            "GRYPE_DB_CACHE_DIR": str(database.parent),
            "GRYPE_DB_AUTO_UPDATE": "false",
            "GRYPE_CHECK_FOR_APP_UPDATE": "false",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    warnings = [told for told in done.stderr.splitlines() if "registry communication is insecure" not in told]
    assert (done.returncode, warnings) == (0, [])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pairs(matches: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Package and vulnerability of each match."""
    return {(match["artifact"]["name"], match["vulnerability"]["id"]) for match in matches}

"""The in-toto statements about an image or a chart: its bill of materials, the known vulnerabilities that do not affect
it, and its provenance.

Sources: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md, https://slsa.dev/spec/v1.0/provenance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

BILL_TYPE = "https://cyclonedx.org/bom"
EXPLOITABILITY_TYPE = "https://openvex.dev/ns"
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "https://finetune.dev/build/{}/v1"
"""Type of our builds, which docs/how-to/release.md describes."""
_BUILDER = "https://finetune.dev/build/make-release"


@dataclass(frozen=True)
class Build:
    """How an image or a chart was built."""

    kind: str
    """Kind of the subject: `image` or `chart`."""
    parameters: Mapping[str, str]
    commit: str
    """Git commit of the source, as 40 hexadecimal digits."""
    materials: Mapping[str, str]
    """Name -> SHA-256 of every other input."""
    started: datetime
    finished: datetime


def statement(reference: str, digest: str, predicate_type: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement about the subject `reference` with `digest` (with `sha256:`)."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": reference, "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    }


def provenance(build: Build) -> dict[str, Any]:
    """Return the SLSA provenance predicate of a build."""
    source = {"name": "source", "digest": {"gitCommit": build.commit}}
    materials = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(build.materials.items())]
    return {
        "buildDefinition": {
            "buildType": _BUILD_TYPE.format(build.kind),
            "externalParameters": dict(build.parameters),
            "internalParameters": {},
            "resolvedDependencies": [source, *materials],
        },
        "runDetails": {
            "builder": {"id": _BUILDER},
            "metadata": {"startedOn": _time(build.started), "finishedOn": _time(build.finished)},
        },
    }


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

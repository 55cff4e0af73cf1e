"""The steps of a release: build, push, sign and attest."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tools.cluster.binaries import find_binaries
from tools.images import ImageError, build
from tools.images.programs import run, timed
from tools.images.sources import REPOSITORY, SOURCES
from tools.release.attach import Layer, attach, digest_of_tag, repository
from tools.release.signing import SigningKey, envelope, signature_payload
from tools.release.statements import BILL_TYPE, EXPLOITABILITY_TYPE, PROVENANCE_TYPE, Build, provenance, statement

CHART = REPOSITORY / "charts" / "finetune-operator"
NOT_AFFECTED = REPOSITORY / "docs" / "vulnerabilities.openvex.json"
_BILL = "opt/finetune/sbom.cdx.json"


@dataclass(frozen=True)
class Published:
    """An image or chart that a release has pushed to the registry."""

    reference: str
    """Registry and repository."""
    digest: str
    """Digest of its manifest, with `sha256:`."""


@dataclass(frozen=True)
class Release:
    """Settings that all parts of a release have in common."""

    registry: str
    """Registry, with a path if needed: registry.example/team."""
    version: str
    key: SigningKey
    commit: str
    """Git commit of the source."""
    plain_http: bool = False
    links: Mapping[str, str] = field(default_factory=dict)
    """Name -> address of each link that the chart shows."""

    def publish_image(self, which: str) -> Published:
        """Build the image `trainer` or `operator`, push it, sign it, and attach its attestations.

        Raises ImageError, DestinationRefusedError, TransientError.
        """
        started, sources = datetime.now(UTC), SOURCES[which]
        image = build(which)
        with timed(f"{image.name}: push"):
            digest = image.push(self.registry, tag=self.version, plain_http=self.plain_http)
        materials = {str(path.relative_to(REPOSITORY)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources.locks}
        made = Build(
            kind="image",
            parameters={"containerfile": str(sources.containerfile.relative_to(REPOSITORY)), "version": self.version},
            commit=self.commit,
            materials=materials | image.storage.file_systems(sources),
            started=started,
            finished=datetime.now(UTC),
        )
        published = Published(f"{self.registry}/{image.name}", digest)
        unaffected = json.loads(NOT_AFFECTED.read_text())
        with image.mounted() as root:
            bill = json.loads((root / _BILL).read_text())
        predicates = {PROVENANCE_TYPE: provenance(made), BILL_TYPE: bill, EXPLOITABILITY_TYPE: unaffected}
        self._sign(published, predicates)
        return published

    def publish_chart(self, images: Sequence[Published]) -> Published:
        """Push the chart with the release's version and a list of these images, sign it, and attach its provenance.

        Raises as `publish_image` does.
        """
        started, plain = datetime.now(UTC), ("--plain-http",) if self.plain_http else ()
        with tempfile.TemporaryDirectory(prefix="chart-") as directory, timed("chart: push"):
            versions = ("--version", self.version, "--app-version", self.version)
            chart = Path(directory, "chart", CHART.name)
            shutil.copytree(CHART, chart)
            description = yaml.safe_load((chart / "Chart.yaml").read_text())
            description["annotations"] |= self._annotations(images)
            (chart / "Chart.yaml").write_text(yaml.safe_dump(description, sort_keys=False))
            helm("package", chart, *versions, "--destination", directory)
            helm("push", Path(directory) / f"{CHART.name}-{self.version}.tgz", f"oci://{self.registry}/charts", *plain)
        reference = f"{self.registry}/charts/{CHART.name}"
        with repository(reference, plain_http=self.plain_http) as place:
            published = Published(reference, digest_of_tag(place, self.version))
        made = Build(
            kind="chart",
            parameters={"chart": str(CHART.relative_to(REPOSITORY)), "version": self.version},
            commit=self.commit,
            materials={},
            started=started,
            finished=datetime.now(UTC),
        )
        self._sign(published, {PROVENANCE_TYPE: provenance(made)})
        return published

    def _annotations(self, images: Sequence[Published]) -> dict[str, str]:
        """Return the chart's annotations for Artifact Hub. `signKey` is left out: it is for PGP, and cosign needs none."""
        named = [{"name": image.reference.rpartition("/")[2], "image": f"{image.reference}@{image.digest}"} for image in images]
        annotations = {"artifacthub.io/images": yaml.safe_dump(named, sort_keys=False)} if named else {}
        if self.links:
            links = [{"name": name, "url": url} for name, url in self.links.items()]
            annotations["artifacthub.io/links"] = yaml.safe_dump(links, sort_keys=False)
        return annotations | {"artifacthub.io/prerelease": "true" if "-" in self.version else "false"}

    def _sign(self, published: Published, predicates: dict[str, dict[str, Any]]) -> None:
        payload = signature_payload(published.reference, published.digest)
        annotations = {"dev.cosignproject.cosign/signature": self.key.sign(payload)}
        signature = Layer(payload, "application/vnd.dev.cosign.simplesigning.v1+json", annotations)
        attestations = [
            Layer(
                envelope(statement(published.reference, published.digest, kind, predicate), self.key),
                "application/vnd.dsse.envelope.v1+json",
                {"dev.cosignproject.cosign/signature": "", "predicateType": kind},
            )
            for kind, predicate in predicates.items()
        ]
        with repository(published.reference, plain_http=self.plain_http) as place:
            attach(place, published.digest, "att", attestations)
            attach(place, published.digest, "sig", [signature])


def source_commit(tree: Path) -> str:
    """Return the commit of a source tree. Raises ImageError if the tree has changes, which a provenance could not name."""
    if run("git", "-C", tree, "status", "--porcelain"):
        raise ImageError(f"{tree} has uncommitted changes: commit or remove them, then release")
    return run("git", "-C", tree, "rev-parse", "HEAD").strip()


def helm(*arguments: str | Path) -> str:
    """Run helm with the logins of `docker login`. If helm is not installed, use the test cluster's. Raises ImageError."""
    installed, binaries = shutil.which("helm"), find_binaries()
    if installed is None and binaries is None:
        raise ImageError("helm is not on PATH: install Helm 3.17 or later, or run `python -m tools.cluster.binaries`")
    docker = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    logins = {"HELM_REGISTRY_CONFIG": str(docker)} if docker.exists() else {}
    return run(installed or binaries.helm, *arguments, environment=logins)  # type: ignore[union-attr]

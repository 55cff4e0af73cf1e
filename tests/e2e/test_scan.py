"""The documented scan, by the real scanner: of the bills that the images hold, and of an image itself in a registry."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.scanner import Advisory, pairs, scan
from tests.support.documented import as_written, blocks_of
from tests.support.registry import running_registry
from tools.cluster.requirements import ensure_packages
from tools.images import build
from tools.images.sources import REPOSITORY

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

PAGE = REPOSITORY / "docs" / "how-to" / "release.md"
PRESENT = [Advisory("CVE-2099-0001", "deb", "glibc"), Advisory("GHSA-2222-3333-4444", "python", "pydantic")]
FOUND = {("libc6", "CVE-2099-0001"), ("libc-bin", "CVE-2099-0001"), ("pydantic", "GHSA-2222-3333-4444")}
"""Debian's advisories name source packages, of which these are two packages."""
OLD = [Advisory("CVE-2099-0002", "deb", "python3.11", "< 3.11.1"), Advisory("GHSA-2222-3333-5555", "python", "pydantic", "< 2")]
"""Repaired in what the images have."""
NOT_AFFECTED = [
    Advisory("GHSA-rrmf-rvhw-rf47", "python", "torch"),
    Advisory("CVE-2026-4538", "python", "torch"),
    Advisory("GHSA-4j2p-28q2-5m79", "python", "accelerate"),
]
"""What docs/vulnerabilities.openvex.json speaks of, by an alias, too."""
LEFT_OUT = {(each.package, each.name) for each in NOT_AFFECTED}


def documented_line() -> str:
    (line,) = [block.text.strip() for block in blocks_of(PAGE) if block.text.startswith("grype ")]
    return as_written(line)


def scan_of_bill(line: str, image: str, folder: Path) -> dict[str, Any]:
    with build(image).mounted() as root:
        (folder / "sbom.cdx.json").write_bytes((root / "opt/finetune/sbom.cdx.json").read_bytes())
    (folder / "docs").symlink_to(REPOSITORY / "docs")
    return scan(line, [*PRESENT, *OLD, *NOT_AFFECTED], folder)


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_scan_of_a_bill_reports_packages_of_both_kinds_and_no_others(image: str, tmp_path: Path) -> None:
    found = scan_of_bill(documented_line(), image, tmp_path)
    assert pairs(found["matches"]) == FOUND
    assert pairs(found.get("ignoredMatches", [])) == (LEFT_OUT if image == "trainer" else set())


def test_scan_without_the_list_reports_what_does_not_apply_as_well(tmp_path: Path) -> None:
    line = re.sub(" --vex .*", "", documented_line())
    assert pairs(scan_of_bill(line, "trainer", tmp_path)["matches"]) == FOUND | LEFT_OUT


def test_list_holds_for_a_scan_of_the_image(tmp_path: Path) -> None:
    ensure_packages()
    with running_registry(tmp_path / "registry", needs_login=True) as registry:
        (tmp_path / "config.json").write_text(registry.docker_config())
        logins = {"DOCKER_CONFIG": str(tmp_path), "REGISTRY_AUTH_FILE": str(tmp_path / "config.json")}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in logins.items():
                patch.setenv(name, value)
            digest = build("trainer").push(f"{registry.host}/team", tag="scanned", plain_http=True)
        found = scan(
            f"grype registry:{registry.host}/team/finetune-trainer@{digest} --vex {REPOSITORY}/docs/vulnerabilities.openvex.json",
            [*PRESENT, *OLD, *NOT_AFFECTED],
            tmp_path,
            {**logins, "GRYPE_REGISTRY_INSECURE_USE_HTTP": "true"},
        )
    # A scanner that sees the files may find packages that no list of installed ones has.
    assert pairs(found["matches"]) >= FOUND
    assert pairs(found["matches"]).isdisjoint(LEFT_OUT)
    assert pairs(found["ignoredMatches"]) == LEFT_OUT

"""docs/vulnerabilities.openvex.json speaks of the versions that are locked, and its reasons hold."""

import json
import re
from pathlib import Path

import pytest

from tools.images.locks import pinned_versions
from tools.images.sources import REPOSITORY, SOURCES

STATEMENTS = json.loads((REPOSITORY / "docs/vulnerabilities.openvex.json").read_text())["statements"]
UNUSED = {
    "CVE-2025-3000": r"torch\.jit\b|from torch import .*\bjit\b",
    "CVE-2026-4538": r"torch\.export|torch\.load\b|aoti_load_package|\.pt2\b",
    "CVE-2026-69112": r"load_checkpoint_(in_model|and_dispatch)",
}
"""What the trainer would have to use for each to matter."""
TRAINER = [*(REPOSITORY / "trainer_image/finetune_trainer").rglob("*.py"), *(REPOSITORY / "operator").rglob("*.py")]


def uses(files: list[Path], pattern: str) -> list[str]:
    return [path.name for path in files if re.search(pattern, path.read_text())]


def test_every_statement_is_about_a_locked_version() -> None:
    locked = {f"pkg:oci/{one.name}": pinned_versions(one.requirements.read_text()) for one in SOURCES.values()}
    for statement in STATEMENTS:
        for product in statement["products"]:
            for component in product.get("subcomponents", []):
                name, version = component["@id"].removeprefix("pkg:pypi/").split("@")
                assert locked[product["@id"]][name] == version, (
                    f"{statement['vulnerability']['name']}: judge it for the new version"
                )


def test_every_statement_names_its_package_in_the_image_and_by_itself() -> None:
    """A scan of an image looks for the image, one of a bill for the package."""
    for statement in STATEMENTS:
        images = [product for product in statement["products"] if product["@id"].startswith("pkg:oci/")]
        components = {component["@id"] for image in images for component in image["subcomponents"]}
        alone = {product["@id"] for product in statement["products"] if product not in images}
        assert components == alone != set()


def test_every_statement_gives_a_reason_that_scanners_know() -> None:
    known = {"vulnerable_code_not_in_execute_path", "vulnerable_code_cannot_be_controlled_by_adversary"}
    assert {statement["vulnerability"]["name"] for statement in STATEMENTS} == UNUSED.keys()
    for statement in STATEMENTS:
        assert statement["status"] == "not_affected"
        assert statement["justification"] in known
        assert statement["impact_statement"].endswith(".")


@pytest.mark.parametrize("vulnerability", UNUSED)
def test_product_does_not_use_what_is_vulnerable(vulnerability: str) -> None:
    assert uses(TRAINER, UNUSED[vulnerability]) == []

"""The name by which an adapter calls its base, and what is said if nobody knows it."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.inspection.base_name import adapter_base_problem, base_name

SOURCE = "pvc://models/base"


def base(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_manifests_name_counts_before_that_of_config_json(tmp_path: Path) -> None:
    directory = base(tmp_path, {"_name_or_path": "maker/elder"})
    assert base_name("maker/base", directory) == "maker/base"
    assert adapter_base_problem("maker/base", directory) is None


def test_the_name_that_only_config_json_gives_is_told(tmp_path: Path) -> None:
    directory = base(tmp_path, {"_name_or_path": "maker/elder"})
    assert base_name(SOURCE, directory) == "maker/elder"
    finding = adapter_base_problem(SOURCE, directory)
    assert finding is not None
    assert (finding.rule, finding.severity, finding.field) == ("adapter-base-guessed", "warning", "spec.model.hubName")
    assert [(change.field, change.value) for change in finding.changes] == [("spec.model.hubName", "maker/elder")]
    assert finding.is_proposal
    # With the change made.
    assert adapter_base_problem("maker/elder", directory) is None


@pytest.mark.parametrize(
    "written", [
        "/srv/models/llama", "./llama", "llama", "a/b/c", "pvc://models/base", "", None, 7, "maker/base\n",
        # Where programs for training write: on the Hub, anyone may take these names.
        "output/last", "Outputs/llama", "models/base", "runs/7", "llama/checkpoint-500", "llama/checkpoint_5", "saves/lora",
    ],
)  # fmt: skip
def test_a_base_without_a_name_is_told(tmp_path: Path, written: Any) -> None:
    directory = base(tmp_path, {"_name_or_path": written})
    assert base_name(SOURCE, directory) == SOURCE
    finding = adapter_base_problem(SOURCE, directory)
    assert finding is not None
    assert (finding.rule, finding.severity, finding.changes) == ("adapter-base-unnamed", "warning", ())
    assert finding.message.startswith("the adapter will name pvc://models/base as its base, which no library can load")
    assert finding.fix == "set spec.model.hubName to the name of the base on the Hub, <org>/<name>, if it has one"


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_config_that_cannot_be_read_names_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert base_name(SOURCE, tmp_path) == SOURCE

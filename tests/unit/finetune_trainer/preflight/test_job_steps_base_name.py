"""What preflight says of the name by which the adapter will call its base."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.preflight.job_steps import inspect_files


@pytest.mark.parametrize(
    ("written", "changes", "told"),
    [
        ("maker/elder", {}, ["adapter-base-guessed"]),
        ("maker/elder", {"model.hubName": "maker/base"}, []),
        ("maker/elder", {"method": {"type": "Full"}}, []),
        # Loading the adapter fails then, and says so.
        ("/srv/base", {}, []),
    ],
    ids=["guessed", "named", "no adapter", "unnamed"],
)
def test_a_guessed_name_is_told(context: Any, model: Path, written: str, changes: dict[str, Any], told: list[str]) -> None:
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": written}))
    findings = inspect_files(context(changes), ExitStack()).findings
    assert [finding.rule for finding in findings if finding.rule.startswith("adapter-base")] == told

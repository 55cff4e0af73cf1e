"""The merge role over a real trained adapter: what is published, and what a failed verification leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_trainer.__main__ import main
from finetune_trainer.context import RunContext
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import run_context, tiny_spec


def trained(claims: Path, **changes: dict[str, Any]) -> RunContext:
    spec = tiny_spec(training={"maxSteps": 2, "microBatchSize": 4}, parallelism={"processesPerNode": 1}, **changes)
    context = run_context(claims, spec)
    assert run_gang(context) == [0]
    return context


def run_merge(context: RunContext) -> tuple[int, TerminationReport]:
    log = context.claims_root / "termination-log"
    arguments = {
        "--plan": context.workspace.root / "plan.json",
        "--plan-sha256": context.plan_sha256,
        "--claims-root": context.claims_root,
        "--termination-log": log,
    }
    code = main(["merge", *(str(part) for pair in arguments.items() for part in pair)])
    report = parse_envelope(log.read_text())
    assert report is not None
    return code, report


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_adapter_and_verified_model_are_published_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    context = trained(tmp_path)
    code, report = run_merge(context)
    assert (code, report.outcome) == (0, Outcome.SUCCEEDED)
    assert {"adapter_sha256", "merged_manifest_sha256", "kl", "top1", "max_abs"} <= set(report.facts)
    assert names(context.output.root) == {"adapter", "merged", "verification.json"}
    assert json.loads(context.output.verification.read_text())["passed"] is True
    settings = json.loads((context.output.adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "pvc://models/tiny"
    assert str(tmp_path) not in (context.output.adapter / "adapter_config.json").read_text()
    again, second = run_merge(context)
    # The new verification says how long it took; all else is as it was.
    assert again == 0
    assert second.facts | {"verification_sha256": ""} == report.facts | {"verification_sha256": ""}


def test_a_model_that_fails_its_verification_is_quarantined(tmp_path: Path) -> None:
    context = trained(tmp_path)
    assert run_merge(context)[0] == 0
    path = context.output.merged / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = -tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    # The size is unchanged, so the merge takes the finished model for its own; only verification can see the difference.
    code, report = run_merge(context)
    assert code == EXIT_CODES[FailureClass.VERIFICATION_FAILED]
    assert report.failure is FailureClass.VERIFICATION_FAILED
    assert names(context.output.root) == {"adapter", "merged.quarantined", "verification.json"}
    assert run_merge(context)[0] == 0


def test_a_fully_trained_model_is_published_as_it_is(tmp_path: Path) -> None:
    context = trained(tmp_path, method={"type": "Full", "lora": None})
    code, report = run_merge(context)
    assert code == 0
    assert set(report.facts) == {"merged_manifest_sha256"}
    assert names(context.output.root) == {"merged"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "manifest.json"} <= names(
        context.output.merged
    )


def test_without_merging_the_adapter_alone_is_published(tmp_path: Path) -> None:
    context = trained(tmp_path, merge={"enabled": False})
    assert run_merge(context)[0] == 0
    assert names(context.output.root) == {"adapter"}


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_adapter_is_not_published(tmp_path: Path, damage: str) -> None:
    context = trained(tmp_path)
    path = context.workspace.adapter / "adapter_model.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
    code, report = run_merge(context)
    assert (code, report.failure) == (EXIT_CODES[FailureClass.CHECKPOINT_INVALID], FailureClass.CHECKPOINT_INVALID)
    assert not context.output.adapter.exists()

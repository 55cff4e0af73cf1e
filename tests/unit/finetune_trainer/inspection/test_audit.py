"""What digests alone show of a run: whether its parts belong together, and what nobody can look at any more."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_job.layout import checkpoint_name
from finetune_trainer.context import RunContext
from finetune_trainer.inspection.audit import RunParts, inspect_run
from finetune_trainer.roles.audit import main
from tests.support.audited_run import audited_run, context_of, copied, rewrite_checkpoints, rewrite_report, rewrite_result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    place = audited_run(tmp_path_factory.mktemp("run"))
    context = context_of(place)
    context.output.provenance.write_text(json.dumps(statement(context)))
    return place


def statement(context: RunContext, **versions: str) -> dict:
    prepared = json.loads((context.workspace.prepared / "manifest.json").read_bytes())["data_hash"]
    return {
        "predicate": {
            "buildDefinition": {"internalParameters": {"planSha256": context.plan_sha256}},
            "runDetails": {"builder": {"version": versions}, "byproducts": [{"digest": {"sha256": prepared}}]},
        }
    }


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def flip(path: Path) -> None:
    """Another last byte."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def errors(parts: RunParts) -> set[str]:
    return {finding.rule for finding in parts.findings if finding.severity == "error"}


def test_an_untouched_run_belongs_together(run) -> None:
    parts = inspect_run(context_of(run))
    assert parts.findings == ()
    assert [each.step for each in parts.checkpoints] == [2, 4, 6, 8]
    assert {each.world_size for each in parts.checkpoints} == {1}
    assert (parts.exported_step, parts.devices) == (8, ("cpu",))


CHANGES: dict[str, tuple[str, Callable[[RunContext], object]]] = {
    "plan in the report": ("audit-plan-differs", lambda run: rewrite_report(run, plan_sha256="0" * 64)),
    "report": ("audit-plan-differs", lambda run: run.workspace.model_report.write_text("{}")),
    "plan of the result": ("audit-plan-differs", lambda run: rewrite_result(run.workspace.adapter, plan_sha256="0" * 64)),
    "plan in the provenance": ("audit-plan-differs", lambda run: edit(run.output.provenance, run.plan_sha256.encode(), b"0")),
    "no provenance": ("audit-plan-differs", lambda run: run.output.provenance.write_text("[]")),
    "record": ("audit-data-differs", lambda run: edit(run.claims_root / "data/train.jsonl", b"4", b"5")),
    "prepared token": ("audit-data-differs", lambda run: flip(run.workspace.prepared / "train/tokens-00000.i4")),
    "data in the report": ("audit-data-differs", lambda run: rewrite_report(run, data_hash="0" * 64)),
    "weight": ("audit-base-differs", lambda run: flip(run.base_model / "model.safetensors")),
    "no configuration": ("audit-base-differs", lambda run: (run.base_model / "config.json").unlink()),
    "another run's checkpoints": ("audit-checkpoint-foreign", lambda run: rewrite_checkpoints(run, learning_sha256="0")),
    "checkpoint of other data": ("audit-checkpoint-foreign", lambda run: rewrite_checkpoints(run, data_hash="0")),
    "value of a checkpoint": (
        "audit-checkpoint-foreign",
        lambda run: flip(run.workspace.checkpoints / checkpoint_name(4) / "rank-00000.safetensors"),
    ),
    "trained adapter": ("audit-result-differs", lambda run: flip(run.workspace.adapter / "adapter_model.safetensors")),
    "published adapter": ("audit-result-differs", lambda run: flip(run.output.adapter / "adapter_model.safetensors")),
    "published adapter alone": (
        "audit-result-differs",
        lambda run: [shutil.rmtree(run.workspace.adapter), flip(run.output.adapter / "adapter_model.safetensors")],
    ),
    "no manifest of the result": ("audit-result-differs", lambda run: (run.workspace.adapter / "manifest.json").unlink()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_afterwards_is_found_by_its_digest(run, tmp_path: Path, what: str) -> None:
    identifier, change = CHANGES[what]
    context = context_of(copied(run, tmp_path))
    change(context)
    assert errors(inspect_run(context)) == {identifier}


def test_what_nobody_can_look_at_is_said_and_refuses_nothing(run, tmp_path: Path) -> None:
    context = context_of(copied(run, tmp_path))
    (context.claims_root / "data/train.jsonl").unlink()
    rewrite_report(context, model_files={})
    context.output.provenance.write_text(json.dumps(statement(context, torch="1.0.0", unknown="1")))
    findings = inspect_run(context).findings
    assert [(finding.rule, finding.severity) for finding in findings] == [("audit-not-proven", "warning")] * 3
    said = [finding.message for finding in findings]
    assert "train.jsonl is gone" in said[0]
    assert "no digests of the base model's weights" in said[1]
    assert "made with torch 1.0.0, but here is" in said[2]


def test_the_process_answers_in_one_line_or_reports_why_it_cannot(
    run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = context_of(run)
    arguments = ["--plan", str(run.plan), "--plan-sha256", context.plan_sha256, "--claims-root", str(run.claims)]
    assert main(["look", *arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["checkpoints"][0] == {"step": 2, "world_size": 1, "best_step": None}
    two, four = (str(context.workspace.checkpoints / checkpoint_name(step)) for step in (2, 4))
    assert main(["checkpoints", "--expected", two, "--found", four]) == 0
    assert json.loads(capsys.readouterr().out)["difference"].startswith("param/base_model.model.model.layers.0")
    trained = str(context.workspace.adapter)
    assert main(["results", "--expected", trained, "--found", trained]) == 0
    assert json.loads(capsys.readouterr().out) == {"difference": None}
    assert main(["checkpoints", "--expected", two, "--found", str(tmp_path)]) != 0
    told = capsys.readouterr()
    assert (told.out, "manifest.json" in told.err) == ("", True)


def test_a_file_that_somebody_put_next_to_a_merged_model_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, again = tmp_path / "published", tmp_path / "again"
    for directory in (published, again):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "manifest.json").write_text(json.dumps({"files": [{"name": "config.json"}], "base": directory.name}))

    def difference() -> str | None:
        assert main(["results", "--expected", str(published), "--found", str(again)]) == 0
        answer: str | None = json.loads(capsys.readouterr().out)["difference"]
        return answer

    assert difference() is None
    (published / "modeling.py").write_text("import os")
    assert difference() == "modeling.py was not reproduced"
    (again / "modeling.py").write_text("import sys")
    assert difference() == "modeling.py has different bytes"
    (published / "modeling.py").unlink()
    assert str(difference()).startswith("modeling.py is missing in ")

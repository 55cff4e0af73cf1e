"""The claim that a job works on: what the operator makes of it, and what lies on it, where nothing refuses the settings."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.plan.resolve import resolve
from finetune_operator.children.claims import claims_named_by, workspace_claim
from finetune_operator.children.frozen_run import Owner
from finetune_trainer.context import RunContext
from finetune_trainer.data.read import record_files
from finetune_trainer.preflight.inspection import Inspection
from finetune_trainer.preflight.job_steps import check_start
from tests.pitfalls.manifests import JOB, plans, settled, specs
from tests.unit.finetune_job.rules.manifests import manifest
from tests.unit.finetune_trainer.release.example import example

OWNER = Owner(JOB.namespace, JOB.name, JOB.uid)
CLAIM, TEMPLATE = "workspace.claimName", "workspace.volumeClaimTemplate"
NAMED, MADE = "workspace", "tiny-workspace"


def made(spec: FineTuneJobSpec) -> list[dict[str, Any]]:
    """The claims that the operator makes for a job."""
    template, retain = spec.workspace.volume_claim_template, spec.workspace.retain
    return [] if template is None else [workspace_claim(OWNER, template, retain, None)]


def names(claims: list[dict[str, Any]]) -> list[str]:
    return [claim["metadata"]["name"] for claim in claims]


def test_a_workspace_that_nobody_makes():
    """Pods would mount a claim that neither the user nor the operator makes."""
    found = specs("workspace-claim-or-template", {CLAIM: None})
    for spec, claims in zip(found, ([], [MADE]), strict=True):
        assert MADE in claims_named_by(spec, JOB.name)
        assert resolve(JOB, spec, None).workspace.claim == MADE
        assert names(made(spec)) == claims


def test_a_template_beside_a_claim_is_for_nothing():
    """No pod mounts what would be made of it."""
    changes = {f"{TEMPLATE}.storage": "10Gi"}
    wrong, right = specs("workspace-claim-or-template", changes)
    assert names(made(wrong)) == [MADE]
    assert MADE not in claims_named_by(wrong, JOB.name)
    assert names(made(right)) == []
    plan, fixed = plans("workspace-claim-or-template", changes)
    assert settled(plan) == settled(fixed)
    assert plan.workspace.claim == NAMED


def test_a_named_claim_is_nobodys_to_delete():
    changes = {"workspace.retain": "Delete"}
    wrong, right = specs("retain-with-named-claim", changes)
    assert made(wrong) == made(right) == []
    plan, fixed = plans("retain-with-named-claim", changes)
    assert settled(plan) == settled(fixed)
    template = {CLAIM: None, f"{TEMPLATE}.storage": "10Gi"}
    listening, without = (FineTuneJobSpec.model_validate(manifest({**template, **more})) for more in (changes, {}))
    assert [["ownerReferences" in claim["metadata"] for claim in made(spec)] for spec in (listening, without)] == [
        [True],
        [False],
    ]


def test_results_go_with_a_claim_that_belongs_to_the_job():
    """The garbage collector deletes what the job owns, and what is on it."""
    changes = {
        CLAIM: None,
        f"{TEMPLATE}.storage": "10Gi",
        "workspace.retain": "Delete",
        "output.destination": f"pvc://{MADE}/out",
    }
    found = specs("output-deleted-with-job", changes)
    for spec, owners in zip(found, ([JOB.uid], []), strict=True):
        (claim,) = made(spec)
        plan = resolve(JOB, spec, None)
        assert plan.output.claim == claim["metadata"]["name"]
        assert [owner["uid"] for owner in claim["metadata"].get("ownerReferences", [])] == owners


@pytest.mark.parametrize(
    "records",
    [
        {"data.source": "pvc://data"},
        {"data.source": None, "data.datasets": [{"source": "pvc://other/a.jsonl"}, {"source": "pvc://data/"}]},
        {"data.validation.source": "pvc://data"},
    ],
)
def test_a_job_reads_its_own_files_as_records(tmp_path: Path, records: dict[str, Any]):
    changes = {**records, CLAIM: "data"}
    read = []
    for name, spec in zip(("wrong", "right"), specs("workspace-inside-data", changes), strict=True):
        workspace = {CLAIM: spec.workspace.claim_name}
        if spec.workspace.volume_claim_template is not None:
            workspace[f"{TEMPLATE}.storage"] = spec.workspace.volume_claim_template.storage
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data/a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        made = example(tmp_path / name, {**records, **workspace}).context
        read.append({path.name for path in record_files(made.claims_root / "data")})
    assert read == [{"a.jsonl", "history.jsonl", "preflight.json", "manifest.json"}, {"a.jsonl"}]


def test_a_claim_that_is_made_for_a_job_holds_no_checkpoint_yet(tmp_path: Path):
    changes = {CLAIM: None, f"{TEMPLATE}.storage": "10Gi", "training.startFrom": "other-0a1b2c3d/checkpoints/step-0000000100"}
    wrong, right = plans("start-needs-named-claim", changes)
    # The claim of the plan is the one that the operator makes, and a claim that was just made is an empty directory.
    (tmp_path / MADE).mkdir()
    job = RunContext(plan=wrong, plan_sha256="", claims_root=tmp_path, attempt=0)
    structure: Any = SimpleNamespace(batches=(), trainable={})
    (finding,) = check_start(Inspection(job, structure=structure))
    assert (finding.rule, finding.field) == ("start-not-usable", "spec.training.startFrom")
    assert wrong.training.start_from is not None
    assert wrong.training.start_from.claim == MADE
    assert list(check_start(Inspection(replace(job, plan=right), structure=structure))) == []

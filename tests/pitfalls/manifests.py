"""What the rule book says about the manifest that comes to the settings of a pitfall."""

from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity, RunPlan
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from tests.unit.finetune_job.rules.manifests import applied
from tests.unit.finetune_job.rules.manifests import manifest as changed

JOB = JobIdentity(namespace="default", name="tiny", uid="0123456789abcdef")


def manifest(
    fsdp: dict[str, Any] | None = None, *, dtype: str | None = None, merge_base: str = "Original", **method: Any
) -> dict[str, Any]:
    """`spec` of a job with these FSDP settings and this method, on two ranks."""
    return {
        "model": {"source": "pvc://models/base", "dtype": dtype},
        "data": {"source": "pvc://data/train.jsonl"},
        "method": method,
        "training": {"maxSteps": 10},
        "parallelism": {"processesPerNode": 2, "fsdp": fsdp or {}},
        "merge": {"base": merge_base},
        "output": {"destination": "pvc://out/result"},
        "workspace": {"claimName": "workspace"},
    }


def findings(fsdp: dict[str, Any] | None = None, *, profile: FineTuneProfileSpec | None = None, **settings: Any) -> set[str]:
    """Ids of what is found in the job of `manifest`."""
    spec = FineTuneJobSpec.model_validate(manifest(fsdp, **settings))
    return {finding.rule for finding in evaluate(RuleContext(spec, profile))}


def specs(
    rule: str, changes: dict[str, Any], profile: FineTuneProfileSpec | None = None
) -> tuple[FineTuneJobSpec, FineTuneJobSpec]:
    """A job that a rule speaks against, and the one that the rule's own fix makes of it, of which it is silent.

    changes: of the plain job of tests/unit/finetune_job/rules/manifests.py, by path under `spec`. Raises AssertionError where it
    is otherwise.
    """
    wrong = changed(changes)
    found = [
        finding
        for finding in evaluate(RuleContext(FineTuneJobSpec.model_validate(wrong), profile, JOB.name))
        if finding.rule == rule
    ]
    assert found, f"{rule} accepts {changes}"
    right = applied(wrong, found[0].changes)
    assert rule not in {
        finding.rule for finding in evaluate(RuleContext(FineTuneJobSpec.model_validate(right), profile, JOB.name))
    }
    return FineTuneJobSpec.model_validate(wrong), FineTuneJobSpec.model_validate(right)


def plans(rule: str, changes: dict[str, Any], profile: FineTuneProfileSpec | None = None) -> tuple[RunPlan, RunPlan]:
    """What the trainer would get of both: of the refused job as if nothing had refused it, and of the fixed one."""
    wrong, right = specs(rule, changes, profile)
    return resolve(JOB, wrong, profile), resolve(JOB, right, profile)


def settled(plan: RunPlan) -> dict[str, Any]:
    """Everything that a plan makes its containers do; not which of it the user has left open."""
    return plan.model_dump(exclude={"choices"})

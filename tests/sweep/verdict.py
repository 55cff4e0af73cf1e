"""What the three gates say of a case: schema, rules, and preflight's look at the model."""

import traceback
from pathlib import Path

from pydantic import ValidationError

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.finding import Finding
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import RunPlan
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from finetune_trainer.added_tokens import remove_made
from finetune_trainer.context import RunContext
from finetune_trainer.preflight.added_tokens import add_tokens, check_rows
from finetune_trainer.preflight.inspection import Inspection
from finetune_trainer.preflight.model_process import check_model
from tests.sweep.case import MODEL_CLAIM, Case
from tests.sweep.material import IDENTITY
from tests.sweep.observation import Verdict

PROFILE = FineTuneProfileSpec(trainer_image="registry.example/trainer")
"""Of CPU ranks, which is where the sweep trains."""


RECURRENT = "packing-with-recurrent-layers"


def verdict_of(case: Case, material: Path, scratch: Path) -> Verdict:
    """Preflight is asked even where rules refuse already, so that both can be judged. scratch: does not exist yet."""
    try:
        spec = FineTuneJobSpec.model_validate(case.spec())
    except ValidationError as error:
        return Verdict(schema_error=str(error)[:500])
    rules = [finding for finding in evaluate(RuleContext(spec, PROFILE)) if finding.severity == "error"]
    crashed = ""
    preflight: list[Finding] = []
    try:
        plan = resolve(IDENTITY, spec, PROFILE)
        scratch.mkdir()
        (scratch / MODEL_CLAIM).symlink_to(material / MODEL_CLAIM)
        preflight = _errors(plan, scratch)
        if [finding.rule for finding in preflight] == [RECURRENT]:
            # Preflight stops here, and what the user would hear next is to be judged, too.
            preflight += _errors(plan.model_copy(update={"data": plan.data.model_copy(update={"packing": False})}), scratch)
    except Exception as error:  # noqa: BLE001 - a gate must never end so, and a case shows that it did
        crashed = f"{type(error).__name__}: {error} ({traceback.format_exc(limit=-2)})"[:600]
    return Verdict(
        rules=tuple(finding.rule for finding in rules),
        preflight=tuple(finding.rule for finding in preflight),
        messages={finding.rule: finding.message[:1000] for finding in (*rules, *preflight)},
        fields={finding.rule: _fields(finding) for finding in (*rules, *preflight)},
        crashed=crashed,
    )


def _fields(finding: Finding) -> tuple[str, ...]:
    return tuple(field.removeprefix("spec.") for field in (finding.field, *(change.field for change in finding.changes)))


def _errors(plan: RunPlan, claims: Path) -> list[Finding]:
    context = RunContext(plan, "", claims, 0)
    findings, added = add_tokens(context) if plan.model.added_tokens else ([], None)
    if not findings:
        context = context.with_trained_rows()
        structure, findings = check_model(context.plan, context.base_model)
        findings += check_rows(Inspection(context, added=added, structure=structure))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        remove_made(context.workspace.added_tokens, context.workspace.base_with_tokens)
    return errors

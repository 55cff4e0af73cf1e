"""Hostile manifests on the real API server next to the models and the rules: what one takes, no other may choke on."""

import json
import os
from collections import Counter
from random import Random

import pytest
from pydantic import ValidationError

from finetune_cli.manifest import parse_job as parse_strictly
from finetune_job.api.job import FineTuneJobSpec, parse_job
from finetune_job.finding import INVALID_FIELD
from finetune_job.names import JOB_KIND
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from tests.hostile.manifests import job_of
from tests.integration.kube import Document, Kube, RefusedError
from tests.integration.test_gates import conditions_of, identifiers
from tests.integration.workload import Workload
from tests.support.source_seed import seed_of_the_sources

pytestmark = pytest.mark.integration
SEED = int(os.environ.get("HOSTILE_SEED", seed_of_the_sources()))
# No schema can describe the values of these fields: the models alone judge them.
FREE_FORM = {"spec.method.settings", "spec.data.templateArguments"}
MANIFESTS = 2000 if "HOSTILE_SEED" in os.environ else 250
REFUSALS = (400, 413, 422)  # Malformed, too large, not valid: any other status is a fault of the server's side.


def offered(kube: Kube, namespace: str, document: Document, validation: str) -> tuple[Document | None, list[Document]]:
    """What the API server would store, or why it refuses."""
    path = kube.path(JOB_KIND, namespace) + f"?dryRun=All&fieldValidation={validation}"
    try:
        return kube.request("POST", path, document), []
    except RefusedError as refusal:
        if refusal.code not in REFUSALS:
            raise
        status = json.loads(str(refusal).partition(": ")[2])
        return None, list((status.get("details") or {}).get("causes") or [{"field": "", "message": status["message"]}])


def errors_of(spec: FineTuneJobSpec) -> set[str]:
    return {finding.rule for finding in evaluate(RuleContext(spec)) if finding.severity == "error"}


def seen_by_the_operator(stored: Document) -> FineTuneJobSpec | None:
    """Return the spec, or None where a free-form field holds what its model refuses."""
    try:
        return parse_job(stored).spec
    except ValidationError as error:
        places = {".".join(map(str, details["loc"])) for details in error.errors()}
    assert places <= {*FREE_FORM, "spec"}, places
    return None


def compared(kube: Kube, namespace: str, document: Document, validation: str) -> str:
    """Offer one manifest to both sides; the outcome."""
    stored, causes = offered(kube, namespace, document, validation)
    parsed = parse_strictly(document)
    if stored is not None:
        # What is pruned and filled in is what the operator gets to see.
        if (seen := seen_by_the_operator(stored)) is None:
            return "taken, and refused by the operator"
        if not isinstance(parsed, list):
            assert seen == parsed.spec, "defaults differ"
            errors_of(seen)
        else:
            # Unknown fields were pruned; and where the schema sees nothing, 1.0 comes back as 1.
            assert validation == "Ignore" or {finding.field for finding in parsed} <= FREE_FORM, parsed
        return "taken"
    broken = conditions_of(causes)
    if not isinstance(parsed, list):
        assert broken, f"the models take what the schema refuses: {causes}"
        assert identifiers(broken) <= errors_of(parsed.spec), causes
        return "refused by a rule"
    return "refused by a rule and unreadable" if identifiers(broken) - {INVALID_FIELD} else "unreadable"


@pytest.mark.timeout(900)
def test_what_one_side_takes_no_other_side_chokes_on(workload: Workload) -> None:
    random, outcomes, faults = Random(SEED), Counter[str](), []
    for number in range(MANIFESTS):
        document = job_of(random)
        try:
            # Half a pair of surrogates is no text in any encoding.
            json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
            parse_strictly(document)
        except (ValueError, RecursionError):
            outcomes["no JSON"] += 1
            continue
        try:
            outcomes[compared(workload.kube, workload.namespace, document, "Ignore" if number % 4 == 0 else "Strict")] += 1
        except AssertionError as fault:
            faults.append(f"{number}: {str(fault)[:600]}\n   {json.dumps(document)[:600]}")
    assert not faults, f"HOSTILE_SEED={SEED}, {len(faults)} of {MANIFESTS}:\n" + "\n".join(faults[:12])
    assert min(outcomes[kind] for kind in ("taken", "refused by a rule", "unreadable")) > MANIFESTS / 20, outcomes

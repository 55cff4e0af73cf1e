"""The API server and the rule book: what the one refuses, the other refuses under the same id."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from finetune_cli.manifest import parse_job
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.crd import KEY_LENGTH
from finetune_job.finding import INVALID_FIELD
from finetune_job.names import API_VERSION, JOB_KIND, PROFILE_KIND
from finetune_job.rules.book import evaluate
from finetune_job.rules.cel import CONDITIONS
from finetune_job.rules.rule import RuleContext
from tests.integration.conftest import Installed
from tests.integration.kube import Document, Kube, RefusedError
from tests.integration.workload import Workload
from tests.support.cases import table
from tests.unit.finetune_job.rules.manifests import manifest
from tests.unit.finetune_job.rules.test_book_verdicts import CASES

pytestmark = pytest.mark.integration
NO_SOURCE: dict[str, Any] = {"data.source": None}


def datasets(**dataset: str) -> dict[str, Any]:
    return NO_SOURCE | {"data.datasets": [{"source": "pvc://data/a.jsonl"}, dataset]}


ELSEWHERE: list[dict[str, Any]] = table(__file__, "ELSEWHERE")


def job(spec: Document) -> Document:
    return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": "tried"}, "spec": spec}


def answer(kube: Kube, namespace: str, document: Document) -> list[Document]:
    """Why the API server refuses a manifest, one cause for each reason; none where it would take it."""
    try:
        kube.request("POST", kube.path(JOB_KIND, namespace) + "?dryRun=All&fieldValidation=Strict", document)
    except RefusedError as refusal:
        status = json.loads(str(refusal).partition(": ")[2])
        if refusal.code not in (400, 422):
            raise
        return list((status.get("details") or {}).get("causes") or [{"field": "", "message": status["message"]}])
    return []


def conditions_of(causes: Iterable[Document]) -> set[str]:
    known = {condition.message for condition in CONDITIONS}
    return {message for message in known for cause in causes if message in cause["message"]}


def identifiers(messages: Iterable[str]) -> set[str]:
    return {message.partition(": ")[0] for message in messages}


def errors_of(document: Document) -> set[str]:
    """Ids by which the command line refuses a manifest without a profile."""
    parsed = parse_job(document)
    if isinstance(parsed, list):
        return {finding.rule for finding in parsed}
    return {finding.rule for finding in evaluate(RuleContext(parsed.spec)) if finding.severity == "error"}


def test_every_condition_refuses_what_its_rule_refuses_and_nothing_else(workload: Workload) -> None:
    pool = [*(changes for _, bad, good, _ in CASES for changes in (bad, good)), *ELSEWHERE]
    met: set[tuple[str, str]] = set()
    for changes in pool:
        document = job(manifest(changes))
        causes = answer(workload.kube, workload.namespace, document)
        broken = conditions_of(causes)
        errors = errors_of(document)
        # Rules are asked only about what the models take; the API server tries conditions next to its schema.
        assert identifiers(broken) <= errors or INVALID_FIELD in errors & identifiers(broken), (changes, causes)
        met |= {(message, _place(cause["field"])) for cause in causes for message in broken if message in cause["message"]}
    reported = {message for message, _ in met}
    assert [one.message for one in CONDITIONS if one.message not in reported] == []
    missing = [
        (one.message, one.at)
        for one in CONDITIONS
        if not any(message == one.message and _is_at(one.at, field) for message, field in met)
    ]
    assert missing == []


def _place(field: str) -> str:
    return field.replace("[0]", "[]").replace("[1]", "[]").removeprefix("spec").removeprefix(".")


def _is_at(path: str, field: str) -> bool:
    return field == path or field.startswith(f"{path}.") or path == ""


@pytest.mark.parametrize("pattern", ["rankPattern", "alphaPattern"])
def test_keys_have_a_greatest_length_which_a_schema_cannot_say(workload: Workload, pattern: str) -> None:
    fits, too_long = ({"method.lora": {pattern: {"k" * length: 8}}} for length in (512, 513))
    assert answer(workload.kube, workload.namespace, job(manifest(fits))) == []
    assert errors_of(job(manifest(fits))) == set()
    (cause,) = answer(workload.kube, workload.namespace, job(manifest(too_long)))
    assert cause["field"] == f"spec.method.lora.{pattern}"
    assert KEY_LENGTH in cause["message"]
    assert errors_of(job(manifest(too_long))) == {INVALID_FIELD}


def test_a_plain_manifest_is_taken(workload: Workload) -> None:
    assert answer(workload.kube, workload.namespace, job(manifest({}))) == []


def test_a_profile_without_resources_has_those_of_the_models(installed: Installed) -> None:
    body = {"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": {"name": "bare"}, "spec": {"trainerImage": "trainer"}}
    installed.kube.create(PROFILE_KIND, "", body)
    try:
        stored = installed.kube.get(PROFILE_KIND, "", "bare")
        assert stored is not None
        assert "train" in stored["spec"]["resources"]
        assert FineTuneProfileSpec.model_validate(stored["spec"]) == FineTuneProfileSpec(trainer_image="trainer")
        partly = {"spec": {"resources": {"train": {"cpu": "4"}}}}
        patched = installed.kube.patch(PROFILE_KIND, "", "bare", partly)["spec"]["resources"]["train"]
        assert patched == {"cpu": "4", "memory": "64Gi", "sharedMemory": "8Gi"}
    finally:
        installed.kube.delete(PROFILE_KIND, "", "bare")

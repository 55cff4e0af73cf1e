"""Whatever a container says, the status that follows is one that the API server takes: a refused write would be tried for
ever."""

import json
import os
import re
from collections import Counter
from random import Random
from typing import Any

import pytest

from finetune_job.api.job import parse_job
from finetune_job.failures import EXIT_CODES, FailureClass, Outcome
from finetune_job.finding import Finding
from finetune_job.progress import Progress
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from finetune_operator.decide.pass_result import PassResult
from finetune_operator.decide.reconcile import reconcile
from finetune_operator.decide.stages.validate_stage import status_findings
from finetune_operator.passes.execute import status_document
from tests.hostile.manifests import Document, job_of, status_schema
from tests.support.builders import T0, a_job, observing
from tests.support.source_seed import seed_of_the_sources

SEED = int(os.environ.get("HOSTILE_SEED", seed_of_the_sources()))
REPORTS = 2500
MOST_BYTES = 1 << 20
"""Of 1.5 MiB that etcd holds of an object, spec and all."""
TEXTS = (
    "",
    "a",
    "x" * 4000,
    "é" * 1900,
    "💥" * 900,
    "\ud800",
    "\x00" * 300,
    "sha256:" + "f" * 64,
    "f" * 64,
    "9" * 19,
    "-1",
    "1e9",
)
NUMBERS = (0, 1, -1, 2**31, 2**53, 2**63, 10**40, 1e300, -1e300, 1e12, float("nan"), float("inf"), None, "7", 1.5)
FACTS = (
    "memory_estimate", "memory_limit", "model_digest", "data_hash", "digest", "address", "adapter_sha256", "step", "total_steps",
    "loss", "eval_loss", "checkpoint_step", "mfu", "verification", "rehearsal",
)  # fmt: skip


def problems(value: Any, schema: Document, path: str = "status") -> list[str]:
    """Why the API server would refuse a value, by the structural schema."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    kind = kinds.get(schema.get("type", ""))
    if kind is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        return [f"{path}: {value!r:.60} is no {schema['type']}"]
    found = []
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        found.append(f"{path}: {value} has more than 64 bits")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r:.60} is none of {schema['enum']}")
    if isinstance(value, str | list):
        most = schema.get("maxLength" if isinstance(value, str) else "maxItems")
        if most is not None and len(value) > most:
            found.append(f"{path}: {len(value)} are more than {most}")
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{path}: {value!r:.60} does not match")
    if isinstance(value, list):
        return found + [
            each for number, item in enumerate(value) for each in problems(item, schema["items"], f"{path}[{number}]")
        ]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, inner in value.items():
            found += problems(inner, known[name], f"{path}.{name}") if name in known else [f"{path}.{name} is unknown"]
    return found


def text(random: Random) -> str:
    return random.choice(TEXTS)[: random.choice((3, 40, 5000))]


def served(random: Random) -> str:
    """A text of the API server's, which keeps no half of a pair of surrogates."""
    return text(random).encode(errors="replace").decode()


def report_of(random: Random) -> str:
    """A termination message of at most 4,096 bytes, as the kubelet hands it on."""
    findings = [
        {name: text(random)[:200] for name in ("rule", "severity", "field", "value", "message", "fix")}
        for _ in range(random.choice((0, 1, 20)))
    ]
    numbers = {name: random.choice(NUMBERS) for name in ("rank", "node_rank", "step", "time", "attempt", "findings_total")}
    report = {
        "role": text(random),
        "outcome": random.choice([*map(str, Outcome), "Perhaps"]),
        "failure": random.choice([*map(str, FailureClass), None]),
        "message": text(random),
        "hint": text(random),
        "findings": findings,
        "facts": {name: text(random)[:400] for name in random.sample(FACTS, 5)},
        # Most reports must parse, or nothing behind the parser would be tried.
        **{name: number for name, number in numbers.items() if random.random() < 0.3},
    }
    return json.dumps(report, ensure_ascii=random.random() < 0.5).encode(errors="surrogatepass")[:4096].decode(errors="replace")


def progress_of(random: Random) -> Progress | None:
    try:
        return Progress.model_validate({name: random.choice(NUMBERS) for name in Progress.model_fields if random.random() < 0.6})
    except ValueError:
        return None


def observation(random: Random) -> Any:
    seen = observing(a_job())
    seen = random.choice((seen.started, lambda: seen.training(random.choice((0, 7))), seen.trained, seen.merged, seen.fetching))()
    message, coded = report_of(random), random.choice(list(EXIT_CODES.values()))
    for rank in range(random.choice((1, 1, 3))):
        seen = seen.pod(rank, exit_code=random.choice((0, coded, 1, 137)), termination_message=message, reason=served(random))
    seen = seen.batch_job("Complete") if random.random() < 0.4 else seen.batch_job_failed(served(random))
    return seen.but(progress=progress_of(random)).build()


def assert_storable(status: Any, what: object) -> None:
    document = json.loads(json.dumps(status_document(status), allow_nan=False))
    assert problems(document, status_schema()) == [], f"HOSTILE_SEED={SEED}: {what!r:.2000}"
    assert len(json.dumps(document, ensure_ascii=False).encode(errors="surrogatepass")) < MOST_BYTES, what


def test_what_a_container_says_never_makes_a_status_that_is_refused() -> None:
    random, outcomes = Random(SEED), Counter[str]()
    for number in range(REPORTS):
        observed = observation(random)
        try:
            actions = reconcile(observed, T0)
        except Exception as error:
            error.add_note(f"HOSTILE_SEED={SEED}, report {number}: {observed.pods}")
            raise
        outcomes["written" if actions.status is not None else "left alone"] += 1
        if actions.status is not None:
            assert_storable(actions.status, observed.pods)
            outcomes["findings"] += bool(actions.status.findings)
            outcomes["evidence"] += any(attempt.evidence for attempt in actions.status.attempts)
    assert min(outcomes[kind] for kind in ("written", "findings", "evidence")) > REPORTS / 50, outcomes


def test_what_the_rules_say_of_any_manifest_can_be_stored() -> None:
    random, judged = Random(SEED), 0
    for _ in range(REPORTS):
        try:
            spec = parse_job(job_of(random)).spec
        except (ValueError, RecursionError):
            continue
        result = PassResult(observing(a_job()).build().job, T0)
        result.set(findings=status_findings(evaluate(RuleContext(spec))))
        assert_storable(result.actions().status, spec)
        judged += 1
    assert judged > REPORTS / 5


@pytest.mark.parametrize("letter", ["x", "é", "💥"])
def test_64_findings_of_the_longest_texts_fit_into_an_object(letter: str) -> None:
    texts = dict.fromkeys(("field", "value", "message", "fix", "source"), letter * 10_000)
    findings = [Finding(rule=f"rule-{number}", severity="error", **texts) for number in range(100)]
    result = PassResult(observing(a_job()).build().job, T0)
    result.set(findings=status_findings(findings))
    status = result.actions().status
    assert status is not None
    assert len(status.findings) == 64
    assert all(finding.message for finding in status.findings)
    assert_storable(status, letter)

"""`python -m finetune_operator.check_release`: the program that `helm test` runs, with its own permission to create jobs and to
use one claim.

It creates an object only if it is given a job to run. Other jobs are only dry runs, to see whether the API server accepts them.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.config import ConfigException
from prometheus_client.parser import text_string_to_metric_families

from finetune_job.names import API_VERSION, JOB_KIND
from finetune_operator.client.access import load_configuration
from finetune_operator.client.answers import ApiError, ApiUnreachableError, Document, read_at_most
from finetune_operator.client.api import Api
from finetune_operator.client.kinds import JOBS
from finetune_operator.client.raw_objects import Fields

CLAIM = "finetune-test"
"""The claim that the chart lets this program use; it need not exist."""
FOREIGN_CLAIM = "not-for-finetune-test"
JOB: Document = {
    "apiVersion": API_VERSION,
    "kind": JOB_KIND,
    "metadata": {"generateName": "finetune-test-"},
    "spec": {
        "model": {"source": f"pvc://{CLAIM}/model"},
        "data": {"source": f"pvc://{CLAIM}/train.jsonl", "format": "PromptCompletion"},
        "training": {"epochs": 1, "globalBatchSize": 16},
        "workspace": {"claimName": CLAIM},
        "output": {"destination": f"pvc://{CLAIM}/results"},
    },
}
RUN = "finetune-test"
"""Name of the job that is really run, rather than submitted as a dry run."""
LOOK_SECONDS = 2.0
METRICS_SECONDS = 10.0
METRICS_BYTES = 64 << 20


def job_with(field: str, value: Any) -> Document:
    """Return JOB with another value in one field of its spec. `field`: `part.field`, such as `training.epochs`."""
    part, name = field.split(".")
    job = copy.deepcopy(JOB)
    job["spec"][part][name] = value
    return job


async def _try(api: Api, namespace: str, job: Document, code: int, message: str) -> str:
    """Submit a job as a dry run. Returns what is wrong with the API server's answer. `code`: expected status, 201 if accepted."""
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    try:
        await api.request("POST", JOBS.path(namespace), query, body=job)
    except ApiError as error:
        return "" if error.code == code and message in error.message else str(error)
    return "" if code == 201 else "the API server accepts it"


async def run_job(api: Api, namespace: str, spec: Document, seconds: float) -> str:
    """Run a job to its end. Returns what went wrong; empty if it succeeded. A successful job is deleted; any other is kept for
    inspection.
    """
    job = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": RUN}, "spec": spec}
    inspect = f"inspect it with kubectl describe finetunejob {RUN} --namespace {namespace}, then delete it"
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    try:
        uid = Fields(await api.create(JOBS, namespace, job)).at("metadata").name("uid")
        while True:
            status = Fields(await api.get(JOBS, namespace, RUN) or {}).at("status")
            phase = status.name("phase") or "not seen by an operator yet"
            if phase == "Succeeded":
                await api.delete(JOBS, namespace, RUN, uid=uid)
                return ""
            if phase in ("Failed", "Cancelled", "Stalled"):
                return f"it is {phase}; {inspect}"
            if loop.time() > end:
                return f"after {seconds:.0f} s it is {phase}; {inspect}"
            await asyncio.sleep(LOOK_SECONDS)
    except ApiError as error:
        return f"{RUN} remains from an earlier test; {inspect}" if error.code == 409 else str(error)


@dataclass(frozen=True)
class MetricsAddress:
    """The address of the operator's metrics, and how to read them."""

    address: str
    authorities: Path | None = None
    """File with the CA certificates to verify the server's certificate; None for the system's."""
    token: Path | None = None
    """File with the token to send; None for no token."""


async def read_metrics(metrics: MetricsAddress) -> str:
    """Read the metrics. Returns what went wrong; empty on success. Raises OSError if a file is missing."""
    address = metrics.address
    context = ssl.create_default_context(cafile=None if metrics.authorities is None else str(metrics.authorities))
    headers = {} if metrics.token is None else {"Authorization": f"Bearer {metrics.token.read_text().strip()}"}
    try:
        timeout = aiohttp.ClientTimeout(total=METRICS_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(address, ssl=context) as answer,
        ):
            if answer.status != 200:
                return f"{address} answers with status {answer.status}"
            text = (await read_at_most(answer.content, METRICS_BYTES)).decode()
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
        reason = str(error) or type(error).__name__
        return f"{address}: {reason}; is the operator running, and does networkPolicy.metricsFrom let this pod in?"
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        return f"{address}: not in Prometheus' format: {error}"
    return "" if any(family.samples for family in families) else f"{address} has no metrics"


async def check(
    namespace: str, metrics: MetricsAddress | None, job: Document | None, job_seconds: float, *, is_admission_asked: bool
) -> list[tuple[str, str]]:
    """Run all checks of a release. Returns the name of each failed check with the problem that it found.

    Args:
        namespace: a namespace that the operator serves.
        metrics: where the metrics are; None if they are not read.
        job: spec of a job to run; None to run none.
        job_seconds: longest time that the job may take.
        is_admission_asked: whether the release contains the admission policy for authors of jobs.

    Raises:
        ApiUnreachableError, ConfigException: nothing can be checked.
    """
    api = Api(await load_configuration())
    try:
        checks = [
            ("a good FineTuneJob is accepted", await _try(api, namespace, JOB, 201, "")),
            (
                "a FineTuneJob with an invalid value is refused, and the message names the field",
                await _try(api, namespace, job_with("training.globalBatchSize", 0), 422, "spec.training.globalBatchSize"),
            ),
        ]
        if is_admission_asked:
            foreign = job_with("workspace.claimName", FOREIGN_CLAIM)
            problem = await _try(
                api, namespace, foreign, 403, f"spec.workspace.claimName: you may not use the claim {FOREIGN_CLAIM}"
            )
            checks.append(("a FineTuneJob that names a claim which its author may not use is refused", problem))
        if job is not None:
            checks.append(("the FineTuneJob of the values succeeds", await run_job(api, namespace, job, job_seconds)))
    finally:
        await api.close()
    if metrics is not None:
        checks.append(("the operator's metrics can be read", await read_metrics(metrics)))
    return checks


def main(arguments: list[str]) -> int:
    """Print the result of each check. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="finetune_operator.check_release", description="Check an installed release.")
    parser.add_argument("--namespace", required=True, help="a served namespace")
    parser.add_argument("--metrics", help="address of the operator's metrics; without it, they are not read")
    parser.add_argument("--metrics-ca", type=Path, help="CA certificates that verify the metrics server's certificate")
    parser.add_argument("--metrics-token", type=Path, help="token that may read the metrics")
    parser.add_argument("--admission", action="store_true", help="the release contains the policy for authors of jobs")
    parser.add_argument("--job", type=json.loads, help="spec of a job to run, in JSON; without it, no job runs")
    parser.add_argument("--job-seconds", type=float, default=1800.0, help="how long the job may take, in seconds")
    given = parser.parse_args(arguments)
    metrics = None if given.metrics is None else MetricsAddress(given.metrics, given.metrics_ca, given.metrics_token)
    try:
        checks = asyncio.run(check(given.namespace, metrics, given.job, given.job_seconds, is_admission_asked=given.admission))
    except (ApiUnreachableError, ConfigException) as error:
        print(f"failed: the API server cannot be reached: {error}")
        return 1
    for what, problem in checks:
        print(f"failed: {what}: {problem}" if problem else f"passed: {what}")
    return 1 if any(problem for _, problem in checks) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

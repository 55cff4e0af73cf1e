"""Provenance.json: an in-toto statement (v1) with a SLSA provenance predicate (v1) over every published weight file.

It says what was made, from what, by what, so that whoever has the files can compare. It is not signed: it proves nothing against
somebody who can replace the files and the statement together. Formats: https://in-toto.io/Statement/v1 and
https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from finetune_job.names import GROUP, JOB_KIND
from finetune_trainer.release.facts import DataSource, RunFacts

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = f"https://{GROUP}/{JOB_KIND}/v1"
"""The build: a plan, resolved from a FineTuneJob, carried out on a base model and data."""
BUILDER = f"https://{GROUP}/trainer"
PACKAGE = "finetune-operator"
LIBRARIES = ("torch", "transformers", "peft", "safetensors")
_PLAN = "planSha256"
_LEARNT_FROM = ("model", "data", "method", "training", "evaluation", "merge")
_IMAGE_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})$")


def statement(facts: RunFacts, weights: Mapping[str, str]) -> dict[str, Any]:
    """The statement. `weights`: SHA-256 by name at the destination."""
    plan = facts.plan
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": weights[name]}} for name in sorted(weights)],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": plan.model_dump(mode="json", include=set(_LEARNT_FROM)),
                "internalParameters": {
                    _PLAN: facts.plan_sha256,
                    "learningSha256": facts.learning_sha256,
                    "trainedStep": facts.trained_step,
                    "parallelism": plan.parallelism.model_dump(mode="json"),
                },
                "resolvedDependencies": _dependencies(facts),
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": _versions()},
                "metadata": {"invocationId": f"{plan.job.namespace}/{plan.job.name}/{plan.job.uid}"},
                "byproducts": [{"name": "prepared data", "digest": {"sha256": facts.data_hash}}],
            },
        },
    }


def encode(document: Mapping[str, Any]) -> bytes:
    """Equal statements give equal bytes."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode()


def stated_plan(encoded: bytes) -> str | None:
    """SHA-256 of the plan that a statement of `encode` is about; None where it is none."""
    try:
        return str(json.loads(encoded)["predicate"]["buildDefinition"]["internalParameters"][_PLAN])
    except (ValueError, KeyError, TypeError):
        return None


def _dependencies(facts: RunFacts) -> list[dict[str, Any]]:
    found = [_base(facts)]
    for source in facts.sources:
        found += _files(source)
    image = facts.plan.placement.trainer_image if facts.plan.placement is not None else None
    if image is not None:
        match = _IMAGE_DIGEST.search(image)
        entry: dict[str, Any] = {"name": "trainer image", "uri": f"oci://{image}"}
        found.append(entry | ({"digest": {"sha256": match[1]}} if match else {}))
    return found


def _base(facts: RunFacts) -> dict[str, Any]:
    digest = {"gitCommit": facts.plan.model.revision} if facts.plan.model.revision else {}
    if facts.model_digest is not None:
        digest["modelDigest"] = facts.model_digest
    entry: dict[str, Any] = {"name": "base model", "uri": facts.base_source}
    if digest:
        entry["digest"] = digest
    if facts.model_digest is not None:
        entry["annotations"] = {"modelDigest": "SHA-256 over configuration, index, headers and file sizes"}
    return entry


def _files(source: DataSource) -> list[dict[str, Any]]:
    about: dict[str, Any] = {"name": f"{source.split} data", "annotations": {"weight": source.weight}}
    if not source.files:
        return [about | {"uri": source.source}]
    commit = {"gitCommit": source.revision} if source.revision else {}
    return [
        about | {"uri": "/".join(filter(None, (source.source.rstrip("/"), file.name))), "digest": {"sha256": file.sha256} | commit}
        for file in source.files
    ]


def _versions() -> dict[str, str]:
    found = {}
    for package in (PACKAGE, *LIBRARIES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout, where the package itself is not installed
            continue
    return found

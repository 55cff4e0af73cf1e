"""Writes the files beside the weights; SHA256SUMS is written last, so it exists only when everything else does.

provenance.json is an in-toto statement (https://in-toto.io/Statement/v1) with a SLSA provenance predicate
(https://slsa.dev/provenance/v1) over every published weight file. It is not signed itself; publishing can sign the list that
names it (`sign.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finetune_job.api.training import GradientReduction
from finetune_job.layout import OutputLayout
from finetune_job.names import GROUP, JOB_KIND
from finetune_trainer.files import file_sha256, read_own, write_durably
from finetune_trainer.release.card import adapter_card, model_card
from finetune_trainer.release.checksums import checksums_match, hashed_weights, remove_checksums, write_checksums
from finetune_trainer.release.facts import DataSource, RunFacts
from finetune_trainer.release.files import CARD, ReleaseLayout

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = f"https://{GROUP}/{JOB_KIND}/v1"
"""Type of the build: a plan, resolved from a FineTuneJob, carried out on a base model and data."""
BUILDER = f"https://{GROUP}/trainer"
PACKAGE = "finetune-operator"
LIBRARIES = ("torch", "transformers", "peft", "safetensors")
_PLAN = "planSha256"
_LEARNT_FROM = ("model", "data", "method", "training", "evaluation", "merge")
_IMAGE_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})$")


def write_release_files(output: OutputLayout, facts: RunFacts) -> dict[str, str]:
    """Write card, provenance and checksums beside the weights; returns their digests, by the names of the report's facts.

    Existing equal files are left alone. Raises OSError, CheckpointError.
    """
    layout = facts.layout
    if layout.needs_adapter_card:
        _write(output, output.adapter / CARD, adapter_card(facts))
    _write(output, output.model_card, model_card(facts))
    weights = {layout.at_destination(name): sha256 for name, sha256 in hashed_weights(output, layout).items()}
    _write(output, output.provenance, encode_statement(provenance_statement(facts, weights)).decode())
    write_checksums(output, layout)
    return release_digests(output)


def is_complete(output: OutputLayout, layout: ReleaseLayout, plan_sha256: str, digests: Mapping[str, str]) -> bool:
    """Whether the results of this plan are complete and hold files with these digests, by their names in the results."""
    if not checksums_match(output, layout, digests):
        return False
    is_file = output.provenance.is_file() and not output.provenance.is_symlink()
    return is_file and plan_sha256_of_statement(read_own(output.provenance)) == plan_sha256


def release_digests(output: OutputLayout) -> dict[str, str]:
    """Digests of the files that describe complete results. Raises OSError."""
    described = {"model_card": output.model_card, "provenance": output.provenance, "checksums": output.checksums}
    if output.report.is_file():  # an earlier release wrote none
        described["report"] = output.report
    return {f"{name}_sha256": file_sha256(path) for name, path in described.items()}


def _write(output: OutputLayout, path: Path, text: str) -> None:
    content = text.encode()
    if path.is_file() and not path.is_symlink() and read_own(path) == content:
        return
    remove_checksums(output)
    write_durably(path, content)


def provenance_statement(facts: RunFacts, weights: Mapping[str, str]) -> dict[str, Any]:
    """The in-toto statement. weights: SHA-256 by name at the destination."""
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
                    "reduction": plan.training.reduction,
                    "virtualRanks": plan.parallelism.world_size if plan.training.reduction is GradientReduction.ORDERED else None,
                    "attempts": [
                        {
                            "attempt": attempt.number,
                            "firstStep": attempt.first_step,
                            "lastStep": attempt.last_step,
                            "worldSize": attempt.world_size,
                            "device": attempt.device,
                        }
                        for attempt in facts.attempts
                    ],
                },
                "resolvedDependencies": _dependencies(facts),
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": versions()},
                "metadata": {"invocationId": f"{plan.job.namespace}/{plan.job.name}/{plan.job.uid}"},
                "byproducts": [{"name": "prepared data", "digest": {"sha256": facts.data_hash}}],
            },
        },
    }


def encode_statement(document: Mapping[str, Any]) -> bytes:
    """Encode a statement. Equal statements give equal bytes."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode()


def plan_sha256_of_statement(encoded: bytes) -> str | None:
    """SHA-256 of the plan of a statement that `encode_statement` encoded; None for anything else."""
    try:
        return str(json.loads(encoded)["predicate"]["buildDefinition"]["internalParameters"][_PLAN])
    except (ValueError, KeyError, TypeError):
        return None


def _dependencies(facts: RunFacts) -> list[dict[str, Any]]:
    dependencies = [_base(facts)]
    for source in facts.sources:
        dependencies += _files(source)
    image = facts.plan.placement.trainer_image if facts.plan.placement is not None else None
    if image is not None:
        match = _IMAGE_DIGEST.search(image)
        entry: dict[str, Any] = {"name": "trainer image", "uri": f"oci://{image}"}
        dependencies.append(entry | ({"digest": {"sha256": match[1]}} if match else {}))
    return dependencies


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
        about
        | {"uri": "/".join(filter(None, (source.source.rstrip("/"), file.name))), "digest": {"sha256": file.sha256} | commit}
        for file in source.files
    ]


def versions() -> dict[str, str]:
    """Versions of this product and of the libraries that make the weights."""
    installed = {}
    for package in (PACKAGE, *LIBRARIES):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:  # run from a checkout, where the package itself is not installed
            continue
    return installed

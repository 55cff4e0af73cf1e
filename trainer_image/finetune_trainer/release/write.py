"""Writes the files next to the weights. SHA256SUMS is written last, so it exists only if all other files do.

provenance.json is an in-toto statement (https://in-toto.io/Statement/v1) with a SLSA provenance predicate
(https://slsa.dev/provenance/v1) over every published weight file. The statement is not signed; publishing can sign SHA256SUMS,
which lists it (`sign.py`).
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
from finetune_trainer.release.facts import RunFacts
from finetune_trainer.release.files import CARD, ReleaseLayout

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = f"https://{GROUP}/{JOB_KIND}/v1"
"""Type of the build: the plan of a FineTuneJob was carried out on a base model and data."""
BUILDER = f"https://{GROUP}/trainer"
PACKAGE = "finetune-operator"
LIBRARIES = ("torch", "transformers", "peft", "safetensors")
_PLAN = "planSha256"
_LEARNT_FROM = ("model", "data", "method", "training", "evaluation", "merge")
_IMAGE_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})$")


def write_release_files(output: OutputLayout, facts: RunFacts) -> dict[str, str]:
    """Write card, provenance and checksums next to the weights. Return their digests, by the names of the report's facts.

    Files that already have the right content are left alone. Raises OSError, CheckpointError.
    """
    layout = facts.layout

    def write(path: Path, content: bytes) -> None:
        if not path.is_file() or path.is_symlink() or read_own(path) != content:
            remove_checksums(output)
            write_durably(path, content)

    if layout.needs_adapter_card:
        write(output.adapter / CARD, adapter_card(facts).encode())
    write(output.model_card, model_card(facts).encode())
    weights = {layout.at_destination(name): sha256 for name, sha256 in hashed_weights(output, layout).items()}
    write(output.provenance, encode_statement(provenance_statement(facts, weights)))
    write_checksums(output, layout)
    return release_digests(output)


def is_complete(output: OutputLayout, layout: ReleaseLayout, plan_sha256: str, digests: Mapping[str, str]) -> bool:
    """Whether this plan's results are complete and hold files with these digests. digests: SHA-256 by name in the results."""
    is_file = output.provenance.is_file() and not output.provenance.is_symlink()
    if not is_file or not checksums_match(output, layout, digests):
        return False
    try:
        statement = json.loads(read_own(output.provenance))
        return bool(statement["predicate"]["buildDefinition"]["internalParameters"][_PLAN] == plan_sha256)
    except (ValueError, KeyError, TypeError):
        return False


def release_digests(output: OutputLayout) -> dict[str, str]:
    """Return the digests of the files that describe complete results. Raises OSError."""
    described = {"model_card": output.model_card, "provenance": output.provenance, "checksums": output.checksums}
    if output.report.is_file():  # earlier releases of this product wrote no report
        described["report"] = output.report
    return {f"{name}_sha256": file_sha256(path) for name, path in described.items()}


def provenance_statement(facts: RunFacts, weights: Mapping[str, str]) -> dict[str, Any]:
    """Return the in-toto statement. weights: SHA-256 of each weight file, by name at the destination."""
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
                            "attempt": start.attempt,
                            "firstStep": start.step,
                            "lastStep": last.step,
                            "worldSize": start.world_size,
                            "device": start.device,
                        }
                        for start, last in facts.attempts
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


def _dependencies(facts: RunFacts) -> list[dict[str, Any]]:
    """List base model, data files and trainer image, with their digests as far as they are known."""
    digest = {"gitCommit": facts.plan.model.revision} if facts.plan.model.revision else {}
    base: dict[str, Any] = {"name": "base model", "uri": facts.base_source}
    if facts.model_digest is not None:
        digest["modelDigest"] = facts.model_digest
        base["annotations"] = {"modelDigest": "SHA-256 over configuration, index, headers and file sizes"}
    dependencies = [base | ({"digest": digest} if digest else {})]
    for source in facts.sources:
        about: dict[str, Any] = {"name": f"{source.split} data", "annotations": {"weight": source.weight}}
        commit = {"gitCommit": source.revision} if source.revision else {}
        for file in source.files:
            uri = "/".join(filter(None, (source.source.rstrip("/"), file.name)))
            dependencies.append(about | {"uri": uri, "digest": {"sha256": file.sha256} | commit})
        if not source.files:
            dependencies.append(about | {"uri": source.source})
    if facts.plan.placement is not None:
        image = facts.plan.placement.trainer_image
        match = _IMAGE_DIGEST.search(image)
        entry: dict[str, Any] = {"name": "trainer image", "uri": f"oci://{image}"}
        dependencies.append(entry | ({"digest": {"sha256": match[1]}} if match else {}))
    return dependencies


def versions() -> dict[str, str]:
    """Return the versions of this product and of the libraries that compute the weights."""
    installed = {}
    for package in (PACKAGE, *LIBRARIES):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:  # run from a checkout, where the package itself is not installed
            continue
    return installed

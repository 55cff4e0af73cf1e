"""The results of a run that needed no computing, ready to be published: what the publish role reads, and no more."""

import hashlib
from pathlib import Path
from typing import Any

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec, PublishSettings
from finetune_job.plan.digest import canonical_json, plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_trainer.context import RunContext
from finetune_trainer.release.checksums import write_checksums
from finetune_trainer.release.files import release_layout
from tests.unit.finetune_job.rules.manifests import manifest

SMALL = {
    "adapter/adapter_model.safetensors": b"adapter" * 1000,
    "adapter/adapter_config.json": b'{"r": 8}',
    "adapter/manifest.json": b'{"files": {}}',
    "merged/config.json": b'{"model_type": "llama"}',
    "merged/tokenizer.json": b"{}",
    "merged/manifest.json": b'{"files": []}',
    "README.md": b"# A model\n",
    "provenance.json": b'{"_type": "https://in-toto.io/Statement/v1"}',
    "report.html": b"<!DOCTYPE html>",
    "report.json": b'{"version": 1}',
    "verification.json": b'{"passed": true}',
    "verification.md": b"# Verified\n",
}
WEIGHTS = "merged/model-00001-of-00002.safetensors", "merged/model-00002-of-00002.safetensors"


def weights(size: int, seed: str = "weights") -> bytes:
    """Bytes that no compression and no accident makes alike."""
    return hashlib.shake_256(seed.encode()).digest(size)


def finished_run(
    directory: Path, destination: str, *, weight_bytes: tuple[int, int] = (5000, 3000), seed: str = "weights", **settings: Any
) -> RunContext:
    """A context whose merge is done. `settings`: of the profile's publish section. The plan lies beside the claims."""
    profile = FineTuneProfileSpec(trainer_image="trainer@sha256:0", publish=PublishSettings(**settings))
    spec = FineTuneJobSpec.model_validate(manifest({"output.destination": destination}))
    plan = resolve(JobIdentity(namespace="team", name="tuned", uid="0123456789"), spec, profile)
    context = RunContext(plan, plan_sha256(plan), directory / "claims", 0)
    results = SMALL | {
        name: weights(size, f"{seed}{number}") for number, (name, size) in enumerate(zip(WEIGHTS, weight_bytes, strict=True))
    }
    for name, content in results.items():
        path = context.output.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_checksums(context.output, release_layout(plan))
    (directory / "plan.json").write_text(canonical_json(plan))
    return context


def published_files(context: RunContext) -> dict[str, bytes]:
    """Content by name at the destination."""
    places, root = release_layout(context.plan), context.output.root
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {places.at_destination(name): content for name, content in found.items()}


def publish_arguments(context: RunContext, directory: Path, credentials: Path) -> list[str]:
    """Return the arguments of `python -m finetune_trainer`."""
    pairs = {
        "--plan": directory / "plan.json",
        "--plan-sha256": context.plan_sha256,
        "--claims-root": context.claims_root,
        "--termination-log": directory / "termination.json",
        "--credentials": credentials,
    }
    return ["publish", *(str(part) for pair in pairs.items() for part in pair)]

"""A finished run without its computing: plan, workspace, base model and small results in the layout of real ones."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import SplitArrays
from finetune_trainer.inspection.report import ModelReport, read_report
from finetune_trainer.release.adapter_check import ServingReport
from finetune_trainer.release.facts import RunFacts, run_facts
from finetune_trainer.release.files import release_layout
from finetune_trainer.verify.gate import GATES, LogitFigures
from tests.unit.finetune_job.rules.manifests import manifest

IMAGE = "registry.example/trainer@sha256:" + "a" * 64
BASE_COMMIT, DATA_COMMIT = "b" * 40, "d" * 40
FROM_HUB: dict[str, Any] = {
    "model.source": "hf://maker/base",
    "model.revision": BASE_COMMIT,
    "data.source": "hf://datasets/maker/records/train",
    "data.revision": DATA_COMMIT,
}
HISTORY = [
    {"step": 0, "attempt": 0, "eval_loss": 2.5},
    *({"step": step, "attempt": 0, "loss": 2.5 - step / 10, "tokens": 100, "supervised_tokens": 60} for step in range(1, 10)),
    {"step": 10, "attempt": 1, "loss": 1.5, "tokens": 100, "supervised_tokens": 60, "eval_loss": 1.75},
]
BASE_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "README.md": b"---\nlicense: other\nlicense_name: maker-terms\nlicense_link: LICENSE\n---\n# Base\n",
    "LICENSE": b"terms",
}
VERIFIED: Any = SimpleNamespace(
    passed=True,
    faults=(),
    logits=LogitFigures(
        num_prompts=4,
        num_positions=80,
        max_abs_difference=0.01,
        usual_abs_difference=0.01,
        max_abs_logit=10.0,
        mean_kl=1e-4,
        effect_mean_kl=0.5,
        top1_agreement=0.99,
    ),
    gate=GATES["bfloat16"],
    other_logits=None,
    tensors=SimpleNamespace(num_untouched=11, num_changed=28),
)


@dataclass(frozen=True)
class Example:
    """A run up to the description of its results."""

    context: RunContext

    def facts(self, serving: ServingReport | None = None) -> RunFacts:
        plan = self.context.plan
        if serving is None and plan.method.trains_adapter:
            serving = ServingReport((), 16, is_for_llama_cpp=True)
        preflight = read_report(self.context.workspace.model_report)
        return run_facts(self.context, 10, preflight, VERIFIED if plan.merge.enabled else None, serving)

    def results(self) -> RunFacts:
        """Weights and reports, as the merge leaves them; card, provenance and checksums are still to be written."""
        output, places = self.context.output, release_layout(self.context.plan)
        for directory in places.directories:
            write_weights(output.root / directory, directory)
        if self.context.plan.merge.enabled:
            output.verification.write_text('{"passed": true}\n')
            output.verification_page.write_text("# Verification\n")
        output.report.write_text("<!DOCTYPE html>\n")
        output.report_data.write_text('{"version": 1}\n')
        return self.facts()


def example(claims: Path, changes: dict[str, Any] | None = None, name: str = "tuned", **profile: Any) -> Example:
    """A run of the plain manifest with changes."""
    spec = FineTuneJobSpec.model_validate(manifest(changes or {}))
    settings = FineTuneProfileSpec.model_validate({"trainerImage": IMAGE, **profile})
    plan = resolve(JobIdentity(namespace="team", name=name, uid="0123456789"), spec, settings)
    context = RunContext(plan, plan_sha256(plan), claims, 0)
    for directory in (context.workspace.root, context.base_model, context.output.root):
        directory.mkdir(parents=True, exist_ok=True)
    for file, content in BASE_FILES.items():
        (context.base_model / file).write_bytes(content)
    context.workspace.history.write_text("".join(f"{json.dumps(line)}\n" for line in HISTORY))
    context.workspace.model_report.write_text(model_report(context).model_dump_json())
    write_prepared(context.workspace.prepared, {"train": _split()}, prepared_facts())
    return Example(context)


def prepared_facts() -> dict[str, Any]:
    """What preparation says of one directory of records."""
    counts = {"num_records": 30, "num_dropped": 2, "num_tokens": 4321, "num_supervised_tokens": 1234, "weight": 1.0}
    return {
        "pad_token_id": 0,
        "inputs": {"sources": [{"split": "train", "weight": 1.0, "files": [["a.jsonl", "e" * 64], ["b.jsonl", "f" * 64]]}]},
        "datasets": [{"split": "train", "source": "where", "num_occurrences": 28, **counts}],
        "splits": {"train": {"num_sequences": 12, "num_dropped": 2, "num_tokens": 4321}},
    }


def model_report(context: RunContext) -> ModelReport:
    return ModelReport(
        memory={},
        record_lengths={},
        plan_sha256=context.plan_sha256,
        model_digest="c" * 64,
        model_files={},
        data_hash="9" * 64,
        wrap_classes=(),
        fsdp_units=(),
        dtypes={},
        trainable={},
        saved_tensors={},
        train_sequences=12,
        supervised_tokens=1234,
        total_steps=10,
        warnings=(),
    )


def _split() -> SplitArrays:
    ends = np.array([4, 8])
    return SplitArrays(np.arange(8), np.ones(8, dtype=bool), ends, np.array([1, 2]), np.array([4, 4]))


def write_weights(directory: Path, seed: str, shards: int = 2, num_bytes: int = 4096) -> None:
    """A directory with weights and a manifest, as the merge (a list) and training (by name) write them."""
    directory.mkdir(parents=True, exist_ok=True)
    is_adapter = directory.name == "adapter"
    names = ["adapter_model.safetensors"] if is_adapter else [f"model-{number + 1:05d}.safetensors" for number in range(shards)]
    for name in names:
        values = np.frombuffer(hashlib.shake_128(f"{seed}/{name}".encode()).digest(num_bytes), dtype=np.uint8)
        (directory / name).write_bytes(save({"weight": values}))
    (directory / ("adapter_config.json" if is_adapter else "config.json")).write_text("{}\n")
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(directory.iterdir())
        if path.name not in {"manifest.json", "README.md"}
    }
    files: Any = entries if is_adapter else [{"name": name, **entry} for name, entry in entries.items()]
    (directory / "manifest.json").write_text(json.dumps({"files": files}))

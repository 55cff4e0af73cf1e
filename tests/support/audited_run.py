"""A small run that has ended, as `finetune run` leaves it, and people who change it and cover that up.

Cover-up: every digest that depends on what was changed is written again, so that only computing the steps again shows it.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from finetune_cli.local.claims import claims_of
from finetune_cli.local.launch import Interruption
from finetune_cli.local.local_run import RunListener
from finetune_cli.local.replay import Interval, Replay
from finetune_cli.local.run_directory import RunDirectory, RunRecord, read_record, write_record
from finetune_job.layout import checkpoint_name
from finetune_job.names import Role
from finetune_job.plan.digest import canonical_json, learning_sha256, text_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.checkpoint.manifest import MANIFEST, Manifest, decode_manifest
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import MANIFEST_FILE, TRAIN, encoded_manifest, manifest_digest, map_tables
from finetune_trainer.files import file_sha256
from finetune_trainer.inspection.report import ModelReport
from finetune_trainer.train.batches import global_batch
from finetune_trainer.weights.headers import ADAPTER_FILE, SINGLE_FILE, TensorHeader, read_header
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import prepared_split, run_context, tiny_spec, write_model_report

STEPS, EVERY = 8, 2
INTERVALS = tuple(Interval(start, start + EVERY) for start in range(0, STEPS, EVERY))
RECORDS = b'{"prompt": "2 + 2", "completion": "4"}\n'
SPEC = tiny_spec(
    method={"lora": {"r": 4, "loraDropout": "0.1"}},
    training={"maxSteps": STEPS, "reduction": "Ordered"},
    checkpoint={"everySteps": EVERY, "keep": 10},
)


def audited_run(directory: Path, seed: int = 3, *, trains: bool = True) -> RunDirectory:
    """The directory of a run on one of its two virtual ranks; its claims are next to it. `trains`: otherwise only its claims."""
    claims = directory / "claims"
    spec = {**SPEC, "training": {**SPEC["training"], "seed": seed}}
    inputs = {"sources": [{"split": TRAIN, "weight": 1.0, "files": [[".jsonl", hashlib.sha256(RECORDS).hexdigest()]]}]}
    (claims / "data").mkdir(parents=True)
    (claims / "data/train.jsonl").write_bytes(RECORDS)
    context = run_context(claims, spec)
    shutil.rmtree(context.workspace.prepared)
    facts = {"pad_token_id": 256, "splits": [TRAIN], "inputs": inputs}
    data_hash = write_prepared(context.workspace.prepared, {TRAIN: prepared_split(12, 1)}, facts)
    write_model_report(context, reshard_after_forward=True)
    rewrite_report(context, data_hash=data_hash, model_files=model_digests(context))
    if trains:
        assert run_gang(context, world_size=1) == [0]
        shutil.copytree(context.workspace.adapter, context.output.adapter)
    place = RunDirectory(claims / ".finetune/default.tiny")
    place.claims.mkdir(parents=True)
    for use in claims_of(context.plan):
        (claims / use.name).mkdir(exist_ok=True)
        (place.claims / use.name).symlink_to(claims / use.name, target_is_directory=True)
    place.plan.write_text(canonical_json(context.plan))
    write_record(place.record, RunRecord(plan_sha256=context.plan_sha256))
    return place


def copied(place: RunDirectory, directory: Path) -> RunDirectory:
    """A copy of a run and its claims."""
    claims = place.root.parents[1]
    shutil.copytree(claims, directory / "claims", symlinks=True)
    copy = RunDirectory(directory / "claims" / place.root.relative_to(claims))
    for link in list(copy.claims.iterdir()):
        link.unlink()
        link.symlink_to(directory / "claims" / link.name, target_is_directory=True)
    return copy


def context_of(place: RunDirectory) -> RunContext:
    """Return the context of a run as its roles have it."""
    text = place.plan.read_text()
    return RunContext(RunPlan.model_validate_json(text), text_sha256(text), place.claims, 0)


def model_digests(context: RunContext) -> dict[str, str]:
    """Return the digests of the model that preflight records."""
    return {name: file_sha256(context.base_model / name) for name in ("config.json", SINGLE_FILE)}


class ForkedReplay(Replay):
    """Ranks are forks of a process that has imported all, which saves ten seconds an interval."""

    def run(
        self,
        roles: Sequence[Role],
        listener: RunListener,
        interruption: Interruption,
        *,
        ranks: int | None,
        until_step: int | None = None,
    ) -> None:
        assert tuple(roles) == (Role.TRAIN,)
        context = RunContext(self.plan, text_sha256(canonical_json(self.plan)), self.place.claims, 0, until_step=until_step)
        assert set(run_gang(context, world_size=ranks)) == {0}


@dataclass(frozen=True)
class Tampering:
    """A change that was made to a run."""

    what: str
    intervals: tuple[Interval, ...]
    """Each of which shows it when it is computed again; empty: only the result does."""


def change_record(place: RunDirectory, random: Random, _foreign: RunDirectory) -> Tampering:
    """Another token in one of the records."""
    context = context_of(place)
    prepared, training = context.workspace.prepared, context.plan.training
    tables = map_tables(prepared, TRAIN)
    sequence = random.randrange(len(tables.sequence_ends))
    used = [
        step
        for step in range(STEPS)
        if sequence in global_batch(step, training.global_batch_size, training.seed, len(tables.sequence_ends))
    ]
    first = int(tables.sequence_ends[sequence - 1]) if sequence else 0
    document = int(random.choice(tables.sequence_documents[first : int(tables.sequence_ends[sequence])]))
    start = int(tables.document_ends[document - 1]) if document else 0
    path = prepared / TRAIN / "tokens-00000.i4"
    tokens = np.fromfile(path, "<i4")
    index = random.randrange(start, int(tables.document_ends[document]))
    supervised = tokens[index] >= 0
    token = int(tokens[index] if supervised else ~tokens[index])
    other = (token + random.randrange(1, 256)) % 256
    tokens[index] = other if supervised else ~other
    tokens.tofile(path)
    manifest = json.loads((prepared / MANIFEST_FILE).read_bytes())
    manifest["files"][f"{TRAIN}/{path.name}"]["sha256"] = file_sha256(path)
    del manifest["data_hash"]
    manifest["data_hash"] = manifest_digest(manifest)
    (prepared / MANIFEST_FILE).write_bytes(encoded_manifest(manifest))
    rewrite_report(context, data_hash=manifest["data_hash"])
    rewrite_checkpoints(context, data_hash=manifest["data_hash"])
    met = tuple(interval for interval in INTERVALS if any(interval.start <= step < interval.end for step in used))
    return Tampering(f"token {index} is {other} instead of {token}", met)


def change_learning_rate(place: RunDirectory, random: Random, _foreign: RunDirectory) -> Tampering:
    """Another learning rate in the plan, by a tenth of a percent up to twice of it."""
    plan = context_of(place).plan
    rate = plan.training.learning_rate * random.choice((0.5, 0.9, 0.999, 1.001, 1.1, 2.0))
    changed = plan.model_copy(update={"training": plan.training.model_copy(update={"learning_rate": rate})})
    place.plan.write_text(canonical_json(changed))
    context = context_of(place)
    record = read_record(place.record)
    assert record is not None
    write_record(place.record, record.model_copy(update={"plan_sha256": context.plan_sha256}))
    rewrite_report(context, plan_sha256=context.plan_sha256)
    rewrite_checkpoints(context, learning_sha256=learning_sha256(changed))
    for directory in (context.workspace.adapter, context.output.adapter):
        rewrite_result(directory, plan_sha256=context.plan_sha256)
    return Tampering(f"the learning rate is {rate}", INTERVALS)


def change_base(place: RunDirectory, random: Random, _foreign: RunDirectory) -> Tampering:
    """Another value of one weight of a linear layer."""
    context = context_of(place)
    path = context.base_model / SINGLE_FILE
    tensor = random.choice([each for each in read_header(path) if "proj" in each.name or "lm_head" in each.name])
    what = change_value(tensor, random)
    rewrite_report(context, model_files=model_digests(context))
    return Tampering(what, INTERVALS)


def plant_checkpoint(place: RunDirectory, random: Random, foreign: RunDirectory) -> Tampering:
    """A checkpoint of a run with another seed, as if it were this one's."""
    context, other = context_of(place), context_of(foreign)
    step = random.choice([each.end for each in INTERVALS])
    own = context.workspace.checkpoints / checkpoint_name(step)
    origin = decode_manifest((own / MANIFEST).read_bytes()).origin
    shutil.rmtree(own)
    shutil.copytree(other.workspace.checkpoints / own.name, own)
    rewrite_checkpoints(context, **origin.model_dump())
    return Tampering(f"checkpoint {step} is another run's", tuple(each for each in INTERVALS if step in (each.start, each.end)))


def change_result(place: RunDirectory, random: Random, _foreign: RunDirectory) -> Tampering:
    """Another value of the adapter, where it was trained and where it was published."""
    context = context_of(place)
    tensor = random.choice(read_header(context.workspace.adapter / ADAPTER_FILE))
    what = change_value(tensor, random)
    shutil.copyfile(tensor.file, context.output.adapter / ADAPTER_FILE)
    for directory in (context.workspace.adapter, context.output.adapter):
        rewrite_result(directory)
    return Tampering(what, ())


TAMPERINGS: Mapping[str, Callable[[RunDirectory, Random, RunDirectory], Tampering]] = {
    "record": change_record,
    "learning rate": change_learning_rate,
    "base weight": change_base,
    "foreign checkpoint": plant_checkpoint,
    "published adapter": change_result,
}


def change_value(tensor: TensorHeader, random: Random) -> str:
    """Double one float32 of a file, or make it a half if it is zero."""
    values = np.memmap(tensor.file, "<f4", "r+", offset=tensor.offset, shape=(tensor.num_bytes // 4,))
    index = random.randrange(len(values))
    values[index] = values[index] * 2 or 0.5
    values.flush()
    return f"value {index} of {tensor.name} is {values[index]}"


def rewrite_report(context: RunContext, **values: Any) -> None:
    """Change what preflight has reported."""
    path = context.workspace.model_report
    path.write_text(ModelReport.model_validate_json(path.read_bytes()).model_copy(update=values).model_dump_json())


def rewrite_checkpoints(context: RunContext, **origin: Any) -> None:
    """Have all checkpoints say that they are of another run."""
    for path in context.workspace.checkpoints.glob(f"step-*/{MANIFEST}"):
        manifest: Manifest = decode_manifest(path.read_bytes())
        path.write_bytes(manifest.model_copy(update={"origin": manifest.origin.model_copy(update=origin)}).encode())


def rewrite_result(directory: Path, **values: Any) -> None:
    """Have the manifest of a trained result name its files as they are."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes()) | values
    for name, entry in manifest["files"].items():
        entry["sha256"] = file_sha256(directory / name)
    path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")

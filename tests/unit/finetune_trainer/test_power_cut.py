"""Every writer that promises durable results keeps the promise: at no moment does a power cut or a failed sync leave a part that
is taken for the whole, and what was written before the call returned is still there.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from finetune_cli.local.run_directory import freeze, run_directory_of, write_record
from finetune_job.failures import Outcome, TerminationReport
from finetune_trainer.checkpoint.manifest import decode_manifest
from finetune_trainer.context import RunContext
from finetune_trainer.data.shard_writer import write_prepared
from finetune_trainer.data.shards import TRAIN
from finetune_trainer.fetch.staging import FetchManifest, FetchStaging, write_manifest
from finetune_trainer.fetch.transfer import TransferOptions, fetch_file
from finetune_trainer.files import write_durably
from finetune_trainer.inspection.report import RehearsalReport, Verdict
from finetune_trainer.json_lines import read_lines
from finetune_trainer.merge import stream
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.writer import temporary_directory
from finetune_trainer.model.base_with_tokens import make_base_with_tokens
from finetune_trainer.model.first_values import ensure_first_values
from finetune_trainer.observe.run_files import History
from finetune_trainer.ranks.reports import write_rank_report
from finetune_trainer.rehearsal.verdicts import keep_verdict
from finetune_trainer.release.write import write_release_files
from finetune_trainer.roles.merge import merge
from finetune_trainer.termination import run_role
from finetune_trainer.train.export import export
from tests.support.forked_ranks import run_gang
from tests.support.power_cut import PowerCuts, Sync
from tests.support.tiny_model import plan_of, prepared_split, run_context, tiny_spec
from tests.unit.finetune_cli.local_jobs import PLAN
from tests.unit.finetune_trainer.checkpoint import saved_models
from tests.unit.finetune_trainer.fetch.test_transfer import AT_ONCE, Scripted, remote_file
from tests.unit.finetune_trainer.merge import tiny
from tests.unit.finetune_trainer.model.test_base_with_tokens import order
from tests.unit.finetune_trainer.release.example import example

REPORT = TerminationReport(role="train", attempt=1, outcome=Outcome.SUCCEEDED, time=0.0)
Writing = Callable[[], object]


class Inputs:
    """What writers read. Each is made once, when it is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def base_and_adapter(self) -> tuple[Path, Path]:
        base = tiny.save_base(self._directory / "base", tiny.llama(), torch.bfloat16)
        return base, tiny.save_adapter(self._directory / "adapter", base, LoraConfig(r=4, target_modules=["q_proj"]))

    @cached_property
    def trained(self) -> RunContext:
        settings = {"training": {"maxSteps": 1}, "parallelism": {"processesPerNode": 1}}
        context = run_context(self._directory / "claims", tiny_spec(**settings))
        assert run_gang(context) == [0]
        return context

    def trained_in(self, claims: Path) -> RunContext:
        shutil.copytree(self.trained.claims_root, claims, dirs_exist_ok=True)
        return replace(self.trained, claims_root=claims)


def of_a_file(root: Path, _inputs: Inputs) -> Writing:
    (root / "state.json").write_bytes(b"before")
    return partial(write_durably, root / "state.json", b"after")


def of_prepared_data(root: Path, _inputs: Inputs) -> Writing:
    write = partial(write_prepared, root / "prepared", facts={"pad_token_id": 0, "splits": [TRAIN]})
    write(splits={TRAIN: prepared_split(3, 1)})
    return partial(write, splits={TRAIN: prepared_split(5, 2)})


def of_a_checkpoint(root: Path, _inputs: Inputs) -> Writing:
    for step in (1, 2):
        saved_models.write(root, step)
    return partial(saved_models.write, root, 3)


def of_a_trained_adapter(root: Path, inputs: Inputs) -> Writing:
    context = inputs.trained_in(root)
    (checkpoint,) = context.workspace.checkpoints.glob("step-*")
    return partial(export, context, checkpoint, decode_manifest((checkpoint / "manifest.json").read_bytes()), {})


def of_a_merge(root: Path, inputs: Inputs) -> Writing:
    base, adapter = inputs.base_and_adapter
    return partial(merge_adapter, MergeOptions(base, (adapter,), root / "merged", None, 400_000))


def of_a_merge_with_many_records(root: Path, inputs: Inputs) -> Writing:
    def write() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream, "JOURNAL_BYTES", 1)
            of_a_merge(root, inputs)()

    return write


def of_the_merge_role(root: Path, inputs: Inputs) -> Writing:
    return partial(merge, inputs.trained_in(root))


def of_a_fetched_source(root: Path, _inputs: Inputs) -> Writing:
    def write() -> None:
        staging, file = FetchStaging(root / "target"), remote_file(b"x" * 1500)
        staging.open([file])
        options = TransferOptions(AT_ONCE, threading.Event(), lambda _: None, sync_bytes=1000)
        fetched = fetch_file(Scripted(b"x" * 1500, []), file, staging, options)
        write_manifest(root / "target", FetchManifest(source="where", revision=None, files=(fetched,)))
        staging.publish(root / "target")

    return write


def of_a_base_with_tokens(root: Path, _inputs: Inputs) -> Writing:
    made = order(root)
    made.record.parent.mkdir()
    return lambda: make_base_with_tokens(made)


def of_first_values(root: Path, inputs: Inputs) -> Writing:
    plan = plan_of(tiny_spec(method={"type": "LoRA", "lora": {"r": 4, "initLoraWeights": "pissa"}}))
    return partial(ensure_first_values, plan, inputs.trained.base_model, root / "first.safetensors")


def of_release_files(root: Path, _inputs: Inputs) -> Writing:
    made = example(root)
    facts = made.results()
    return partial(write_release_files, made.context.output, facts)


def of_a_rank_report(root: Path, _inputs: Inputs) -> Writing:
    return partial(write_rank_report, root / "reports", REPORT)


def of_a_role_report(root: Path, _inputs: Inputs) -> Writing:
    return partial(run_role, "train", 1, lambda: REPORT, Path("/dev/null"), lambda: bare_context(root))


def of_a_verdict(root: Path, _inputs: Inputs) -> Writing:
    context = bare_context(root)
    context.workspace.root.parent.mkdir(parents=True)
    return partial(keep_verdict, context, "a" * 64, RehearsalReport(verdict=Verdict.PASSED, seconds=9.0, parameters=7))


def of_a_history(root: Path, _inputs: Inputs) -> Writing:
    (root / "history.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return lambda: History(root / "history.jsonl", 1).close()


def of_a_local_run(root: Path, _inputs: Inputs) -> Writing:
    place = run_directory_of(root, PLAN.job)
    place.root.mkdir(parents=True)
    write_record(place.record, freeze(place, PLAN))
    return lambda: write_record(place.record, freeze(place, PLAN))


def bare_context(claims: Path) -> RunContext:
    return RunContext(plan_of(tiny_spec()), "", claims, 1)


def records_of_a_journal(path: Path) -> Iterator[tuple[Path, int, str]]:
    """What the journals of a merge and of a fetch call durable."""
    if path.name == "merged.tmp-journal":
        for line in path.read_bytes().splitlines()[1:]:
            record = json.loads(line.partition(b" ")[2])
            yield temporary_directory(path.with_name("merged")) / record["file"], record["num_bytes"], record["sha256"]
    elif path.name == "complete.jsonl":
        for record in read_lines(path.read_text()):
            yield path.parent / "files" / record["path"], record["size"], record["sha256"]


@dataclass(frozen=True)
class Writer:
    """A writer. prepare: makes what is there before, and returns what is then recorded."""

    prepare: Callable[[Path, Inputs], Writing]
    only_logged: Callable[[Sync], bool] = lambda _sync: False
    """Failed syncs that do not end the call, because the file is of no great worth or the report says that it is missing."""
    continues: bool = False
    """Whether the next call goes on with what a failed one has left."""
    most_failures: int = 8
    """Failed syncs that are tried, the last one always among them."""

    def __str__(self) -> str:
        return self.prepare.__name__.removeprefix("of_").replace("_", " ")


WRITERS = [
    *map(
        Writer,
        (
            of_a_file,
            of_prepared_data,
            of_a_base_with_tokens,
            of_first_values,
            of_release_files,
            of_a_rank_report,
            of_a_history,
            of_a_local_run,
        ),
    ),
    *(Writer(each, only_logged=lambda _sync: True) for each in (of_a_role_report, of_a_verdict)),
    *(Writer(each, continues=True) for each in (of_a_merge, of_a_merge_with_many_records, of_a_fetched_source)),
    Writer(of_a_trained_adapter, most_failures=4),
    Writer(of_the_merge_role, continues=True, most_failures=3),
    # The file that names the latest checkpoint is for people.
    Writer(of_a_checkpoint, only_logged=lambda sync: sync.name.startswith("latest") or sync == Sync(".", 2)),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_no_power_cut_and_no_failed_sync_leaves_a_part_for_the_whole(
    writer: Writer, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(failing: Sync | None = None) -> PowerCuts:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        write = writer.prepare(root, inputs)
        with monkeypatch.context() as patch:
            cuts = PowerCuts(root, patch, failing, records_of_a_journal)
            if failing is None or writer.only_logged(failing):
                write()
            else:
                with pytest.raises(Exception, match="Input/output error"):
                    write()
        assert cuts.problems == []
        return cuts

    whole = written()
    assert whole.syncs
    assert whole.losses() == []
    # The first sync of each name, and the last of each directory.
    syncs = [sync for sync in whole.syncs if sync.number == 1 or (whole.root / sync.name).is_dir()]
    for failing in syncs[:: -max(1, len(syncs) // writer.most_failures)]:
        cuts = written(failing)
        assert cuts.has_failed
        assert writer.continues or not list(cuts.root.rglob("*.tmp-*"))

"""Which roles run, what follows the end of one, and the progress of training. One whole run is a test in tests/e2e."""

import http.server
import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from finetune_cli.commands.run import local_plan
from finetune_cli.exit_codes import ExitCode
from finetune_cli.local import local_run
from finetune_cli.local.claims import claims_of
from finetune_cli.local.launch import Interruption
from finetune_cli.local.local_run import LocalRun, next_step, roles_of
from finetune_cli.local.rank_zero import read_progress
from finetune_cli.local.run_directory import RunDirectory, RunRecord, read_record
from finetune_cli.render.run import LiveView
from finetune_job.api.job import parse_job
from finetune_job.api.status import Restarts
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.progress import Progress
from tests.unit.finetune_cli.local_jobs import PLAN, published
from tests.unit.finetune_cli.manifests import ACCEPTED

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def report(failure: FailureClass | None = None, result: Outcome = Outcome.FAILED) -> TerminationReport:
    return TerminationReport(role="train", outcome=result, failure=failure)


def test_only_what_is_elsewhere_is_fetched():
    assert roles_of(PLAN) == (Role.PREFLIGHT, Role.TRAIN, Role.MERGE)
    document = yaml.safe_load(ACCEPTED)
    document["spec"]["model"]["source"] = "s3://models/base"
    plan = local_plan(parse_job(document), own_output=False)
    assert roles_of(plan) == (Role.FETCH, Role.PREFLIGHT, Role.TRAIN, Role.MERGE)
    uses = claims_of(plan)
    assert [(use.name, use.is_input) for use in uses] == [("workspace", False), ("data", True), ("out", False)]


def test_results_for_elsewhere_are_published_from_the_workspace():
    plan = local_plan(published(), own_output=False)
    assert roles_of(plan) == (Role.PREFLIGHT, Role.TRAIN, Role.MERGE, Role.PUBLISH)
    assert [use.name for use in claims_of(plan)] == ["models", "data", "workspace"]


def test_what_follows_an_end():
    record = RunRecord(plan_sha256="x")
    done = next_step(record, report(None, Outcome.SUCCEEDED), Role.TRAIN, 3, interrupted=False, now=NOW)
    assert done.record.finished == [Role.TRAIN]
    assert done.exit_code is done.again_after_seconds is None
    refused = next_step(record, report(None, Outcome.REFUSED), Role.PREFLIGHT, 3, interrupted=False, now=NOW)
    assert refused.exit_code is ExitCode.REFUSED
    again = next_step(record, report(FailureClass.INTERNAL), Role.TRAIN, 3, interrupted=False, now=NOW)
    assert again.again_after_seconds == 0
    assert (again.record.restarts[Role.TRAIN].counted, list(again.record.restarts)) == (1, [Role.TRAIN])
    later = next_step(again.record, report(FailureClass.INTERNAL), Role.TRAIN, 3, interrupted=False, now=NOW)
    assert later.again_after_seconds > 0
    assert (
        next_step(again.record, report(FailureClass.INTERNAL), Role.TRAIN, 1, interrupted=False, now=NOW).exit_code
        is ExitCode.FAILED
    )
    assert (
        next_step(record, report(FailureClass.USER_DATA), Role.TRAIN, 3, interrupted=False, now=NOW).exit_code is ExitCode.FAILED
    )
    stopped = next_step(record, report(FailureClass.PREEMPTED), Role.TRAIN, 3, interrupted=True, now=NOW)
    assert stopped.exit_code is ExitCode.INTERRUPTED
    assert stopped.record == record


def test_a_new_checkpoint_between_two_failures_is_progress_as_on_a_cluster() -> None:
    record = RunRecord(plan_sha256="x")

    def failed(checkpoint_step: int | None) -> int | None:
        """Restarts in a row afterwards; None: given up."""
        nonlocal record
        step = next_step(
            record, report(FailureClass.DEVICE_FAULT), Role.TRAIN, 0, interrupted=False, now=NOW, checkpoint_step=checkpoint_step
        )
        record = step.record
        return None if step.exit_code is not None else record.restarts[Role.TRAIN].in_a_row

    assert [failed(None) for _ in range(3)] == [1, 2, 3]
    assert [failed(10) for _ in range(6)] == [1, 2, 3, 4, 5, None]
    assert failed(12) == 1
    assert record.restarts[Role.TRAIN].uncounted == 9


@pytest.mark.parametrize(
    ("told", "ends"),
    [([None] * 9, ExitCode.FAILED), ([10] * 9, ExitCode.FAILED), ([10, 20, 30, 40, 50, 60, 70, 80, 90], ExitCode.DONE)],
)
def test_the_checkpoints_that_training_tells_of_are_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[int | None], ends: ExitCode
) -> None:
    """Each attempt tells of a checkpoint and ends with a fault of its device; the tenth succeeds."""
    steps = iter(told)

    place, attempts = RunDirectory(tmp_path), list[int]()

    def launched(*arguments: Any) -> TerminationReport:
        attempts.append(arguments[0].attempt)
        kept = read_record(place.record)
        # Before anything runs under a number it is used up, whoever is killed then.
        assert kept is not None
        assert kept.next_attempt == {Role.TRAIN: attempts[-1] + 1}
        step = next(steps, "done")
        if step == "done":
            return report(None, Outcome.SUCCEEDED)
        progress = Progress(attempt=0, step=90, total_steps=100, checkpoint_step=step)
        monkeypatch.setattr(local_run, "read_progress", lambda *_: progress)
        arguments[-1]()
        return report(FailureClass.DEVICE_FAULT)

    monkeypatch.setattr(local_run, "launch", launched)
    interruption = Interruption()
    monkeypatch.setattr(interruption, "pause", lambda _: None)
    run = LocalRun(place, PLAN, RunRecord(plan_sha256="x"), 0, LiveView(Console(quiet=True), "tune"))
    assert run.execute(0, interruption, [Role.TRAIN]) is ends
    assert attempts == list(range(len(attempts)))
    kept = read_record(place.record)
    assert kept is not None
    assert kept.seconds[Role.TRAIN] > 0


def test_a_command_that_is_given_again_tries_again_what_was_given_up(tmp_path: Path) -> None:
    given_up = Restarts(counted=2, uncounted=7, in_a_row=7, in_a_row_since="2025-12-01T00:00:00Z", at_checkpoint=40)
    record = RunRecord(plan_sha256="x", restarts={Role.FETCH: given_up, Role.TRAIN: given_up})
    unavailable = report(FailureClass.SOURCE_UNAVAILABLE)
    assert next_step(record, unavailable, Role.FETCH, 3, interrupted=False, now=NOW).exit_code is ExitCode.FAILED
    run = LocalRun(RunDirectory(tmp_path), PLAN, record, 0, LiveView(Console(quiet=True), "tune"))
    again = next_step(run.record, unavailable, Role.FETCH, 3, interrupted=False, now=NOW)
    assert (again.exit_code, again.record.restarts[Role.FETCH].in_a_row_since) == (None, "2026-01-01T00:00:00Z")
    assert run.record.restarts[Role.TRAIN] == Restarts(counted=2, uncounted=7, at_checkpoint=40)


def test_progress_is_asked_of_rank_0(tmp_path):
    answer = Progress(attempt=1, step=3, total_steps=10, loss=2.5)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.model_dump_json().encode())

        def log_message(self, *arguments):
            pass

    assert read_progress(tmp_path, 1) is None
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "observe.json").write_text(json.dumps({"port": server.server_address[1], "attempt": 1}))
        assert read_progress(tmp_path, 1) == answer
        assert read_progress(tmp_path, 2) is None
        server.shutdown()
    assert read_progress(tmp_path, 1) is None
    for damaged in ("[]", "{", "[" * 100_000, '{"attempt": 1, "port": []}', '{"attempt": 1, "port": 99999999999999999999}'):
        (tmp_path / "observe.json").write_text(damaged)
        assert read_progress(tmp_path, 1) is None

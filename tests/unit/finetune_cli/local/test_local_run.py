"""Which roles run, what follows the end of one, and the progress of training. One whole run is a test in tests/e2e."""

from __future__ import annotations

import http.server
import json
import threading
from datetime import UTC, datetime

import yaml

from finetune_cli.commands.run import local_plan
from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.claims import claims_of
from finetune_cli.local.local_run import next_step, roles_of
from finetune_cli.local.rank_zero import OBSERVE_FILE, read_progress
from finetune_cli.local.run_directory import RunRecord
from finetune_job.api.job import parse_job
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
        (tmp_path / OBSERVE_FILE).write_text(json.dumps({"port": server.server_address[1], "attempt": 1}))
        assert read_progress(tmp_path, 1) == answer
        assert read_progress(tmp_path, 2) is None
        server.shutdown()
    assert read_progress(tmp_path, 1) is None
    (tmp_path / OBSERVE_FILE).write_text("[]")
    assert read_progress(tmp_path, 1) is None

"""The pure parts of local mode; one real run is a test of its own in tests/e2e."""

from __future__ import annotations

import http.server
import json
import signal
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from finetune_cli.commands.run import local_plan
from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.claims import claims_of, directories, link_claims, parse_claims
from finetune_cli.local.errors import LocalError
from finetune_cli.local.launch import Launch, outcome
from finetune_cli.local.place import freeze, held, place_of, start_fresh
from finetune_cli.local.progress import OBSERVE_FILE, read_progress
from finetune_cli.local.record import RunRecord, read_record, write_record
from finetune_cli.local.stages import next_step, roles_of
from finetune_cli.local.summary import Losses, Summary, losses, summarise
from finetune_cli.render.summary import summary_text
from finetune_job.api.job import parse_job
from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport
from finetune_job.names import Role
from finetune_job.progress import Progress
from tests.unit.cli.manifests import ACCEPTED


def job(**parallelism):
    document = yaml.safe_load(ACCEPTED)
    document["spec"]["parallelism"] |= parallelism
    return parse_job(document)


def published():
    document = yaml.safe_load(ACCEPTED)
    document["spec"]["output"] = {"destination": "s3://results/tuned", "adapter": False}
    return parse_job(document)


PLAN = local_plan(job(), own_output=False)


def report(failure: FailureClass | None = None, result: Outcome = Outcome.FAILED) -> TerminationReport:
    return TerminationReport(role="train", outcome=result, failure=failure)


def test_claims_are_parsed():
    assert parse_claims(["models=/srv/a=b", "data=x"]) == {"models": Path("/srv/a=b"), "data": Path("x")}
    for wrong in ("models", "models=", "=x", "Models=/x"):
        with pytest.raises(LocalError, match="NAME=PATH"):
            parse_claims([wrong])
    with pytest.raises(LocalError, match="once"):
        parse_claims(["a=1", "a=2"])


def test_claims_become_links(tmp_path):
    models = tmp_path / "elsewhere"
    models.mkdir()
    (tmp_path / "claims" / "data").mkdir(parents=True)
    uses = claims_of(PLAN)
    assert [(use.name, use.is_input) for use in uses] == [("models", True), ("data", True), ("workspace", False), ("out", False)]
    places = directories(uses, tmp_path / "claims", {"models": models})
    view = tmp_path / "view"
    for _ in range(2):
        link_claims(uses, places, view)
        assert (view / "models").resolve() == models.resolve()
        assert (view / "out").resolve() == (tmp_path / "claims" / "out").resolve()
        assert {path.name for path in view.iterdir()} == {"models", "data", "workspace", "out"}


def test_a_missing_input_claim_is_named(tmp_path):
    uses = claims_of(PLAN)
    with pytest.raises(LocalError, match=r"spec.model.source: claim models is .*does not exist.*--claim models=PATH"):
        link_claims(uses, directories(uses, tmp_path, {}), tmp_path / "view")


def test_the_plan_of_this_machine():
    assert PLAN.workspace.path == "tuned-local"
    assert PLAN.placement is None
    assert local_plan(job(), own_output=True).output.claim == "output-directory"
    assert local_plan(published(), own_output=True).publish is None
    with pytest.raises(LocalError, match=r"spec.parallelism.nodes: 2 .*processesPerNode") as caught:
        local_plan(job(nodes=2), own_output=False)
    assert caught.value.exit_code is ExitCode.REFUSED


def test_the_command_of_a_role():
    order = Launch(Role.TRAIN, 3, Path("/p/plan.json"), "abc", Path("/c"), Path("/t"), lock=0)
    command = order.command(29500)
    assert command[1:4] == ["-m", "finetune_trainer", "train"]
    text = " ".join(command)
    for part in ("--plan /p/plan.json", "--plan-sha256 abc", "--claims-root /c", "--attempt 3", "--termination-log /t"):
        assert part in text
    assert "--node-rank 0 --master-address 127.0.0.1 --master-port 29500 --observe-port 0" in text
    assert "--node-rank" not in Launch(Role.MERGE, 0, Path("p"), "a", Path("c"), Path("t"), lock=0).command(1)


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, report(None, Outcome.SUCCEEDED), (Outcome.SUCCEEDED, None)),
        (0, None, (Outcome.SUCCEEDED, None)),
        (EXIT_CODES[FailureClass.USER_DATA], report(FailureClass.USER_DATA), (Outcome.FAILED, FailureClass.USER_DATA)),
        (EXIT_CODES[FailureClass.USER_DATA], None, (Outcome.FAILED, FailureClass.USER_DATA)),
        (40, report(None, Outcome.REFUSED), (Outcome.REFUSED, FailureClass.USER_CONFIG)),
        # A report that claims success while the process failed is left over from before the failure.
        (-signal.SIGKILL, report(None, Outcome.SUCCEEDED), (Outcome.FAILED, FailureClass.INTERNAL)),
        (1, None, (Outcome.FAILED, FailureClass.INTERNAL)),
    ],
)
def test_how_a_role_ended(code, said, expected):
    found = outcome(Role.TRAIN, 0, code, said, Path("train-0.log"))
    assert (found.outcome, found.failure) == expected


def test_only_what_lies_elsewhere_is_fetched():
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


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_budget_in_a_record_of_the_first_release_is_the_gangs():
    record = RunRecord.model_validate_json('{"plan_sha256": "x", "restarts": {"counted": 2, "uncounted": 1}}')
    assert (record.restarts[Role.TRAIN].counted, record.restarts[Role.TRAIN].uncounted) == (2, 1)


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
    assert next_step(record, report(FailureClass.USER_DATA), Role.TRAIN, 3, interrupted=False, now=NOW).exit_code is ExitCode.FAILED
    stopped = next_step(record, report(FailureClass.PREEMPTED), Role.TRAIN, 3, interrupted=True, now=NOW)
    assert stopped.exit_code is ExitCode.INTERRUPTED
    assert stopped.record == record


def test_the_plan_is_frozen_until_fresh(tmp_path):
    place = place_of(tmp_path, PLAN.job)
    place.claims.mkdir(parents=True)
    for claim in ("workspace", "out"):
        (tmp_path / claim).mkdir()
        (place.claims / claim).symlink_to(tmp_path / claim)
    record = freeze(place, PLAN).model_copy(update={"next_attempt": {Role.MERGE: 1}})
    write_record(place.record, record)
    assert freeze(place, PLAN) == record
    other = PLAN.model_copy(update={"training": PLAN.training.model_copy(update={"max_steps": 99})})
    with pytest.raises(LocalError, match=r"changed since its last run \(training\).*--fresh"):
        freeze(place, other)
    for path in ("workspace/tuned-local/checkpoints", "workspace/another-job", "out/tuned/merged", "out/tuned/notes"):
        (tmp_path / path).mkdir(parents=True)
    for name in ("verification.json", "verification.md", "provenance.json", "README.md", "SHA256SUMS"):
        (tmp_path / "out/tuned" / name).write_text("of the earlier run")
    start_fresh(place)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if ".finetune" not in path.parts}
    assert left == {"workspace", "workspace/another-job", "out", "out/tuned", "out/tuned/notes"}
    assert freeze(place, other).plan_sha256 != record.plan_sha256


def test_fresh_leaves_a_readme_that_no_merge_has_written(tmp_path):
    place = place_of(tmp_path, PLAN.job)
    place.claims.mkdir(parents=True)
    write_record(place.record, freeze(place, PLAN))
    readme = tmp_path / "out" / "tuned" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("of the user")
    (place.claims / "out").symlink_to(tmp_path / "out")
    start_fresh(place)
    assert readme.exists()


def test_fresh_removes_nothing_without_a_record(tmp_path):
    place = place_of(tmp_path, PLAN.job)
    place.claims.mkdir(parents=True)
    (tmp_path / "out" / "tuned" / "merged").mkdir(parents=True)
    (place.claims / "out").symlink_to(tmp_path / "out")
    start_fresh(place)
    assert (tmp_path / "out" / "tuned" / "merged").exists()


def test_one_command_at_a_time(tmp_path):
    place = place_of(tmp_path, PLAN.job)
    with held(place), pytest.raises(LocalError, match="another finetune run"), held(place):
        pass
    with held(place):
        pass


def test_a_damaged_record_is_none(tmp_path):
    path = tmp_path / "record.json"
    assert read_record(path) is None
    write_record(path, RunRecord(plan_sha256="x", finished=[Role.PREFLIGHT], next_attempt={Role.TRAIN: 2}))
    assert read_record(path).next_attempt == {Role.TRAIN: 2}
    path.write_text("{")
    assert read_record(path) is None


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


def test_losses_come_from_the_held_out_records_or_the_history():
    assert losses({"initial_eval_loss": "6.9", "eval_loss": "3.1"}, []) == Losses(6.9, 3.1, held_out=True)
    history = [{"step": 0, "eval_loss": 7.0}, {"step": 1, "loss": 7.0}, {"step": 2, "loss": 5.0}]
    assert losses({}, history) == Losses(7.0, 5.0, held_out=False)
    assert losses({}, [*history, {"step": 3, "eval_loss": 4.5}]) == Losses(7.0, 4.5, held_out=True)
    assert losses({}, []) is None


def test_the_summary_tells_where_everything_is(tmp_path):
    claims = tmp_path / "claims"
    output = claims / "out" / "tuned"
    for name in ("adapter", "merged"):
        (output / name).mkdir(parents=True)
    figures = {
        "passed": True,
        "tensors": {"num_changed": 28, "num_untouched": 11},
        "logits": {"mean_kl": 1.5e-6, "top1_agreement": 1.0},
        "other_logits": {"mean_kl": 0.02, "top1_agreement": 0.975},
    }
    (output / "verification.json").write_text(json.dumps(figures))
    workspace = claims / "workspace" / "tuned-local"
    workspace.mkdir(parents=True)
    (workspace / "history.jsonl").write_text('{"step": 9, "loss": 1.0}\n{"step": 10, "loss": 0.5}\n{"step": 11, "lo')
    record = RunRecord(
        plan_sha256="x",
        seconds={Role.TRAIN: 20.0, Role.MERGE: 5.0},
        facts={Role.TRAIN: {"initial_eval_loss": "6.9", "eval_loss": "3.1"}, Role.PUBLISH: {"address": "oci://host/a@sha256:0"}},
    )
    summary = summarise(PLAN, record, claims)
    assert summary.step == 10
    text = summary_text(ExitCode.DONE, summary)
    for part in (
        "held-out loss: 6.9000 before, 3.1000 after",
        str(output / "adapter"),
        str(output / "merged"),
        "published at:  oci://host/a@sha256:0",
        "passed, 28 tensors changed, 11 untouched, mean KL 1.5e-06, same token 100.0%",
        "on other base: mean KL 0.02, same token 97.5%",
        "25.0 s",
    ):
        assert part in text


def test_an_interrupted_run_says_how_to_go_on():
    text = summary_text(ExitCode.INTERRUPTED, Summary(losses=None, step=7, adapter=None, merged=None, verification=None))
    assert "Run the same command again to continue" in text
    assert "last step:     7" in text

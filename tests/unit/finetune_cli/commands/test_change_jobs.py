"""Changes to jobs where others change them too, or where the caller may not look. tests/integration has a real API server."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from finetune_cli import change_verbs
from finetune_cli.app import app
from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.objects import Cluster
from finetune_cli.commands.change_jobs import MOST_CONFLICTS, fork, retry, set_suspended, submit
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.jobs.next_manifest import parse_change
from finetune_cli.jobs.seen import SeenJob, seen_job
from tests.unit.finetune_cli.jobs import objects
from tests.unit.finetune_cli.manifests import ACCEPTED

CONFLICT = ClusterError("changed", status=409)
DENIED = ClusterError("you may not", status=403)


class ChangedCluster(Cluster):
    """Holds one job. `answers`: errors of the next changes."""

    def __init__(self, document: dict[str, Any], *answers: ClusterError) -> None:
        self.document, self.answers, self.sent = copy.deepcopy(document), list(answers), list[dict[str, Any]]()
        self.namespace = "team"
        self.others: list[str] | ClusterError = []
        self.given_profile: dict[str, Any] | ClusterError | None = None

    def job(self, name: str) -> SeenJob:
        return seen_job(self.document)

    def jobs(self, *, everywhere: bool = False, selector: str = "") -> list[SeenJob]:
        if isinstance(self.others, ClusterError):
            raise self.others
        return [seen_job({**self.document, "metadata": {"name": name}}) for name in self.others]

    def get(self, version: str, plural: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        assert (plural, name, namespace) == ("finetuneprofiles", "default", "")
        if isinstance(self.given_profile, ClusterError):
            raise self.given_profile
        return self.given_profile

    def send(self, method: str, path: str, body: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        self.sent.append(body)
        if self.answers:
            raise self.answers.pop(0)
        return {**self.document, **body, "metadata": {**self.document["metadata"], **body.get("metadata", {})}}


def test_somebody_who_changes_the_job_at_the_same_time_is_waited_for() -> None:
    cluster = ChangedCluster(objects.STALLED, CONFLICT, CONFLICT)
    cluster.document["metadata"]["resourceVersion"] = "7"
    assert retry(cluster, "stalled", None).said == "trying again (spec.run.retry: 1)"
    assert len(cluster.sent) == 3
    assert cluster.sent[0]["metadata"]["resourceVersion"] == "7"
    with pytest.raises(ClusterError, match="other clients keep changing it"):
        retry(ChangedCluster(objects.STALLED, *[CONFLICT] * MOST_CONFLICTS), "stalled", None)
    with pytest.raises(ClusterError, match="you may not"):
        retry(ChangedCluster(objects.STALLED, DENIED), "stalled", None)


def test_a_change_names_one_field_alone() -> None:
    cluster = ChangedCluster(objects.RUNNING)
    set_suspended(cluster, "running", suspended=True)
    assert cluster.sent == [{"spec": {"run": {"suspend": True}}}]


def test_names_of_new_jobs_are_free_as_far_as_that_can_be_seen() -> None:
    cluster = ChangedCluster(objects.FAILED)
    cluster.others = ["failed", "failed-2"]
    assert retry(cluster, "failed", None).job.name == "failed-3"
    cluster.others = DENIED
    assert retry(cluster, "failed", None).job.name == "failed-2"
    assert "name: failed-2" in fork(cluster, "failed", None, [])[0]
    assert "name: mine" in fork(cluster, "failed", "mine", [])[0]


def test_a_fork_begins_with_a_checkpoint_if_it_is_told_to() -> None:
    running = ChangedCluster(objects.RUNNING)
    for start, step in (("newest", 50), ("30", 30)):
        text, report = fork(running, "running", None, [parse_change("training.seed=7")], start)
        spec = yaml.safe_load(text)["spec"]
        assert spec["training"]["startFrom"].endswith(f"/checkpoints/step-{step:010d}")
        assert spec["training"]["seed"] == 7
        assert f"had trained after step {step};" in text
        assert report.exit_code is ExitCode.DONE
    for start in ("0", "-1", "1e3", "latest", "9" * 11):
        with pytest.raises(LocalError, match=f"--from {start} is not a step; write one"):
            fork(running, "running", None, [], start)
    with pytest.raises(LocalError, match="--from newest: the status of team/new names no checkpoint"):
        fork(ChangedCluster(objects.NEW), "new", None, [], "newest")


def test_a_copy_of_a_fork_says_that_it_begins_with_the_same_checkpoint() -> None:
    start = "running-0a1b2c3d/checkpoints/step-0000000050"
    said = f"begins with the checkpoint {start} of its workspace"
    failed = ChangedCluster(objects.FAILED)
    failed.document["spec"]["training"] = {**failed.document["spec"].get("training", {}), "startFrom": start}
    text, _ = fork(failed, "failed", None, [])
    assert yaml.safe_load(text)["spec"]["training"]["startFrom"] == start
    assert text.startswith(f"# From the FineTuneJob team/failed. It {said}.\n")
    assert retry(failed, "failed", None).said == f"created with the spec of failed; it {said}"
    text, _ = fork(failed, "failed", None, [parse_change("training.startFrom=")])
    assert text.startswith("# From the FineTuneJob team/failed. It begins with the base model.\n")


def test_a_fork_on_a_claim_that_goes_with_the_other_job_says_so() -> None:
    running = ChangedCluster(objects.RUNNING)

    def head(**workspace: Any) -> str:
        running.document["spec"]["workspace"] = workspace
        text = fork(running, "running", None, [], "newest")[0]
        return text[: text.index("apiVersion")]

    template = {"storage": "1Gi"}
    assert "Its workspace is the claim running-workspace. Deleting running also deletes that claim" in head(
        volumeClaimTemplate=template, retain="Delete"
    )
    assert "is deleted" not in head(volumeClaimTemplate=template, retain="Keep")
    assert "is deleted" not in head(volumeClaimTemplate=template)
    assert "is deleted" not in head(claimName="scratch", retain="Delete"), "a claim that the user has made stays"


def test_the_profile_of_the_cluster_judges_too() -> None:
    text = ACCEPTED.replace("    dtype: bfloat16\n", "    dtype: bfloat16\n    allowRemoteCode: true\n")
    cluster = ChangedCluster(objects.NEW)
    cluster.given_profile = {"spec": {"trainerImage": "t"}}
    report, made = submit(cluster, text, "job.yaml", None)
    assert (report.exit_code, made, cluster.sent) == (ExitCode.REFUSED, [], [])
    for other in (DENIED, None, {"spec": {"trainerImages": []}}, {}):
        cluster.given_profile = other
        assert len(submit(cluster, text, "job.yaml", None)[1]) == 1, "the operator judges by a profile that may not be read"


def test_two_namespaces_are_one_too_many() -> None:
    text = ACCEPTED.replace("  name: tuned\n", "  name: tuned\n  namespace: team\n")
    with pytest.raises(LocalError, match=r"metadata.namespace: team is not other of -n"):
        submit(ChangedCluster(objects.NEW), text, "job.yaml", "other")
    assert len(submit(ChangedCluster(objects.NEW), text, "job.yaml", "team")[1]) == 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ChangedCluster:
    """What the verbs find."""
    made = ChangedCluster(objects.RUNNING)
    monkeypatch.setattr("finetune_cli.cluster.objects.Cluster", lambda *_: made)
    return made


def test_on_a_terminal_an_end_for_good_is_confirmed(cluster: ChangedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: next(answers))
    monkeypatch.setattr(change_verbs, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    assert CliRunner().invoke(app, ["cancel", "running"]).exit_code == 130
    assert cluster.sent == []
    assert CliRunner().invoke(app, ["cancel", "running"]).exit_code == 0
    assert CliRunner().invoke(app, ["cancel", "running", "--yes"]).exit_code == 0
    assert cluster.sent == [{"spec": {"run": {"cancel": True}}}] * 2


@pytest.mark.parametrize(("document", "code"), [(objects.SUCCEEDED, 0), (objects.FAILED, 1)])
def test_a_submitted_job_is_watched_to_its_end(
    cluster: ChangedCluster, tmp_path: Path, document: dict[str, Any], code: int
) -> None:
    cluster.document = document
    file = tmp_path / "job.yaml"
    file.write_text(ACCEPTED)
    done = CliRunner().invoke(app, ["submit", str(file), "--watch"])
    assert done.exit_code == code, done.output
    assert ": created\n" in done.stdout
    assert f"{document['metadata']['namespace']}/{document['metadata']['name']}: " in done.stdout.partition("created\n")[2]
    file.write_text(f"{ACCEPTED}---\n{ACCEPTED.replace('name: tuned', 'name: other')}")
    done = CliRunner().invoke(app, ["submit", str(file), "--watch"])
    assert (done.exit_code, "--watch: follows one job, and" in done.stderr) == (2, True)
    assert len(cluster.sent) == 1, "none of two is created that cannot both be watched"
    assert CliRunner().invoke(app, ["submit", str(tmp_path / "none.yaml")]).exit_code == 2

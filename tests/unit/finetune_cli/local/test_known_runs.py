"""Runs of this machine as another command sees, follows and stops them."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.exit_codes import LocalError
from finetune_cli.local.known_runs import find_run
from finetune_cli.local.run_directory import freeze, read_record, run_directory_of, write_record
from finetune_job.failures import Outcome, TerminationReport
from finetune_job.names import Role
from tests.support.cases import table
from tests.unit.finetune_cli.local_jobs import PLAN

COMMAND = """
import signal, sys, time
from pathlib import Path
from finetune_cli.local.run_directory import RunDirectory, locked
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
with locked(RunDirectory(Path(sys.argv[1]))):
    print("locked", flush=True)
    while not asked:
        time.sleep(0.05)
    time.sleep(float(sys.argv[2]))
"""
"""Stands for `finetune run`, which needs this long to save."""


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    place = run_directory_of(tmp_path, PLAN.job)
    place.claims.mkdir(parents=True)
    record = freeze(place, PLAN)
    attempts = {Role.PREFLIGHT: 1, Role.TRAIN: 1}
    write_record(place.record, record.model_copy(update={"finished": [Role.PREFLIGHT], "next_attempt": attempts}))
    (tmp_path / ".finetune" / "default.damaged").mkdir()
    return tmp_path


@pytest.fixture
def command(claims: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    place = run_directory_of(claims, PLAN.job)
    seconds = getattr(request, "param", 0)
    arguments = [sys.executable, "-c", COMMAND, place.root, str(seconds)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def finetune(*arguments: str, claims: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments, "--claims", str(claims)])
    return result.exit_code, result.output


def test_what_runs_is_listed_and_stopped(claims: Path, command: subprocess.Popen[str]) -> None:
    name = PLAN.job.name
    _, text = finetune("status", claims=claims)
    header, line = text.splitlines()
    assert header.split() == ["JOB", "STATE", "PROCESS", "SINCE", "STEP"]
    assert line.split()[:3] == [f"{PLAN.job.namespace}/{name}", "training", str(command.pid)]
    (entry,) = json.loads(finetune("status", "-o", "json", claims=claims)[1])["runs"]
    assert (entry["stage"], entry["process"], entry["finished"]) == ("train", command.pid, ["preflight"])
    code, said = finetune("stop", name, "-n", PLAN.job.namespace, claims=claims)
    assert (code, said) == (0, "")
    assert command.wait(300) == 0
    assert finetune("status", claims=claims)[1].splitlines()[1].split()[1:] == ["stopped", "in", "train"]


@pytest.mark.parametrize("command", [60], indirect=True)
def test_a_stop_that_takes_longer_says_so(claims: Path, command: subprocess.Popen[str]) -> None:
    code, said = finetune("stop", PLAN.job.name, "-n", PLAN.job.namespace, "--timeout", "0", claims=claims)
    assert code == 3
    assert f"process {command.pid} is still running after 0 s" in said


def test_another_command_follows_it_to_its_end(claims: Path, command: subprocess.Popen[str]) -> None:
    arguments = ["attach", PLAN.job.name, "-n", PLAN.job.namespace, "--claims", claims]
    entry = [sys.executable, "-m", "finetune_cli", *arguments]
    with subprocess.Popen(entry, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert "training" in follower.stdout.readline()
        command.send_signal(signal.SIGTERM)
        assert follower.wait(300) == 0


@pytest.mark.parametrize("verb", ["stop", "attach"])
def test_what_does_not_run_is_said(claims: Path, verb: str) -> None:
    code, said = finetune(verb, PLAN.job.name, "-n", PLAN.job.namespace, claims=claims)
    assert (code, said) == (3, f"{PLAN.job.namespace}/{PLAN.job.name} is not running\n")
    code, said = finetune(verb, "unknown", claims=claims)
    assert code == 2
    assert "default/unknown: no such run below" in said


def test_nothing_was_run(tmp_path: Path) -> None:
    assert finetune("status", claims=tmp_path) == (0, f"no job was run below {tmp_path}\n")


@pytest.fixture
def logged(claims: Path) -> Path:
    """Two attempts of training have written, and the first one failed."""
    place = run_directory_of(claims, PLAN.job)
    record = read_record(place.record)
    assert record is not None
    write_record(place.record, record.model_copy(update={"next_attempt": {Role.PREFLIGHT: 1, Role.TRAIN: 2}}))
    place.output("preflight", 0).write_text("looked\n")
    place.output("train", 0).write_text("[rank 0] first\n")
    place.output("train", 1).write_bytes(b"[rank 0] one\n[rank 1] two\x1b[31m\n[rank 0] three")
    ended = TerminationReport(role=Role.TRAIN, attempt=0, outcome=Outcome.FAILED, time=0.0)
    place.termination_log("train", 0).write_text(ended.model_dump_json())
    place.termination_log("train", 1).write_text(ended.model_copy(update={"outcome": Outcome.SUCCEEDED}).model_dump_json())
    return claims


@pytest.mark.parametrize(("options", "lines"), table(__file__, "test_what_a_run_on_this_machine_has_written_is_printed"))
def test_what_a_run_on_this_machine_has_written_is_printed(logged: Path, options: list[str], lines: list[str]) -> None:
    assert finetune("logs", PLAN.job.name, *options, claims=logged) == (0, "".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(("options", "code", "said"), table(__file__, "test_a_log_that_is_not_there_is_told"))
def test_a_log_that_is_not_there_is_told(logged: Path, options: list[str], code: int, said: str) -> None:
    ended, text = finetune("logs", PLAN.job.name, *options, claims=logged)
    assert ended == code
    assert said in text


def test_a_log_is_followed_until_nothing_works_on_the_run(logged: Path, command: subprocess.Popen[str]) -> None:
    arguments = [sys.executable, "-m", "finetune_cli", "logs", PLAN.job.name, "--claims", str(logged), "-f"]
    following = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(2)] == ["[rank 0] one\n", "[rank 1] two\\x1b[31m\n"]
        with run_directory_of(logged, PLAN.job).output("train", 1).open("a") as log:
            log.write(" and\n[rank 0] four\n")
        assert [following.stdout.readline() for _ in range(2)] == ["[rank 0] three and\n", "[rank 0] four\n"]
        command.terminate()
        assert following.communicate(timeout=300)[0] == ""
        assert following.returncode == 0
    finally:
        following.kill()
        following.wait()


def test_a_rehearsal_of_the_same_job_is_not_meant(claims: Path) -> None:
    rehearsal = run_directory_of(claims, PLAN.job, purpose="rehearsal")
    rehearsal.root.mkdir()
    write_record(rehearsal.record, freeze(rehearsal, PLAN))
    with pytest.raises(LocalError, match="is not running"):
        find_run(claims, PLAN.job.name, PLAN.job.namespace)

"""The plan and the record of local runs, and what --fresh removes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from finetune_cli.exit_codes import LocalError
from finetune_cli.local.run_directory import (
    Holder,
    RunRecord,
    begun_with,
    freeze,
    holder_of,
    locked,
    read_record,
    run_directory_of,
    start_fresh,
    write_record,
)
from finetune_job.names import Role
from tests.unit.finetune_cli.local_jobs import PLAN


def test_the_plan_is_frozen_until_fresh(tmp_path):
    place = run_directory_of(tmp_path, PLAN.job)
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
    reports = ("verification.json", "verification.md", "report.html", "report.json")
    for name in (*reports, "provenance.json", "README.md", "SHA256SUMS"):
        (tmp_path / "out/tuned" / name).write_text("of the earlier run")
    start_fresh(place)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if ".finetune" not in path.parts}
    assert left == {"workspace", "workspace/another-job", "out", "out/tuned", "out/tuned/notes"}
    assert freeze(place, other).plan_sha256 != record.plan_sha256


def test_a_run_of_a_release_that_told_of_fewer_choices_continues_with_its_own_plan(tmp_path: Path) -> None:
    place = run_directory_of(tmp_path, PLAN.job)
    place.root.mkdir(parents=True)
    before = PLAN.model_copy(update={"choices": PLAN.choices[:-1]})
    record = freeze(place, before)
    write_record(place.record, record)
    assert begun_with(place, PLAN) == before
    assert freeze(place, before) == record
    other = PLAN.model_copy(update={"training": PLAN.training.model_copy(update={"max_steps": 99})})
    assert begun_with(place, other) is None


def test_fresh_leaves_a_readme_that_no_merge_has_written(tmp_path):
    place = run_directory_of(tmp_path, PLAN.job)
    place.claims.mkdir(parents=True)
    write_record(place.record, freeze(place, PLAN))
    readme = tmp_path / "out" / "tuned" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("of the user")
    (place.claims / "out").symlink_to(tmp_path / "out")
    start_fresh(place)
    assert readme.exists()


def test_fresh_removes_nothing_without_a_record(tmp_path):
    place = run_directory_of(tmp_path, PLAN.job)
    place.claims.mkdir(parents=True)
    (tmp_path / "out" / "tuned" / "merged").mkdir(parents=True)
    (place.claims / "out").symlink_to(tmp_path / "out")
    start_fresh(place)
    assert (tmp_path / "out" / "tuned" / "merged").exists()


def test_fresh_does_not_guess_where_the_results_of_a_damaged_plan_are(tmp_path: Path) -> None:
    place = run_directory_of(tmp_path, PLAN.job)
    place.claims.mkdir(parents=True)
    write_record(place.record, freeze(place, PLAN))
    place.plan.write_text(place.plan.read_text()[:300])
    with pytest.raises(LocalError, match=r"plan.json cannot be read, .* not known .* remove them and .*or run without --fresh"):
        start_fresh(place)
    other = PLAN.model_copy(update={"training": PLAN.training.model_copy(update={"max_steps": 99})})
    with pytest.raises(LocalError, match=r"changed since its last run \(its settings\)"):
        freeze(place, other)
    assert freeze(place, PLAN) == read_record(place.record), "without --fresh it is written again"
    start_fresh(place)
    assert not place.record.exists()


def test_one_command_at_a_time(tmp_path):
    place = run_directory_of(tmp_path, PLAN.job)
    with locked(place):
        attempts = {Role.PREFLIGHT: 1, Role.TRAIN: 2}
        write_record(place.record, RunRecord(plan_sha256="x", finished=[Role.PREFLIGHT], next_attempt=attempts))
        with pytest.raises(LocalError) as refused, locked(place):
            pass
    for words in (f"process {os.getpid()}", "(train)", "since 20", "`finetune stop`"):
        assert words in str(refused.value)
    with locked(place):
        assert holder_of(place).pid == os.getpid(), "the lock names the command that has it now"
    assert holder_of(place) is None


def test_a_damaged_record_is_none(tmp_path):
    path = tmp_path / "record.json"
    assert read_record(path) is None
    write_record(path, RunRecord(plan_sha256="x", finished=[Role.PREFLIGHT], next_attempt={Role.TRAIN: 2}))
    assert read_record(path).next_attempt == {Role.TRAIN: 2}
    path.write_text("{")
    assert read_record(path) is None


def test_what_a_killed_command_left_is_not_taken_for_it(tmp_path):
    """Its processes keep the lock, and its number may be another process's by now."""
    place = run_directory_of(tmp_path, PLAN.job)
    with locked(place) as lock:
        kept = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    try:
        place.lock.write_text(Holder(pid=1, since=datetime(2026, 1, 1, tzinfo=UTC)).model_dump_json())
        found = holder_of(place)
        assert found is not None
        assert found.pid == 0
        with pytest.raises(LocalError, match="are still saving their state; try again"), locked(place):
            pass
        place.lock.write_text("no JSON")
        assert holder_of(place).pid == 0
    finally:
        kept.kill()
        kept.wait()
    assert holder_of(place) is None
    assert holder_of(run_directory_of(tmp_path, PLAN.job, "another")) is None


def test_a_look_of_another_command_refuses_no_run(tmp_path):
    place = run_directory_of(tmp_path, PLAN.job)
    with locked(place):
        pass
    # The command that ran last has ended.
    place.lock.write_text(Holder(pid=1, since=datetime(2026, 1, 1, tzinfo=UTC)).model_dump_json())
    look = place.lock.open()
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.2, look.close).start()
    with locked(place):
        assert look.closed

"""Preflight rehearses a job that it accepts, next to its data, and says so; in a process of its own, which leaves nothing."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_job.api.job import RunSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.failures import FailureClass, Outcome
from finetune_job.plan.resolve import placement_of
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.inspection.report import RehearsalReport, Stage, StageResult, Verdict, read_report
from finetune_trainer.preflight import job_steps
from finetune_trainer.processes.child import start_answering
from finetune_trainer.processes.forked import ResourceBounds, run_children
from finetune_trainer.rehearsal.child_tasks import make_model_in_child
from finetune_trainer.rehearsal.scaled_model import RehearsalPaths, ScaledModel
from finetune_trainer.rehearsal.verdicts import not_done_finding
from finetune_trainer.roles import preflight
from finetune_trainer.roles import rehearse as process
from tests.support.forked_ranks import run_processes
from tests.support.living import living
from tests.unit.finetune_trainer.preflight.conftest import claims, context, made_claims, manifest, model

__all__ = ["claims", "context", "made_claims", "manifest", "model"]
PASSED = RehearsalReport(verdict=Verdict.PASSED, seconds=9.0, stages=(StageResult(stage=Stage.BUILD, seconds=1.0),))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Preflight with a rehearsal that is only written down."""
    told: list[str] = []
    verdicts: list[RehearsalReport] = []

    def start(_job: Any, until_done: ExitStack) -> Callable[[], RehearsalReport]:
        told.append("begin")
        until_done.callback(told.append, "end")

        def wait() -> RehearsalReport:
            told.append("verdict")
            return verdicts[-1]

        return wait

    def run(job: Any, verdict: RehearsalReport = PASSED) -> tuple[Any, list[str]]:
        told.clear()
        verdicts.append(verdict)
        monkeypatch.setattr(preflight, "start_rehearsal", start)
        return preflight.run(job), told

    return run


def test_processes_work_while_this_one_does(context: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's inspection while the tokenizer is loaded, and the rehearsal while the data is prepared."""
    _, told = recorded(context({"preflight.rehearsal": "Skip"}))
    checked = preflight.check_model

    def written_down(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: (told.append(name), original(*arguments, **named))[1]

    class Process:
        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            told.append("end of the model")

    job = context({"preflight.rehearsal": "Run"})
    monkeypatch.setattr(job_steps, "torch_is_here", lambda: False)
    monkeypatch.setattr(job_steps, "start_check", written_down("model", lambda *_: Process()))
    monkeypatch.setattr(preflight, "finish_check", written_down("structure", lambda *_: checked(job.plan, job.base_model)))
    for module, name, short in ((job_steps, "load_checked_tokenizer", "tokenizer"), (job_steps, "prepare", "data")):
        monkeypatch.setattr(module, name, written_down(short, getattr(module, name)))
    result, told = recorded(job)
    assert result.outcome is Outcome.SUCCEEDED
    assert told == ["model", "tokenizer", "structure", "begin", "data", "verdict", "end", "end of the model"]


def test_a_job_that_skips_the_rehearsal_or_is_refused_starts_none(context: Any, recorded: Any) -> None:
    assert recorded(context({"preflight.rehearsal": "Skip"}))[1] == []
    refused = {"preflight.rehearsal": "Run", "method.lora.targetModules": ["nowhere"]}
    result, told = recorded(context(refused))
    assert result.outcome is Outcome.REFUSED
    assert told == []


def test_what_the_data_refuses_ends_a_rehearsal_unheard(context: Any, recorded: Any) -> None:
    result, told = recorded(context({"preflight.rehearsal": "Run", "data.source": "pvc://data/nothing.jsonl"}))
    assert result.outcome is Outcome.REFUSED
    assert told == ["begin", "end"]
    assert [finding.field for finding in result.findings] == ["spec.data.source"]


def test_a_rehearsal_that_passed_is_not_repeated(context: Any, recorded: Any) -> None:
    job = context({"preflight.rehearsal": "Run"})
    assert recorded(job)[1] == ["begin", "verdict", "end"]
    (kept,) = (job.claims_root / "workspace" / "rehearsals").iterdir()
    result, told = recorded(job)
    assert told == []
    assert result.facts["rehearsal"] == "Passed"
    report = read_report(job.workspace.model_report)
    assert report is not None
    assert report.rehearsal.kept_since == json.loads(kept.read_bytes())["since"]
    assert report.rehearsal.stages == PASSED.stages


def requiring(job: Any) -> Any:
    """A run of it whose profile requires a rehearsal."""
    profile = FineTuneProfileSpec.model_validate({"trainerImage": "t", "requireRehearsal": True})
    return replace(job, plan=job.plan.model_copy(update={"placement": placement_of("strict", profile, RunSpec())}))


@pytest.mark.nightly
def test_a_verdict_that_a_claim_keeps_is_not_trusted_where_the_profile_requires_a_rehearsal(
    context: Any, recorded: Any, monkeypatch: Any
) -> None:
    job = requiring(context({"preflight.rehearsal": "Run"}))
    asked: list[str] = []
    monkeypatch.setattr(preflight, "find_verdict", lambda _context, key: asked.append(key))
    for _ in range(2):
        result, told = recorded(job)
        assert (result.outcome, told) == (Outcome.SUCCEEDED, ["begin", "verdict", "end"])
    assert asked == []


def test_no_rehearsal_is_refused_where_the_profile_requires_one(context: Any, recorded: Any) -> None:
    job = requiring(context({"preflight.rehearsal": "Run"}))
    finding = not_done_finding("it ran for too long", job.claims_root)
    result, _ = recorded(job, RehearsalReport(verdict=Verdict.NOT_DONE, findings=(finding,)))
    assert (result.outcome, result.failure) == (Outcome.REFUSED, FailureClass.USER_CONFIG)
    assert [each.rule for each in result.findings] == ["rehearsal-required", "rehearsal-not-done"]
    assert "requireRehearsal of profile strict" in result.message
    assert "Skip" not in "".join(each.fix for each in result.findings)
    assert not any(each.changes for each in result.findings)
    assert result.facts["rehearsal"] == "NotDone"
    assert not job.workspace.prepared.exists()
    skipped = requiring(context({"preflight.rehearsal": "Skip"}))
    assert [each.rule for each in recorded(skipped)[0].findings] == ["rehearsal-required"]


@pytest.mark.nightly
def test_other_settings_are_rehearsed_again(context: Any, recorded: Any) -> None:
    recorded(context({"preflight.rehearsal": "Run"}))
    assert "begin" in recorded(context({"preflight.rehearsal": "Run", "method.lora.r": 4}))[1]


@pytest.mark.parametrize("severity", ["error", "warning"])
def test_what_the_rehearsal_finds_decides_and_is_found_again(context: Any, recorded: Any, severity: str) -> None:
    job = context({"preflight.rehearsal": "Run"})
    finding = not_done_finding("made up", job.claims_root).model_copy(update={"severity": severity})
    verdict = Verdict.FAILED if severity == "error" else Verdict.NOT_DONE
    for _ in range(2):
        result, told = recorded(job, RehearsalReport(verdict=verdict, findings=(finding,)))
        assert told == ["begin", "verdict", "end"]
        assert result.outcome is (Outcome.REFUSED if severity == "error" else Outcome.SUCCEEDED)
        assert [each.rule for each in result.findings] == ["rehearsal-not-done"]
        assert job.workspace.prepared.exists() == (severity == "warning")


@pytest.mark.parametrize(
    ("asked", "clock", "processors"), [(None, 600.0, 110.0 + 7.0), (30.0, 30.0, math.inf)], ids=["preflight", "finetune run"]
)
def test_the_budget_of_a_rehearsal_is_processor_time_beyond_what_came_before(
    context: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: float | None, clock: float, processors: float
) -> None:
    """On a busy machine the clock runs on while others compute; a person who waits says how long."""
    given: list[ResourceBounds] = []

    def rehearse(_plan: Any, _model: Any, _scratch: Any, bounds: ResourceBounds, **_: Any) -> RehearsalReport:
        given.append(bounds)
        return PASSED

    monkeypatch.setattr("finetune_trainer.rehearsal.run.rehearse", rehearse)
    monkeypatch.setattr("finetune_trainer.processes.forked.used_processor_seconds", lambda: 7.0)
    monkeypatch.setattr(process, "_import_libraries", lambda _: None)
    job, answer = context(), io.BytesIO()
    process._rehearse(process._Order(job.plan, job.base_model, tmp_path / "scratch", answer), 1000.0, asked)
    (bounds,) = given
    assert (bounds.began, bounds.deadline, bounds.processor_seconds) == (1000.0, 1000.0 + clock, processors)
    assert json.loads(answer.getvalue())["report"]["verdict"] == "Passed"


def test_an_accepted_job_is_rehearsed_and_nothing_is_left(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Below the limit of the test itself. What else bounds it is processor time, of which it takes a small part.
    monkeypatch.setattr(process, "SECONDS", 540.0)
    job = context({"preflight.rehearsal": "Run"})
    result = preflight.run(job)
    assert result.outcome is Outcome.SUCCEEDED, result
    report = read_report(job.workspace.model_report)
    assert report is not None
    assert report.rehearsal.verdict is Verdict.PASSED, report.rehearsal
    assert result.facts["rehearsal"] == "Passed"
    assert report.rehearsal.stages, "no stage was tried"
    assert not list(job.workspace.root.glob("rehearsal*"))


def test_a_rehearsal_that_is_ended_leaves_neither_processes_nor_files(context: Any) -> None:
    """With its libraries imported its process has one thread, and sees no device: a fork copies neither."""
    before = psutil.Process().children(recursive=True)
    job = context({"preflight.rehearsal": "Run"})
    with ExitStack() as until_done:
        process.start_rehearsal(job, until_done)
        (running,) = [each for each in psutil.Process().children() if each not in before]
        ranks = ("undisturbed", "killed")
        while not any((scratch / name).exists() for scratch in job.workspace.root.glob("rehearsal.tmp-*") for name in ranks):
            assert running.is_running()
            assert running.status() != psutil.STATUS_ZOMBIE
            time.sleep(0.05)
        assert running.num_threads() == 1
        assert {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}.items() <= running.environ().items()
        family = [each for each in psutil.Process().children(recursive=True) if each not in before]
    assert not list(job.workspace.root.glob("rehearsal*"))
    psutil.wait_procs(family, timeout=120)
    assert living(family) == []


def test_a_skipped_rehearsal_is_recorded(context: Any) -> None:
    job = context({"preflight.rehearsal": "Skip"})
    assert preflight.run(job).facts["rehearsal"] == "Skipped"
    report = read_report(job.workspace.model_report)
    assert report is not None
    assert report.rehearsal.verdict is Verdict.SKIPPED


RANK = """
import sys
from pathlib import Path
from finetune_job.plan.run_plan import RunPlan
from tests.unit.finetune_trainer.roles.test_rehearse import train_alone
import torch
torch.set_num_threads(1)
train_alone(RunPlan.model_validate_json(sys.stdin.buffer.read()), Path(sys.argv[1]), "started")
"""


def train_alone(plan: RunPlan, root: Path, run: str) -> None:
    """A rank of a rehearsal, in this process."""
    from finetune_trainer.rehearsal.child_tasks import run_rank

    run_rank(RehearsalPaths(root).run(run, plan), 0, 1, f"file://{root}/{run}.store")


def _train_in_forks(plan: RunPlan, model: Path, root: Path) -> int:
    """As a rehearsal does: the scaled-down model in one fork, the rank in another."""
    bounds = ResourceBounds(time.monotonic() + 300, 1 << 40)

    def in_fork(task: Callable[[], Any]) -> Any:
        ended = run_children({"task": task}, root, bounds, together=True)["task"]
        assert ended.problem == ""
        return ended.value

    made = in_fork(partial(make_model_in_child, plan, model, RehearsalPaths(root)))
    scaled = ScaledModel.model_validate_json(made).plan
    (root / "plan.json").write_text(scaled.model_dump_json())
    in_fork(partial(train_alone, scaled, root, "forked"))
    return 0


@pytest.mark.nightly
def test_a_forked_rank_learns_what_a_started_one_learns(context: Any, model: Path, tmp_path: Path) -> None:
    """To the bit: losses, norms, and the adapter's bytes."""
    plan = context({"preflight.rehearsal": "Run", "parallelism.processesPerNode": 1}).plan
    assert run_processes([partial(_train_in_forks, plan, model, tmp_path)]) == [0]
    given, environment = (tmp_path / "plan.json").read_bytes(), os.environ | process.ON_CPU
    subprocess.run([sys.executable, "-c", RANK, str(tmp_path)], input=given, check=True, env=environment)
    found, wanted = (tmp_path / name / "workspace" for name in ("forked", "started"))
    lines = [[json.loads(line) for line in (each / "history.jsonl").read_text().splitlines()] for each in (found, wanted)]
    said = [[(line["step"], line.get("loss"), line.get("gradient_norm")) for line in each] for each in lines]
    assert said[0] == said[1]
    assert len(said[0]) >= 3
    for path in (wanted / "trained").iterdir():
        assert (found / "trained" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_rehearsal_whose_process_ended_reports_the_seconds_since_its_begin(tmp_path: Path) -> None:
    child = start_answering(["false"], os.environ, b"", 100)
    report = process._report(child, tmp_path, time.monotonic() - 61.0)
    assert report.verdict is Verdict.NOT_DONE
    assert 61.0 <= report.seconds < 70.0
    assert "status 1" in report.findings[0].message

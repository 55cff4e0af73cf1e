"""Runs that are computed again: one that is what it says, and those that somebody has changed and covered that up."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.commands import audit as command
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.replay import Interval, draw
from finetune_cli.local.run_directory import RunDirectory
from finetune_cli.render.audit import AuditEnd, audit_text
from finetune_job.names import Role
from finetune_trainer.roles.audit import parser, run
from finetune_trainer.weights.headers import SINGLE_FILE, read_header
from tests.support.audited_run import INTERVALS, TAMPERINGS, ForkedReplay, audited_run, change_value, context_of, copied

AS_OTHERS = ("learning rate", "base weight")
"""Found in the same way as a changed record, so once a night is often enough."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunDirectory]:
    """A run, and one like it with another seed."""
    directory = tmp_path_factory.mktemp("runs")
    return audited_run(directory / "own"), audited_run(directory / "foreign", seed=4)


@pytest.fixture(autouse=True)
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts a Python with all modules, but for one test that has the process for comparisons started."""
    monkeypatch.setattr(command, "Replay", ForkedReplay)
    if "untouched" not in request.node.name:
        monkeypatch.setattr(command, "_answer", lambda arguments, _interruption: run(parser().parse_args(arguments)))


def audited(place: RunDirectory, *arguments: str) -> tuple[int, dict]:
    answer = CliRunner().invoke(app, ["audit", str(place.root), "-o", "json", *arguments], catch_exceptions=False)
    assert answer.stdout, answer.stderr
    return answer.exit_code, json.loads(answer.stdout)


def seed_that_draws(interval: Interval) -> str:
    return str(next(seed for seed in range(1000) if draw(INTERVALS, 1, seed) == [interval]))


def files_of(place: RunDirectory) -> dict[Path, tuple[int, bytes]]:
    claims = place.root.parents[1]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in claims.rglob("*") if path.is_file()}


def test_an_untouched_run_is_what_it_says_and_stays_as_it_is(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = files_of(runs[0])
    code, document = audited(runs[0], "--intervals", "9", "--seed", "5")
    assert (code, document["outcome"], document["findings"]) == (0, "same", [])
    assert document["intervals"] == [{"start": start, "end": start + 2} for start in (0, 2, 4, 6)]
    assert (document["available"], document["seed"], document["comparedResult"]) == (4, 5, True)
    assert files_of(runs[0]) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly if kind in AS_OTHERS else ()) for kind in TAMPERINGS]
)
def test_a_covered_up_change_is_found_by_computing_steps_again(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path, kind: str
) -> None:
    place = copied(runs[0], tmp_path)
    tampering = TAMPERINGS[kind](place, Random(f"{kind} 1"), runs[1])
    drawn = tampering.intervals[-1] if tampering.intervals else INTERVALS[0]
    code, document = audited(place, "--intervals", "1", "--seed", seed_that_draws(drawn))
    found = {finding["rule"]: finding for finding in document["findings"]}
    if tampering.intervals:
        assert (code, document["outcome"]) == (1, "different"), tampering
        assert found["audit-interval-differs"]["field"] == f"step-{drawn.end:010d}"
        assert found["audit-interval-differs"]["value"].startswith("param/base_model.model.")
    else:
        assert (code, list(found)) == (1, ["audit-result-differs"]), tampering
        assert "differs from value" in found["audit-result-differs"]["message"]


def refused(*arguments: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return answer.exit_code, answer.stderr


def test_what_cannot_be_audited_is_told_with_the_fix(runs: tuple[RunDirectory, RunDirectory], tmp_path: Path) -> None:
    place = copied(runs[0], tmp_path)
    run = str(place.root)
    claims = place.root.parents[1]
    assert refused("audit", "absent", "--claims", str(claims)) == (
        2,
        f"absent: no such run below {claims}; `finetune list --claims {claims}` lists the existing ones\n",
    )
    code, said = refused("audit", "x" * 300, "--claims", str(claims))
    assert (code, said.partition("xx: ")[2]) == (
        2,
        f"no such run below {claims}; `finetune list --claims {claims}` lists the existing ones\n",
    )
    code, said = refused("audit", run, "--ranks", "3")
    assert (code, said) == (2, "--ranks 3: the run has 2; give at most as many\n")
    code, said = refused("audit", run, "--claim", f"other={tmp_path}")
    assert (code, said.partition(";")[0]) == (2, "--claim other: the job names no such claim")

    checkpoints = context_of(place).workspace.checkpoints
    for step in (2, 4):
        shutil.rmtree(checkpoints / f"step-{step:010d}")
    code, document = audited(place, "--intervals", "1", "--seed", "1")
    assert (code, document["available"]) == (0, 1)
    (finding,) = document["findings"]
    assert (finding["rule"], finding["field"]) == ("audit-not-proven", "spec.checkpoint.keep")
    assert "steps 1 to 6 precede the oldest kept checkpoint" in finding["message"]
    shutil.rmtree(checkpoints / "step-0000000006")
    code, said = refused("audit", run)
    assert (code, said.splitlines()[-1].partition(";")[0]) == (
        2,
        "default/tiny: 1 checkpoints were kept, and an interval is between two of them",
    )
    place.plan.write_text("{}")
    assert refused("audit", run) == (2, f"{place.plan} is not the plan of a run (ValidationError)\n")


def test_a_plan_that_its_record_does_not_name_is_not_computed(runs: tuple[RunDirectory, RunDirectory], tmp_path: Path) -> None:
    place = copied(runs[0], tmp_path)
    place.plan.write_text(place.plan.read_text().replace('"learning_rate":0.01', '"learning_rate":0.02'))
    code, document = audited(place)
    assert (code, document["intervals"], [each["rule"] for each in document["findings"]]) == (1, [], ["audit-plan-differs"])


def test_a_changed_record_is_found_by_its_digest_and_named_by_its_own_path(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path
) -> None:
    place = copied(runs[0], tmp_path)
    record = place.root.parents[1] / "data/train.jsonl"
    record.write_bytes(record.read_bytes().replace(b"4", b"5"))
    code, document = audited(place)
    (finding,) = document["findings"]
    assert (code, document["intervals"], finding["rule"]) == (1, [], "audit-data-differs")
    assert finding["message"] == f"{record} no longer holds the prepared records"


class CopyingReplay(ForkedReplay):
    """What would come out of the same records and weights, without computing it: what the run has."""

    change: Callable[[Path], object] = staticmethod(lambda workspace: None)
    original = Path()
    merged = Path()

    def run(self, roles: Sequence[Role], *arguments: object, **named: object) -> None:
        self.workspace.root.mkdir(parents=True, exist_ok=True)
        if tuple(roles) == (Role.MERGE,):
            shutil.copytree(self.merged, self.output.merged)
            return
        names = ["preflight.json"] if tuple(roles) == (Role.PREFLIGHT,) else ["trained", "history.jsonl", "accounts.jsonl"]
        for name in names:
            source = self.original / name
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, self.workspace.root / name)
        self.change(self.workspace.root)


def test_a_result_that_the_plan_does_not_give_is_named_with_tensor_and_step(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of = copied(runs[0], tmp_path / "own")
    output = context_of(run_of).output
    shutil.copytree(context_of(run_of).base_model, output.merged)
    names = [path.name for path in output.merged.iterdir()]
    (output.merged / "manifest.json").write_text(json.dumps({"files": [{"name": name} for name in names]}))
    own = context_of(runs[0]).workspace.root
    other = context_of(runs[1]).workspace.root
    monkeypatch.setattr(command, "Replay", CopyingReplay)
    monkeypatch.setattr(CopyingReplay, "merged", shutil.copytree(output.merged, tmp_path / "merged"))

    def reproduced(original: Path, change: Callable[[Path], object], place: RunDirectory = run_of) -> tuple[int, dict]:
        monkeypatch.setattr(CopyingReplay, "original", original)
        monkeypatch.setattr(CopyingReplay, "change", staticmethod(change))
        answer = CliRunner().invoke(app, ["reproduce", str(place.root), "-o", "json"], catch_exceptions=False)
        return answer.exit_code, json.loads(answer.stdout)

    code, document = reproduced(own, lambda workspace: None)
    assert (code, document["findings"], document["comparedResult"], document["comparedMerged"]) == (0, [], True, True)

    tensor = read_header(output.merged / SINGLE_FILE)[0]
    change_value(tensor, Random(1))
    code, document = reproduced(own, lambda workspace: None)
    (finding,) = document["findings"]
    assert (code, finding["rule"], finding["field"]) == (1, "audit-result-differs", "merged")
    assert f"differs from the recomputed result: {tensor.name} differs from" in finding["message"]
    shutil.rmtree(output.merged)
    code, document = reproduced(own, lambda workspace: None)
    assert (code, document["findings"][0]["rule"], document["comparedMerged"]) == (0, "audit-not-proven", False)

    code, document = reproduced(other, lambda workspace: None)
    # On the workspace and where it was published.
    assert (code, [each["field"] for each in document["findings"]]) == (1, ["trained", "adapter", "merged"])
    assert "the adapter differs already, so nothing was merged" in document["findings"][2]["message"]
    assert not document["comparedMerged"]
    assert "lora_A.weight differs from value 0 on" in document["findings"][0]["message"]

    def on_a_gpu(workspace: Path) -> None:
        accounts = workspace / "accounts.jsonl"
        if accounts.exists():
            accounts.write_text(accounts.read_text().replace('"cpu"', '"NVIDIA H100"'))

    _, document = reproduced(other, on_a_gpu)
    assert "(trained on cpu, computed again on NVIDIA H100: devices round differently)" in document["findings"][0]["message"]

    trained_there = copied(runs[0], tmp_path / "gpu")
    on_a_gpu(context_of(trained_there).workspace.root)
    _, document = reproduced(other, on_a_gpu, trained_there)
    assert "(computed on NVIDIA H100, whose kernels may add up in varying order" in document["findings"][0]["message"]

    def other_data(workspace: Path) -> None:
        report = json.loads((workspace / "preflight.json").read_bytes())
        (workspace / "preflight.json").write_text(json.dumps({**report, "data_hash": "f" * 64}))

    code, document = reproduced(own, other_data)
    assert (code, [each["rule"] for each in document["findings"]]) == (1, ["audit-data-differs"])
    assert not document["comparedResult"]

    bare = copied(runs[0], tmp_path / "bare")
    for directory in (context_of(bare).workspace.adapter, context_of(bare).output.adapter):
        shutil.rmtree(directory)
    code, said = refused("reproduce", str(bare.root))
    assert (code, said.splitlines()[-1].partition(";")[0]) == (2, "default/tiny has no trained result to compare with")


class InterruptedReplay(ForkedReplay):
    """Somebody presses Ctrl-C while the first interval is computed."""

    def run(self, *_arguments: object, **_named: object) -> None:
        assert self.workspace.prepared.is_dir()
        raise LocalError("interrupted; nothing was changed", ExitCode.INTERRUPTED)


def test_nothing_is_left_of_an_audit_that_was_interrupted(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Replay", InterruptedReplay)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = files_of(runs[0])
    assert refused("audit", str(runs[0].root))[0] == 130
    assert list(tmp_path.iterdir()) == []
    assert files_of(runs[0]) == before


def test_the_text_says_what_was_computed_again() -> None:
    whole = AuditEnd("default/tiny", [], has_compared_result=True, has_compared_merged=True)
    assert audit_text(whole).splitlines()[-1] == "  compared: the trained result and the merged model, byte for byte"
    end = AuditEnd("default/tiny", [], [INTERVALS[0], INTERVALS[2]], 4, 7, has_compared_result=True)
    assert audit_text(end).splitlines() == [
        "",
        "default/tiny: nothing differs",
        "  computed again: steps 1 to 2, steps 5 to 6 (2 of 4 intervals, --seed 7)",
        "  compared: the trained result, byte for byte",
    ]

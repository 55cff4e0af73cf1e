"""The plan of a job on this machine, and its end as data."""

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from finetune_cli.answers import reported_errors
from finetune_cli.app import app
from finetune_cli.commands import run as command
from finetune_cli.commands.run import RunEnd, local_plan, run_document
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_cli.local.look import Look
from finetune_cli.local.run_directory import RunDirectory, begun_with, freeze, read_plan, run_directory_of
from finetune_cli.local.summary import Losses, Summary
from finetune_job.api.training import GradientReduction
from finetune_job.failures import FailureClass, Outcome, TerminationReport
from finetune_job.finding import Finding
from finetune_job.plan.digest import learning_sha256
from tests.support.cases import table
from tests.unit.finetune_cli.local_jobs import PLAN, job, published
from tests.unit.finetune_cli.manifests import ACCEPTED, REFUSED

ROOT = Path(__file__).parents[4]
PROBLEM = Finding(rule="data-empty", severity="error", field="spec.data.source", value="", message="no record", fix="give one")


def test_the_plan_of_this_machine():
    assert PLAN.workspace.path == "tuned-local"
    assert PLAN.placement is None
    assert local_plan(job(), own_output=True).output.claim == "output-directory"
    assert local_plan(published(), own_output=True).publish is None
    with pytest.raises(LocalError, match=r"spec.parallelism.nodes: 2 .*processesPerNode") as caught:
        local_plan(job(nodes=2), own_output=False)
    assert caught.value.exit_code is ExitCode.REFUSED


def test_on_gpus_the_plan_leaves_attention_to_preflight_and_adds_adapters_with_the_base() -> None:
    plans = {on_gpu: local_plan(job(), own_output=False, on_gpu=on_gpu) for on_gpu in (False, True)}
    assert {on_gpu: plan.leaves_attention_open for on_gpu, plan in plans.items()} == {False: False, True: True}
    assert [plans[on_gpu].method.lora.fused_forward for on_gpu in (False, True)] == [False, True]
    assert learning_sha256(plans[True]) == learning_sha256(plans[False])


def test_a_run_keeps_the_plan_of_the_devices_that_it_began_with(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path)
    with_gpu, without = (local_plan(job(), own_output=False, on_gpu=on_gpu) for on_gpu in (True, False))
    assert begun_with(place, with_gpu) is None
    freeze(place, with_gpu)
    assert begun_with(place, with_gpu) == with_gpu
    assert begun_with(place, without) is None
    place.record.write_text(freeze(place, with_gpu).model_dump_json())
    with pytest.raises(LocalError, match="the manifest has changed"):
        freeze(place, without)


def test_a_run_is_planned_for_the_gpus_that_its_first_attempt_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: list[int] = []
    monkeypatch.setattr(command, "gpu_mebibytes", lambda: gpus)
    monkeypatch.setattr(command, "check_trainer", lambda: None)
    # It ends before anything runs, after its plan is frozen.
    monkeypatch.setattr(command, "_refused_at_once", lambda *_: [PROBLEM])
    for claim in ("models", "data", "models-out", "workspace"):
        (tmp_path / claim).mkdir()

    def leaves_attention_open(*, fresh: bool = False) -> bool:
        manifest = (ROOT / "examples/quickstart.yaml").read_text()
        end = command.run_job(manifest, command.Options(tmp_path, {}, None, fresh), Console(file=io.StringIO()))
        assert (end.exit_code, end.findings) == (ExitCode.REFUSED, [PROBLEM])
        assert end.job is not None
        plan = read_plan(run_directory_of(tmp_path, end.job))
        assert plan is not None
        return plan.leaves_attention_open

    assert not leaves_attention_open()
    gpus.append(81_559)
    assert not leaves_attention_open()
    assert leaves_attention_open(fresh=True)
    gpus.clear()
    assert leaves_attention_open()
    assert not leaves_attention_open(fresh=True)


@pytest.mark.parametrize(("ranks", "gpus", "is_refused"), [(2, [], True), (2, [81_559], False), (1, [], False)])
def test_parameters_are_offloaded_from_a_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: list[int], is_refused: bool
) -> None:
    monkeypatch.setattr(command, "gpu_mebibytes", lambda: gpus)
    monkeypatch.setattr(command, "check_trainer", lambda: None)
    monkeypatch.setattr(command, "_refused_at_once", lambda *_: [PROBLEM])
    for claim in ("models", "data", "models-out", "workspace"):
        (tmp_path / claim).mkdir()
    document = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    document["spec"]["parallelism"] |= {"processesPerNode": ranks, "fsdp": {"offloadParams": True}}
    options = command.Options(tmp_path, {}, None, False)
    if is_refused:
        with pytest.raises(LocalError, match=r"offloadParams: true: this machine has no GPU.*remove it") as caught:
            command.run_job(json.dumps(document), options, Console(file=io.StringIO()))
        assert caught.value.exit_code is ExitCode.REFUSED
    else:
        assert command.run_job(json.dumps(document), options, Console(file=io.StringIO())).findings == [PROBLEM]


def test_a_job_trains_on_fewer_ranks_if_its_gradients_are_added_up_in_order():
    two_nodes = job(nodes=2, processesPerNode=2)
    ordered = two_nodes.model_copy(
        update={"spec": two_nodes.spec.model_copy(update={"training": training(two_nodes, GradientReduction.ORDERED)})}
    )
    assert local_plan(ordered, own_output=False, ranks=3).parallelism.world_size == 4
    for wrong, ranks, said in (
        (ordered, 5, r"--ranks 5: the job has 4; give at most as many"),
        (ordered, None, r"spec.parallelism.nodes: 2 .*give --ranks 1 to 4"),
        (two_nodes, 1, r"--ranks 1: .*set spec.training.reduction to Ordered"),
    ):
        with pytest.raises(LocalError, match=said) as caught:
            local_plan(wrong, own_output=False, ranks=ranks)
        assert caught.value.exit_code is ExitCode.REFUSED


def training(of, reduction):
    return of.spec.training.model_copy(update={"reduction": reduction})


def test_an_end_is_there_as_data():
    summary = Summary(Losses(2.5, 1.25, held_out=True), 7, Path("/out/adapter"), None, None, workspace=Path("/w"), seconds=3.14)
    last = TerminationReport(role="merge", outcome=Outcome.FAILED, failure=FailureClass.DISK_FULL, message="full", hint="grow it")
    document = run_document(RunEnd(ExitCode.FAILED, PLAN.job, [], last, summary))
    assert json.loads(json.dumps(document)) == {
        "outcome": "failed",
        "job": {"namespace": PLAN.job.namespace, "name": PLAN.job.name},
        "findings": [],
        "failure": {"role": "merge", "class": "DiskFull", "message": "full", "hint": "grow it"},
        "losses": {"first": 2.5, "last": 1.25, "heldOut": True},
        "step": 7,
        "adapter": "/out/adapter",
        "merged": None,
        "publishedAt": None,
        "adapterPublishedAt": None,
        "verification": None,
        "report": None,
        "workspace": "/w",
        "restarts": 0,
        "seconds": 3.1,
    }


def test_a_refusal_is_data_on_standard_output_and_told_on_standard_error(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text(REFUSED)
    answer = CliRunner().invoke(app, ["run", str(manifest), "--claims", str(tmp_path), "-o", "json"])
    document = json.loads(answer.stdout)
    assert answer.exit_code == 1
    assert (document["outcome"], document["job"]) == ("refused", None)
    assert "wrap-class-name-blank" in [finding["rule"] for finding in document["findings"]]
    assert "wrap-class-name-blank" in answer.stderr


@pytest.mark.parametrize(("options", "said"), table(__file__, "test_a_place_that_cannot_be_written_to_is_told_and_no_refusal"))
def test_a_place_that_cannot_be_written_to_is_told_and_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "job.yaml").write_text(ACCEPTED)
    done = CliRunner().invoke(app, ["run", "job.yaml", *options])
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == f"{tmp_path}/{said} check the path, your permissions and the free disk space\n"


def test_a_reader_that_has_gone_ends_a_command_without_a_word() -> None:
    with pytest.raises(BrokenPipeError), reported_errors():
        raise BrokenPipeError(32, "Broken pipe")


def test_a_run_tells_beforehand_what_no_later_stage_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = tuple(
        Finding(rule=rule, severity="warning", field="spec", value="", message=f"about {rule}", fix="do")
        for rule in ("adapter-base-unnamed", "data-records-dropped")
    )
    monkeypatch.setattr(command, "look", lambda *_, **__: Look(findings=warnings))
    said = io.StringIO()
    assert command._refused_at_once(PLAN, {}, Console(file=said)) == []
    assert "about adapter-base-unnamed" in said.getvalue()
    assert "about data-records-dropped" not in said.getvalue()

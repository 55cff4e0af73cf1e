"""A job that goes right passes; a trainer that goes wrong is found, in the stage where it does."""

import errno
import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.inspection.report import RehearsalReport, Stage, Verdict
from tests.support.forked_ranks import run_processes, wrap
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama
from tests.unit.finetune_trainer.rehearsal.large_model import write_headers

SECONDS = 300.0
"""The machine may be busy."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", torch.float32)


@pytest.fixture(scope="module")
def coarse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("coarse") / "tiny", torch.bfloat16)


def nothing() -> None:
    """No fault."""


def rehearsed(
    plan: RunPlan,
    model: Path,
    root: Path,
    fault: Callable[[], None] = nothing,
    *,
    seconds: float = SECONDS,
    memory: int = 3 << 30,
) -> RehearsalReport:
    """In a process that has imported torch and computed nothing, as it has to be."""
    root.mkdir()
    answer = root.with_suffix(".json")
    assert run_processes([partial(_rehearse, plan, model, root, fault, seconds, memory, answer)]) == [0]
    return RehearsalReport.model_validate_json(answer.read_bytes())


def _rehearse(
    plan: RunPlan, model: Path, root: Path, fault: Callable[[], None], seconds: float, memory: int, answer: Path
) -> None:
    from finetune_trainer.processes.forked import ResourceBounds
    from finetune_trainer.rehearsal.run import rehearse
    from finetune_trainer.roles.merge import merge

    fault()
    report = rehearse(plan, model, root, ResourceBounds(time.monotonic() + seconds, memory), merge=merge)
    answer.write_text(report.model_dump_json())


def test_a_job_that_goes_right_passes(model: Path, tmp_path: Path) -> None:
    """Also if what is published beside the weights has directories."""
    base = Path(shutil.copytree(model, tmp_path / "base"))
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    report = rehearsed(plan_of(tiny_spec()), base, tmp_path / "root")
    assert report.verdict is Verdict.PASSED, report.model_dump_json(indent=1)
    assert [result.stage for result in report.stages] == [
        Stage.BUILD,
        Stage.TRAIN,
        Stage.RESUME,
        Stage.SAVE,
        Stage.COMPARE,
        Stage.MERGE,
    ]
    assert not any(result.problem for result in report.stages)
    assert report.findings == ()
    assert "training: steps: 6 -> 3" in report.changes
    assert "parallelism.fsdp.reshardAfterForward: false undisturbed, true when resumed; the same bytes" in report.changes
    assert 0 < report.peak_memory_bytes < 3 << 30


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            tiny_spec(method={"type": "QDoRA", "lora": {"r": 4, "loraDropout": "0.1"}}, merge={"base": "Dequantized"}),
            marks=pytest.mark.nightly,
        ),
        tiny_spec(
            method={"type": "Full", "lora": None},
            parallelism={"processesPerNode": 4, "fsdp": {"version": 1, "offloadParams": True}},
        ),
        pytest.param(
            tiny_spec(
                method={"type": "LoRA", "lora": {"r": 4, "modulesToSave": ["lm_head"], "initLoraWeights": "pissa_niter_4"}},
                parallelism={"processesPerNode": 2, "fsdp": {"offloadParams": True}},
            ),
            marks=pytest.mark.nightly,
        ),
        tiny_spec(method={"type": "VeRA", "lora": None, "settings": {"r": 512}}, parallelism={"processesPerNode": 1}),
    ],
    ids=["qdora-dropout", "full-fsdp1-offloaded", "saved-and-decomposed", "vera-alone"],
)
def test_other_methods_pass_on_twins_of_a_large_model(spec: dict[str, Any], tmp_path: Path) -> None:
    large = write_headers(tmp_path / "large")
    report = rehearsed(plan_of(spec), large, tmp_path / "root")
    assert report.verdict is Verdict.PASSED, report.model_dump_json(indent=1)
    assert report.parameters < 2_000_000
    assert "num_hidden_layers: 24 -> 2" in report.changes


def empty_adapter(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`save_file` that leaves out all but one tensor."""
    tensors, *others = arguments
    return original(dict(list(tensors.items())[:1]), *others, **named)


def without_moments(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`load` that leaves the optimizer as new."""
    result = original(*arguments, **named)
    for state in arguments[3].state.values():
        for value in state.values():
            value.zero_()
    return result


@dataclass(frozen=True)
class Planted:
    """A function of the trainer, what stands for it, and the stage that must notice."""

    function: str
    wrapper: Callable[..., Any]
    stage: Stage
    ranks: int = 2
    """One if nothing that they do together goes wrong, which takes half of the time."""

    def __call__(self) -> None:
        wrap(self.function, self.wrapper)


def weaker_last_layer(original: Callable[..., Any], model: Any) -> Any:
    """Gradients of which one tensor is half as large on ranks."""
    found = original(model)
    if torch.distributed.is_initialized():
        found[-1].mul_(0.5)
    return found


def lost_on_a_rank(original: Callable[..., Any], model: Any) -> Any:
    """Gradients of which a rank's part of the first tensor is missing. It is LoRA's A, which gets none in the first step."""
    found = original(model)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        found[0].zero_()
    return found


def without_a_micro_step() -> None:
    """The second rank loses the first micro-step of every step."""
    from finetune_trainer.objective.next_token import NextToken

    original, calls = NextToken.weighted_loss, itertools.count()

    def weighted_loss(self: Any, *arguments: Any) -> torch.Tensor:
        loss = original(self, *arguments)
        is_lost = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1 and next(calls) % 2 == 0
        # What is said of the loss stays right.
        return loss - (loss - loss.detach()) if is_lost else loss

    setattr(NextToken, "weighted_loss", weighted_loss)  # noqa: B010 - typed otherwise


def never_gathered_again(original: Callable[..., Any], model: Any, reduction: Any, **named: Any) -> Any:
    """Parameters that stay gathered stay so when a step has changed them."""
    found = original(model, reduction, **named)
    if reduction.keeps_gathered:
        model.set_reshard_after_backward(False)
    return found


def copied_base(original: Callable[..., Any], options: Any, **_named: Any) -> Any:
    """A merge that adds nothing."""
    result = original(options)
    path = options.output / "model.safetensors"
    base = load_file(options.base / "model.safetensors")
    save_file(base, path, metadata={"format": "pt"})
    return result


def unlucky(_original: Callable[..., Any], *_arguments: Any, **_named: Any) -> Any:
    raise ValueError("no such luck")


def named_field(_original: Callable[..., Any], *_arguments: Any, **_named: Any) -> Any:
    from finetune_trainer.errors import ConfigError

    raise ConfigError("spec.training.weightDecay: cannot be", "leave it unset")


FAULTS = {
    "no-checkpoint": Planted("checkpoint.checkpoints:begin_save", unlucky, Stage.TRAIN, 1),
    "part-of-an-adapter": Planted("train.export:save_file", empty_adapter, Stage.TRAIN, 1),
    "resumes-without-moments": Planted("checkpoint.checkpoints:load", without_moments, Stage.RESUME, 1),
    "old-values-stay-gathered": Planted("train.step:reducing", never_gathered_again, Stage.RESUME),
    "gradient-of-one-tensor": Planted("train.step:local_gradients", weaker_last_layer, Stage.COMPARE),
    "merges-nothing": Planted("roles.merge:merge_adapter", copied_base, Stage.MERGE, 1),
}
AT_NIGHT = ("no-checkpoint", "part-of-an-adapter")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly if name in AT_NIGHT else ()) for name in FAULTS])
def test_a_planted_fault_is_found_in_its_stage(model: Path, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    merge = {"enabled": fault.stage is Stage.MERGE}
    spec = tiny_spec(parallelism={"processesPerNode": fault.ranks}, merge=merge)
    report = rehearsed(plan_of(spec), model, tmp_path / "root", fault)
    assert report.verdict is Verdict.FAILED, report
    assert [result.stage for result in report.stages if result.problem][:1] == [fault.stage]
    (finding,) = report.findings
    assert (finding.rule, finding.severity, finding.field) == ("rehearsal-failed", "error", "spec.method")
    assert f"({fault.stage.value})" in finding.message
    assert str(tmp_path) not in finding.message


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            partial(wrap, "train.step:local_gradients", weaker_last_layer),
            "in step 1 the gradient of",
            marks=pytest.mark.nightly,  # With 32 bits it is planted above.
        ),
        pytest.param(
            partial(wrap, "train.step:local_gradients", lost_on_a_rank), "in step 2 the gradient of", marks=pytest.mark.nightly
        ),
        (without_a_micro_step, "gradient norm"),
    ],
    ids=["one-tensor", "part-of-a-rank", "micro-step"],
)
def test_sixteen_bits_hide_no_wrong_gradient(coarse_model: Path, tmp_path: Path, fault: Callable[[], None], said: str) -> None:
    report = rehearsed(plan_of(tiny_spec(merge={"enabled": False})), coarse_model, tmp_path / "root", fault)
    assert [result.stage for result in report.stages if result.problem] == [Stage.COMPARE], report
    assert said in report.findings[0].message


def cut_off() -> None:
    """Gloo has no interface to bind to, as in a pod without a loopback device."""
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    wrap("train.rank:_wait_for_the_cause", lambda *_arguments: None)


def full_disk(_original: Callable[..., Any], *_arguments: Any, **_named: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "/claims/workspace")


def killed(_original: Callable[..., Any], *_arguments: Any, **_named: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (cut_off, "cannot reach each other.*no-such-interface"),
        (partial(wrap, "train.run:build_optimizer", full_disk), "No space left on device"),
        (partial(wrap, "train.run:build_optimizer", killed), "SIGKILL.*lack of memory"),
    ],
    ids=["no-loopback", "full-disk", "killed-for-memory"],
)
def test_what_this_machine_lacks_says_nothing_about_the_job(
    model: Path, tmp_path: Path, fault: Callable[[], None], said: str
) -> None:
    report = rehearsed(plan_of(tiny_spec()), model, tmp_path / "root", fault)
    assert report.verdict is Verdict.NOT_DONE, report
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("rehearsal-not-done", "warning")
    assert re.search(said, finding.message, re.DOTALL), finding.message


def test_an_error_of_the_trainer_keeps_its_field_and_fix(model: Path, tmp_path: Path) -> None:
    report = rehearsed(plan_of(tiny_spec()), model, tmp_path / "root", partial(wrap, "train.run:build_optimizer", named_field))
    (finding,) = report.findings
    assert (finding.field, finding.fix) == ("spec.training.weightDecay", "leave it unset")
    assert finding.message.endswith("fails: cannot be")


@pytest.mark.parametrize(("bound", "said"), [({"seconds": 0.5}, "did not end in time"), ({"memory": 1 << 20}, "GiB of memory")])
def test_bounds_end_it_with_a_warning_and_no_child_is_left(model: Path, tmp_path: Path, bound: dict[str, Any], said: str) -> None:
    began = time.monotonic()
    report = rehearsed(plan_of(tiny_spec()), model, tmp_path / "root", **bound)
    assert report.verdict is Verdict.NOT_DONE
    # What it waited for counts, too.
    assert bound.get("seconds", 0.1) <= report.seconds <= time.monotonic() - began + 0.1
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("rehearsal-not-done", "warning")
    assert said in finding.message
    assert not processes_below(tmp_path)


def test_a_model_of_which_no_scaled_down_model_can_be_made_is_a_warning(model: Path, tmp_path: Path) -> None:
    report = rehearsed(
        plan_of(tiny_spec()), model, tmp_path / "root", partial(wrap, "rehearsal.child_tasks:make_scaled_model", unlucky)
    )
    assert report.verdict is Verdict.NOT_DONE
    assert "no such luck" in report.findings[0].message


def processes_below(directory: Path) -> list[int]:
    """Processes that have a file of this directory open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(directory) in str(link.readlink()) for link in (process / "fd").iterdir()):
                found.append(int(process.name))
        except OSError:
            continue
    return found

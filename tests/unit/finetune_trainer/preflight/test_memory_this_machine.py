"""A run on one machine is planned for the GPUs that it has; the driver's program is a stand-in."""

from pathlib import Path

import pytest

from finetune_memory import this_machine
from finetune_memory.limit import MemoryLimit
from finetune_trainer.preflight.memory import batches_of, limit_here
from tests.support.builders import a_job
from tests.unit.finetune_memory.jobs import GIB, shape_of

LOCAL = a_job().spec("training.globalBatchSize", 16).plan().model_copy(update={"placement": None})
SOURCE = "the smallest GPU of this machine"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`driver("echo 81559")`: what the program does, after it has kept its arguments."""

    def installed(program: str) -> Path:
        seen = tmp_path / "arguments"
        path = tmp_path / "nvidia-smi"
        path.write_text(f'#!/bin/sh\necho "$@" > {seen}\n{program}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return seen

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return installed


def test_the_smallest_gpu_decides(driver, monkeypatch) -> None:
    seen = driver("echo 81559; echo 24576")
    assert limit_here(LOCAL) == MemoryLimit(24 * GIB, is_device=True, source=SOURCE, devices=2)
    assert seen.read_text().split() == ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    limit_here(LOCAL)
    assert seen.read_text().split()[-1] == "--id=0"


@pytest.mark.parametrize("program", ["exit 9", "echo '[N/A]'", "echo '[Insufficient Permissions]'", "true", "echo 0"])
def test_without_an_answer_nothing_is_known(driver, program: str) -> None:
    driver(program)
    assert limit_here(LOCAL) is None


def test_a_driver_that_does_not_answer_is_not_waited_for(driver, monkeypatch) -> None:
    monkeypatch.setattr(this_machine, "DRIVER_SECONDS", 0.5)
    driver("exec sleep 60")
    assert limit_here(LOCAL) is None


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_gpus_that_may_not_be_used_do_not_count(driver, monkeypatch, visible: str) -> None:
    driver("echo 81559")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert limit_here(LOCAL) is None


def test_no_driver_and_a_profile(monkeypatch, tmp_path: Path, driver) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert limit_here(LOCAL) is None
    driver("echo 24576")
    placed = a_job().with_profile(gpu={"resourceName": "nvidia.com/gpu", "memory": "80Gi"}).plan()
    assert (limit_here(placed) or LOCAL).bytes == 80 * GIB


def test_what_is_left_open_fits_the_gpu_of_this_machine(driver) -> None:
    """An 8B model on 80 GiB: the usual 8 sequences at a time would not."""
    driver("echo 81920")
    for problem, attention in (("its scores are capped", "sdpa"), ("", "varlen")):
        found = batches_of(LOCAL, shape_of("Llama-3.1-8B", LOCAL), "bfloat16", can_recompute=True, attention_problem=problem)
        assert {choice.field.rpartition(".")[2]: choice.value for choice in found} == {
            "attention": attention,
            "microBatchSize": 4,
            "activationCheckpointing": "None",
        }
        assert all(SOURCE in choice.reason for choice in found[1:])

"""A rank of a deterministic job pins its kernels before it joins, and no other rank does."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_job.failures import Outcome
from finetune_trainer.ranks import determinism
from finetune_trainer.train import rank
from tests.support.tiny_model import run_context, tiny_spec

WORKSPACE, ALGORITHM = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in determinism.ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    fill, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic
    fused, precision = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    rounds = torch.backends.cudnn.allow_tf32
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic = fill, cudnn
    torch.backends.cuda.enable_cudnn_sdp(enabled=fused)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = rounds


@pytest.mark.parametrize("is_asked_for", [True, False])
@pytest.mark.usefixtures("unpinned")
def test_kernels_are_pinned_before_the_gang_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked_for: bool) -> None:
    seen: list[tuple[bool, bool, str | None, str | None]] = []

    def join(*_: Any, **__: Any) -> None:
        sdp = torch.backends.cuda.cudnn_sdp_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), sdp, os.environ.get(WORKSPACE), os.environ.get(ALGORITHM)))
        raise RuntimeError("far enough")

    monkeypatch.setattr(rank, "joined", join)
    # The administrator's own choice stays.
    monkeypatch.setenv(ALGORITHM, "Tree")
    training = {"maxSteps": 1, "globalBatchSize": 2, "deterministic": is_asked_for}
    context = run_context(tmp_path, tiny_spec(training=training, parallelism={"processesPerNode": 1}))
    report = rank.run_rank(context, rank=0, world_size=1, local_rank=0, node_rank=0, observe_port=0)
    assert report.outcome is Outcome.FAILED
    assert seen == [(True, False, ":4096:8", "Tree") if is_asked_for else (False, True, None, "Tree")]


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.usefixtures("unpinned")
def test_float32_is_never_rounded_to_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool) -> None:
    """As `finetune estimate` says. Images of others ask for it by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, as if a program had."""
    seen: list[tuple[str, bool]] = []

    def join(*_: Any, **__: Any) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        raise RuntimeError("far enough")

    monkeypatch.setattr(rank, "joined", join)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    training = {"maxSteps": 1, "globalBatchSize": 2, "deterministic": is_deterministic}
    context = run_context(tmp_path, tiny_spec(training=training, parallelism={"processesPerNode": 1}))
    rank.run_rank(context, rank=0, world_size=1, local_rank=0, node_rank=0, observe_port=0)
    assert seen == [("highest", False)]


@pytest.mark.usefixtures("unpinned")
def test_what_has_no_fixed_order_is_refused_and_what_holds_is_told() -> None:
    held = determinism.pin_kernels()
    assert held == {
        WORKSPACE: ":4096:8",
        ALGORITHM: "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_MAX_NCHANNELS": "4",
        "NCCL_NVLS_ENABLE": "0",
    }
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

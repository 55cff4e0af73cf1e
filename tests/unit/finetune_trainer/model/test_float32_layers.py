"""DeLoRA in float16: PEFT's own layer overflows in its first step, the trainer's computes what PEFT computes in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft.tuners.delora import DeloraConfig, DeloraLinear
from torch import nn

from finetune_trainer.model.float32_layers import compute_delora_in_float32
from finetune_trainer.model.sharded import build
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.ranks.gang import Gang
from tests.support.method_settings import SETTINGS
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama

SIZE = 64


def layer(is_fresh: bool) -> DeloraLinear:
    torch.manual_seed(0)
    config = DeloraConfig(r=4, init_weights=is_fresh)
    return DeloraLinear(nn.Linear(SIZE, SIZE, dtype=torch.float16), "default", config, r=4, delora_lambda=15)


def inputs() -> torch.Tensor:
    return 4 * torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_layer_computes_in_float16_what_peft_computes_in_float32(is_fresh: bool) -> None:
    """Not fresh: with a B that is not zero, whose product is not simply that of the base."""
    exact, fixed = layer(is_fresh).float(), layer(is_fresh).float()
    compute_delora_in_float32(nn.Sequential(fixed))
    wanted = exact(inputs().half().float())
    wanted.square().sum().backward()
    with torch.autocast("cpu", dtype=torch.float16):
        found = fixed(inputs().half())
    found.float().square().sum().backward()
    assert found.dtype is torch.float16
    assert (found.float() - wanted).abs().max() <= 0.005 * wanted.abs().max()
    for name in ("delora_A", "delora_B", "delora_lambda"):
        gradient, expected = (getattr(each, name)["default"].grad.float() for each in (fixed, exact))
        assert (gradient - expected).norm() <= 0.01 * expected.norm(), name


def test_pefts_own_layer_overflows() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert not layer(True).float()(inputs()).isfinite().all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_trainer_builds_models_that_compute_so(tmp_path: Path, dtype: str) -> None:
    base = write_tiny_llama(tmp_path / "base")
    method = {"type": "DeLoRA", "lora": None, "settings": SETTINGS["DeLoRA"]}
    plan = plan_of(tiny_spec(model={"dtype": dtype}, method=method, parallelism={"processesPerNode": 1}))
    trained = build(plan, base, Gang(0, 1, 0, torch.device("cpu"), None), NextToken())
    own = [module.forward.__module__ for module in trained.module.modules() if isinstance(module, DeloraLinear)]
    assert set(own) == {"finetune_trainer.model.float32_layers" if dtype == "float16" else "peft.tuners.delora.layer"}

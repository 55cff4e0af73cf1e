"""Whole modules and biases that are trained next to adapters of a 16-bit base: held in float32, computed like the base.

On two ranks, against all of it in float32 in one process: what is left are the roundings of bfloat16.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.model.dtypes import resolve_dtypes
from tests.support.cases import table
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama, write_tokenizer
from tests.unit.finetune_trainer.model.adapted_gang import (
    AdapterCase,
    Trained,
    load,
    logits_of,
    save_adapter,
    train_in_gang,
    train_plainly,
)
from tests.unit.finetune_trainer.train.recorded_steps import distance

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = table(__file__, "CASES")
ROUNDING = 2**-5
"""Relative L2 of a gradient through two layers of products with 8 bits each; 0.007 to 0.014 were measured."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    llama = write_tiny_llama(root / "llama", pad_token_id=None)
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(llama)
    return {"llama": llama, "biased": _write_biased(root / "biased")}


def _write_biased(directory: Path) -> Path:
    torch.manual_seed(7)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=256, **dropout)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def case_of(bases: dict[str, Path], name: str) -> AdapterCase:
    base, kind, lora, fsdp = CASES[name]
    return AdapterCase(bases[base], {"type": kind, "lora": {"r": 4, **lora}}, fsdp)


@pytest.fixture(scope="module")
def found(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return train_in_gang({name: case_of(bases, name) for name in CASES}, tmp_path_factory.mktemp("gang"))


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_merge_are_those_of_float32_within_16_bits(
    bases: dict[str, Path], found: dict[str, Trained], tmp_path: Path, name: str
) -> None:
    case = case_of(bases, name)
    _, expected = train_plainly(load(case.base).float(), case)
    first = found[name].gradients[0]
    assert first.keys() == expected.gradients[0].keys()
    for parameter, gradient in expected.gradients[0].items():
        assert distance(first[parameter], gradient) <= ROUNDING, parameter
    assert {values.dtype for values in found[name].parameters.values()} == {torch.float32}
    adapter = save_adapter(case, found[name], tmp_path / "adapter")
    adapted = logits_of(PeftModel.from_pretrained(load(case.base), adapter))
    merge_adapter(MergeOptions(case.base, (adapter,), tmp_path / "merged", None, 10**9))
    merged = load(tmp_path / "merged")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    assert torch.allclose(logits_of(merged).float(), adapted.float(), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("method", "param"),
    [
        ({"type": "LoRA"}, None),
        ({"type": "LoRA", "lora": {"modulesToSave": ["norm"]}}, torch.bfloat16),
        ({"type": "LoRA", "lora": {"modulesToSave": ["norm"], "autocastAdapterDtype": False}}, None),
        ({"type": "LoRA", "lora": {"bias": "all"}}, torch.bfloat16),
        ({"type": "LNTuning"}, torch.bfloat16),
    ],
)
def test_what_is_trained_in_float32_computes_in_the_bases_type(method: dict[str, Any], param: torch.dtype | None) -> None:
    assert resolve_dtypes(plan_of({**tiny_spec(), "method": method}), torch.bfloat16).param is param

"""Each text that is matched in an error of a library is a text that the library says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune_trainer.model import library_texts
from tests.unit.finetune_trainer.preflight.test_architecture import SIZES


def built(kind: str, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), **settings)
    return model


def adapted(kind: str, **settings: Any) -> None:
    get_peft_model(built(kind), LoraConfig(task_type="CAUSAL_LM", **settings))


SAID: dict[str, tuple[Callable[[], object], str]] = {
    "UNKNOWN_ATTENTION": (lambda: built("gpt_oss", attn_implementation="sdpa"), "attn_implementation"),
    "STACKED_WEIGHTS": (
        lambda: adapted("mixtral", target_parameters=["experts.down_proj"], target_modules=[], lora_dropout=0.1),
        "ParamWrapper",
    ),
    "REFUSED_MODULE": (lambda: adapted("mamba", target_modules=["out_proj"]), "Module 'out_proj' is incompatible with"),
    "NO_DEFAULT_TARGETS": (lambda: adapted("olmo2"), "Please specify `target_modules`"),
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_the_library_says_it(name: str) -> None:
    provoke, text = SAID[name]
    with pytest.raises(ValueError) as error:
        provoke()
    match = getattr(library_texts, name).search(str(error.value))
    assert match is not None
    assert match[0] == text


def test_every_text_is_here() -> None:
    assert {name for name in vars(library_texts) if name.isupper()} == set(SAID)

"""Each text that is matched in an error of a library is a text that the library says."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune_job.api.method import MethodType
from finetune_trainer.model import library_texts
from finetune_trainer.model.adapters import config_class
from tests.unit.finetune_trainer.preflight.test_architecture import SIZES

WITHOUT_CONV1D = ("LoHa", "LoKr", "OFT", "BOFT", "HRA", "MiSS")


def built(kind: str, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), **settings)
    return model


def adapted(kind: str, **settings: Any) -> None:
    get_peft_model(built(kind), LoraConfig(task_type="CAUSAL_LM", **settings))


def other(method: str, kind: str = "llama", **settings: Any) -> Callable[[], object]:
    config = config_class(MethodType(method))(task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **settings})
    return lambda: get_peft_model(built(kind), config)


SAID: list[tuple[str, Callable[[], object], str]] = [
    ("UNKNOWN_ATTENTION", lambda: built("gpt_oss", attn_implementation="sdpa"), "attn_implementation"),
    (
        "STACKED_WEIGHTS",
        lambda: adapted("mixtral", target_parameters=["experts.down_proj"], target_modules=[], lora_dropout=0.1),
        "ParamWrapper",
    ),
    ("REFUSED_MODULE", lambda: adapted("mamba", target_modules=["out_proj"]), "out_proj"),
    ("NO_DEFAULT_TARGETS", lambda: adapted("olmo2"), "Please specify `target_modules`"),
    *(("REFUSED_CLASS", other(name, "gpt2", target_modules=["c_attn"]), "Conv1D") for name in WITHOUT_CONV1D),
    ("NOT_DIVISIBLE", other("BOFT", boft_block_size=7), "boft_block_size"),
    ("NOT_DIVISIBLE", other("BOFT", boft_block_size=0, boft_block_num=7), "boft_block_num"),
    ("BEYOND_LAYER", other("MiSS", r=99), "r"),
]


@pytest.mark.parametrize(("name", "provoke", "text"), SAID)
def test_the_library_says_it(name: str, provoke: Callable[[], object], text: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        provoke()
    match = getattr(library_texts, name).search(str(error.value))
    assert match is not None
    assert next((group for group in match.groups() if group), match[0]) == text


def test_every_text_is_here() -> None:
    texts = {name for name, value in vars(library_texts).items() if isinstance(value, re.Pattern)}
    assert texts == {name for name, _, _ in SAID}

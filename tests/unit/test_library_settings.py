"""docs/reference/library-settings.md names every setting of the locked libraries that a job has no field for, and no other."""

import dataclasses
import inspect
import re
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from peft import LoraConfig, PeftConfig, PeftType
from transformers import BitsAndBytesConfig
from transformers.utils.quantization_config import QuantizationMethod

from finetune_job.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "library-settings.md"


def fields(chosen: Any, *common: Any) -> set[str]:
    """Of a dataclass, without those of `common`."""
    return {field.name for field in dataclasses.fields(chosen)} - {name for each in common for name in fields(each)}


def values(chosen: type[Enum]) -> set[str]:
    return {str(member.value) for member in chosen}


def names(chosen: type[Enum]) -> set[str]:
    return {member.name for member in chosen}


def arguments(chosen: Any) -> set[str]:
    return set(inspect.signature(chosen).parameters) - {"self", "module", "kwargs"}


def words(declared: Any) -> set[str]:
    """The texts that a type takes."""
    if typing.get_origin(declared) is typing.Literal:
        return set(typing.get_args(declared))
    return {word for part in typing.get_args(declared) for word in words(part)}


TAKEN: dict[str, tuple[set[str], set[str]]] = {
    "peft.LoraConfig": (
        fields(LoraConfig, PeftConfig),
        {
            *("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
            *("init_lora_weights", "modules_to_save", "trainable_token_indices", "rank_pattern", "alpha_pattern", "use_rslora"),
            *("bias", "use_dora"),
        },
    ),
    "peft.LoraConfig.init_lora_weights": (
        words(typing.get_type_hints(LoraConfig)["init_lora_weights"]),
        {"gaussian", "orthogonal", "pissa", "olora"},
    ),
    "peft.PeftType": (values(PeftType), {str(method.peft_type) for method in METHODS.values() if method.peft_type}),
    "transformers.utils.quantization_config.QuantizationMethod": (values(QuantizationMethod), {"bitsandbytes"}),
    "transformers.BitsAndBytesConfig": (
        arguments(BitsAndBytesConfig),
        {
            *("load_in_8bit", "load_in_4bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
            "bnb_4bit_quant_storage",
        },
    ),
    "torch.distributed.fsdp.FullyShardedDataParallel": (
        arguments(torch_fsdp.FullyShardedDataParallel),
        {"cpu_offload", "auto_wrap_policy", "mixed_precision", "sync_module_states", "use_orig_params"},
    ),
    "torch.distributed.fsdp.ShardingStrategy": (names(torch_fsdp.ShardingStrategy), {"FULL_SHARD"}),
    "torch.distributed.fsdp.BackwardPrefetch": (names(torch_fsdp.BackwardPrefetch), set()),
    "torch.distributed.fsdp.StateDictType": (names(torch_fsdp.StateDictType), {"FULL_STATE_DICT", "SHARDED_STATE_DICT"}),
    "torch.distributed.fsdp.MixedPrecision": (fields(torch_fsdp.MixedPrecision), {"param_dtype", "reduce_dtype"}),
    "torch.distributed.fsdp.fully_shard": (
        arguments(torch_fsdp.fully_shard),
        {"reshard_after_forward", "mp_policy", "offload_policy"},
    ),
    "torch.distributed.fsdp.MixedPrecisionPolicy": (fields(torch_fsdp.MixedPrecisionPolicy), {"param_dtype", "reduce_dtype"}),
    "torch.distributed.fsdp.CPUOffloadPolicy": (fields(torch_fsdp.CPUOffloadPolicy), set()),
}
"""By what is read: all that it takes, and what a job can say."""


def listed() -> dict[str, dict[str, str]]:
    """By the heading of each table, its names and reasons."""
    found: dict[str, dict[str, str]] = {}
    for part in PAGE.read_text().split("\n### `")[1:]:
        rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", part, flags=re.MULTILINE)
        assert len(dict(rows)) == len(rows)
        found[part.partition("`")[0]] = dict(rows)
    return found


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_job_cannot_say_has_its_line(name: str) -> None:
    taken, said = TAKEN[name]
    assert said <= taken
    assert set(listed()[name]) == taken - said
    assert all(len(reason) > 5 for reason in listed()[name].values())


def test_every_table_is_checked() -> None:
    assert set(listed()) == set(TAKEN)

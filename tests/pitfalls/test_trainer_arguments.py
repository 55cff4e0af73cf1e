"""What transformers' TrainingArguments and accelerate's plugin make of FSDP settings, at construction and on CPU."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch.distributed.fsdp import ShardingStrategy

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.parallelism import FsdpSpec
from tests.pitfalls.manifests import findings, manifest


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """TrainingArguments writes its settings into the environment, where the next plugin would find them."""
    with mock.patch.dict(os.environ):
        yield


def plugin_arguments(directory: Any, **settings: Any) -> dict[str, Any]:
    """What TrainingArguments hands to accelerate."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(directory), fsdp="full_shard", fsdp_config=settings, use_cpu=True)
    found: dict[str, Any] = arguments.fsdp_plugin_args
    return found


def plugin(**settings: Any) -> Any:
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(**settings)


def test_a_string_turns_offloading_on(tmp_path):
    assert plugin_arguments(tmp_path, cpu_offload="false")["cpu_offload"] is True
    # The API server takes no string at all; the models alone read it as what it says.
    assert FineTuneJobSpec.model_validate(manifest({"offloadParams": "false"})).parallelism.fsdp.offload_params is False


def test_the_version_that_is_assumed_differs(tmp_path):
    assert plugin_arguments(tmp_path)["fsdp_version"] == 2
    assert plugin().fsdp_version == 1
    assert FsdpSpec().version == 2


def test_version_1_is_announced_to_end_and_works(tmp_path):
    assert plugin_arguments(tmp_path, version=1)["fsdp_version"] == 1
    assert not findings({"version": 1})


def test_version_1_always_shards_fully(tmp_path):
    given = plugin_arguments(tmp_path, version=1, reshard_after_forward="no_shard", sharding_strategy="NO_SHARD")
    assert "sharding_strategy" not in given
    # Broadcasting needs an accelerator.
    assert plugin(**{**given, "sync_module_states": False}).sharding_strategy is ShardingStrategy.FULL_SHARD
    assert "no-effect-reshard-after-forward" in findings({"version": 1, "reshardAfterForward": False})


def test_efficient_loading_turns_synchronisation_on():
    """On a machine without an accelerator what it turns on is refused, so that one sees that it was."""
    with pytest.raises(RuntimeError, match="no available devices"):
        plugin(fsdp_version=1, cpu_ram_efficient_loading=True, sync_module_states=False)
    assert plugin(fsdp_version=1, cpu_ram_efficient_loading=False, sync_module_states=False).sync_module_states is False
    efficient = {"version": 1, "cpuRamEfficientLoading": True, "syncModuleStates": False}
    assert "no-effect-cpu-ram-efficient-loading" in findings(efficient)


def test_one_process_is_taken_without_a_word(tmp_path):
    assert plugin_arguments(tmp_path)

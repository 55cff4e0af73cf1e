"""FSDP as accelerate applies, saves and loads it.

`Accelerator` itself never turns FSDP on for CPU processes, so that a test through it would silently test DDP: its own functions
are called with an object that holds what they read of it.
"""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.models import LAYER_CLASSES


def stand_in(case: Case, state_dict_type: str = "FULL_STATE_DICT", mixed_precision: str = "no") -> Any:
    """What accelerate's FSDP functions read of an accelerator, in a rank of a gang."""
    import torch
    from accelerate.utils import fsdp_utils
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
    from torch import distributed

    # Accelerate's own kind of logger wants an accelerator to have been made.
    fsdp_utils.logger = logging.getLogger(__name__)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=case.version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER_CLASSES[case.model]],
        state_dict_type=state_dict_type,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
        use_orig_params=case.use_orig_params,
    )
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision=mixed_precision,
        is_main_process=distributed.get_rank() == 0,
        process_index=distributed.get_rank(),
        num_processes=distributed.get_world_size(),
        is_fsdp2=case.version == 2,
        wait_for_everyone=distributed.barrier,
    )


def prepared(accelerator: Any, model: Any) -> Any:
    """The model under FSDP 2, as accelerator.prepare would return it."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    return fsdp2_prepare_model(accelerator, model)


def save(accelerator: Any, model: Any, directory: Path) -> None:
    """accelerator.save_state for the adapter alone."""
    from accelerate.utils.fsdp_utils import save_fsdp_model

    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(directory), adapter_only=True)


def load(accelerator: Any, model: Any, directory: Path) -> None:
    """accelerator.load_state for the adapter alone."""
    from accelerate.utils.fsdp_utils import load_fsdp_model

    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(directory), adapter_only=True)

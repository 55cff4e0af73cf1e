"""The trainer, with ranks that only tell whether they could use a device and what they see, in told-RANK in the claims."""

from __future__ import annotations

import json
import os
import runpy
from typing import Any

TOLD = "told"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")


def tell(context: Any, **_others: Any) -> int:
    import torch

    could_use = not torch.cuda._is_in_bad_fork()
    found = [could_use, *(os.environ.get(name) for name in VARIABLES)]
    (context.claims_root / f"{TOLD}-{os.environ['RANK']}").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    from finetune_trainer.train import rank

    # Ranks are forks of this process.
    rank.run_launched_rank = tell
    runpy.run_module("finetune_trainer", run_name="__main__", alter_sys=True)

"""The trainer, with ranks that only tell whether they could use a device and what they see, in told-RANK in the claims.

Started as a program it is the supervisor; the process that ranks are forks of imports this module, too.
"""

import json
import os
import runpy
from typing import Any

TOLD = "told"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_TELLING = "TELLS_OF_DEVICES"


def tell(context: Any, **_others: Any) -> int:
    import torch

    could_use = not torch.cuda._is_in_bad_fork()
    found = [could_use, *(os.environ.get(name) for name in VARIABLES)]
    (context.claims_root / f"{TOLD}-{os.environ['RANK']}").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    from finetune_trainer.roles import torchrun

    os.environ[_TELLING] = "1"
    torchrun.PRELOADED += ",tests.unit.finetune_trainer.roles.told_devices"
    runpy.run_module("finetune_trainer", run_name="__main__", alter_sys=True)
elif _TELLING in os.environ:
    from finetune_trainer.train import rank

    rank.run_launched_rank = tell

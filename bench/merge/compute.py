"""`python -m bench.merge.compute`: the merge's arithmetic alone, one projection in memory, as many threads as processors."""

import json
import os
import statistics
import threading
import time
from typing import Any

from bench.merge.model import RANK

REPEATS = 12
ROUNDS = 5


def measure(rank: int = RANK, num_rows: int = 5632, num_columns: int = 2048) -> dict[str, Any]:
    """Bytes of bf16 weights per second through the steps of a LoRA of this rank, bits and check for finite values as in a
    merge.
    """
    import torch

    from finetune_trainer.merge.changes import Orientation
    from finetune_trainer.merge.steps.low_rank import Factors, LowRankStep
    from finetune_trainer.merge.steps.step import Scratch

    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = (torch.randn(num_rows, num_columns) / 50).bfloat16()
    factors = Factors(
        torch.randn(rank, num_columns) / 50, torch.randn(num_rows, rank) / 50, None, 2.0, Orientation.LINEAR, rounds_product=False
    )
    step = LowRankStep(factors, torch.bfloat16)
    blocks = step.row_blocks(num_rows, num_columns)

    def work(ready: threading.Barrier) -> None:
        torch.set_num_threads(1)
        out, scratch = torch.empty_like(base), Scratch()
        ready.wait()
        for _ in range(REPEATS):
            for first, last in blocks:
                if not step.apply(base[first:last], (first, last), out[first:last], scratch):
                    raise ArithmeticError("the benchmark's weights are not finite")

    rates = []
    for _ in range(ROUNDS):
        ready = threading.Barrier(num_threads + 1)
        threads = [threading.Thread(target=work, args=(ready,)) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        ready.wait()
        started = time.monotonic()
        for thread in threads:
            thread.join()
        rates.append(num_threads * REPEATS * base.nbytes / (time.monotonic() - started))
    return {
        "threads": num_threads,
        "shape": [num_rows, num_columns],
        "median_gigabytes_per_second": round(statistics.median(rates) / 1e9, 2),
        "min_gigabytes_per_second": round(min(rates) / 1e9, 2),
        "max_gigabytes_per_second": round(max(rates) / 1e9, 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))

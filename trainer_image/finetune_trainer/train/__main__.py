"""One rank: torchrun runs this script in a fork of a process that has imported what the plan needs (roles/agent.py).

`python -m finetune_trainer.train` does the same in a new process.
"""

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

from finetune_job.names import OBSERVE_PORT
from finetune_trainer.context import add_run_arguments, add_until_step, run_context
from finetune_trainer.processes.child import require_single_thread
from finetune_trainer.processes.start import die_with, end, keep_bitsandbytes_out, name_process, preload, send_output_to
from finetune_trainer.ranks.reports import rank_process_name
from finetune_trainer.ranks.start_signs import leave_start_signs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and return the exit code. Raises PlanMismatchError, ModelError, OSError."""
    die_with_agent()
    name_process(rank_process_name(int(os.environ["RANK"])))
    arguments = _parser().parse_args(argv)
    if arguments.output_pipes is not None:
        leave_start_signs(arguments.output_pipes, int(os.environ["LOCAL_RANK"]))
        send_output_to(os.open(arguments.output_pipes / os.environ["LOCAL_RANK"], os.O_WRONLY))
    context = run_context(arguments).with_trained_rows()
    keep_bitsandbytes_out(context.plan)
    preload("finetune_trainer.train.rank")
    set_threads()
    from finetune_trainer.train.rank import run_launched_rank

    return run_launched_rank(context, node_rank=arguments.node_rank, observe_port=arguments.observe_port)


def die_with_agent() -> None:
    """Make the kernel kill this process when its parent ends; the parent ends with torchrun's agent.

    Raises ThreadsAtForkError if the parent has several threads: a lock that one of them held could stay locked here forever.
    """
    agent = multiprocessing.parent_process()
    die_with(os.getppid())
    if agent is None:
        return
    if not agent.is_alive():
        os._exit(1)
    require_single_thread(os.getppid())


def set_threads() -> None:
    """Set the number of threads that torchrun requests. The library that reads the variable was loaded before torchrun set it."""
    import torch

    if number := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(number))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.train", description=__doc__)
    add_run_arguments(parser)
    add_until_step(parser)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--observe-port", type=int, default=OBSERVE_PORT)
    parser.add_argument("--output-pipes", type=Path, default=None)
    return parser


if __name__ == "__main__" and (status := main()):
    # After success, return normally, because torchrun waits for the return value of a script that it runs in a fork.
    end(status)

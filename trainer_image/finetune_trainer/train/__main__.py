"""`python -m finetune_trainer.train`: one rank, as torchrun starts it. Reads the plan before it imports what the plan needs."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from finetune_job.names import OBSERVE_PORT
from finetune_trainer.context import add_run_arguments, run_context
from finetune_trainer.processes.start import end, keep_bitsandbytes_out, preload


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; the exit code. Raises PlanMismatchError."""
    arguments = _parser().parse_args(argv)
    if arguments.output_pipes is not None:
        send_output_to(arguments.output_pipes / os.environ["LOCAL_RANK"])
    context = run_context(arguments)
    keep_bitsandbytes_out(context.plan)
    preload("finetune_trainer.train.rank")
    from finetune_trainer.train.rank import run_launched_rank

    return run_launched_rank(context, node_rank=arguments.node_rank, observe_port=arguments.observe_port)


def send_output_to(pipe: Path) -> None:
    """Let this process write its output, native libraries' included, into a pipe that the supervisor reads."""
    descriptor = os.open(pipe, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.train", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--observe-port", type=int, default=OBSERVE_PORT)
    parser.add_argument("--output-pipes", type=Path, default=None)
    return parser


if __name__ == "__main__":
    end(main())

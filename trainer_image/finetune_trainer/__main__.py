"""`python -m finetune_trainer {fetch,preflight,train,merge,publish}`: one role, as the plan and these arguments say.

`python -m finetune_trainer serve`: roles of one plan on a user's own machine, each in a fork of a process that has imported once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn, TextIO

from finetune_job.failures import TerminationReport
from finetune_job.names import CREDENTIALS_MOUNT, OBSERVE_PORT, RENDEZVOUS_PORT, TERMINATION_LOG, Role
from finetune_trainer.context import RunContext, add_run_arguments, add_until_step, run_context
from finetune_trainer.processes.child import fork
from finetune_trainer.processes.container import take_attempt
from finetune_trainer.processes.start import (
    die_with,
    end,
    keep_bitsandbytes_out,
    keep_torch_out,
    map_torch_libraries,
    preload,
    preload_for_forks,
    send_output_to,
)
from finetune_trainer.termination import run_role

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""Of a role's lines, from which `finetune run` tells what a role is doing and waiting for."""


def parser() -> argparse.ArgumentParser:
    """The arguments of all roles."""
    top = argparse.ArgumentParser(prog="python -m finetune_trainer", description=__doc__)
    roles = top.add_subparsers(dest="role", required=True)
    for role in Role:
        arguments = roles.add_parser(role.value)
        add_run_arguments(arguments)
        arguments.add_argument("--termination-log", type=Path, default=Path(TERMINATION_LOG))
        if role in (Role.FETCH, Role.PUBLISH):
            arguments.add_argument("--credentials", type=Path, default=Path(CREDENTIALS_MOUNT))
            arguments.add_argument("--parent", type=int, help="process with which this one ends")
        if role is Role.TRAIN:
            add_until_step(arguments)
            arguments.add_argument("--node-rank", type=int, default=0)
            arguments.add_argument("--master-address", default="127.0.0.1")
            arguments.add_argument("--master-port", type=int, default=RENDEZVOUS_PORT)
            arguments.add_argument("--ranks", type=int, help="processes of this node alone; unset: as the plan says")
            arguments.add_argument("--nodes", type=int, help="nodes of this attempt of an elastic gang; unset: as the plan says")
            arguments.add_argument("--attempt-file", type=Path, help="names the attempt of a container that was started again")
            arguments.add_argument("--observe-port", type=int, default=OBSERVE_PORT, help="0: any free port, see observe.json")
    return top


def _fetch(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.network.environment import go_online

    go_online()
    from finetune_trainer.credentials import Credentials
    from finetune_trainer.roles.fetch import fetch

    return fetch(context, Credentials(arguments.credentials))


def _preflight(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
    if not (context.plan.model.allow_remote_code or arguments.is_forked):
        keep_torch_out()
    from finetune_trainer.roles.preflight import run

    return run(context, is_forked=arguments.is_forked)


def _train(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.roles.torchrun import Launch
    from finetune_trainer.roles.train import supervise

    return supervise(
        context,
        Launch(
            plan_path=arguments.plan,
            node_rank=arguments.node_rank,
            master_address=arguments.master_address,
            master_port=arguments.master_port,
            observe_port=arguments.observe_port,
            ranks=arguments.ranks,
            nodes=arguments.nodes,
            attempt_file=arguments.attempt_file,
        ),
    )


def _merge(context: RunContext, _arguments: argparse.Namespace) -> TerminationReport:
    keep_bitsandbytes_out(context.plan)
    preload("finetune_trainer.roles.merge")
    from finetune_trainer.roles.merge import merge

    return merge(context)


def _publish(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.network.environment import go_online

    go_online()
    from finetune_trainer.credentials import Credentials
    from finetune_trainer.roles.publish import publish

    return publish(context, Credentials(arguments.credentials))


ROLES: dict[Role, Callable[[RunContext, argparse.Namespace], TerminationReport]] = {
    Role.FETCH: _fetch,
    Role.PREFLIGHT: _preflight,
    Role.TRAIN: _train,
    Role.MERGE: _merge,
    Role.PUBLISH: _publish,
}


SERVE = "serve"


def serve(argv: Sequence[str]) -> int:
    """Run roles until standard input ends, one at a time; 0. If it ends while a role runs, the role gets SIGTERM and may save.

    Standard input: `{"arguments": [...], "log": PATH}` a line, with the arguments of a role other than fetch and publish, whose
    libraries read the environment when they are imported. Standard output: `{"pid": N}` when it runs, `{"code": N}` when it has
    ended; negative: the signal. Each role leads a process group, and dies with this process.
    """
    top = argparse.ArgumentParser(prog=f"python -m finetune_trainer {SERVE}")
    add_run_arguments(top)
    arguments = top.parse_args(argv)
    map_torch_libraries()
    context = run_context(arguments)
    from finetune_trainer.roles import rehearse, train

    preload_for_forks(context.plan, "finetune_trainer.roles.preflight", *rehearse.LIBRARIES, *train.LIBRARIES)
    with os.fdopen(os.dup(1), "w") as answer, os.fdopen(os.dup(0), "rb", buffering=0) as orders:
        os.dup2(2, 1)
        while line := orders.readline():
            order = json.loads(line)
            with fork(partial(_serve_role, order["arguments"], order["log"])) as child:
                _say(answer, pid=child.pid)
                # The next order comes after the end of this one: what can be read before it is the end of the input.
                if orders.fileno() in wait([*child.descriptors(), orders.fileno()]):
                    child.send_signal(signal.SIGTERM)
                _say(answer, code=child.join())
    return 0


def _say(answer: TextIO, **content: int) -> None:
    with suppress(BrokenPipeError):  # whoever asked is gone
        print(json.dumps(content), file=answer, flush=True)


def _serve_role(arguments: Sequence[str], log: str) -> NoReturn:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    send_output_to(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    end(main(arguments, is_forked=True))


def main(argv: Sequence[str] | None = None, *, is_forked: bool = False) -> int:
    """Run one role; the exit code. is_forked: from a process that serves."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    arguments = parser().parse_args(argv, argparse.Namespace(is_forked=is_forked))
    if getattr(arguments, "parent", None) is not None:
        die_with(arguments.parent)
    if arguments.role in (Role.TRAIN, Role.MERGE):
        map_torch_libraries()
    if getattr(arguments, "attempt_file", None) is not None:
        first = arguments.attempt
        arguments.attempt = take_attempt(first)
        if arguments.attempt == first:
            arguments.attempt_file = None
    contexts: list[RunContext] = []

    def body() -> TerminationReport:
        contexts.append(run_context(arguments))
        role = Role(arguments.role)
        # Of an earlier preflight's rows this one knows nothing: the base may have changed since.
        context = contexts[0] if role in (Role.FETCH, Role.PREFLIGHT) else contexts[0].with_trained_rows()
        return ROLES[role](context, arguments)

    return run_role(
        arguments.role,
        arguments.attempt,
        body,
        arguments.termination_log,
        lambda: contexts[0] if contexts else None,
        node_rank=getattr(arguments, "node_rank", 0),
    )


if __name__ == "__main__":
    end(serve(sys.argv[2:]) if sys.argv[1:2] == [SERVE] else main())

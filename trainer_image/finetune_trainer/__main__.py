"""`python -m finetune_trainer {fetch,preflight,train,merge,publish}`: run one role with the plan and these arguments."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune_job.failures import TerminationReport
from finetune_job.names import CREDENTIALS_MOUNT, OBSERVE_PORT, RENDEZVOUS_PORT, TERMINATION_LOG, Role
from finetune_trainer.context import RunContext, add_run_arguments, add_until_step, run_context
from finetune_trainer.processes.container import take_attempt
from finetune_trainer.processes.start import (
    die_with,
    end,
    keep_bitsandbytes_out,
    keep_torch_out,
    map_torch_libraries,
    preload,
    start_no_threads,
)
from finetune_trainer.termination import run_role

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""Format of a role's log lines, from which `finetune run` learns what a role is doing or waiting for."""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the arguments of all roles."""
    top = argparse.ArgumentParser(prog="python -m finetune_trainer", description=__doc__)
    roles = top.add_subparsers(dest="role", required=True)
    for role in Role:
        arguments = roles.add_parser(role.value)
        add_run_arguments(arguments)
        arguments.add_argument("--termination-log", type=Path, default=Path(TERMINATION_LOG))
        arguments.add_argument("--parent", type=int, help="process with which this one ends")
        if role in (Role.FETCH, Role.PUBLISH):
            arguments.add_argument("--credentials", type=Path, default=Path(CREDENTIALS_MOUNT))
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


def _preflight(context: RunContext, _arguments: argparse.Namespace) -> TerminationReport:
    if not context.plan.model.allow_remote_code:
        keep_torch_out()
    start_no_threads()
    from finetune_trainer.roles.preflight import run

    return run(context)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one role and return the exit code."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    arguments = parser().parse_args(argv)
    if arguments.parent is not None:
        die_with(arguments.parent)
    if arguments.role == Role.MERGE:
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
        # Preflight ignores rows of an earlier preflight: the base may have changed since.
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
    end(main())

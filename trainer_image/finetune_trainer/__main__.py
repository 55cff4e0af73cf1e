"""`python -m finetune_trainer {fetch,preflight,train,merge,publish}`: run one role of a job."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune_job.failures import TerminationReport
from finetune_job.names import CREDENTIALS_MOUNT, OBSERVE_PORT, RENDEZVOUS_PORT, TERMINATION_LOG, Role
from finetune_trainer.context import RunContext, add_run_arguments, add_until_step, run_context
from finetune_trainer.processes.start import die_with, end, keep_bitsandbytes_out, keep_torch_out, preload, start_no_threads
from finetune_trainer.termination import run_role

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""Format of a role's log lines, which `finetune run` parses to show what a role is doing or waiting for."""


def parser() -> argparse.ArgumentParser:
    """Build the argument parser for all roles."""
    top = argparse.ArgumentParser(prog="python -m finetune_trainer", description=__doc__)
    top.add_argument("--parent", type=int, help="id of a process; when it ends, so does this one")
    roles = top.add_subparsers(dest="role", required=True)
    for role in Role:
        arguments = roles.add_parser(role.value)
        add_run_arguments(arguments)
        arguments.add_argument("--termination-log", type=Path, default=Path(TERMINATION_LOG))
        if role in (Role.FETCH, Role.PUBLISH):
            arguments.add_argument("--credentials", type=Path, default=Path(CREDENTIALS_MOUNT))
        if role is Role.TRAIN:
            add_until_step(arguments)
            arguments.add_argument("--node-rank", type=int, default=0)
            arguments.add_argument("--master-address", default="127.0.0.1")
            arguments.add_argument("--master-port", type=int, default=RENDEZVOUS_PORT)
            arguments.add_argument("--ranks", type=int, help="number of processes on this node; unset: as the plan says")
            arguments.add_argument("--nodes", type=int, help="nodes of an elastic gang in this attempt; unset: as the plan says")
            arguments.add_argument("--restarts", type=int, default=0, help="how often failed ranks are restarted on this node")
            arguments.add_argument("--observe-port", type=int, default=OBSERVE_PORT, help="0: any free port (see observe.json)")
    return top


def _with_credentials(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.network.environment import go_online

    go_online()
    from finetune_trainer.credentials import Credentials

    credentials = Credentials(arguments.credentials)
    if arguments.role == Role.FETCH:
        from finetune_trainer.roles.fetch import fetch

        return fetch(context, credentials)
    from finetune_trainer.roles.publish import publish

    return publish(context, credentials)


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
            restarts=arguments.restarts,
        ),
    )


def _merge(context: RunContext, _arguments: argparse.Namespace) -> TerminationReport:
    keep_bitsandbytes_out(context.plan)
    preload("finetune_trainer.roles.merge")
    from finetune_trainer.roles.merge import merge

    return merge(context)


ROLES: dict[Role, Callable[[RunContext, argparse.Namespace], TerminationReport]] = {
    Role.FETCH: _with_credentials,
    Role.PREFLIGHT: _preflight,
    Role.TRAIN: _train,
    Role.MERGE: _merge,
    Role.PUBLISH: _with_credentials,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one role and return the exit code."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    arguments = parser().parse_args(argv)
    if arguments.parent is not None:
        die_with(arguments.parent)
    contexts: list[RunContext] = []

    def body() -> TerminationReport:
        contexts.append(run_context(arguments))
        role = Role(arguments.role)
        # Preflight must not use the token rows that an earlier preflight recorded, since the base may have changed.
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

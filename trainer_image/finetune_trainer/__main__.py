"""`python -m finetune_trainer {fetch,preflight,train,merge,publish}`: one role, as the plan and these arguments say."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune_job.failures import TerminationReport
from finetune_job.names import CREDENTIALS_MOUNT, OBSERVE_PORT, RENDEZVOUS_PORT, Role
from finetune_trainer.context import RunContext, add_run_arguments, run_context
from finetune_trainer.termination import run_role

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes looks for a termination message by default."""


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
        if role is Role.TRAIN:
            arguments.add_argument("--node-rank", type=int, default=0)
            arguments.add_argument("--master-address", default="127.0.0.1")
            arguments.add_argument("--master-port", type=int, default=RENDEZVOUS_PORT)
            arguments.add_argument("--observe-port", type=int, default=OBSERVE_PORT, help="0: any free port, see observe.json")
    return top


def _fetch(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.network.environment import go_online

    go_online()
    from finetune_trainer.credentials import Credentials
    from finetune_trainer.roles.fetch import fetch

    return fetch(context, Credentials(arguments.credentials))


def _preflight(context: RunContext, _arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.processes.start import keep_torch_out

    if not context.plan.model.allow_remote_code:
        keep_torch_out()
    from finetune_trainer.roles.preflight import run

    return run(context)


def _train(context: RunContext, arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.roles.train import Launch, supervise

    return supervise(
        context,
        Launch(
            plan_path=arguments.plan,
            node_rank=arguments.node_rank,
            master_address=arguments.master_address,
            master_port=arguments.master_port,
            observe_port=arguments.observe_port,
        ),
    )


def _merge(context: RunContext, _arguments: argparse.Namespace) -> TerminationReport:
    from finetune_trainer.processes.start import keep_bitsandbytes_out, preload

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
    """Run one role; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    arguments = parser().parse_args(argv)
    contexts: list[RunContext] = []

    def body() -> TerminationReport:
        contexts.append(run_context(arguments))
        return ROLES[Role(arguments.role)](contexts[0], arguments)

    return run_role(
        arguments.role,
        arguments.attempt,
        body,
        arguments.termination_log,
        lambda: contexts[0] if contexts else None,
        node_rank=getattr(arguments, "node_rank", 0),
    )


if __name__ == "__main__":
    from finetune_trainer.processes.start import end

    end(main())

"""The least rights of each command for jobs, as docs/reference/rights.md has them; a test tries each alone."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_cli.cluster.errors import Right
from finetune_job.names import GROUP

JOB = Right("get", "finetunejobs", GROUP)
CREATE = Right("create", "finetunejobs", GROUP)
USE = Right("use", "persistentvolumeclaims")
"""Asked for by the admission policy of the chart; who may create pods does not need it."""
PATCH = Right("patch", "finetunejobs", GROUP)
JOBS = Right("list", "finetunejobs", GROUP)
PODS = Right("list", "pods")
LOG = Right("get", "pods/log")
EVENTS = Right("list", "events")
PROFILE = Right("get", "finetuneprofiles", GROUP)
PROFILES = Right("list", "finetuneprofiles", GROUP)
READER = (Right("get", "configmaps"), Right("create", "pods"), Right("get", "pods"), Right("delete", "pods"), LOG)
"""Of the pod that reads a workspace."""
RESULTS_READER = (*READER[:-1], Right("get", "pods/exec"), Right("create", "pods/exec"))
"""Of the pod in which programs send the results; the API server asks for `create`, too, from Kubernetes 1.35 on."""


@dataclass(frozen=True)
class CommandRights:
    """Of one command. Rights to profiles are of the cluster, all others of the jobs' namespace."""

    command: str
    needed: tuple[Right, ...]
    optional: tuple[Right, ...] = ()
    """Without them the answer says what is missing."""


COMMANDS = (
    CommandRights("list", (JOBS,)),
    CommandRights("status JOB", (JOB,)),
    CommandRights("status JOB --curve --checkpoints", (JOB, *READER)),
    CommandRights("wait JOB", (JOB,)),
    CommandRights("logs JOB, of pods that exist", (JOB, PODS, LOG)),
    CommandRights("logs JOB, of pods that are gone", (JOB, PODS, *READER)),
    CommandRights("explain job/JOB", (JOB,), (PODS, EVENTS, PROFILE)),
    CommandRights("cost", (JOBS,), (PROFILES,)),
    CommandRights("download JOB DIR", (JOB, *RESULTS_READER)),
    CommandRights("submit FILE", (CREATE, USE), (JOB, PROFILE)),
    CommandRights("submit FILE --watch", (CREATE, USE, JOB), (PROFILE,)),
    CommandRights("suspend JOB", (JOB, PATCH)),
    CommandRights("resume JOB", (JOB, PATCH)),
    CommandRights("cancel JOB", (JOB, PATCH)),
    CommandRights("retry JOB, that waits", (JOB, PATCH)),
    CommandRights("retry JOB, that has ended", (JOB, CREATE, USE), (JOBS,)),
    CommandRights("fork JOB", (JOB,), (JOBS, PROFILE)),
    CommandRights("reproduce JOB", (JOB, CREATE, *READER), (PROFILE,)),
)
HEAD = """## Commands

This is what a Role must grant to users of `kubectl finetune` in the namespace of the jobs; rights to profiles must be
cluster-wide. With `-A` the rights to jobs must be cluster-wide too. Without an optional right a command still works, and says
what it could not read. With the right to list jobs, `status`, `logs` and the others also suggest a name if a job does not exist.
A test runs the commands with exactly these rights, and with fewer.

The chart's admission policy requires the right to `use` claims of those who create jobs; a right to the claims that the job names
is enough, and so is the right to create pods.

The roles `user` and `viewer` of the chart give the rights to jobs; those to pods, logs, events and configmaps come with the
built-in roles `view` (to read) and `edit` (to run the pod that reads a workspace).
"""


def page_section() -> str:
    """The section of docs/reference/rights.md."""
    lines = ["| command | needs | optional |", "|---|---|---|"]
    lines += [f"| `{each.command}` | {_words(each.needed)} | {_words(each.optional)} |" for each in COMMANDS]
    return "\n".join([HEAD, *lines, ""])


def _words(rights: tuple[Right, ...]) -> str:
    by_resource: dict[str, list[str]] = {}
    for each in rights:
        by_resource.setdefault(f"{each.resource}.{each.group}" if each.group else each.resource, []).append(each.verb)
    return ", ".join(f"{' '.join(verbs)} {resource}" for resource, verbs in by_resource.items()) or "-"

"""Reads a job's workspace: the losses of its steps and its checkpoints, by a pod that lives for seconds."""

from __future__ import annotations

from contextlib import closing

from finetune_cli.cluster.objects import Cluster
from finetune_cli.cluster.reader_pod import read_workspace
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.jobs.stored_run import CHECKPOINTS, HISTORY, StoredRun, stored_run


def read_run(cluster: Cluster, job: SeenJob) -> StoredRun:
    """Read history and checkpoints. Raises ClusterError."""
    with closing(read_workspace(cluster, job, [HISTORY, CHECKPOINTS])) as printed:
        return stored_run(printed)

"""`finetune bundle`: what is known of a job in one archive to hand on, without secrets."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from finetune_cli.cluster.objects import Cluster, Unseen, unless_refused
from finetune_cli.cluster.pod_logs import pod_lines
from finetune_cli.exit_codes import LocalError
from finetune_cli.jobs.diagnosis import diagnose
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.redact import redacted, redacted_text
from finetune_cli.jobs.seen import SeenJob, SeenPod
from finetune_cli.render.diagnosis import diagnosis_text
from finetune_cli.render.job_status import status_text
from finetune_cli.render.verdicts import as_json
from finetune_job.names import API_VERSION, PROFILE_PLURAL

MOST_LINES = 5000
"""Of each log, from its end."""
MOST_LOG_BYTES = 4 << 20
MOST_PODS = 128


def write_bundle(cluster: Cluster, name: str, target: Path, now: datetime) -> list[str]:
    """Write the archive; what it lacks, and why. Raises LocalError."""
    # Others read it, whose contexts have other names.
    job = replace(cluster.job(name), context=None)
    missing: list[str] = []
    files = dict(_files(cluster, job, now, missing))
    files["missing.txt"] = "".join(f"{one}\n" for one in missing) or "nothing is missing\n"
    try:
        with target.open("xb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for path, text in files.items():
                content = text.encode(errors="replace")
                entry = tarfile.TarInfo(f"{job.name}/{path}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(content))
    except FileExistsError as error:
        raise LocalError(f"{target} exists already; name another file with --output") from error
    except OSError as error:
        # What cannot be a file cannot be removed either.
        with suppress(OSError):
            target.unlink()
        raise LocalError(f"{target} cannot be written: {error.strerror}; name another file with --output") from error
    return missing


def _files(cluster: Cluster, job: SeenJob, now: datetime, missing: list[str]) -> Iterator[tuple[str, str]]:
    def seen(what: str, read: Callable[[], Any]) -> Any:
        found = unless_refused(read)
        if isinstance(found, Unseen):
            missing.append(f"{what}: {found.reason}")
            return None
        return found

    yield "job.json", as_json(redacted(job.document))
    pods: list[SeenPod] = seen("pods and their logs", lambda: cluster.pods_of(job)) or []
    events = seen("events", lambda: cluster.events_of(job, pods)) or []
    profile = seen("profile", lambda: cluster.get(API_VERSION, PROFILE_PLURAL, job.profile, ""))
    diagnosis = diagnose(job.with_profile(profile), now, pods, events)
    yield "status.txt", redacted_text(status_text(job, diagnosis, now))
    yield "diagnosis.txt", redacted_text(diagnosis_text(job, diagnosis))
    yield "events.txt", "".join(redacted_text(_event_line(each)) for each in events)
    if profile is not None:
        yield "profile.json", as_json(redacted(profile))
    if len(pods) > MOST_PODS:
        missing.append(f"logs of {len(pods) - MOST_PODS} of {len(pods)} pods: those of the first {MOST_PODS} are here")
    for pod in pods[:MOST_PODS]:
        yield f"pods/{pod.name}.json", as_json(redacted(pod.document))
        if pod.has_logs:
            log = seen(f"log of {pod.name}", partial(_log, cluster, job, pod))
            if log is not None:
                yield f"logs/{pod.name}.log", log
    if not pods:
        command = job.command("logs")
        missing.append(f"logs: no pod of this job exists any more; `{command}` reads those of training from its workspace")


def _event_line(event: Any) -> str:
    time_text = event.time.isoformat() if event.time is not None else "-"
    return (
        f"{time_text} {plain(event.kind)} {plain(event.subject)} {plain(event.reason)}: {plain(event.message)} (x{event.count})\n"
    )


def _log(cluster: Cluster, job: SeenJob, pod: SeenPod) -> str:
    query = {"tailLines": str(MOST_LINES), "limitBytes": str(MOST_LOG_BYTES)}
    return redacted_text("\n".join(pod_lines(cluster, job.namespace, pod, query, follow=False)) + "\n")

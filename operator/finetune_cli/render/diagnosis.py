"""Output of `finetune explain job/NAME`: the diagnosis of a job, as text and as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from finetune_cli.jobs.diagnosis import Diagnosis
from finetune_cli.jobs.plain import plain
from finetune_cli.jobs.progress import stage_name, state
from finetune_cli.jobs.seen import SeenJob
from finetune_cli.render.verdicts import labelled

_MOST = 1000


def diagnosis_text(job: SeenJob, diagnosis: Diagnosis, unseen: Sequence[str] = ()) -> str:
    """Return reason, evidence, advice and patch as text. `unseen`: what could not be read, and why."""
    stage = stage_name(job)
    lines = [f"{plain(job.title)}: {plain(state(job), 128)}" + (f", {stage}" if stage else "")]
    lines.append(labelled("reason", plain(diagnosis.reason, _MOST) or "nothing is the matter with this job"))
    lines += [labelled("shown", plain(fact, _MOST)) for fact in diagnosis.evidence]
    lines += [labelled("fix", plain(text, _MOST)) for text in diagnosis.advice]
    lines += command_lines(diagnosis)
    if diagnosis.patch is not None:
        lines.append(labelled("patch", plain(json.dumps(diagnosis.patch), _MOST)))
    if diagnosis.word:
        lines.append(labelled("more", f"finetune explain {plain(diagnosis.word, 128)}"))
    lines += [labelled("unseen", plain(text, _MOST)) for text in unseen]
    return "\n".join(lines) + "\n"


def command_lines(diagnosis: Diagnosis) -> list[str]:
    """Return a line for each command to type, however long the command is."""
    return [f"    {'run:':<8}{plain(command, _MOST)}" for command in diagnosis.commands]


def diagnosis_document(job: SeenJob, diagnosis: Diagnosis, unseen: Sequence[str] = ()) -> dict[str, Any]:
    """Return the diagnosis as data. `patch` is a JSON merge patch for the manifest of a new job."""
    return {
        "namespace": job.namespace,
        "name": job.name,
        "state": state(job),
        "stage": stage_name(job),
        "reason": diagnosis.reason,
        "word": diagnosis.word,
        "evidence": list(diagnosis.evidence),
        "advice": list(diagnosis.advice),
        "commands": list(diagnosis.commands),
        "patch": diagnosis.patch,
        "unseen": list(unseen),
    }

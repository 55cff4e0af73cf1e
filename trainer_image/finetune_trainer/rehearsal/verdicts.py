"""Verdicts of rehearsals: a result becomes a finding, and passed verdicts are kept for later jobs with the same key.

A kept verdict is a small file on the workspace's claim, next to the jobs' directories. A user who can write there can forge
a verdict, but gains no more than with `spec.preflight.rehearsal: Skip`: a job that was not tried. Training still asserts its
invariants, and the merge is still verified. If a profile requires a rehearsal, kept verdicts are not used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import platform
import re
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import finetune_job
import finetune_memory
import finetune_trainer
from finetune_job.catalogue.book import make_finding
from finetune_job.failures import FailureClass
from finetune_job.finding import Finding
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.files import file_sha256, open_regular, write_durably
from finetune_trainer.inspection.report import TITLES, RehearsalReport, Stage, StrictModel, Verdict
from finetune_trainer.rehearsal.scaled_plan import UNSCALED_PARAMETERS
from finetune_trainer.weights.headers import CONFIG_FILE

FAILED, NOT_DONE = "rehearsal-failed", "rehearsal-not-done"
SKIP = "set spec.preflight.rehearsal: Skip"
_FIELD = re.compile(r"^(spec(?:\.[A-Za-z0-9_\[\]]+)+): ")
_LONGEST_MESSAGE = 600
KEPT = "rehearsals"
"""Directory of kept verdicts, at the root of the workspace's claim."""
MOST_KEPT, KEPT_BYTES = 200, 1 << 18
"""Maximum number of files, beyond which the oldest are removed, and maximum bytes of a file. A verdict takes a few KB."""
_KEPT_NAME = re.compile(r"[0-9a-f]{64}\.json$")
_UNSCALED_BYTES = 8 * UNSCALED_PARAMETERS
"""Maximum size of the weights of a model that is tried unchanged, in bytes."""
_KEYED_BYTES = 1 << 28
"""Maximum bytes of a model's files that are read for a key. A tokenizer with 260,000 tokens takes 20 MB."""
_PLACES: dict[str, Any] = {
    "job": True,
    "fetch": True,
    "publish": True,
    "placement": True,
    "workspace": True,
    "output": True,
    "choices": True,
    "model": {"location": True, "revision": True},
    "data": {"train": True, "validation": True},
}
"""Fields that the key leaves out: they state only who runs a plan, where, and on which texts. A rehearsal sets its own values."""
log = logging.getLogger(__name__)


class StageFailure(Exception):  # noqa: N818 - the problem that a rehearsal looks for, not an error of this program
    """The job would fail in this stage, or silently give a wrong result."""

    def __init__(self, stage: Stage, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.stage, self.hint = stage, hint


class Inconclusive(Exception):  # noqa: N818 - see StageFailure
    """The rehearsal says nothing about the job: no small model could be made, or this machine cannot run one."""


def failure_of_stage(stage: Stage, message: str, hint: str, failure: FailureClass | None) -> Exception:
    """Return StageFailure, or Inconclusive if this machine's memory or disk ran out."""
    if failure in (FailureClass.HOST_OUT_OF_MEMORY, FailureClass.DISK_FULL):
        return Inconclusive(message)
    return StageFailure(stage, message, hint)


def failed_finding(problem: StageFailure, plan: RunPlan, root: Path) -> Finding:
    """Return the finding that refuses the job. Its field is the one that the message names, if any."""
    message = _shortened(str(problem), root)
    named = _FIELD.match(message)
    may_skip = plan.placement is None or not plan.placement.requires_rehearsal
    return make_finding(
        FAILED,
        field=named[1] if named else "spec.method",
        value=plan.method.type.value,
        message=f"tried on a scaled-down model, the stage '{TITLES[problem.stage]}' ({problem.stage.value}) fails: "
        f"{message.removeprefix(named[0]) if named else message}",
        fix=problem.hint
        or "change the settings that it names" + (f"; if only the scaled-down model is at fault, {SKIP}" if may_skip else ""),
    )


def not_done_finding(reason: str, root: Path) -> Finding:
    """Return a warning: the job continues without a rehearsal."""
    return make_finding(
        NOT_DONE,
        field="spec.preflight.rehearsal",
        value="Run",
        message=f"the job could not be tried to the end on a scaled-down model: {_shortened(reason, root)}",
        fix=f"no action needed; to omit the rehearsal, {SKIP}",
        changes={"spec.preflight.rehearsal": "Skip"},
    )


def _shortened(message: str, root: Path) -> str:
    text = message.replace(str(root), "<rehearsal>").strip()
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def rehearsal_key(plan: RunPlan, directory: Path, model_digest: str, weight_bytes: int) -> str:
    """Return the digest of everything on which a verdict depends; empty if some of it is unknown, so none is kept or used.

    The key covers settings, the model's architecture, libraries and this code. model_digest: digest of configuration and
    headers. weight_bytes: size of the weights; the key covers them if the model is small enough to be tried unchanged.
    """
    if plan.model.allow_remote_code:
        return ""
    try:
        files = _file_digests(directory, weight_bytes)
    except OSError as error:
        log.warning("the verdict of this rehearsal is not kept for other jobs: %s", error)
        return ""
    described = {
        "plan": plan.model_dump(mode="json", exclude=_PLACES),
        "has_validation": plan.data.validation is not None,
        "image": None if plan.placement is None else plan.placement.trainer_image,
        "model": model_digest,
        "files": files,
        "software": _software(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _file_digests(directory: Path, weight_bytes: int) -> dict[str, str]:
    """Return digests of the files that a rehearsal may read: those next to the weights, and the weights if they are small.

    Raises OSError, including if the files are too large to be read for this purpose.
    """
    is_small = weight_bytes <= _UNSCALED_BYTES
    paths = [path for path in sorted(directory.iterdir()) if path.is_file() and (is_small or path.suffix == ".json")]
    size = sum(path.stat().st_size for path in paths)
    if size > _KEYED_BYTES:
        raise OSError(
            errno.EFBIG, f"files next to the weights have {size:,} bytes, and at most {_KEYED_BYTES:,} are read", str(directory)
        )
    return {path.name: file_sha256(path) for path in paths if path.name != CONFIG_FILE}


@cache
def _software() -> str:
    """Return the digest of Python, every installed distribution and the code of the trainer."""
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}\n".encode())
    for name in sorted(f"{distribution.name}=={distribution.version}" for distribution in distributions()):
        digest.update(f"{name}\n".encode())
    for package in (finetune_job, finetune_memory, finetune_trainer):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{package.__name__} {path.relative_to(root)} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


class _Kept(StrictModel):
    """The content of the file of a kept verdict."""

    key: str
    since: str
    report: RehearsalReport


def find_verdict(context: RunContext, key: str) -> RehearsalReport | None:
    """Return the passed verdict with this key; None if there is none that can be used."""
    if not key:
        return None
    try:
        with open_regular(_kept_path(context, key)) as file:
            content = file.read(KEPT_BYTES + 1)
        kept = _Kept.model_validate_json(content)
        datetime.fromisoformat(kept.since)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        log.warning("a kept verdict of a rehearsal is not used: %s", type(error).__name__)
        return None
    report = kept.report
    if kept.key != key or len(content) > KEPT_BYTES or report.verdict is not Verdict.PASSED or report.findings:
        log.warning("a kept verdict of a rehearsal is not used: it belongs to another rehearsal, or that one did not pass")
        return None
    return report.model_copy(update={"kept_since": kept.since, "seconds": 0.0})


def keep_verdict(context: RunContext, key: str, report: RehearsalReport) -> None:
    """Keep a verdict under its key if the rehearsal passed. If the file cannot be written, a warning is logged."""
    if not key or report.verdict is not Verdict.PASSED:
        return
    path = _kept_path(context, key)
    kept = _Kept(key=key, since=datetime.now(UTC).isoformat(timespec="seconds"), report=report)
    try:
        if path.parent.is_symlink():
            raise NotADirectoryError(f"{path.parent} is a link")
        path.parent.mkdir(exist_ok=True)
        write_durably(path, kept.model_dump_json().encode())
        kept_files = (file for file in path.parent.iterdir() if _KEPT_NAME.match(file.name))
        ages = sorted(((file.lstat().st_mtime, file) for file in kept_files), reverse=True)
        for _, oldest in ages[MOST_KEPT:]:
            oldest.unlink(missing_ok=True)
    except OSError:
        log.warning("the verdict of the rehearsal could not be kept at %s", path, exc_info=True)


def _kept_path(context: RunContext, key: str) -> Path:
    return context.claims_root / context.plan.workspace.claim / KEPT / f"{key}.json"

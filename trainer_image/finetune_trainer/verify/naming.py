"""The end of every merge: the model is verified, takes its final name if it passes and is quarantined if it fails.

Called by the merge role and by the merge of directories on the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from finetune_job.api.output import MergeBase
from finetune_job.layout import MergedPaths
from finetune_trainer.errors import VerificationError
from finetune_trainer.files import publish_directory
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.verify.gate import Gate
from finetune_trainer.verify.report import VerificationReport
from finetune_trainer.verify.run import verify_merge

log = logging.getLogger(__name__)


def verify_and_name(
    paths: MergedPaths,
    *,
    base: Path,
    adapters: Sequence[Path],
    prompts: Sequence[Sequence[int]],
    gate: Gate,
    quantization: Quantization | None,
    merged_onto: MergeBase,
    base_sha256: Mapping[str, str] | None,
    allow_remote_code: bool,
    withdraw: Callable[[], None],
) -> VerificationReport:
    """Verify the model at `paths.current`; it then is at `paths.verified`. All other arguments but one: as of `verify_merge`.

    withdraw: called if the model fails, after its reports are written and before it loses its name. What says elsewhere that the
    model is a result has to stop saying so then.
    Raises VerificationError for a model that fails, which is then kept as `paths.quarantined`, and as `verify_merge` does.
    """
    merged = paths.current
    report = verify_merge(
        base=base,
        adapters=adapters,
        merged=merged,
        prompts=prompts,
        gate=gate,
        report_path=paths.report,
        page_path=paths.page,
        quantization=quantization,
        merged_onto=merged_onto,
        base_sha256=base_sha256,
        allow_remote_code=allow_remote_code,
    )
    log.info("%s", report.text())
    if not report.passed:
        withdraw()
        kept = quarantine(merged, paths.quarantined)
        raise VerificationError(
            f"{report.text()}\nthe merged model is kept as {kept.name}",
            f"see {paths.page.name} in the same directory; the adapter itself is whole",
        )
    if merged != paths.verified:
        publish_directory(merged, paths.verified)
    return report


def quarantine(path: Path, kept: Path) -> Path:
    """Rename a failed model to `kept`, numbered if that exists already, and return the new path. Nothing is deleted."""
    target, number = kept, 1
    while target.exists():
        number += 1
        target = kept.with_name(f"{kept.name}-{number}")
    return path.rename(target)

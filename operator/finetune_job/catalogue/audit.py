"""What `finetune audit` and `finetune reproduce` say of a run that has ended."""

from __future__ import annotations

from finetune_job.catalogue.entry import Entry, Gate

_AUDIT = "tests/unit/finetune_trainer/inspection/test_audit.py"
_LATER = "Nobody can tell then what the result was made of."

AUDIT_ENTRIES = (
    Entry(
        "audit-plan-differs",
        "error",
        "Plan, records and results of a run do not name the same plan",
        f"A plan is frozen before anything runs, and never changes: somebody has edited it or what names it. {_LATER}",
        "Restore plan and record of the run, or do not trust its result",
        f"{_AUDIT}::test_what_was_changed_afterwards_is_found_by_its_digest",
        gate=Gate.AUDIT,
    ),
    Entry(
        "audit-data-differs",
        "error",
        "The records or the prepared data are not those that the run was trained on",
        f"Records and prepared data have digests that preparation, checkpoints and provenance name. {_LATER}",
        "Restore the records and the prepared data of the run, or do not trust its result",
        f"{_AUDIT}::test_what_was_changed_afterwards_is_found_by_its_digest",
        gate=Gate.AUDIT,
    ),
    Entry(
        "audit-base-differs",
        "error",
        "The base model is not the one that preflight saw",
        "An adapter belongs to the very weights that it was trained on. Of a job with `model.addedTokens` these are in a base "
        "that preflight has made, which has to hold every value of the base that the job names.",
        "Restore the base model of the run, or do not trust its result",
        f"{_AUDIT}::test_what_was_changed_afterwards_is_found_by_its_digest",
        gate=Gate.AUDIT,
    ),
    Entry(
        "audit-checkpoint-foreign",
        "error",
        "A checkpoint is damaged, or belongs to another run",
        "Each checkpoint names what its run learns and the data, and has a digest of every file. No run resumes from another's.",
        "Restore the checkpoint, or do not trust the run's result",
        f"{_AUDIT}::test_what_was_changed_afterwards_is_found_by_its_digest",
        gate=Gate.AUDIT,
    ),
    Entry(
        "audit-interval-differs",
        "error",
        "Steps that were computed again end with other values than the run's checkpoint",
        "Plan, data and base model do not lead from one checkpoint to the next. One of the four is not what the run had, even if "
        "all digests agree; or another kind of device or other library versions computed the steps, which round otherwise.",
        "Do not trust the run's result, unless the versions or the device differ; then audit it with those that trained it",
        "tests/unit/finetune_cli/commands/test_audit.py::test_a_covered_up_change_is_found_by_computing_steps_again",
        gate=Gate.AUDIT,
    ),
    Entry(
        "audit-result-differs",
        "error",
        "The result of a run is not what its checkpoint, or its plan run again, gives",
        "The adapter that was published is another one than was trained, or cannot be made again on this machine.",
        "Do not use the result; train again, or take it from where it was published first",
        f"{_AUDIT}::test_what_was_changed_afterwards_is_found_by_its_digest",
        gate=Gate.AUDIT,
    ),
    Entry(
        "audit-not-proven",
        "warning",
        "A part of a run could not be looked at, or is compared under other conditions",
        "Steps before the oldest checkpoint that was kept, records that are gone, a base without digests, other versions of "
        "libraries: nothing is claimed of them, for or against the run.",
        "Do what the finding says, or run the whole plan again with `finetune reproduce`",
        f"{_AUDIT}::test_what_nobody_can_look_at_is_said_and_refuses_nothing",
        gate=Gate.AUDIT,
    ),
)

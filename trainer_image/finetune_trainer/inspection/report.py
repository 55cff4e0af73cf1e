"""What preflight learnt from the model, kept on the workspace for the trainer, the merge and people."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from finetune_job.rules.rule import Finding
from finetune_trainer.inspection.rehearsal_report import SKIPPED, RehearsalReport


class ModelReport(BaseModel):
    """Content of `WorkspaceLayout.model_report`. Names and shapes are global, before any sharding."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    plan_sha256: str
    model_digest: str
    """SHA-256 over configuration, index, headers and file sizes of the base model; no weight is read for it."""
    model_files: dict[str, str]
    """SHA-256 of configuration and weight files, which the merge must find again; empty where nothing is merged."""
    data_hash: str
    wrap_classes: tuple[str, ...]
    """Layer classes that become FSDP units; empty under another policy than TRANSFORMER_BASED_WRAP."""
    fsdp_units: tuple[str, ...]
    """Names of the modules that become units of their own; the root is one besides."""
    dtypes: dict[str, str]
    """Element types by use: load, param, reduce, save."""
    trainable: dict[str, tuple[int, ...]]
    """Name and shape of each parameter that is trained."""
    saved_tensors: dict[str, tuple[int, ...]]
    """Name and shape of each tensor that the trained adapter (or model) must contain."""
    train_sequences: int
    supervised_tokens: int
    """Tokens that the loss counts in one pass over the training data."""
    total_steps: int
    record_lengths: dict[int, int]
    """Training records by tokens: the smallest power of two that holds them -> how many; dropped ones, too."""
    rehearsal: RehearsalReport = SKIPPED
    """How the job went on a small twin of the model."""
    memory: dict[str, int]
    """What a rank will need, in bytes, by what for; empty where that could not be estimated."""
    warnings: tuple[Finding, ...]

    @property
    def trainable_parameters(self) -> int:
        """Number of values that are trained."""
        total = 0
        for shape in self.trainable.values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total


def read_report(path: Path) -> ModelReport | None:
    """The report at `path`, or None where there is none."""
    return ModelReport.model_validate_json(path.read_bytes()) if path.is_file() else None

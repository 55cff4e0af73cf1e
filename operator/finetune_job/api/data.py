"""`spec.data`: what is learnt from."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_job.api.base import ApiModel, ClaimSource


class DataFormat(StrEnum):
    """What one record holds."""

    PROMPT_COMPLETION = "PromptCompletion"
    TEXT = "Text"


class LossOn(StrEnum):
    """Which tokens are supervised."""

    COMPLETION = "Completion"
    ALL = "All"


class ValidationData(ApiModel):
    """Held-out records, never trained on."""

    source: ClaimSource
    """JSON Lines file in the same format: `pvc://<claim>/<path>`."""


class DataSpec(ApiModel):
    """The training records and how they become token sequences."""

    source: ClaimSource
    """JSON Lines file, one record per line: `pvc://<claim>/<path>`."""
    validation: ValidationData | None = None
    """Held-out records for the evaluation loss and the verification prompts.
    Unset: no evaluation, and verification takes training prompts."""
    format: DataFormat = DataFormat.PROMPT_COMPLETION
    """PromptCompletion: keys `prompt` and `completion`. Text: key `text`."""
    max_sequence_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Longest sequence, in tokens. Longer records are dropped and counted, never cut."""
    packing: bool = True
    """Fill each sequence with whole records; their boundaries are kept, so that no record sees another."""
    loss_on: LossOn | None = None
    """Supervised tokens. Unset: Completion for PromptCompletion, All for Text."""

"""`spec.merge`, `spec.output` and `spec.workspace`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from finetune_job.api.base import ApiModel, ClaimName, ClaimSource, DecimalString, Dtype, SizeString


class MergeBase(StrEnum):
    """Weights that the adapter is added to. Only Original gives what was trained; the rule book says why of the others."""

    ORIGINAL = "Original"
    QUANTIZED = "Quantized"
    """The packed weights that the adapter was trained on: refused."""
    TRAINED = "Trained"
    """The model in memory at the end of the training, sharded as it is: refused."""


class VerifySpec(ApiModel):
    """Comparison of the merged model with base and adapter on held-out prompts."""

    num_prompts: Annotated[int, Field(ge=1, le=1024)] = 8
    """Prompts compared."""
    max_kl_divergence: DecimalString | None = None
    """Largest mean Kullback-Leibler divergence per token, in nats. Unset: by element type, see the verification report."""
    min_top1_agreement: DecimalString | None = None
    """Smallest share of positions at which both choose the same token. Unset: by element type."""


class MergeSpec(ApiModel):
    """Adding the adapter to the base model, in a CPU pod with bounded memory."""

    enabled: bool = True
    """Whether a merged model is made. Full fine-tuning has nothing to merge."""
    dtype: Dtype | None = None
    """Element type of the merged weights. Unset: the base's own."""
    base: MergeBase = MergeBase.ORIGINAL
    """Original: the weights as stored, before any quantisation. The rule book refuses the others, which other tools offer."""
    max_shard_size: SizeString = "5GB"
    """Largest weight shard."""
    verify: VerifySpec = VerifySpec()
    """Verification gate."""


class OutputSpec(ApiModel):
    """Where the results go."""

    destination: ClaimSource
    """Directory that will hold `adapter/`, `merged/` and `verification.json`: `pvc://<claim>/<path>`."""


class RetainPolicy(StrEnum):
    """What becomes of a workspace claim made from the template when the job is deleted."""

    KEEP = "Keep"
    DELETE = "Delete"


class AccessMode(StrEnum):
    """Access modes of a claim."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"


class VolumeClaimTemplate(ApiModel):
    """A claim to be made for the workspace."""

    storage: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}(Ki|Mi|Gi|Ti)$", max_length=16)]
    """Size, as a Kubernetes quantity with a binary unit."""
    storage_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Unset: the profile's, or the cluster's default."""
    access_mode: AccessMode = AccessMode.READ_WRITE_ONCE
    """More than one node needs ReadWriteMany."""


class WorkspaceSpec(ApiModel):
    """Prepared data, checkpoints, logs and reports."""

    claim_name: ClaimName | None = None
    """An existing claim. Exactly one of claimName and volumeClaimTemplate."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """A claim made by the operator. Exactly one of claimName and volumeClaimTemplate."""
    retain: RetainPolicy = RetainPolicy.KEEP
    """Whether a claim made from the template outlives the job."""

"""`spec.merge`, `spec.output` and `spec.workspace`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from finetune_job.api.base import ApiModel, ClaimName, DecimalString, Destination, SizeString
from finetune_job.api.enumerations import LARGEST_SHARD, Dtype, MergeBase
from finetune_job.api.inputs import SecretRef


class VerifySpec(ApiModel):
    """Comparison of the merged model with base and adapter on held-out prompts."""

    num_prompts: Annotated[int, Field(ge=1, le=1024)] = 8
    """Number of prompts that are compared."""
    max_kl_divergence: DecimalString | None = None
    """Largest mean Kullback-Leibler divergence per token, in nats, over the 90 % of positions that diverge least (50 % if layers
    choose experts). Unset: by element type, see the verification report."""
    min_top1_agreement: DecimalString | None = None
    """Smallest share of positions at which both models choose the same token. Unset: by element type."""


class MergeSpec(ApiModel):
    """Adding the adapter to the base model, in a CPU pod with bounded memory."""

    enabled: bool = True
    """Whether a merged model is written. Full fine-tuning has nothing to merge."""
    dtype: Dtype | None = None
    """Element type of the merged weights. Unset: the base's own."""
    base: MergeBase = MergeBase.ORIGINAL
    """Original: the weights as stored, before any quantisation. Dequantized: the weights that an adapter of QLoRA or QDoRA saw in
    training, with quantisation errors. The verification report shows how far either is from what was trained. The other values,
    which other tools offer, are refused."""
    max_shard_size: SizeString = LARGEST_SHARD
    """Maximum size of a weight shard."""
    verify: VerifySpec = VerifySpec.model_construct()
    """Verification gate."""


class OutputSpec(ApiModel):
    """Where the results go."""

    destination: Destination
    """`pvc://<claim>/<path>` or `s3://<bucket>/<prefix>`: a directory that will hold `adapter/`, `merged/`, the model card and
    the reports. `hf://<organisation>/<model>` or `oci://<registry>/<repository>:<tag>`: the merged model, or an adapter alone, at
    the top. The adapter of a merged model goes to `<organisation>/<model>-adapter` on the Hub, to `adapter/` in a registry."""
    adapter: bool = True
    """Whether the adapter is published too. Without a merged model it is the result, and always published."""
    secret_ref: SecretRef | None = None
    """Secret with the credentials for the destination. `hf://`: a write token under `token`. `s3://`: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY and optionally AWS_SESSION_TOKEN. `oci://`: of type kubernetes.io/dockerconfigjson. Only the pod that
    publishes sees it."""
    sample_answers: Annotated[int, Field(ge=0, le=16)] | None = None
    """Number of held-out prompts for which the report shows the answers of base and tuned model. Unset: 3, or 0 if the
    destination is `hf://` or `oci://`, where others could read the held-out records."""
    private: bool = True
    """Whether a repository on the Hub is created as private if it does not exist yet."""


class RetainPolicy(StrEnum):
    """Whether a workspace claim created from the template is kept when the job is deleted."""

    KEEP = "Keep"
    DELETE = "Delete"


class AccessMode(StrEnum):
    """Access modes of a claim."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"


class VolumeClaimTemplate(ApiModel):
    """A claim to be created for the workspace."""

    storage: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}(Ki|Mi|Gi|Ti)$", max_length=16)]
    """Size, as a Kubernetes quantity with a binary unit."""
    storage_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Storage class. Unset: the profile's, or the cluster's default."""
    access_mode: AccessMode = AccessMode.READ_WRITE_ONCE
    """Access mode. More than one node needs ReadWriteMany."""


class WorkspaceSpec(ApiModel):
    """Prepared data, checkpoints, logs and reports."""

    claim_name: ClaimName | None = None
    """An existing claim. Set exactly one of claimName and volumeClaimTemplate."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """A claim created by the operator. Set exactly one of claimName and volumeClaimTemplate."""
    retain: RetainPolicy = RetainPolicy.KEEP
    """Whether a claim created from the template outlives the job."""

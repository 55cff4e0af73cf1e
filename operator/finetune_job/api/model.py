"""`spec.model`: the base model."""

from enum import StrEnum

from finetune_job.api.base import ApiModel, Dtype, Revision, Source


class Attention(StrEnum):
    """Attention implementations that keep packed documents apart on every device."""

    SDPA = "sdpa"
    EAGER = "eager"


class ModelSpec(ApiModel):
    """Which base model, and how it is loaded."""

    source: Source
    """Directory with config.json, safetensors weights and the tokenizer: `pvc://<claim>/<path>`, `hf://<org>/<name>` or
    `s3://<bucket>/<prefix>`. The latter two are copied to the workspace first."""
    revision: Revision | None = None
    """Commit of an `hf://` source; required there and not allowed elsewhere."""
    dtype: Dtype | None = None
    """Element type in which the base model is held. Unset: the type its weights are stored in, as config.json says."""
    attention: Attention | None = None
    """Attention implementation. Unset: sdpa."""
    allow_remote_code: bool = False
    """Whether Python code in the model directory may run. The profile must allow it too."""

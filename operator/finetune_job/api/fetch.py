"""`spec.fetch`: credentials of the one pod that has a way out of the cluster."""

from typing import Annotated

from pydantic import StringConstraints

from finetune_job.api.base import ApiModel, SecretName


class SecretKeyRef(ApiModel):
    """One key of a Secret of the job's namespace."""

    name: SecretName
    """Secret."""
    key: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$", max_length=253)] = "token"
    """Key in it."""


class SecretRef(ApiModel):
    """A Secret of the job's namespace."""

    name: SecretName
    """Secret."""


class FetchSpec(ApiModel):
    """What the fetch pod may show to a hub or an object store. No other pod sees these, and the operator never reads them."""

    hub_token_secret_ref: SecretKeyRef | None = None
    """Access token for `hf://` sources. Unset: public repositories only."""
    s3_secret_ref: SecretRef | None = None
    """Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and optionally AWS_SESSION_TOKEN, for `s3://` sources.
    Unset: public buckets only."""

"""What a plan says of the ways in and out of the cluster: what is fetched, and where results are published."""

from __future__ import annotations

from finetune_job.api.base import ClaimPath
from finetune_job.plan.plan_model import PlanModel


class SecretKey(PlanModel):
    """A key of a Secret; its value is in no plan."""

    name: str
    key: str


class FetchItem(PlanModel):
    """One thing to copy to the workspace."""

    source: str
    """`hf://` or `s3://`."""
    revision: str | None
    """Commit, of `hf://` sources."""
    target: ClaimPath


class FetchPlan(PlanModel):
    """What is copied before anything is looked at."""

    items: tuple[FetchItem, ...]
    hub_endpoint: str | None
    """None: the library's own."""
    s3_endpoint: str | None
    s3_region: str | None
    hub_token: SecretKey | None
    s3_secret: str | None


class PublishPlan(PlanModel):
    """Where the results go from the workspace."""

    destination: str
    """`hf://`, `s3://` or `oci://`; a registry with its tag."""
    secret: str | None
    """Secret whose keys credentials.py names for this kind of destination."""
    private: bool
    hub_endpoint: str | None
    """None: the library's own."""
    s3_endpoint: str | None
    s3_region: str | None
    plain_http_registries: tuple[str, ...]

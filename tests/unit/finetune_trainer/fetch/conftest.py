"""A plan whose sources lie on a hub of the test's own, and short patience."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FetchSettings, FineTuneProfileSpec
from finetune_job.plan.digest import plan_sha256
from finetune_job.plan.resolve import resolve
from finetune_job.plan.run_plan import JobIdentity
from finetune_trainer.context import RunContext
from finetune_trainer.credentials import Credentials
from finetune_trainer.network.retry import RetryPolicy
from tests.support.hub import Hub, running_hub
from tests.unit.finetune_job.rules.manifests import manifest

QUICK = RetryPolicy(attempts=4, first_seconds=0.01, longest_seconds=0.02)
LOCAL = Credentials(Path("/no/such/directory"))
"""As on a user's own machine."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # Nor what this machine has of its own.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with running_hub() as running:
        yield running


ContextOf = Callable[..., RunContext]


@pytest.fixture
def context_of(hub: Hub, tmp_path: Path) -> ContextOf:
    """A context for the plain manifest with changes; its workspace is there."""

    def context(changes: dict[str, Any]) -> RunContext:
        profile = FineTuneProfileSpec(trainer_image="trainer@sha256:0", fetch=FetchSettings(hub_endpoint=hub.address))
        spec = FineTuneJobSpec.model_validate(manifest(changes))
        plan = resolve(JobIdentity(namespace="team", name="tuned", uid="0123456789"), spec, profile)
        made = RunContext(plan, plan_sha256(plan), tmp_path / "claims", 0)
        made.workspace.root.mkdir(parents=True, exist_ok=True)
        return made

    return context


@pytest.fixture
def model_of(context_of: ContextOf, hub: Hub) -> Callable[..., RunContext]:
    """A context whose model is this repository."""

    def context(files: dict[str, bytes], **more: Any) -> RunContext:
        commit = hub.add("org/model", files, token=more.pop("token", None))
        return context_of({"model.source": "hf://org/model", "model.revision": commit, **more})

    return context

"""Reads FineTuneProfiles of an API server, which may be from another release, and writes them as manifests."""

from __future__ import annotations

import json

from pydantic import ValidationError

from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.names import API_VERSION, PROFILE_KIND

_MOST_PROBLEMS = 5


def read_profile(spec: object) -> FineTuneProfileSpec | str:
    """Return the spec of a profile, or say why this release cannot read it."""
    try:
        return FineTuneProfileSpec.model_validate(spec)
    except ValidationError as error:
        problems = error.errors(include_url=False)[:_MOST_PROBLEMS]
        return "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'spec'}: {problem['msg']}" for problem in problems)


def profile_manifest(name: str, spec: object) -> str:
    """Write the manifest of a profile."""
    return json.dumps({"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": {"name": name}, "spec": spec})

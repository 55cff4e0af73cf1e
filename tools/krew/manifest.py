"""The plugin manifest that Krew reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.krew.platforms import PYTHON, Platform

PROGRAM = "kubectl-finetune"
_DESCRIPTION = """Validates FineTuneJobs without a cluster, explains every finding, submits and follows jobs, shows their logs,
losses and checkpoints, says why one failed and what to change, and downloads results. To compute on your
own machine (run, merge, data, rehearse), install the Python package instead.
"""
_CAVEATS = (
    f"On macOS, python{PYTHON} must be on PATH, or its path in FINETUNE_PYTHON. On Linux, the plugin contains its own Python.\n"
)


def archive_name(version: str, target: Platform) -> str:
    return f"{PROGRAM}-v{version}-{target.name}.tar.gz"


def manifest(version: str, url: str, sha256: Mapping[Platform, str]) -> dict[str, Any]:
    """Return the plugin's manifest. url: directory of the archives. sha256: platform -> digest of its archive."""
    needs_python = any(target.debian is None for target in sha256)
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "finetune"},
        "spec": {
            "version": f"v{version}",
            "shortDescription": "Validate, submit, follow and explain fine-tuning jobs",
            "description": _DESCRIPTION,
            **({"caveats": _CAVEATS} if needs_python else {}),
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": target.os, "arch": target.arch}},
                    "uri": f"{url.rstrip('/')}/{archive_name(version, target)}",
                    "sha256": digest,
                    "bin": PROGRAM,
                }
                for target, digest in sha256.items()
            ],
        },
    }

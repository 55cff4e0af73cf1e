"""Reads the progress of a local run from its rank 0, as the operator does."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from finetune_job.layout import WorkspaceLayout
from finetune_job.progress import Progress

ANSWER_SECONDS = 2.0


def read_progress(workspace: Path, attempt: int) -> Progress | None:
    """Read the latest progress of this attempt; None while rank 0 does not answer."""
    try:
        address = json.loads(WorkspaceLayout(workspace).rank_zero.read_bytes())
        if address.get("attempt") != attempt:
            return None
        connection = http.client.HTTPConnection("127.0.0.1", int(address["port"]), timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/progress")
            answer = connection.getresponse().read(65_536)
        finally:
            connection.close()
        progress = Progress.model_validate_json(answer)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError, http.client.HTTPException):
        # Anybody who can write to the workspace may have written anything there, so an invalid answer is ignored.
        return None
    return progress if progress.attempt == attempt else None

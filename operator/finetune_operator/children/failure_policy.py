"""What the Job controller itself does about failing pods: nothing but to say so."""

from typing import Any

DISRUPTION_FAILS_THE_JOB: dict[str, Any] = {
    "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
}
"""The only rule. An exit-code rule such as `NotIn [0]` would turn a queue's suspension into a failure, because ranks that are
suspended exit at different moments; and a Job without retries fails on any other failure anyway."""

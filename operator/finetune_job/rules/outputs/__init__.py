"""Rules on results and their destinations."""

from finetune_job.rules.outputs import destinations, settings

__all__ = ["destinations", "settings"]

"""Rules on the optimizer, its learning rate and the length of the run."""

from finetune_job.rules.optimizer import reach, settings

__all__ = ["reach", "settings"]

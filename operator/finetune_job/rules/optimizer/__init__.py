"""The optimizer, its learning rate and the length of the run."""

from finetune_job.rules.optimizer import moments, schedule

RULES = (*schedule.RULES, *moments.RULES)

"""The optimizer, its learning rate and the length of the run."""

from finetune_job.rules.optimizer import moments, reach, schedule

RULES = (*schedule.RULES, *moments.RULES, *reach.RULES)

"""The optimizer, its learning rate and the length of the run."""

from finetune_job.rules.optimizer import reach
from finetune_job.rules.optimizer.settings import MOMENT_RULES, SCHEDULE_RULES

RULES = (*SCHEDULE_RULES, *MOMENT_RULES, *reach.RULES)

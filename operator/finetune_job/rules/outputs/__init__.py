"""Where results go, and what they are."""

from finetune_job.rules.outputs import destinations, settings

RULES = (*destinations.RULES, *settings.RULES)

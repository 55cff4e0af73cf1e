"""Methods and their settings."""

from finetune_job.rules.method_configuration import expressions, lora, methods, modules, settings

RULES = (*methods.RULES, *settings.RULES, *modules.RULES, *expressions.RULES, *lora.RULES)

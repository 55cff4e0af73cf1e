"""Methods and their settings."""

from finetune_job.rules.method_configuration import lora, methods, modules, settings

RULES = (*methods.RULES, *settings.RULES, *modules.RULES, *lora.RULES)

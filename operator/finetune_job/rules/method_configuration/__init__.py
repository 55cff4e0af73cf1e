"""Rules on methods and their settings."""

from finetune_job.rules.method_configuration import expressions, lora, methods, modules, settings

__all__ = ["expressions", "lora", "methods", "modules", "settings"]

"""The configuration class of a method, whose fields finetune_job/method_settings.py fills."""

from __future__ import annotations

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS


def config_class(method: MethodType) -> type[PeftConfig]:
    """PEFT's configuration class of a method that has an adapter."""
    found: type[PeftConfig] = PEFT_TYPE_TO_CONFIG_MAPPING[METHODS[method].peft_type]
    return found

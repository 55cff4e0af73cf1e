"""For fork servers to preload, first of all: has them collect garbage rarely, and does what each of their forks that loads a
model would do again, for 0.2 to 0.5 s."""

from importlib import import_module

from finetune_job.plan.run_plan import RunPlan
from tests.support import collector

collector.collect_rarely()
for name in ("peft.tuners.lora.bnb", "peft.utils.transformers_weight_conversion"):
    import_module(name)
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
RunPlan.model_rebuild()

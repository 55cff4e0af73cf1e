"""Jobs of well-known models, judged by the planner."""

from finetune_job.plan.run_plan import RunPlan
from finetune_memory.adapters import trained_parameters
from finetune_memory.estimate import Estimate
from finetune_memory.families import base_parameters
from finetune_memory.layers import layer_names
from finetune_memory.limit import MemoryLimit
from finetune_memory.model_shape import ModelShape, facts_of
from finetune_memory.sharding import unit_names
from finetune_memory.verdict import MemoryVerdict, judge_memory
from tests.support.builders import JobBuilder, a_job
from tests.unit.finetune_memory.configs import CONFIGS

GIB = 2**30


def shape_of(name: str, plan: RunPlan) -> ModelShape:
    config = CONFIGS[name]
    held = "float32" if plan.method.type.value == "Full" else "bfloat16"
    parameters = trained_parameters(base_parameters(config, held), plan.method, held, config["model_type"])
    return ModelShape(parameters, unit_names(parameters, plan.parallelism.fsdp, layer_names(parameters)), facts_of(config))


def judged(
    job: JobBuilder, name: str = "Llama-3.1-8B", gib: float | None = 80, *, longest: int | None = None, devices: int | None = None
) -> MemoryVerdict:
    """devices: of the one machine where it runs; None: of a cluster."""
    plan = job.plan()
    shape = shape_of(name, plan)
    limit = None if gib is None else MemoryLimit(int(gib * GIB), is_device=True, source="gpu.memory", devices=devices)
    return judge_memory(plan, shape, "bfloat16", limit, longest=longest)


def term(estimate: Estimate, name: str) -> int:
    return sum(each.bytes for each in estimate.terms if each.name == name)


def small_job() -> JobBuilder:
    kept = a_job().spec("training.microBatchSize", 1).spec("training.activationCheckpointing", "None")
    # With a mask, which the formulas count.
    return kept.spec("data.maxSequenceLength", 2048).spec("model.attention", "sdpa")

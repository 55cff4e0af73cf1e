"""Lists the checks of a model, in the order in which their findings are shown.

They run in their own process (model_process.py), and in the rehearsal on a scaled-down model.
"""

from __future__ import annotations

from pathlib import Path

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.preflight.adapter_names import (
    check_excluded_names,
    check_layers_of_experts,
    check_left_out,
    check_method_settings,
    check_module_names,
    check_parameter_names,
    check_ranks_in_file,
    check_saved_names,
    check_token_indices,
)
from finetune_trainer.preflight.architecture import (
    check_compiler,
    check_recomputation,
    check_recurrence,
    check_wrap_classes,
)
from finetune_trainer.preflight.attached import check_attached, check_coverage
from finetune_trainer.preflight.attention import check_variable_length, may_use_varlen
from finetune_trainer.preflight.bypassed import check_units_used, check_used
from finetune_trainer.preflight.checks import CheckStep, nothing_refused, run_steps
from finetune_trainer.preflight.fsdp_units import check_stacked_weights, check_unit_sizes, check_units
from finetune_trainer.preflight.merge_check import check_merge, check_thresholds
from finetune_trainer.preflight.meta_model import (
    attach_adapters,
    can_attach,
    check_conflict,
    check_loading,
    describe_structure,
    fill_in_use,
    has_conflict,
)
from finetune_trainer.preflight.model_inspection import (
    ModelInspection,
    has_method_settings,
    has_structure,
    is_attached,
    is_loaded,
    is_observed,
    is_sharded,
    is_version_1,
    trains_lora,
)
from finetune_trainer.preflight.small_model import check_small_model
from finetune_trainer.preflight.stored_weights import check_decomposition, check_element_types, check_zero_rows
from finetune_trainer.preflight.task import check_task
from finetune_trainer.preflight.two_heads import check_rows_of_two_heads

STRUCTURE: tuple[CheckStep[ModelInspection], ...] = (
    CheckStep(check_loading, (nothing_refused,)),
    CheckStep(check_wrap_classes, (is_loaded,)),
    CheckStep(check_compiler, (is_loaded,)),
    CheckStep(check_recomputation, (is_loaded,)),
    CheckStep(check_method_settings, (is_loaded, has_method_settings)),
    CheckStep(check_module_names, (is_loaded, trains_lora)),
    CheckStep(check_layers_of_experts, (is_loaded, trains_lora)),
    CheckStep(check_excluded_names, (is_loaded, trains_lora)),
    CheckStep(check_saved_names, (is_loaded, trains_lora)),
    CheckStep(check_parameter_names, (is_loaded, trains_lora)),
    CheckStep(check_token_indices, (is_loaded, trains_lora)),
    CheckStep(attach_adapters, (is_loaded, can_attach)),
    CheckStep(check_stacked_weights, (is_attached, is_sharded, is_version_1)),
    CheckStep(check_recurrence, (is_loaded,)),
    CheckStep(check_conflict, (has_conflict,)),
    CheckStep(check_units, (is_attached, is_sharded)),
    CheckStep(check_unit_sizes, (is_attached, is_sharded)),
    CheckStep(check_element_types, (is_attached,)),
    CheckStep(check_attached, (is_attached,)),
    CheckStep(check_rows_of_two_heads, (is_attached,)),
    CheckStep(check_used, (is_attached, is_observed)),
    CheckStep(check_units_used, (is_attached, is_observed, is_sharded)),
    CheckStep(check_coverage, (is_attached, trains_lora)),
    CheckStep(check_left_out, (is_attached, trains_lora)),
    CheckStep(check_ranks_in_file, (is_attached, trains_lora)),
    CheckStep(check_zero_rows, (is_attached, trains_lora)),
    CheckStep(check_decomposition, (is_attached, trains_lora)),
    CheckStep(check_variable_length, (is_loaded, may_use_varlen)),
    CheckStep(describe_structure, (is_attached, nothing_refused)),
)
"""The checks that build the trained structure and report what prevents it."""

MODEL: tuple[CheckStep[ModelInspection], ...] = (
    CheckStep(check_task),
    CheckStep(fill_in_use, (nothing_refused,)),
    *STRUCTURE,
    CheckStep(check_small_model, (has_structure, is_observed)),
    CheckStep(check_thresholds, (has_structure,)),
    CheckStep(check_merge, (has_structure,)),
)
"""The checks that need the model but not its data."""


def inspect_structure(plan: RunPlan, directory: Path) -> ModelInspection:
    """Runs the checks of the structure, without observing a small model."""
    seen = ModelInspection(plan, directory)
    run_steps(STRUCTURE, seen)
    return seen


def inspect_model(plan: RunPlan, directory: Path) -> ModelInspection:
    """Runs all checks of a model. Reads headers, and of weights only what stored_weights.py looks at."""
    seen = ModelInspection(plan, directory)
    run_steps(MODEL, seen)
    return seen

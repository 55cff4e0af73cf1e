"""Lists the checks of a model, in the order in which their findings are shown.

The checks run in their own process (model_process.py). The structure checks also run on the rehearsal's scaled-down model.
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
    check_forward,
    check_recomputation,
    check_recurrence,
    check_wrap_classes,
)
from finetune_trainer.preflight.attached import check_attached, check_coverage, check_rows_of_two_heads
from finetune_trainer.preflight.attention import check_variable_length
from finetune_trainer.preflight.bypassed import check_units_used, check_used
from finetune_trainer.preflight.fsdp_units import check_stacked_weights, check_unit_sizes, check_units
from finetune_trainer.preflight.merge_check import check_merge, check_thresholds
from finetune_trainer.preflight.meta_model import attach_adapters, check_loading, describe_structure, fill_in_use
from finetune_trainer.preflight.model_inspection import Check, ModelInspection, run_checks
from finetune_trainer.preflight.small_model import check_small_model
from finetune_trainer.preflight.stored_weights import check_decomposition, check_element_types, check_zero_rows
from finetune_trainer.preflight.task import check_task

STRUCTURE: tuple[Check, ...] = (
    check_loading,
    check_forward,
    check_wrap_classes,
    check_compiler,
    check_recomputation,
    check_method_settings,
    check_module_names,
    check_layers_of_experts,
    check_excluded_names,
    check_saved_names,
    check_parameter_names,
    check_token_indices,
    attach_adapters,
    check_stacked_weights,
    check_recurrence,
    check_units,
    check_unit_sizes,
    check_element_types,
    check_attached,
    check_rows_of_two_heads,
    check_used,
    check_units_used,
    check_coverage,
    check_left_out,
    check_ranks_in_file,
    check_zero_rows,
    check_decomposition,
    check_variable_length,
    describe_structure,
)
"""The checks that build the trained structure and report what prevents it."""

MODEL: tuple[Check, ...] = (check_task, fill_in_use, *STRUCTURE, check_small_model, check_thresholds, check_merge)
"""The checks that need the model but not its data."""


def inspect_structure(plan: RunPlan, directory: Path) -> ModelInspection:
    """Runs the checks of the structure, without those that need the observation of a small model."""
    seen = ModelInspection(plan, directory)
    run_checks(STRUCTURE, seen)
    return seen


def inspect_model(plan: RunPlan, directory: Path) -> ModelInspection:
    """Runs all checks of a model. Reads headers, and only those weights that stored_weights.py needs."""
    seen = ModelInspection(plan, directory)
    run_checks(MODEL, seen)
    return seen

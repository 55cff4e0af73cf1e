"""FSDP units and element types that only the real model decides."""

from __future__ import annotations

from finetune_job.catalogue.entry import Entry

_ARCHITECTURES = "tests/unit/trainer_preflight/test_architectures.py"
_UNITS = "tests/unit/trainer_preflight/test_fsdp_units.py"

ENTRIES = (
    Entry(
        "wrap-class-unknown",
        "error",
        "The model has no layer class of this name",
        "FSDP would shard no layer, or fail, when the model is wrapped on the GPUs.",
        "Write one of the model's own classes, which the finding lists, or leave transformerLayerClsToWrap out",
        "tests/unit/trainer_preflight/test_refused.py::test_an_unknown_wrap_class_lists_the_models_own",
    ),
    Entry(
        "unit-without-parameters",
        "warning",
        "An FSDP unit holds no parameter",
        "There is nothing in it to shard.",
        "Remove the class from transformerLayerClsToWrap",
        f"{_UNITS}::test_a_unit_without_parameters_is_a_warning",
    ),
    Entry(
        "unit-bypassed",
        "error",
        "A module that would be an FSDP unit is never called",
        "FSDP gathers the weights of a unit while it is called. Code that reads them at another time finds shards.",
        "Leave autoWrapPolicy and transformerLayerClsToWrap out, so that whole layers are the units",
        "tests/unit/trainer_preflight/test_bypassed.py::test_a_unit_that_is_never_called_is_refused",
    ),
    Entry(
        "stacked-experts-under-fsdp1",
        "error",
        "FSDP 1 cannot shard adapted stacked experts",
        "PEFT changes stacked weights in the forward pass, and FSDP 1 holds them as views of one tensor that may not be changed.",
        "Set parallelism.fsdp.version: 2, or name only modules outside the experts",
        f"{_ARCHITECTURES}::test_experts_that_peft_takes_for_linear_layers_need_version_2",
    ),
    Entry(
        "fsdp1-flat-parameter-mixed",
        "error",
        "FSDP 1 joins parameters that need different weight decay or learning rates",
        "A flat parameter of version 1 has one weight decay and one learning rate.",
        "Set parallelism.fsdp.useOrigParams: true, or version: 2",
        f"{_ARCHITECTURES}::test_a_flat_parameter_holds_what_is_treated_alike",
    ),
    Entry(
        "parameter-not-shardable",
        "error",
        "FSDP cannot shard a parameter of this shape",
        "A parameter without dimensions, or one that is not contiguous in memory, is refused by torch when the model is sharded.",
        "Train on one rank, or choose another model",
        f"{_UNITS}::test_a_parameter_without_dimensions_is_not_sharded",
    ),
    Entry(
        "trained-in-two-types",
        "error",
        "One FSDP unit trains parameters of two element types",
        "FSDP 2 reduces the gradients of a unit in one element type and fails in the first backward pass.",
        "Set training.precision: fp32, or model.dtype: float32",
        f"{_UNITS}::test_a_unit_that_trains_two_element_types_is_refused",
    ),
    Entry(
        "trained-in-float16",
        "error",
        "Parameters are trained in float16",
        "Squares of small gradients and Adam's epsilon are zero in float16, and the first steps divide by zero.",
        "Set spec.model.dtype: bfloat16, or keep adapters in float32",
        f"{_ARCHITECTURES}::test_element_types_that_the_stored_weights_decide",
    ),
)

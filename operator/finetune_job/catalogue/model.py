"""Findings on the base model: its files, its architecture and tokens, and the FSDP units that only the real model decides."""

from __future__ import annotations

from finetune_job.catalogue.entry import EITHER, Entry

_REFUSED = "tests/unit/finetune_trainer/preflight/test_refused_jobs.py"
_FILES = "tests/unit/finetune_trainer/inspection/test_model_files.py"
_BASE_NAME = "tests/unit/finetune_trainer/inspection/test_base_name.py"
_HOSTILE = "tests/hostile/test_model_files.py"
_TASK = "tests/unit/finetune_trainer/preflight/test_task.py"
_ARCHITECTURES = "tests/unit/finetune_trainer/preflight/test_architecture.py"
_FIT = "tests/unit/finetune_trainer/preflight/test_fit.py"
_UNITS = "tests/unit/finetune_trainer/preflight/test_fsdp_units.py"

FILE_ENTRIES = (
    Entry(
        "model-directory-missing",
        "error",
        "The model's directory does not exist on its claim",
        "Every later step reads the base model from this directory.",
        "Put the model there, or correct the path in spec.model.source",
        f"{_REFUSED}::test_a_missing_model_names_what_lies_beside",
    ),
    Entry(
        "model-directory-unreadable",
        "error",
        "The model's directory cannot be listed",
        "The pods run as the user and group of the profile, and these may not read the directory.",
        "Let the group of the pods (the profile's fsGroup) read the directory",
        f"{_FILES}::test_a_directory_that_cannot_be_listed_is_refused",
    ),
    Entry(
        "model-file-unusable",
        "error",
        "An entry of the model's directory cannot be read as a file, leads out of its claim, or is not what its name promises",
        "Libraries open whatever has the right name: a pipe would block them, and what a link leads to would be published.",
        "Replace it with the file of the original model, or remove it",
        f"{_HOSTILE}::test_a_special_file_is_named_and_never_opened",
    ),
    Entry(
        "model-config-unreadable",
        "error",
        "The model's config.json is missing or is not JSON",
        "config.json names the architecture and its sizes; no library can build the model without it.",
        "Copy config.json to the claim again",
        f"{_REFUSED}::test_a_missing_or_foreign_configuration_is_refused",
    ),
    Entry(
        "adapter-base-unnamed",
        "warning",
        "Nothing says what the Hub calls the base model",
        "adapter_config.json then names the source of the manifest, which AutoPeftModel.from_pretrained cannot load.",
        "Set spec.model.hubName",
        f"{_BASE_NAME}::test_a_base_without_a_name_is_told",
    ),
    Entry(
        "adapter-base-guessed",
        "warning",
        "Only config.json says what the Hub calls the base model",
        "transformers writes there from where a model was loaded before it was saved, and it may have been trained in between.",
        "Set spec.model.hubName",
        f"{_BASE_NAME}::test_the_name_that_only_config_json_gives_is_told",
    ),
    Entry(
        "model-already-quantized",
        "error",
        "The base model is quantized already",
        "Base weights are read as float32, float16 or bfloat16 numbers. Quantized weights are not such numbers, and an adapter "
        "cannot be merged into them exactly.",
        "Use the original 16-bit model, with method QLoRA if it is to be quantized during training",
        f"{_REFUSED}::test_a_quantised_base_is_refused",
    ),
    Entry(
        "model-weights-ambiguous",
        "error",
        "The directory holds both one weights file and an index of several",
        "Libraries differ in which of the two they read, so training and merge could use different weights.",
        "Remove the one that does not belong to the model",
        f"{_FILES}::test_one_file_and_an_index_together_are_refused",
    ),
    Entry(
        "model-weights-missing",
        "error",
        "The directory holds no safetensors weights",
        "Without weights there is nothing to train.",
        "Copy the whole model directory, weights included",
        f"{_REFUSED}::test_absent_weights_are_refused",
    ),
    Entry(
        "model-pickle-only",
        "error",
        "The weights exist only as pickle files",
        "A pickle file runs code of its author's choice when it is opened.",
        "Convert the weights to safetensors once, on a machine where you trust them",
        f"{_REFUSED}::test_pickled_weights_are_refused_with_the_conversion",
    ),
    Entry(
        "model-index-broken",
        "error",
        "The index of the weights does not describe the files",
        "The index says which file holds which tensor. If it is wrong, weights would be missing or be read from the wrong file.",
        "Copy the index and all shards of the same save",
        f"{_REFUSED}::test_an_index_that_disagrees_with_its_shards_is_refused",
    ),
    Entry(
        "model-shard-broken",
        "error",
        "A weights file is missing, truncated or not a safetensors file",
        "Loading it would fail on every rank, after the GPUs were granted.",
        "Copy the file to the claim again",
        f"{_REFUSED}::test_every_truncated_or_missing_shard_is_named",
    ),
    Entry(
        "model-weights-incomplete",
        "error",
        "The files do not hold every weight that config.json asks for",
        "transformers would initialise the missing weights at random and only print a warning.",
        "Copy all files of one and the same model",
        f"{_REFUSED}::test_weights_that_do_not_fill_the_model_are_refused",
    ),
)


ARCHITECTURE_ENTRIES = (
    Entry(
        "model-holds-adapter",
        "error",
        "The model's directory also holds an adapter",
        "transformers would load the adapter and the base model that it names, instead of this model.",
        "Merge the adapter, or remove its files",
        f"{_TASK}::test_an_adapter_beside_the_weights_is_refused",
    ),
    Entry(
        "model-of-another-task",
        "error",
        "The model is not a causal language model",
        "As a language model it would lose its head, and what was learnt with it. The libraries load it without an error.",
        "Use a decoder whose class in config.json ends with ForCausalLM or LMHeadModel",
        f"{_TASK}::test_a_model_of_another_task_is_refused_by_its_class",
    ),
    Entry(
        "model-of-more-than-text",
        "warning",
        "The model takes more than text, and only its text part is trained",
        "The parts for images or sound stay as they are.",
        "Train on text alone, or use the text model that belongs to it",
        f"{_TASK}::test_of_a_model_of_images_and_text_it_is_said_that_text_alone_is_trained",
    ),
    Entry(
        "special-token-beyond-vocabulary",
        "warning",
        "config.json names a special token for which the embedding has no row",
        "Programs that generate text with the model would fail on this token, or never stop.",
        "Write the tokenizer's own id in config.json, or null if the tokenizer has none",
        f"{_TASK}::test_a_special_token_beyond_the_embedding_is_said",
    ),
    Entry(
        "model-not-causal",
        "error",
        "What the model predicts depends on later tokens",
        "It would learn to copy the token that it is to predict. This is measured on a small model of the same architecture.",
        "Use a causal language model; an encoder needs is_decoder: true to be one",
        f"{_TASK}::test_a_model_that_looks_ahead_is_refused_whatever_its_class_is_called",
    ),
    Entry(
        "model-not-accepted",
        "error",
        "The libraries cannot build the model that config.json describes",
        "Every rank would fail in the same way when it loads the model.",
        "Check config.json and its architecture against the libraries of the trainer image",
        f"{_REFUSED}::test_a_missing_or_foreign_configuration_is_refused",
    ),
    Entry(
        "model-settings-conflict",
        "error",
        "The settings of the method cannot work with this model",
        "PEFT, FSDP or this trainer refuses to attach, train or shard the adapters of this model.",
        "Change the setting that the message names",
        f"{_REFUSED}::test_settings_that_peft_refuses_for_this_model_are_refused",
    ),
    Entry(
        "attention-not-supported",
        "error",
        "transformers has no such attention implementation for this architecture",
        "The model could not be built with it.",
        "Set spec.model.attention: eager",
        f"{_ARCHITECTURES}::test_attention_that_the_architecture_lacks_is_refused",
    ),
    Entry(
        "compile-without-compiler",
        "error",
        "torch.compile needs a compiler that the trainer image does not have",
        "The first training step would fail.",
        "Set spec.training.compile: false, or use a trainer image with a compiler",
        f"{_REFUSED}::test_compiling_without_a_compiler_is_refused",
    ),
    Entry(
        "activation-checkpointing-not-supported",
        "error",
        "The architecture cannot compute its layers again in the backward pass",
        "transformers refuses activation checkpointing for this class of models.",
        "Set spec.training.activationCheckpointing: None",
        f"{_ARCHITECTURES}::test_activation_checkpointing_is_refused_where_the_architecture_has_none",
    ),
    Entry(
        "packing-with-recurrent-layers",
        "error",
        "Packing cannot keep records apart in a model with recurrent layers",
        "The state of a recurrent layer would run on from one record of a sequence into the next.",
        "Set spec.data.packing: false",
        f"{_REFUSED}::test_packing_is_refused_where_a_state_would_run_on_from_record_to_record",
    ),
    Entry(
        "packing-leaks",
        "error",
        "A packed record sees the record before it",
        "The model's code does not restart its attention mask at a new record. This is measured on a small model.",
        "Set spec.data.packing: false",
        f"{_ARCHITECTURES}::test_packing_is_refused_where_a_document_sees_the_one_before",
    ),
    Entry(
        "tokenizer-beyond-vocabulary",
        EITHER,
        "The tokenizer has more tokens than the model's embedding has rows",
        "A record with such a token would fail in the forward pass. It is an error if the data use one, otherwise a warning.",
        "Use the tokenizer of this model, or resize the model's embeddings and save it",
        f"{_FIT}::test_tokens_that_the_embedding_does_not_have_are_an_error_where_the_data_uses_them",
    ),
    Entry(
        "document-beyond-positions",
        "error",
        "A record is longer than the model's positions",
        "Beyond max_position_embeddings a model has learnt nothing, or its code fails.",
        "Set spec.data.maxSequenceLength to the model's number of positions or less, or, of rotary ones, spec.model.maxPositions",
        f"{_FIT}::test_a_record_beyond_the_models_positions_is_an_error",
    ),
    Entry(
        "sequence-beyond-positions",
        "error",
        "A sequence is longer than the attention biases that the model's code makes",
        "The code of this architecture (MPT) fails with longer sequences, packed or not.",
        "Set spec.data.maxSequenceLength to the model's max_seq_len or less",
        f"{_FIT}::test_rows_that_packing_fills_beyond_what_the_code_computes_are_an_error",
    ),
)


SHARDING_ENTRIES = (
    Entry(
        "wrap-class-unknown",
        "error",
        "The model has no layer class of this name",
        "FSDP would shard no layer, or fail, when the model is wrapped on the GPUs.",
        "Write one of the model's own classes, which the finding lists, or leave transformerLayerClsToWrap out",
        "tests/unit/finetune_trainer/preflight/test_refused_jobs.py::test_an_unknown_wrap_class_lists_the_models_own",
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
        "unit-holds-most-of-the-model",
        "warning",
        "The classes to wrap, or the smallest size of a unit, leave most of the model in one FSDP unit",
        "Every rank gathers a unit whole. If the named classes are norms, or the whole model, or if no layer has as many "
        "parameters as minNumParams says (100 million if it is unset), that is the memory of NO_WRAP.",
        "Leave autoWrapPolicy and transformerLayerClsToWrap out, so that whole layers are the units",
        f"{_UNITS}::test_classes_that_leave_most_of_the_model_in_one_unit_are_a_warning",
    ),
    Entry(
        "unit-bypassed",
        "error",
        "A module that would be an FSDP unit is never called",
        "FSDP gathers the weights of a unit while it is called. Code that reads them at another time finds shards.",
        "Leave autoWrapPolicy and transformerLayerClsToWrap out, so that whole layers are the units",
        "tests/unit/finetune_trainer/preflight/test_bypassed.py::test_a_unit_that_is_never_called_is_refused",
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

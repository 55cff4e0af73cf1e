"""The very common ones."""

from __future__ import annotations

from tests.pitfalls.catalogue.entry import Avoided, Changed, Entry, NotApplicable, NotReproduced, Refused, Reproduced, Severity

_P = "tests/pitfalls/"
_U = "tests/unit/"
_FIT = f"{_U}trainer_preflight/test_fit.py"

ENTRIES = (
    Entry(
        1,
        "fsdp1-lora-nonuniform-requires-grad",
        Severity.START,
        "FSDP 1 with use_orig_params false, and a unit that holds frozen and trained parameters: any wrap policy but PEFT's",
        "ValueError: Must flatten tensors with uniform `requires_grad`",
        Reproduced((f"{_P}test_trainable.py::test_lora_in_flat_units_fails_without_pefts_policy",)),
        Refused(rules=("fsdp1-lora-mixed-requires-grad",)),
        ("torch _flat_param.py", "peft docs, fsdp.md", "accelerate PR 2253"),
    ),
    Entry(
        2,
        "fsdp1-dora-use-orig-params-true",
        Severity.START,
        "FSDP 1, DoRA, PEFT's wrap policy and use_orig_params true",
        "IndexError: tuple index out of range in the first forward pass, because the shape of a shard is read outside its unit",
        Reproduced((f"{_P}test_dora.py::test_original_parameters_in_leaf_units_fail",)),
        Refused(rules=("fsdp1-dora-orig-params",)),
        ("peft PR 1806", "peft issues 1737, 1910, 1984"),
    ),
    Entry(
        3,
        "fsdp1-qlora-integer-storage",
        Severity.START,
        "FSDP 1 with a 4-bit base stored as uint8, or an 8-bit base",
        "ValueError: Cannot flatten integer dtype tensors",
        Reproduced(
            (
                f"{_P}test_quantization.py::test_bytes_cannot_be_flattened",
                f"{_P}test_quantization.py::test_an_8_bit_base_cannot_be_sharded",
            )
        ),
        Refused(rules=("fsdp1-qlora-integer-storage", "quantization-bits")),
        ("torch _flat_param.py", "bitsandbytes docs, fsdp_qlora.md"),
    ),
    Entry(
        4,
        "fsdp1-qlora-storage-ne-model-dtype",
        Severity.START,
        "FSDP 1 with 4-bit weights stored in another floating type than norms and embeddings have",
        "ValueError: Must flatten tensors with uniform dtype",
        Reproduced((f"{_P}test_quantization.py::test_storage_of_another_type_cannot_be_flattened",)),
        Refused(rules=("fsdp1-qlora-storage-not-model-dtype",)),
        ("bitsandbytes docs, fsdp_qlora.md", "peft docs, fsdp.md"),
    ),
    Entry(
        5,
        "fsdp1-adapter-base-dtype-mix",
        Severity.START,
        "FSDP 1, a 16-bit base, float32 adapters, and a policy that puts both into one unit",
        "ValueError: Must flatten tensors with uniform dtype, whatever use_orig_params says",
        Reproduced((f"{_P}test_dtypes.py::test_float32_adapters_in_16_bit_layers_fail",)),
        Refused(rules=("fsdp1-adapter-dtype",)),
        ("peft issues 2129, 2889", "peft docs of autocast_adapter_dtype"),
    ),
    Entry(
        6,
        "merge-and-unload-on-sharded-fsdp1",
        Severity.SAVE,
        "merge_and_unload on the wrapped model, right after training",
        "FSDP 1: RuntimeError about data that is not allocated, or about sizes; FSDP 2 merges exactly on CPU ranks",
        Reproduced(
            (
                f"{_P}test_merging.py::test_a_sharded_model_cannot_be_merged_under_fsdp_1",
                f"{_P}test_merging.py::test_fsdp_2_merges_in_place_on_cpu_ranks",
            )
        ),
        Refused(rules=("merge-while-sharded",)),
        ("peft docs, fsdp.md", "peft issues 2129, 1674, 484, 1432"),
    ),
    Entry(
        7,
        "fsdp-sharded-save-model-writes-nothing",
        Severity.SILENT,
        "Trainer.save_model under FSDP with SHARDED_STATE_DICT",
        "no weights are written and nothing is said",
        NotReproduced("Trainer turns FSDP on for accelerators only; read in its source"),
        Avoided(
            "The state-dict type has no effect: the adapter is written whole and checked tensor by tensor after every save.",
            (f"{_U}trainer_train/test_methods.py::test_peft_loads_the_adapter_with_every_tensor_equal_and_the_same_logits",),
        ),
        ("transformers trainer.py, save_model", "peft docs, fsdp.md"),
    ),
    Entry(
        8,
        "fsdp-naive-save-pretrained",
        Severity.SILENT,
        "save_pretrained on a sharded model",
        "FSDP 2 without a gathered state dict: RuntimeError: Attempted to access the data pointer on an invalid python storage",
        Changed(
            "under FSDP 1 the file holds no tensor even with a gathered state dict: PEFT looks for names that hold those of the "
            "wrappers, so that the documented recipe writes an empty adapter.",
            (
                f"{_P}test_saving.py::test_pefts_save_finds_no_tensor_under_fsdp_1",
                f"{_P}test_saving.py::test_fsdp_2_saves_what_was_gathered_and_nothing_else",
            ),
        ),
        Avoided(
            "Names are taken from PEFT before sharding, and the file is checked for names, shapes and finite values.",
            (f"{_U}trainer_train/test_methods.py::test_peft_loads_the_adapter_with_every_tensor_equal_and_the_same_logits",),
        ),
        ("peft issues 1443, 1328, 1710",),
    ),
    Entry(
        9,
        "no-split-modules-missing-silent",
        Severity.SLOW,
        "PEFT's wrap policy where neither the environment nor the model names a layer class, or names are empty",
        "no error: only adapter leaves become units and every rank gathers the whole base",
        Reproduced((f"{_P}test_wrapping.py::test_blank_names_wrap_no_layer_without_a_word",)),
        Refused(rules=("wrap-class-list-empty", "wrap-class-name-blank")),
        ("peft utils/other.py", "peft PR 2167"),
    ),
    Entry(
        10,
        "no-split-modules-empty-string-error",
        Severity.START,
        "peft up to 0.13 and a model that names no layer classes",
        "Exception: Could not find the transformer layer class to wrap in the model",
        NotReproduced("mended in peft 0.14; a wrong name still ends so, see entry 43"),
        Avoided(
            "Without names the class of the elements of the longest list of modules is wrapped.",
            (f"{_P}test_wrapping.py::test_a_model_that_names_no_classes_has_its_longest_list_wrapped",),
        ),
        ("peft issue 2166, PR 2167",),
    ),
    Entry(
        11,
        "pad-equals-eos-masks-eos",
        Severity.SILENT,
        "pad token = end token, and a collator that masks padding by its id",
        "no end token is ever in the loss: the model never learns to stop",
        Reproduced((f"{_P}test_data_collation.py::test_an_end_token_that_also_pads_is_never_learnt",)),
        Avoided(
            "What is supervised is decided per token when the data is prepared; padding is never recognised by its id.",
            (f"{_U}trainer_data/test_tokenize.py::test_the_completion_and_the_end_are_supervised_the_prompt_is_not",),
        ),
        ("trl issue 976", "transformers data_collator.py"),
    ),
    Entry(
        12,
        "gc-without-input-require-grads",
        Severity.START,
        "a frozen base, reentrant activation checkpoints, and embeddings whose output needs no gradient",
        "RuntimeError: element 0 of tensors does not require grad, or a warning and no gradients; transformers' switch is right",
        Reproduced(
            (
                f"{_P}test_activation_checkpointing.py::test_reentrant_checkpoints_need_inputs_with_gradients",
                f"{_P}test_activation_checkpointing.py::test_transformers_own_checkpoints_train",
            )
        ),
        Avoided(
            "Checkpoints are never reentrant.",
            (f"{_U}trainer_train/test_build.py::test_recomputed_activations_give_the_same_gradients_bit_for_bit",),
        ),
        ("peft docs, troubleshooting", "peft issue 137"),
    ),
    Entry(
        13,
        "ddp-reentrant-marked-ready-twice",
        Severity.START,
        "DDP with reentrant activation checkpoints of a module that runs twice or with find_unused_parameters",
        "RuntimeError: Expected to mark a variable ready only once",
        Reproduced((f"{_P}test_activation_checkpointing.py::test_ddp_counts_reentrant_gradients_twice",)),
        Avoided(
            "Ranks are always sharded, never replicated by DDP, and checkpoints are never reentrant.",
            (f"{_U}trainer_train/test_build.py::test_recomputed_activations_give_the_same_gradients_bit_for_bit",),
        ),
        ("peft issues 313, 301, 663, 1745", "trl issue 4782"),
    ),
    Entry(
        14,
        "fp16-weights-with-amp-grad-scaler",
        Severity.SILENT,
        "trained parameters in float16, with a gradient scaler or without one",
        "ValueError: Attempting to unscale FP16 gradients; without a scaler Adam's epsilon is zero and adapters become NaN",
        Reproduced(
            (
                f"{_P}test_loss_scaling.py::test_a_scaler_takes_no_float16_gradients",
                f"{_P}test_loss_scaling.py::test_adams_epsilon_is_zero_in_float16",
            )
        ),
        Refused(rules=("float16-adapter",)),
        ("peft docs, troubleshooting",),
    ),
    Entry(
        15,
        "target-modules-partial-typo",
        Severity.SILENT,
        "target_modules with one wrong name next to a right one",
        "the wrong name is dropped without a word",
        Reproduced((f"{_P}test_module_names.py::test_one_wrong_name_beside_a_right_one_is_dropped_without_a_word",)),
        Refused(
            preflight=("target-module-unknown",),
            tests=(f"{_U}trainer_preflight/test_refused.py::test_one_wrong_target_among_right_ones_is_found_with_its_near_match",),
        ),
    ),
    Entry(
        16,
        "modules-to-save-typo",
        Severity.SILENT,
        "a name in modules_to_save that the model does not have",
        "no word; the module stays frozen",
        Reproduced((f"{_P}test_module_names.py::test_one_wrong_name_beside_a_right_one_is_dropped_without_a_word",)),
        Refused(
            preflight=("saved-module-unknown",),
            tests=(f"{_U}trainer_preflight/test_refused.py::test_a_saved_module_that_does_not_exist_is_refused",),
        ),
    ),
    Entry(
        17,
        "task-head-not-in-modules-to-save",
        Severity.SILENT,
        "a new head with random weights that is neither trained nor saved",
        "each load draws another head",
        NotReproduced("only models with a task head of their own have it"),
        NotApplicable(
            "Only causal language models are trained; a weight that the files do not hold, such as a new head's, is refused"
        ),
        ("peft docs, troubleshooting",),
    ),
    Entry(
        18,
        "new-chat-tokens-not-trained",
        Severity.SILENT,
        "tokens added to the tokenizer and embeddings resized, with adapters on attention and MLP alone",
        "the new rows stay random",
        NotReproduced("needs a script that resizes embeddings"),
        Refused(
            preflight=("tokenizer-beyond-vocabulary",),
            tests=(f"{_FIT}::test_tokens_that_the_embedding_does_not_have_are_an_error_where_the_data_uses_them",),
        ),
        ("peft docs, troubleshooting", "trl docs, SFT"),
    ),
    Entry(
        19,
        "optimizers-arg-with-fsdp",
        Severity.START,
        "Trainer(optimizers=...) with FSDP, as recipes for LoRA+ do",
        "RuntimeError: Passing `optimizers` is not allowed if PyTorch FSDP is enabled",
        NotReproduced("Trainer turns FSDP on for accelerators only"),
        Avoided(
            "LoRA+ is a setting; the optimizer is made by the trainer after sharding.",
            (f"{_U}trainer_train/test_optimizers.py::test_lora_plus_gives_lora_b_its_own_rate",),
        ),
        ("transformers trainer.py", "peft docs, lora.md"),
    ),
    Entry(
        20,
        "device-map-auto-distributed",
        Severity.START,
        "device_map='auto' under DDP or FSDP",
        "ValueError: You can't train a model that has been loaded with `device_map='auto'` in any distributed mode",
        NotReproduced("accelerate checks it for accelerators only"),
        NotApplicable("There is no device map: each rank loads onto its own device"),
        ("accelerate accelerator.py",),
    ),
    Entry(
        21,
        "quantized-without-adapter",
        Severity.START,
        "a 4-bit or 8-bit base without an adapter",
        "ValueError: You cannot perform fine-tuning on purely quantized models",
        NotReproduced("a check of Trainer alone"),
        Refused(rules=("quantization-without-qlora",)),
        ("transformers trainer.py",),
    ),
    Entry(
        22,
        "merge-into-quantized-base",
        Severity.SILENT,
        "merge_and_unload on a 4-bit or 8-bit base",
        "the sum is packed again: logits change by more than the adapter's own effect, with a warning about rounding",
        Reproduced((f"{_P}test_quantization.py::test_merging_into_4_bits_rounds_the_update_away",)),
        Refused(rules=("merge-into-quantized",)),
        ("peft lora/bnb.py",),
    ),
    Entry(
        23,
        "qlora-train-4bit-merge-bf16-gap",
        Severity.SILENT,
        "an adapter trained on packed weights, merged into the 16-bit ones",
        "the merged model is not what was trained; PEFT says nothing",
        Reproduced((f"{_P}test_quantization.py::test_an_adapter_trained_on_4_bits_means_something_else_on_the_original",)),
        Avoided(
            "merge.base Dequantized merges into exactly what was trained on; with Original the gap is measured and reported.",
            (
                f"{_U}trainer_merge/test_quantization.py::test_a_dequantized_merge_is_pefts_merge_into_what_the_adapter_saw",
                f"{_U}trainer_verify/test_quantized.py::test_the_gate_is_about_the_base_that_was_used",
            ),
        ),
    ),
    Entry(
        24,
        "both-activation-checkpointings",
        Severity.START,
        "fsdp_config.activation_checkpointing together with the training argument",
        "ValueError: both can't be set to True",
        NotReproduced("Trainer checks it only where FSDP is on, which needs an accelerator"),
        Refused(rules=("no-effect-activation-checkpointing",)),
        ("transformers trainer.py",),
    ),
    Entry(
        25,
        "save-only-model-sharded",
        Severity.START,
        "save_only_model with SHARDED_STATE_DICT, or with load_best_model_at_end",
        "ValueError",
        NotReproduced("Trainer checks it only where FSDP is on, which needs an accelerator"),
        Avoided(
            "There is one form of checkpoint, which always holds the optimizer; the best one can be exported at the end.",
            (f"{_U}trainer_checkpoint/test_checkpoints.py::test_the_best_is_kept_and_exported",),
        ),
        ("transformers trainer.py",),
    ),
    Entry(
        26,
        "fsdp-single-process",
        Severity.START,
        "fsdp with one process",
        "ValueError: Using fsdp only works in distributed training",
        Changed(
            "TrainingArguments takes it without a word.",
            (f"{_P}test_trainer_arguments.py::test_one_process_is_taken_without_a_word",),
        ),
        Avoided(
            "One rank trains the unsharded model, with the result of any number of ranks.",
            (f"{_U}trainer_train/test_equivalence.py::test_a_split_run_is_the_same_run",),
        ),
        ("transformers training_args.py",),
    ),
    Entry(
        27,
        "fsdp-plus-deepspeed",
        Severity.START,
        "fsdp and deepspeed together",
        "refused by the launchers",
        NotReproduced("DeepSpeed is not installed"),
        NotApplicable("There is no DeepSpeed here and no field for it"),
        ("accelerate commands/launch.py",),
    ),
)

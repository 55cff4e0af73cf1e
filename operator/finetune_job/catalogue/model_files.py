"""The base model as files: directory, configuration, weights and index."""

from __future__ import annotations

from finetune_job.catalogue.entry import Entry

_REFUSED = "tests/unit/trainer_preflight/test_refused.py"
_FILES = "tests/unit/trainer_preflight/test_model_files.py"
_HOSTILE = "tests/hostile/test_model_files.py"

ENTRIES = (
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
        "An entry of the model's directory cannot be read as a file, or is far too large for its name",
        "Libraries open whatever has the right name: a pipe would block them, and a device never ends.",
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

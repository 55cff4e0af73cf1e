"""Names in the settings of an adapter: modules, parameters, layers, rows and patterns that have to exist in the model."""

from __future__ import annotations

from finetune_job.catalogue.entry import Entry

_REFUSED = "tests/unit/trainer_preflight/test_refused.py"
_PATTERNS = "tests/pitfalls/test_patterns.py"
_UNITS = "tests/unit/trainer_preflight/test_fsdp_units.py"
_NAMES = "tests/unit/trainer_preflight/test_module_names.py"

ENTRIES = (
    Entry(
        "target-module-unknown",
        "error",
        "A name matches no module that can hold an adapter",
        "PEFT raises only if nothing at all matches; one wrong name among right ones is dropped without a message.",
        "Use a name that the model has; the finding lists them, with near matches",
        f"{_PATTERNS}::test_names_of_no_module",
    ),
    Entry(
        "target-module-excluded",
        "warning",
        "A target is excluded everywhere by excludeModules",
        "PEFT gives the module no adapter and prints nothing.",
        "Remove the name from targetModules or from excludeModules",
        f"{_NAMES}::test_a_target_of_which_nothing_is_left_is_a_warning",
    ),
    Entry(
        "target-module-saved-whole",
        "warning",
        "A target is also trained whole by modulesToSave",
        "PEFT trains a copy of the module and gives it no adapter.",
        "Remove the name from targetModules or from modulesToSave",
        f"{_NAMES}::test_a_target_of_which_nothing_is_left_is_a_warning",
    ),
    Entry(
        "target-parameter-unknown",
        "error",
        "A name in targetParameters matches no parameter that LoRA can adapt",
        "PEFT adapts parameters of two or three dimensions and ignores names that match none.",
        "Use a name that the model has; the finding lists its stacked parameters",
        f"{_UNITS}::test_a_parameter_that_the_model_lacks_is_refused",
    ),
    Entry(
        "saved-module-unknown",
        "error",
        "A name in modulesToSave matches no module",
        "PEFT would train and save nothing for it.",
        "Use a name that the model has; the finding lists them, with near matches",
        f"{_PATTERNS}::test_names_of_no_module",
    ),
    Entry(
        "saved-module-by-its-end",
        "warning",
        "A name in modulesToSave is the end of other names, too",
        "PEFT compares the end of names, so `norm` also means `input_layernorm`: more modules are trained than was meant.",
        "Write a longer end of the name, as in model.norm",
        f"{_PATTERNS}::test_a_saved_module_named_by_its_end",
    ),
    Entry(
        "layer-number-unknown",
        "error",
        "layersToTransform names a layer that the model does not have",
        "PEFT leaves the number out without a message.",
        "Write numbers of layers that exist, from 0",
        f"{_PATTERNS}::test_a_layer_beyond_the_model",
    ),
    Entry(
        "adapter-pattern-unmatched",
        "error",
        "A pattern matches nothing",
        "PEFT ignores keys of rankPattern, alphaPattern and the like that match no module.",
        "Write a key that matches names of the model, or remove it",
        f"{_PATTERNS}::test_a_pattern_that_matches_nothing",
    ),
    Entry(
        "adapter-patterns-overlap",
        "warning",
        "Two patterns with different values match the same module",
        "PEFT takes the first in the order of adapter_config.json, which is alphabetical.",
        "Let one pattern match each module",
        f"{_PATTERNS}::test_the_first_pattern_that_matches_counts",
    ),
    Entry(
        "token-index-unknown",
        "error",
        "A token id is beyond the rows of the embedding",
        "PEFT would fail, or write outside the embedding, when it trains this row.",
        "Write ids from 0 to the number of rows, less one",
        f"{_UNITS}::test_rows_beyond_the_embedding_are_refused",
    ),
    Entry(
        "method-setting-invalid",
        "error",
        "The method does not have this setting, or does not take this value",
        "PEFT's configuration of the method would refuse it, or ignore it.",
        "Write a setting of this method, with a value of the type that PEFT takes",
        f"{_REFUSED}::test_a_setting_that_the_method_does_not_have_is_found_with_its_near_match",
    ),
    Entry(
        "feedforward-module-not-adapted",
        "error",
        "feedforwardModules names a module that is not adapted",
        "IA3 requires each of them to be a target; PEFT would refuse to load the trained adapter.",
        "Name adapted modules only",
        f"{_PATTERNS}::test_feed_forward_modules_that_are_not_adapted",
    ),
)

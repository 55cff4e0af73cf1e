"""Methods: which are supported, and where their settings are."""

from __future__ import annotations

from finetune_job.methods import METHODS, Family
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.unsupported_methods import UNSUPPORTED

_TYPE = "method.type"
_LORA = "method.lora"
_SETTINGS = "method.settings"
_MEASURED = "this product: tests/unit/finetune_trainer/model/test_adapters_every_method.py"
_PEFT = "peft 0.21"


@rule(
    "method-not-supported",
    "Not every PEFT method trains right here",
    reads=(_TYPE,),
    sources=(_MEASURED, "peft: docs/source/package_reference"),
    reproduction=Reproduction(
        "tests/pitfalls/test_refused_methods.py::test_prompts_shift_the_labels_or_miss_the_second_document "
        "tests/pitfalls/test_refused_methods.py::test_methods_that_want_a_task_with_each_record "
        "tests/pitfalls/test_refused_methods.py::test_clustering_wants_another_library "
        "tests/pitfalls/test_refused_methods.py::test_other_objects_than_tensors_go_from_layer_to_layer "
        "tests/pitfalls/test_refused_methods.py::test_a_mixture_wants_trained_adapters_and_computes_every_batch_twice "
        "tests/pitfalls/test_refused_methods.py::test_attention_of_pefts_own_is_there_for_few_models_and_for_no_merge "
        "tests/pitfalls/test_refused_methods.py::test_methods_that_two_ranks_train_to_other_weights",
        "of each method its own: logits of prompts are longer or the second packed document has others, task_ids "
        "are wanted, scikit-learn or a trained adapter is, the adapter has no merge, or two ranks end on other weights than one",
    ),
    holds_for=_PEFT,
)
def method_not_supported(context: RuleContext) -> Problem | None:
    kind = context.spec.method.type
    if kind not in UNSUPPORTED:
        return None
    reason, nearest = UNSUPPORTED[kind].reason, UNSUPPORTED[kind].nearest
    return Problem(
        field=_TYPE,
        value=kind,
        message=f"{kind} is not supported: {reason}",
        fix=f"set {_TYPE} to {nearest}, which is nearest to it, and remove {_SETTINGS}",
        changes={_TYPE: nearest, _SETTINGS: None},
    )


@rule(
    "lora-settings-misplaced",
    "Only LoRA, QLoRA, DoRA and QDoRA take method.lora",
    reads=(_TYPE, _LORA),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
        "no error: the run's plan is the same with and without it",
    ),
    holds_for=OURS,
)
def lora_settings_misplaced(context: RuleContext) -> Problem | None:
    method = context.spec.method
    if METHODS[method.type].family is Family.LORA or method.lora is None:
        return None
    if METHODS[method.type].family is Family.FULL:
        reason, instead = "Full trains every weight", ""
    else:
        reason, instead = f"{method.type} is not a kind of LoRA", f", or write them as {_SETTINGS}"
    return Problem(
        field=_LORA,
        value="set",
        message=f"{reason}; these settings would be ignored",
        fix=f"remove {_LORA}{instead}, or set {_TYPE} to LoRA",
        changes={_LORA: None},
    )


@rule(
    "method-settings-misplaced",
    "LoRA, QLoRA, DoRA, QDoRA and Full take no method.settings",
    reads=(_TYPE, _SETTINGS),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_no_effect.py::test_what_nothing_reads",
        "no error: the run's plan is the same with and without it",
    ),
    holds_for=OURS,
)
def method_settings_misplaced(context: RuleContext) -> Problem | None:
    method = context.spec.method
    family = METHODS[method.type].family
    if family is Family.OTHER or method.settings is None:
        return None
    instead = f"write them as {_LORA}" if family is Family.LORA else f"remove {_SETTINGS}"
    return Problem(
        field=_SETTINGS,
        value="set",
        message=f"{method.type} does not read them; they would be ignored",
        fix=f"{instead}, or choose the method that they belong to",
        changes={_SETTINGS: None},
    )


RULES = (
    method_not_supported,
    lora_settings_misplaced,
    method_settings_misplaced,
)

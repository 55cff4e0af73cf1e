"""Each finding of preflight has changes that a test applies, or a reason why no program can fix it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from finetune_job.catalogue.book import ENTRIES
from finetune_job.catalogue.entry import Gate

ROOT = Path(__file__).parents[4]
_PREFLIGHT = "tests/unit/finetune_trainer/preflight/"
_CASES = f"{_PREFLIGHT}test_changes_clear_their_finding.py"
_FORMS = "tests/unit/finetune_trainer/data/test_forms_of_records.py::test_every_form_is_prepared_or_refused_with_a_fix_that_works"
_OF_MODEL = f"{_CASES}::test_the_changes_of_a_finding_clear_it"
_PATCHED = f"{_CASES}::test_the_changes_clear_what_another_model_would_show"
_COUNTS = f"{_CASES}::test_the_changes_make_counts_fit"
_ADDED = f"{_PREFLIGHT}test_added_tokens.py::test_the_changes_of_findings_about_added_tokens_clear_them"
_ESTIMATE = (
    "tests/unit/finetune_cli/checks/test_estimate.py::test_a_manifest_of_model_data_and_method_fits_or_what_is_told_makes_it_fit"
)
APPLIED = {
    "activation-checkpointing-not-supported": _OF_MODEL,
    "added-token-known": _ADDED,
    "added-token-unread": _ADDED,
    "added-tokens-untrained": _ADDED,
    "adapter-base-guessed": "tests/unit/finetune_trainer/inspection/test_base_name.py"
    "::test_the_name_that_only_config_json_gives_is_told",
    "adapter-blocks-of-another-size": _OF_MODEL,
    "adapter-bypassed": _OF_MODEL,
    "adapter-pattern-on-experts": _OF_MODEL,
    "adapter-pattern-unmatched": _OF_MODEL,
    "attention-not-supported": _OF_MODEL,
    "chat-template-unusable": f"{_CASES}::test_a_tokenizer_without_a_template_gets_the_one_that_its_tokens_are_for",
    "chat-token-untrained": f"{_PREFLIGHT}test_token_rows.py::test_the_changes_have_rows_trained_that_nobody_has",
    "compile-without-compiler": f"{_CASES}::test_a_job_that_cannot_be_compiled_is_not",
    "data-preference-pairs": _FORMS,
    "data-record-invalid": _FORMS,
    "data-split-missing": f"{_CASES}::test_a_split_that_there_is_not_is_left_out_or_the_one_that_there_is",
    "decomposition-too-long": _PATCHED,
    "evaluations-beyond-the-end": _COUNTS,
    "experts-adapted-and-saved": _OF_MODEL,
    "experts-not-excluded": _OF_MODEL,
    "feedforward-module-not-adapted": _OF_MODEL,
    "fsdp1-flat-parameter-mixed": _OF_MODEL,
    "full-name-beside-layers": _OF_MODEL,
    "layer-number-unknown": _OF_MODEL,
    "memory-estimate-exceeds-gpu": _ESTIMATE,
    "memory-estimate-exceeds-pod": f"{_CASES}::test_the_changes_fit_the_memory_of_a_pod",
    "model-settings-conflict": _OF_MODEL,
    "packed-weight-read": _OF_MODEL,
    "packing-leaks": _OF_MODEL,
    "packing-with-recurrent-layers": _OF_MODEL,
    "parameter-not-shardable": f"{_CASES}::test_a_model_that_cannot_be_sharded_is_trained_on_one_rank",
    "qlora-storage-not-param-dtype": _OF_MODEL,
    "rehearsal-not-done": f"{_CASES}::test_a_rehearsal_that_cannot_be_done_is_skipped",
    "saved-module-unknown": _OF_MODEL,
    "sequence-beyond-positions": _COUNTS,
    "stacked-experts-under-fsdp1": _OF_MODEL,
    "target-gives-no-tensor": _OF_MODEL,
    "target-module-not-adapted": _OF_MODEL,
    "target-module-unknown": _OF_MODEL,
    "target-parameter-unknown": _OF_MODEL,
    "target-parameters-all-layers": _OF_MODEL,
    "token-index-unknown": _OF_MODEL,
    "trainable-tokens-overlap": _OF_MODEL,
    "trained-in-float16": _OF_MODEL,
    "trained-in-two-types": _PATCHED,
    "trained-token-unread": f"{_PREFLIGHT}test_token_rows_read.py::test_rows_beside_lora_are_told_of",
    "trained-without-gradient": _PATCHED,
    "unit-bypassed": _OF_MODEL,
    "unit-holds-most-of-the-model": _OF_MODEL,
    "unit-without-parameters": _OF_MODEL,
    "verification-within-rounding": _OF_MODEL,
    "wrap-class-unknown": _OF_MODEL,
}
"""Findings with changes, and the test that makes them and looks again. Three are rules, of which preflight sees more."""
_MODEL_FILES = "the files of the model are wrong, and the manifest is not"
_OTHER_MODEL = "another model is needed, which only the author can name"
_TEMPLATE = "the chat template is to be written or replaced by its author"
_DATA = "the data are wrong, and the manifest is not"
_STORAGE = "the storage or the profile is wrong, and the manifest is not"
_CHOICE = "more than one setting would do, each with another result, so the author chooses"
WITHOUT = {
    "adapter-patterns-overlap": _CHOICE,
    "added-token-not-kept": _OTHER_MODEL,
    "added-tokens-without-rows": _OTHER_MODEL,
    "token-rows-with-two-heads": _MODEL_FILES,
    "adapter-without-values": "which rank or block is wanted depends on the method, and the author chooses it",
    "chat-answer-not-asked-for": _TEMPLATE,
    "chat-asks-otherwise": _TEMPLATE,
    "chat-generation-misplaced": _TEMPLATE,
    "chat-marker-split": _TEMPLATE,
    "chat-roles-unmarked": _TEMPLATE,
    "chat-stop-token-unknown": _MODEL_FILES,
    "chat-template-dated": _TEMPLATE,
    "chat-template-doubles-begin": _TEMPLATE,
    "chat-template-without-begin": _TEMPLATE,
    "chat-words-left-out": "the template or the records are to be changed by their author",
    "claim-not-mounted": _STORAGE,
    "claim-too-small": _STORAGE,
    "adapter-base-unnamed": "only the author knows what the Hub calls the base, if it is there",
    "data-all-too-long": "a longer sequence takes more memory and split records are other data, so the author chooses",
    "data-empty": _DATA,
    "data-file-missing": _DATA,
    "data-file-unreadable": _STORAGE,
    "data-files-left-out": _DATA,
    "data-held-out-in-training": _DATA,
    "data-records-dropped": "a longer sequence takes more memory, and the job runs without these records",
    "data-records-repeated": _DATA,
    "data-unknown-tokens": _OTHER_MODEL,
    "data-weight-without-records": "a weight is inside a list, and removing the data set would do as well",
    "directory-not-writable": _STORAGE,
    "document-beyond-positions": "records are dropped, or positions beyond those that were learnt are computed: a choice",
    "dora-zero-row": _CHOICE,
    "experts-not-packed": "nothing is wrong, and whether so little packing is worth it the author decides",
    "experts-without-adapter": "nothing is wrong, and whether experts are adapted the author decides",
    "fewer-sequences-than-batch": _CHOICE,
    "large-model-on-cpu": _STORAGE,
    "linear-layers-without-adapter": "nothing is wrong, and whether these layers are adapted the author decides",
    "merge-impossible": _CHOICE,
    "method-setting-invalid": "the rule book finds the same in the manifest, with changes",
    "model-already-quantized": _OTHER_MODEL,
    "model-config-unreadable": _MODEL_FILES,
    "model-directory-missing": _MODEL_FILES,
    "model-directory-unreadable": _STORAGE,
    "model-file-unusable": _MODEL_FILES,
    "model-holds-adapter": _MODEL_FILES,
    "model-index-broken": _MODEL_FILES,
    "model-not-accepted": _MODEL_FILES,
    "model-not-causal": _OTHER_MODEL,
    "model-of-another-task": _OTHER_MODEL,
    "model-of-more-than-text": _OTHER_MODEL,
    "model-pickle-only": _MODEL_FILES,
    "model-shard-broken": _MODEL_FILES,
    "model-weights-ambiguous": _MODEL_FILES,
    "model-weights-incomplete": _MODEL_FILES,
    "model-weights-missing": _MODEL_FILES,
    "output-exists": "only the author can name another destination, or move the old results",
    "rank-beyond-width": "a lower rank also changes the scaling alpha / r, so the author chooses",
    "rehearsal-failed": "what failed names a setting, and skipping the rehearsal would not fix it",
    "router-adapted": "nothing is wrong, and whether routers are adapted the author decides",
    "saved-module-by-its-end": "which of the modules of that end is meant only the author knows",
    "saved-module-inside-adapter": "which module outside the adapter is meant only the author knows",
    "saved-module-packed": _CHOICE,
    "special-token-beyond-vocabulary": _MODEL_FILES,
    "start-not-usable": "only the author can name another checkpoint, and without one it is another training",
    "stop-token-unknown": _MODEL_FILES,
    "target-module-excluded": _CHOICE,
    "target-module-saved-whole": _CHOICE,
    "tokenizer-beyond-vocabulary": _MODEL_FILES,
    "tokenizer-unusable": _MODEL_FILES,
    "tokenizer-without-end": _MODEL_FILES,
    "tracker-unknown": "an image with the tracker would do, and without it the author sees no curves",
}
RULES_TOO = {
    "added-tokens-untrained",
    "qlora-storage-not-param-dtype",
    "target-parameters-all-layers",
    "trainable-tokens-overlap",
}
"""Ids of the rule book that preflight uses with changes of its own."""


def test_every_finding_of_preflight_is_applied_or_has_a_reason() -> None:
    ids = {entry.id for entry in ENTRIES if entry.gate in (Gate.PREFLIGHT, Gate.REHEARSAL)}
    assert set(APPLIED) | set(WITHOUT) == ids | RULES_TOO
    assert set(APPLIED).isdisjoint(WITHOUT)


def test_what_the_sources_give_changes_is_applied() -> None:
    """An id next to `changes` in one call; helpers that are handed both are in the list above."""
    written = _ids_with_changes()
    assert {"packing-leaks", "target-module-not-adapted", "attention-not-supported"} <= written
    assert written - set(APPLIED) == set()


def _ids_with_changes() -> set[str]:
    found = set()
    for path in [*(ROOT / "trainer_image").rglob("*.py"), *(ROOT / "operator/finetune_memory").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args or not any(each.arg == "changes" for each in call.keywords):
                continue
            first = call.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add(first.value)
    return found


@pytest.mark.parametrize("identifier", sorted(APPLIED))
def test_the_test_that_applies_changes_exists_and_names_the_finding(identifier: str) -> None:
    path, _, name = APPLIED[identifier].partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if path == _CASES:
        assert identifier in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}

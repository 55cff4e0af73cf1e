"""What the table of model types says is what the library says, and the library is asked about any other."""

from typing import Any

import pytest
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from finetune_trainer.weights import families
from finetune_trainer.weights.families import FAMILIES, LEGACY_NAME_RULES
from finetune_trainer.weights.name_rules import ExpertStack

ONE_LAYER = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 1)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_table_says_what_the_library_says(model_type: str) -> None:
    silent, tied, untied = (
        families.library_family({"model_type": model_type, **ONE_LAYER, **stated})
        for stated in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})
    )
    ours = FAMILIES[model_type]
    assert silent is not None
    assert tied is not None
    assert untied is not None
    assert (ours.rules, ours.prefix) == (silent.rules, silent.prefix)
    assert dict(ours.ties) == dict(tied.ties)
    assert ours.is_tied({}) == silent.is_tied({})
    assert ours.always_tied == tied.always_tied == untied.always_tied
    assert ours.has_transposed_experts == silent.has_transposed_experts
    assert ours.peft_fuses_experts == silent.peft_fuses_experts


def test_legacy_names_are_the_librarys() -> None:
    transforms = get_checkpoint_conversion_mapping("legacy")
    assert transforms is not None
    assert tuple(families._rule(transform) for transform in transforms) == LEGACY_NAME_RULES


def test_library_is_asked_about_types_that_the_table_lacks() -> None:
    family = families.family_of({"model_type": "jamba", "num_hidden_layers": 2}, {})
    assert [type(rule) for rule in family.rules] == [ExpertStack, ExpertStack]
    assert not family.is_tied({})


@pytest.mark.parametrize(
    ("kind", "says", "is_tied", "is_always"),
    [
        ("granitemoe", {"tie_word_embeddings": True}, True, False),
        ("granitemoe", {"tie_word_embeddings": False}, False, False),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}, True, False),
        ("nemotron", {"num_key_value_heads": 2}, False, False),
        ("t5", {"tie_word_embeddings": False}, True, True),
        # Its layers share parameters, too, which nothing in config.json parts by themselves.
        (
            "zamba2",
            {"num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2},
            True,
            True,
        ),
    ],
)
def test_the_library_is_asked_whether_embeddings_are_tied_and_could_be_parted(
    kind: str, says: dict[str, Any], is_tied: bool, is_always: bool
) -> None:
    family = families.library_family({"model_type": kind, **ONE_LAYER, **says})
    assert family is not None
    assert family.is_tied(says) == is_tied
    assert family.always_tied == is_always
    assert "lm_head.weight" in family.ties


def test_a_configuration_with_an_infinite_number_is_read_as_transformers_writes_it() -> None:
    stated = {"num_hidden_layers": 1, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert families.library_family({"model_type": "bamba", **stated}) is not None

"""Layer classes that match nothing: skipped in silence by PEFT, refused late by others."""

import pytest
import torch

from tests.pitfalls.lab.build import adapted, load_base
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.models import LAYERS
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import findings

PEFT_ENVIRONMENT = "FSDP_TRANSFORMER_CLS_TO_WRAP"


def layers_wrapped(rank: int, case: Case, classes: str, own_classes: list[str] | None) -> dict[str, int]:
    """How many decoder layers PEFT's policy makes units of, and how many values the largest unit gathers.

    classes: what accelerate passes on in the environment, joined by commas. own_classes: the model's `_no_split_modules`.
    """
    import os

    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    os.environ[PEFT_ENVIRONMENT] = classes
    model = adapted(case, load_base(case))
    model.base_model.model._no_split_modules = own_classes
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=fsdp_auto_wrap_policy(model), device_id=torch.device("cpu"))
    found = [module for module in wrapped.modules() if isinstance(module, FullyShardedDataParallel)]
    return {
        "layers": sum(isinstance(unit.module, LlamaDecoderLayer) for unit in found),
        "largest": max(unit._handle.flat_param._unpadded_unsharded_size.numel() for unit in found if unit._handle),
        "units": len(found),
    }


def test_blank_names_wrap_no_layer_without_a_word():
    """[""] and [] reach PEFT as an empty text: no error, and every rank gathers the whole base."""
    right = run_ranks(layers_wrapped, Case(), "LlamaDecoderLayer", [])[0].value
    blank = run_ranks(layers_wrapped, Case(), "", [])[0].value
    assert right["layers"] == LAYERS
    assert blank["layers"] == 0
    assert blank["units"] == right["units"] - LAYERS
    assert blank["largest"] > LAYERS * right["largest"]
    assert findings({"version": 1, "transformerLayerClsToWrap": []}, type="LoRA") == {"wrap-class-list-empty"}
    assert findings({"version": 1, "transformerLayerClsToWrap": [""]}, type="LoRA") == {"wrap-class-name-blank"}


@pytest.mark.parametrize(
    ("classes", "refused"), [("NopeLayer", set()), ("LlamaDecoderLayer, LlamaMLP", {"wrap-class-name-malformed"})]
)
def test_unknown_and_spaced_names_are_refused_by_peft(classes, refused):
    """That a well-formed name is unknown only preflight can say, which has the model."""
    results = run_ranks(layers_wrapped, Case(), classes, [])
    assert "Could not find the transformer layer class to wrap in the model" in results[0].error
    assert findings({"version": 1, "transformerLayerClsToWrap": [classes]}, type="LoRA") == refused


@pytest.mark.parametrize("classes", ["", " ", "LlamaDecoderLayer, LlamaMLP"])
def test_accelerate_compares_names_as_they_stand(classes):
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

    model = load_base(Case())
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=classes.split(",")
    )
    with pytest.raises(ValueError, match="Could not find the transformer layer class"):
        plugin.set_auto_wrap_policy(model)


def test_a_model_that_names_no_classes_has_its_longest_list_wrapped():
    from finetune_trainer.model.wrap_plan import layer_classes

    model = load_base(Case())
    assert layer_classes(model, None) == ("LlamaDecoderLayer",)
    for module in model.modules():
        module._no_split_modules = None
    assert layer_classes(model, None) == ("LlamaDecoderLayer",)

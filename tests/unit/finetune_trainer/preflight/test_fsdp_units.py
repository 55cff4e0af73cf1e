"""Units that torch would refuse, or share a parameter without a word, are named before any rank starts."""

from pathlib import Path

import pytest
import torch
from torch import nn

from finetune_trainer.preflight.fsdp_units import _largest_unit, check_unit_sizes, check_units
from finetune_trainer.preflight.model_inspection import AttachedModel, ModelInspection
from finetune_trainer.preflight.model_process import check_model
from tests.support.tiny_model import plan_of, tiny_spec


def rules(job):
    """The findings about the job's model."""
    return {finding.rule: finding for finding in check_model(job.plan, job.base_model)[1]}


def test_a_list_of_layers_is_no_unit(context):
    finding = rules(context({"parallelism.fsdp.transformerLayerClsToWrap": ["ModuleList"]}))["model-settings-conflict"]
    assert (finding.field, finding.value) == ("spec.parallelism.fsdp.transformerLayerClsToWrap", '["ModuleList"]')
    assert "LlamaDecoderLayer" in finding.fix


@pytest.mark.parametrize(
    ("classes", "severity"),
    [
        (["LlamaRMSNorm"], "error"),
        (["LlamaRotaryEmbedding"], "error"),
        (["SiLUActivation", "LlamaRMSNorm"], "error"),
        (["LlamaModel"], "warning"),
        (["LlamaForCausalLM"], "warning"),
        (["LlamaRMSNorm", "LlamaModel"], "warning"),
    ],
)
def test_classes_that_leave_the_layers_in_one_unit_are_refused_or_a_warning(context, classes, severity):
    finding = rules(context({"parallelism.fsdp.transformerLayerClsToWrap": classes}))["unit-holds-most-of-the-model"]
    assert (finding.severity, finding.value) == (severity, ", ".join(classes))
    assert "LlamaDecoderLayer" in finding.fix
    assert [(change.field, change.value) for change in finding.changes] == [
        ("spec.parallelism.fsdp.transformerLayerClsToWrap", None)
    ]


@pytest.mark.parametrize("smallest", [{}, {"parallelism.fsdp.minNumParams": 10**13}])
def test_a_size_that_no_layer_reaches_leaves_one_unit_and_is_a_warning(context, smallest):
    finding = rules(context({"parallelism.fsdp.autoWrapPolicy": "SIZE_BASED_WRAP", **smallest}))["unit-holds-most-of-the-model"]
    assert (finding.severity, finding.field, finding.value) == (
        "warning",
        "spec.parallelism.fsdp.autoWrapPolicy",
        "SIZE_BASED_WRAP",
    )
    assert "the root unit is one FSDP unit with 100% of the layers' parameters" in finding.message
    assert [(change.field, change.value) for change in finding.changes] == [
        ("spec.parallelism.fsdp.autoWrapPolicy", None),
        ("spec.parallelism.fsdp.minNumParams", None),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism.fsdp.autoWrapPolicy": "SIZE_BASED_WRAP", "parallelism.fsdp.minNumParams": 500},
        {"parallelism.fsdp.autoWrapPolicy": "NO_WRAP"},
    ],
    ids=["a size that layers reach", "what the rules speak of"],
)
def test_other_policies_that_are_meant_are_not_spoken_of(context, changes):
    assert "unit-holds-most-of-the-model" not in rules(context(changes))


@pytest.mark.parametrize(
    "classes", [None, ["LlamaDecoderLayer"], ["LlamaAttention", "LlamaMLP"], ["LlamaDecoderLayer", "LlamaRMSNorm"]]
)
def test_classes_that_divide_the_model_are_not_spoken_of(context, classes):
    assert "unit-holds-most-of-the-model" not in rules(context({"parallelism.fsdp.transformerLayerClsToWrap": classes}))


def test_what_is_judged_is_the_unit_and_not_the_name():
    """What the model's own classes leave in the root unit, such as embeddings, does not count, however large it is."""
    model = nn.Sequential(nn.Embedding(1000, 10), nn.Linear(10, 10, bias=False), nn.Linear(10, 30, bias=False))
    assert _largest_unit(model, ("1", "2"), ("1", "2")) == ("2", 0.75)
    assert _largest_unit(model, ("1",), ("1", "2")) == ("", 0.75)


def test_a_class_without_layers_is_refused_of_a_model_with_one_layer():
    model = nn.Sequential(Part(10), nn.Embedding(100, 10), nn.LayerNorm(1))
    model._no_split_modules = ["Part"]
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 2, "fsdp": {"transformerLayerClsToWrap": ["LayerNorm"]}}))
    (found,) = check_unit_sizes(ModelInspection(plan, Path("model"), attached=AttachedModel(model, {}, ("2",))))
    assert (found.rule, found.severity) == ("unit-holds-most-of-the-model", "error")


class Part(nn.Module):
    """A layer of so many values."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Group(nn.Sequential):
    """Some layers in one module."""


@pytest.mark.parametrize(
    ("sizes", "is_found"),
    [
        # Half of all parameters in one unit, and a little less; the model's own layers hold a quarter.
        ([[25, 25], [25, 25]], True),
        ([[25, 24], [25, 24], [2]], False),
        # Three quarters in one unit are half as much again as half of them, which the largest layer holds; 11 of 16 are not.
        ([[8, 4], [4]], True),
        ([[8, 3], [5]], False),
    ],
)
def test_a_unit_is_too_large_from_half_of_the_model_and_half_as_much_again_as_with_its_own_classes(sizes, is_found):
    model = nn.Sequential(*(Group(*map(Part, group)) for group in sizes))
    model._no_split_modules = ["Part"]
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 2, "fsdp": {"transformerLayerClsToWrap": ["Group"]}}))
    units = tuple(str(number) for number in range(len(sizes)))
    found = list(check_unit_sizes(ModelInspection(plan, Path("model"), attached=AttachedModel(model, {}, units))))
    assert [finding.rule for finding in found] == ["unit-holds-most-of-the-model"] * is_found


def test_a_rank_beyond_a_layers_width_is_a_warning(context):
    finding = rules(context({"method.lora.r": 64}))["rank-beyond-width"]
    assert "rankPattern" in finding.fix


def test_overlapping_patterns_are_a_warning(context):
    changes = {"method.lora.rankPattern": {"q_proj": 4, "self_attn.q_proj": 2}}
    assert rules(context(changes))["adapter-patterns-overlap"].severity == "warning"


def attached(model, *units):
    plan = plan_of(tiny_spec(parallelism={"processesPerNode": 2}))
    return ModelInspection(plan, Path("model"), attached=AttachedModel(model, {}, units))


def test_a_parameter_without_dimensions_is_not_sharded():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    (finding,) = check_units(attached(model))
    assert (finding.rule, finding.severity, finding.value) == ("parameter-not-shardable", "error", "scale")
    assert {change.field: change.value for change in finding.changes} == {
        "spec.parallelism.nodes": 1,
        "spec.parallelism.processesPerNode": 1,
    }


def test_a_unit_that_trains_two_element_types_is_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16))
    (finding,) = check_units(attached(model))
    assert (finding.rule, finding.severity, finding.value) == ("trained-in-two-types", "error", "bfloat16, float32")
    assert check_units(attached(model, "0", "1")) == []


@pytest.mark.parametrize(
    ("computed", "loaded", "trained"),
    [
        ("bfloat16", "float16", "bfloat16, float32"),
        ("float16", "bfloat16", "float16, float32"),
        ("bfloat16", "float32", "bfloat16, float32"),
        ("float16", "float16", None),
        ("float32", "bfloat16", None),
    ],
)
def test_magnitudes_of_packed_weights_are_measured_in_the_type_of_before(context, computed, loaded, trained):
    """PEFT adds an update in the computing type to the weights as they were, and torch promotes both."""
    changes = {
        "method": {"type": "QDoRA", "lora": {"autocastAdapterDtype": False}, "quantization": {"computeDtype": computed}},
        "model.dtype": loaded,
        "training.optimizer": "SGD",
        "parallelism": {"processesPerNode": 2, "fsdp": {"version": 2}},
        "merge.enabled": False,
    }
    found = rules(context(changes)).get("trained-in-two-types")
    assert (found.value if found is not None else None) == trained
    if found is not None:
        assert [(one.field, one.value) for one in found.changes] == [("spec.method.lora.autocastAdapterDtype", True)]
        changes["method"]["lora"]["autocastAdapterDtype"] = True
        assert "trained-in-two-types" not in rules(context(changes))

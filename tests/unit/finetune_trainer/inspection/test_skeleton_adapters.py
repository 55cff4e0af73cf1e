"""Adapters without values have the names, shapes and element types of real ones, and are made without a single value."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family
from finetune_trainer.inspection import skeleton as valueless
from finetune_trainer.inspection.skeleton import load_skeleton
from finetune_trainer.model.adapters import attach, fixed_tensors, stored_names
from finetune_trainer.model.load import build_with_lazy_zeros
from tests.support.method_settings import SETTINGS
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama

KINDS = [kind.value for kind, method in METHODS.items() if method.family is Family.OTHER and not method.refused]
MORE = [("BOFT", {"boftBlockNum": 4, "boftBlockSize": 0})]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("base") / "model")


@pytest.mark.parametrize(("kind", "settings"), [*((kind, SETTINGS.get(kind, {})) for kind in KINDS), *MORE])
def test_an_adapter_without_values_is_the_real_one(base, monkeypatch, kind, settings):
    plan = plan_of(_spec(kind, settings))
    real = attach(build_with_lazy_zeros(plan, base), plan)
    monkeypatch.setattr(valueless, "build_with_lazy_zeros", _no_values)
    found = valueless.attach_skeleton_adapters(load_skeleton(plan, base)[0], plan, base)
    assert _seen(found) == _seen(real)
    assert stored_names(found) == stored_names(real)
    assert _shapes(fixed_tensors(found)) == _shapes(fixed_tensors(real))
    tensors = [*found.parameters(), *found.buffers(), *fixed_tensors(found).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_of_stacked_experts_have_the_element_types_of_real_ones(tmp_path, autocast):
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_local_experts=4, vocab_size=264
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plan = plan_of(tiny_spec(method={"lora": {"r": 4, "autocastAdapterDtype": autocast}}))
    found = valueless.attach_skeleton_adapters(load_skeleton(plan, tmp_path)[0], plan, tmp_path)
    assert _seen(found) == _seen(attach(build_with_lazy_zeros(plan, tmp_path), plan))
    experts = {each.dtype for name, each in found.named_parameters() if ".experts." in name and each.requires_grad}
    assert experts == {torch.float32 if autocast else torch.bfloat16}


def test_pefts_own_functions_are_there_again_afterwards(base):
    """What replaces them while the model is looked at would train nothing."""
    plan = plan_of(_spec("BOFT", SETTINGS["BOFT"]))
    valueless.attach_skeleton_adapters(load_skeleton(plan, base)[0], plan, base)
    real = attach(build_with_lazy_zeros(plan, base), plan)
    matrices = [each for name, each in real.named_buffers() if name.endswith("boft_P")]
    assert matrices
    assert all(each.device.type == "cpu" and bool((each.sum(dim=-1) == 1).all()) for each in matrices)


def _spec(kind, settings):
    spec = tiny_spec()
    spec["method"] = {"type": MethodType(kind).value, "settings": settings}
    return spec


def _no_values(*_):
    raise AssertionError("values were asked for")


def _seen(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors}


def _shapes(tensors):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

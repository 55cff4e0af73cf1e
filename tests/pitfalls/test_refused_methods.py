"""`method-not-supported`, method by method: what PEFT does under a trainer like ours; AdaLoRA: test_prompt_methods.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, XLoraConfig, get_peft_model
from torch import nn
from torch.nn import functional

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS
from finetune_trainer.model.adapters import adapter_config, config_class
from tests.pitfalls.lab.ranks import run_ranks
from tests.pitfalls.manifests import plans
from tests.pitfalls.one_process import VOCABULARY, llama, mixtral

RULE = "method-not-supported"
PEFT_SETTINGS: dict[str, dict[str, Any]] = {
    "PromptTuning": {"num_virtual_tokens": 4},
    "PTuning": {"num_virtual_tokens": 4},
    "PrefixTuning": {"num_virtual_tokens": 4},
    "MultitaskPromptTuning": {"num_virtual_tokens": 4},
    "Cartridge": {"num_virtual_tokens": 4},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]},
    "RandLoRA": {"r": 4, "target_modules": "all-linear"},
    "AdaptionPrompt": {"adapter_len": 4, "adapter_layers": 2},
}
FIRST, SECOND = torch.arange(8), torch.arange(20, 30)
POSITIONS = torch.cat([torch.arange(8), torch.arange(10)])


def method_of(changes: dict[str, Any]) -> str:
    """The method that the fix leaves; the plans are there for it."""
    wrong, right = plans(RULE, changes)
    assert METHODS[wrong.method.type].refused
    assert adapter_config(right.method)
    return right.method.type.value


def adapted(method: str) -> nn.Module:
    """The same every time, and no longer where it started."""
    torch.manual_seed(0)
    config = config_class(MethodType(method))(task_type="CAUSAL_LM", **PEFT_SETTINGS.get(method, {}))
    model = get_peft_model(llama(), config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def packed_and_alone(method: str) -> tuple[int, float]:
    """By how much a row of two packed documents grows, and how far the logits of the second are from those that it has alone."""
    model = adapted(method)
    with torch.no_grad():
        row = model(input_ids=torch.cat([FIRST, SECOND])[None], position_ids=POSITIONS[None], use_cache=False).logits[0]
        alone = model(input_ids=SECOND[None], position_ids=torch.arange(10)[None], use_cache=False).logits[0]
    return len(row) - len(POSITIONS), float((row[-10:] - alone[-10:]).abs().max())


@pytest.mark.parametrize(
    ("method", "shift"), [("PromptTuning", 4), ("PTuning", 4), ("CPT", 3), ("PrefixTuning", 0), ("Cartridge", 0)]
)
def test_prompts_shift_the_labels_or_miss_the_second_document(method: str, shift: int):
    grown, off = packed_and_alone(method)
    assert grown == shift
    assert off > 1e-3
    assert packed_and_alone(method_of({"method.type": method})) == (0, pytest.approx(0, abs=1e-5))


@pytest.mark.parametrize("method", ["MultitaskPromptTuning", "Poly"])
def test_methods_that_want_a_task_with_each_record(method: str):
    with pytest.raises(ValueError, match="task_ids"):
        adapted(method)(input_ids=FIRST[None])
    assert adapted(method_of({"method.type": method}))(input_ids=FIRST[None]).logits.isfinite().all()


def test_clustering_wants_another_library():
    with pytest.raises(ImportError, match="scikit-learn"):
        adapted("AdaMSS")
    assert adapted(method_of({"method.type": "AdaMSS"}))


def passes(model: nn.Module) -> tuple[int, list[bool]]:
    """Forward passes of the layers for one batch, and whether each was given a tensor by the layer before it."""
    seen: list[bool] = []
    second = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    given = second.register_forward_pre_hook(lambda _, arguments: seen.append(isinstance(arguments[0], torch.Tensor)))
    model(input_ids=FIRST[None], use_cache=False)
    given.remove()
    return len(seen), seen


def test_other_objects_than_tensors_go_from_layer_to_layer():
    assert not all(passes(adapted("Shadow"))[1])
    assert all(passes(adapted(method_of({"method.type": "Shadow"})))[1])


def test_a_mixture_wants_trained_adapters_and_computes_every_batch_twice(tmp_path: Path):
    get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(tmp_path)
    base = llama()
    base.config.use_cache = False
    # PEFT numbers the adapters itself, and fails on other names.
    mixed = {"adapters": {"0": str(tmp_path), "1": str(tmp_path)}, "hidden_size": base.config.hidden_size, "xlora_depth": 1}
    mixture = get_peft_model(base, XLoraConfig(task_type="CAUSAL_LM", **mixed))
    trained = [name for name, parameter in mixture.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("xlora_classifier" in name for name in trained), "and no adapter"
    assert passes(mixture)[0] == 2
    assert passes(adapted(method_of({"method.type": "XLoRA"})))[0] == 1


def test_attention_of_pefts_own_is_there_for_few_models_and_for_no_merge():
    method = "AdaptionPrompt"
    with pytest.raises(ValueError, match="Unsupported model type for adaption prompt"):
        get_peft_model(mixtral(), config_class(MethodType(method))(task_type="CAUSAL_LM", **PEFT_SETTINGS[method]))
    with pytest.raises(AttributeError, match="merge_and_unload"):
        adapted(method).merge_and_unload()
    right = adapted(method_of({"method.type": method})).eval()
    apart = right(input_ids=FIRST[None]).logits
    assert torch.allclose(right.merge_and_unload()(input_ids=FIRST[None]).logits, apart, atol=1e-5)


def trained(rank: int, methods: list[str], world_size: int) -> dict[str, list[Any]]:
    """By method: what is trained after three steps on the same global batch."""
    return {method: _steps(rank, method, world_size) for method in methods}


def _steps(rank: int, method: str, world_size: int) -> list[Any]:
    model = adapted(method)
    if world_size > 1:
        _shard(model, world_size)
    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(held, lr=1e-2, eps=1e-3)
    generator = torch.Generator().manual_seed(11)
    documents = [torch.randint(0, VOCABULARY, (1, 20 + number), generator=generator) for number in range(4)]
    for _ in range(3):
        for document in documents[rank::world_size]:
            logits = model(input_ids=document, use_cache=False).logits[0, :-1]
            (functional.cross_entropy(logits, document[0, 1:], reduction="sum") / 100 * world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in held]
    return [value.detach().flatten().tolist() for value in whole]


def _shard(model: nn.Module, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    for name, module in model.named_modules():
        if name.endswith(("layers.0", "layers.1")):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def test_methods_that_two_ranks_train_to_other_weights():
    methods = ["OSF", "RandLoRA"]
    allowed = {method_of({"method.type": method}) for method in methods}
    alone = trained(0, [*methods, *allowed], 1)
    pair = run_ranks(trained, [*methods, *allowed], 2)[0].value
    apart = {name: distance(alone[name], pair[name]) for name in pair}
    assert apart["OSF"] > 1e-4
    assert apart["RandLoRA"] > 1e-4
    assert {name: apart[name] for name in allowed} == pytest.approx(dict.fromkeys(allowed, 0.0), abs=1e-5)


def distance(one: Any, other: Any) -> float:
    return max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in zip(one, other, strict=True))

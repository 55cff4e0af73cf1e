"""Which optimizer is built, what decays, what learns faster, and how exact the fused step is."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from finetune_trainer.checkpoint.state import ParameterRange, optimizer_entry, pieces
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import attach
from finetune_trainer.train.optimizers import AdamW, build_optimizer, decays, set_learning_rate
from tests.support.cases import table
from tests.support.tiny_model import plan_of, tiny_spec, write_tiny_llama

FULL: dict[str, Any] = {"method": {"type": "Full", "lora": None}, "parallelism": {"processesPerNode": 1}}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], count: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        optimizer.step()
    return torch.cat([parameter.detach().double().flatten() for parameter in parameters])


def fresh_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)) for size in (1, 7, 1000, 4099)]


def test_fused_adamw_is_as_exact_as_the_plain_loop() -> None:
    found = {}
    for name, dtype, options in (
        ("exact", torch.float64, {"foreach": False}),
        ("fused", torch.float32, {"fused": True}),
        ("loop", torch.float32, {"foreach": False}),
    ):
        parameters = fresh_parameters(dtype)
        found[name] = steps(torch.optim.AdamW(parameters, lr=1e-2, **options), parameters)
    error = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in ("fused", "loop")}
    assert error["fused"] < 1.1 * error["loop"] < 1e-6


def test_fused_adamw_does_not_depend_on_where_a_tensor_is_cut() -> None:
    whole = fresh_parameters(torch.float32)[-1]
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([501, 1000, 4099 - 1501])]
    gradients = [torch.randn(whole.shape, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2, fused=True) for parameters in ([whole], parts)]
    for gradient in gradients:
        whole.grad = gradient.clone()
        for part, cut in zip(parts, gradient.split([501, 1000, 4099 - 1501]), strict=True):
            part.grad = cut.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat([part.detach() for part in parts]))


@pytest.mark.parametrize("name", ["AdamW", "RAdam", "SGD"])
def test_weight_decay_is_decoupled_in_every_optimizer(model_directory: Path, name: str) -> None:
    """Without gradients to speak of, decay alone moves a weight: by rate times decay at each step."""
    training = {"optimizer": name, "weightDecay": "0.1", "adamEpsilon": "1", "momentum": None}
    plan = plan_of(tiny_spec(**FULL, training={key: value for key, value in training.items() if value}))
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    optimizer = build_optimizer(pieces(model), plan)
    set_learning_rate(optimizer, 0.5)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for key, parameter in model.named_parameters():
        expected = before[key] if "norm" in key else before[key] * 0.95**2
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-8)
    assert optimizer_entry(optimizer).name == name


@pytest.mark.parametrize(("name", "shape", "expected"), table(__file__, "test_biases_and_normalisation_weights_do_not_decay"))
def test_biases_and_normalisation_weights_do_not_decay(name: str, shape: list[int], expected: bool) -> None:
    assert decays(name, tuple(shape)) is expected


def test_lora_plus_gives_lora_b_its_own_rate(model_directory: Path) -> None:
    plan = plan_of(
        tiny_spec(method={"type": "LoRA", "lora": {"r": 4, "loraPlusRatio": "16"}}, parallelism={"processesPerNode": 1})
    )
    model = attach(AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32), plan)
    found = pieces(model)
    optimizer = build_optimizer(found, plan)
    set_learning_rate(optimizer, 0.25)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert len(rates) == len(found)
    assert {rates[id(piece.holder)] for piece in found if "lora_B" in piece.name} == {4.0}
    assert {rates[id(piece.holder)] for piece in found if "lora_A" in piece.name} == {0.25}


def test_a_flat_parameter_that_should_decay_in_part_is_refused() -> None:
    plan = plan_of(tiny_spec(**FULL, training={"weightDecay": "0.1"}))
    flat = nn.Parameter(torch.zeros(20))
    found = [ParameterRange("layer.weight", (4, 4), 0, 16, flat, 0), ParameterRange("layer.norm.weight", (4,), 0, 4, flat, 16)]
    with pytest.raises(ConfigError, match="shares one flat parameter"):
        build_optimizer(found, plan)
    without = plan_of(tiny_spec(**FULL))
    assert [len(group["params"]) for group in build_optimizer(found, without).param_groups] == [1]


def test_adamw_steps_on_what_a_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of torch's step on sharded tensors, which takes each new process a good part of a second to prepare."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(values: torch.Tensor) -> DTensor:
            return distribute_tensor(values, mesh, [Shard(0)])

        found: dict[type, torch.Tensor] = {}
        seen: list[bool] = []
        module = import_module("torch.optim.adam")
        adam = module.adam

        def watched(parameters: list[torch.Tensor], *given: Any, **named: Any) -> None:
            seen.append(any(isinstance(parameter, DTensor) for parameter in parameters))
            adam(parameters, *given, **named)

        monkeypatch.setattr(module, "adam", watched)
        for kind in (AdamW, torch.optim.AdamW):
            parameters = [nn.Parameter(sharded(values.detach())) for values in fresh_parameters(torch.float32)]
            optimizer = kind(parameters, lr=1e-2, weight_decay=0.1, fused=True)
            for step in range(3):
                for parameter in parameters:
                    parameter.grad = sharded(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
                optimizer.step()
            found[kind] = torch.cat([parameter.detach().full_tensor() for parameter in parameters])
        assert seen == [False] * 3 + [True] * 3
        assert torch.equal(found[AdamW], found[torch.optim.AdamW])
    finally:
        distributed.destroy_process_group()

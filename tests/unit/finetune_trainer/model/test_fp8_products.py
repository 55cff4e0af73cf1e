"""Products in FP8: exact where every value has a place in E4M3, close elsewhere, and only of weights that are frozen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_trainer.errors import ConfigError
from finetune_trainer.model import fp8_products
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.compilation import compile_layers
from finetune_trainer.model.fp8_products import Fp8Linear, install_fp8, rounded, without_fp8
from finetune_trainer.model.fused_adapters import fuse_adapters
from tests.support.tiny_model import plan_of, tiny_spec

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IDS = torch.arange(4 * 32).view(4, 32) * 7 % 264
SHORT = torch.tensor([0.0, 0.25, -0.5, 1.0, -1.5, 2.0, 3.5, -4.0, 416.0])
"""Values that E4M3 has, up to its largest but one."""


def filled(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Of such values, with 448 in each row and in each column, so that every scale is 1."""
    found = SHORT[torch.randint(0, len(SHORT), (rows, columns), generator=torch.Generator().manual_seed(seed))]
    for number in range(max(rows, columns)):
        found[number % rows, number % columns] = 448.0
    return found.bfloat16()


def frozen(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Fp8Linear:
    layer = Fp8Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def adapted(kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **lora: Any) -> PeftModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES | (EXPERTS if kind == "mixtral" else {}))
    plan = plan_of(tiny_spec(method={"type": "LoRA", "lora": {"r": 16, "loraAlpha": 16, **lora}}))
    model = attach(AutoModelForCausalLM.from_config(config, dtype=dtype), plan)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    assert isinstance(model, PeftModel)
    return model


def step(model: nn.Module) -> tuple[float, torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    found = torch.cat([each.grad.flatten().float() for each in model.parameters() if each.grad is not None])
    model.zero_grad()
    return loss.item(), found


def test_products_of_values_that_fp8_has_are_exact_in_both_directions() -> None:
    rows, weight, gradient = filled(48, 32, 1), filled(64, 32, 2), filled(48, 64, 3)
    layer, given = frozen(weight), rows.clone().requires_grad_()
    result = layer(given)
    assert torch.equal(result, (rows.double() @ weight.double().T).bfloat16())
    result.backward(gradient)
    assert given.grad is not None
    assert torch.equal(given.grad, (gradient.double() @ weight.double()).bfloat16())
    assert layer.weight.grad is None


def test_each_row_has_a_scale_of_its_own() -> None:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.tensor([10.0**exponent for exponent in range(-16, 16)])[:, None]
    rows = (torch.randn(32, 64, generator=generator) * sizes).bfloat16()
    weight = (torch.randn(32, 64, generator=generator) * sizes.flip(0)).bfloat16()
    found, exact = frozen(weight)(rows).double(), rows.double() @ weight.double().T
    # Relative to the lengths of the two rows. One scale for all would leave nothing of most.
    error = (found - exact).abs() / (rows.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None])
    assert float(error.max()) < 0.03
    values, scales = rounded(rows)
    assert float(((values.double() * scales - rows.double()).abs() / rows.double().abs().amax(dim=1, keepdim=True)).max()) < 2**-4
    assert values.float().abs().amax(dim=1).tolist() == [448.0] * 32


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    rows = torch.ones(32, 32).bfloat16()
    rows[0] = 0
    rows[1, 3], rows[2, 3] = torch.nan, torch.inf
    found = frozen(torch.eye(32).bfloat16(), torch.full((32,), 2.0))(rows)
    assert found[0].tolist() == [2.0] * 32
    assert not bool(found[1].isfinite().any())
    assert not bool(found[2].isfinite().all())
    assert found[3].tolist() == [3.0] * 32


def test_the_shape_of_the_input_is_kept_and_autocast_decides_on_its_type() -> None:
    weight, given = torch.randn(32, 16), torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = frozen(weight)(given)
    assert (found.shape, found.dtype) == ((2, 5, 32), torch.bfloat16)
    weight, given = weight.bfloat16(), given.bfloat16()
    without = frozen(weight)(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(frozen(weight)(given), without)


def test_only_frozen_layers_of_fitting_sizes_within_transformer_layers_change() -> None:
    model = adapted(targetModules=["q_proj", "down_proj"])
    model.base_model.model.model.layers[0].self_attn.k_proj.weight.requires_grad_(True)
    model.base_model.model.model.layers[0].self_attn.o_proj = nn.Linear(64, 40, bias=False).requires_grad_(False)
    assert install_fp8(model, None, CPU, torch.bfloat16) == 12
    changed = {name.removeprefix("base_model.model.model.") for name, each in model.named_modules() if type(each) is Fp8Linear}
    of_first = {"self_attn.q_proj.base_layer", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj.base_layer"}
    assert changed == {f"layers.0.{name}" for name in of_first} | {
        f"layers.1.{name}" for name in of_first | {"self_attn.k_proj", "self_attn.o_proj"}
    }


def test_the_router_of_experts_and_their_stacked_weights_stay_as_they_are() -> None:
    model = adapted("mixtral", targetModules=["q_proj"])
    for layer in model.base_model.model.model.layers:
        layer.mlp.router = nn.Sequential(nn.Linear(64, 16)).requires_grad_(False)
        layer.mlp.second = nn.ModuleDict({"gate": nn.Linear(64, 16)}).requires_grad_(False)
    install_fp8(model, None, CPU, torch.bfloat16)
    changed = {name.rpartition(".layers.")[2] for name, each in model.named_modules() if type(each) is Fp8Linear}
    names = ("q_proj.base_layer", "k_proj", "v_proj", "o_proj")
    assert changed == {f"{layer}.self_attn.{name}" for layer in (0, 1) for name in names}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "mixtral"])
def test_losses_and_gradients_are_near_those_of_bfloat16(kind: str) -> None:
    model = adapted(kind)
    loss, wanted = step(model)
    fuse_adapters(model, ())
    install_fp8(model, None, CPU, torch.bfloat16)
    loss_in_fp8, found = step(model)
    assert loss_in_fp8 != loss
    assert loss_in_fp8 == pytest.approx(loss, rel=2e-3)
    assert float(torch.cosine_similarity(found, wanted, dim=0)) > 0.98
    with without_fp8(model):
        plain_loss, plain = step(model)
    assert plain_loss == pytest.approx(loss, rel=1e-4)
    assert float(torch.cosine_similarity(plain, wanted, dim=0)) > 0.9995
    assert step(model)[0] == loss_in_fp8, "and FP8 again after that"


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer: original(layer, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("without_a_compiler")
def test_compiled_layers_share_their_code_and_have_the_same_values() -> None:
    model = adapted()
    fuse_adapters(model, ())
    install_fp8(model, None, CPU, torch.bfloat16)
    loss, wanted = step(model)
    compile_layers(model, plan_of(tiny_spec()).parallelism.fsdp)
    compiled_loss, found = step(model)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert compiled_loss == pytest.approx(loss, rel=1e-4)
    assert float(torch.cosine_similarity(found, wanted, dim=0)) > 0.999


@pytest.mark.parametrize(
    ("computed", "layers", "problem"),
    [
        (torch.float32, True, "products are float32, and those of FP8 are bfloat16"),
        (torch.bfloat16, False, "no frozen linear layer within transformer layers has sides that are multiples of 16"),
    ],
)
def test_what_cannot_compute_so_is_refused(computed: torch.dtype, layers: bool, problem: str) -> None:
    model = adapted()
    if not layers:
        model.requires_grad_(True)
    with pytest.raises(ConfigError) as refused:
        install_fp8(model, None, CPU, computed)
    assert str(refused.value) == f"spec.training.fp8: {problem}"
    assert refused.value.hint == "set spec.training.fp8: false"
    assert not any(type(each) is Fp8Linear for each in model.modules())


def test_a_device_that_cannot_compute_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "device_problem", lambda _device: "too old")
    model = adapted()
    with pytest.raises(ConfigError, match=r"spec\.training\.fp8: too old"):
        install_fp8(model, None, CPU, torch.bfloat16)
    assert not any(type(each) is Fp8Linear for each in model.modules())


def test_the_largest_value_of_a_row_is_the_largest_of_fp8_whatever_its_size() -> None:
    """Dividing by a scale that is rounded itself may give a little more than 448, and infinity is not far."""
    sizes = (
        torch.randn(20_000, 1, generator=torch.Generator().manual_seed(5)) * 10.0 ** torch.arange(-10, 10).repeat(1000)[:, None]
    )
    values, _ = rounded(torch.cat([sizes, sizes / 3], dim=1))
    assert values.float()[:, 0].abs().eq(448).all()


def test_a_device_is_asked_for_a_product_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8_products._refusal(CPU) == ""
    original = fp8_products.scaled_product

    def only_forward(first: torch.Tensor, second: torch.Tensor, *, sums_fast: bool) -> torch.Tensor:
        if not sums_fast:
            raise RuntimeError("not on this card\nat some line")
        return original(first, second, sums_fast=sums_fast)

    monkeypatch.setattr(fp8_products, "scaled_product", only_forward)
    assert fp8_products._refusal(CPU) == "torch has no such products there: not on this card"


@pytest.mark.parametrize(("capability", "can"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_gpus_before_ada_have_no_such_products(capability: tuple[int, int], can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Card")
    monkeypatch.setattr(fp8_products, "_refusal", lambda _device: "")
    told = f"Card has compute capability {capability[0]}.{capability[1]}, and products in FP8 need 8.9"
    assert fp8_products.device_problem(torch.device("cuda")) == ("" if can else told)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "AMD" in fp8_products.device_problem(torch.device("cuda"))

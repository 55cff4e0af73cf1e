"""What a layer of a few values keeps, part by part, computed by hand from the operations of transformers' layers."""

from dataclasses import replace
from typing import Any

from finetune_job.api.inputs import Attention
from finetune_job.plan.element_types import Elements
from finetune_memory.activations import Activations, TrainingPass, layer_activations
from finetune_memory.layers import Layer, Linear, Norm
from finetune_memory.model_shape import ParameterShape, Workload
from tests.unit.finetune_memory.test_formulas import FACTS, PLAIN

EMPTY = Layer((), (), (), 0, "float32", 0)
# 16 tokens. Queries of 8 values and keys of 4; values of 4; the result of 8, and a float32 for each of 4 heads.
ATTENTION = 16 * (8 + 4) * 2 + 16 * 4 * 2 + 16 * 8 * 2 + 16 * 4 * 4
SCORES = 2 * 4 * 8 * 8


def kept(
    layer: Layer = EMPTY,
    *,
    mask: bool = False,
    on_gpu: bool = True,
    attention: Attention = Attention.SDPA,
    dropout: float = 0.0,
    packed: bool = False,
    fused: bool = False,
    elements: Elements = PLAIN,
    is_first: bool = False,
    **facts: Any,
) -> Activations:
    work = Workload(rows=2, length=8, has_mask=mask, on_gpu=on_gpu)
    during = TrainingPass(replace(FACTS, **facts), work, elements, attention, dropout, packed, fused)
    return layer_activations(layer, during, is_first=is_first)


def linear(name: str, inputs: int, outputs: int, rank: int = 0, *, magnitude: bool = False) -> Linear:
    return Linear(name, inputs, outputs, is_trained=False, rank=rank, adapter_dtype="float32", has_magnitude=magnitude)


def test_attention() -> None:
    assert kept().kept == ATTENTION == 1024
    # A mask repeats keys and values for all heads, and is a tensor of its own for each row.
    repeated = 16 * (8 + 8) * 2 + 16 * 8 * 2 + 16 * 8 * 2 + 16 * 4 * 4
    assert kept(mask=True).kept == repeated + 2 * 8 * 8 * 2
    eager = 16 * (8 + 8 + 8) * 2 + SCORES * (4 + 2)
    assert kept(attention=Attention.EAGER).kept == eager
    assert kept(attention=Attention.EAGER, score_softcap=True).kept == eager + SCORES * 2
    assert kept(attention=Attention.EAGER, attention_dropout=0.1).kept == eager + SCORES * 2 * 2
    # A CPU has no fused attention with dropout: all in float32.
    assert kept(on_gpu=False, attention_dropout=0.1).kept == (16 * (8 + 8 + 8) + SCORES * 3) * 4


def norms(*each: Norm) -> Layer:
    return replace(EMPTY, norms=each)


def test_norms() -> None:
    plain = Norm("input_layernorm", 8, is_trained=False, has_bias=False)
    # Input and root in float32.
    assert kept(norms(plain)).kept - ATTENTION == 16 * 8 * 4 + 16 * 4
    assert kept(norms(replace(plain, is_trained=True))).kept - ATTENTION == 16 * 8 * 4 + 16 * 4 + 16 * 8 * 2
    # LayerNorm: its input, a mean and a deviation.
    assert kept(norms(replace(plain, has_bias=True))).kept - ATTENTION == 16 * 8 * 2 + 16 * 8
    # Over the 2 values of each of 4 heads.
    assert kept(norms(Norm("self_attn.q_norm", 2, False, False))).kept - ATTENTION == 16 * 8 * 4 + 16 * 4 * 4
    assert kept(norms(plain, plain), is_first=True).kept == kept(norms(plain)).kept


def linears(*each: Linear) -> Layer:
    return replace(EMPTY, linears=each)


def test_adapters() -> None:
    up = linears(linear("mlp.up_proj", 8, 16, rank=2))
    # A copy of the input in float32, and the input of B.
    assert kept(up).kept - ATTENTION == 16 * 8 * 4 + 16 * 2 * 4
    # Dropout: what is left, and a mask of a byte on a GPU, of a float32 on a CPU.
    assert kept(up, dropout=0.1).kept - ATTENTION == 16 * 8 * 4 + 16 * 8 + 16 * 2 * 4
    assert kept(up, dropout=0.1, on_gpu=False).kept - ATTENTION == 16 * 8 * 4 * 2 + 16 * 2 * 4
    # Magnitudes scale both results, of 2 and of 4 bytes.
    with_magnitudes = linears(linear("mlp.up_proj", 8, 16, rank=2, magnitude=True))
    assert kept(with_magnitudes).kept - kept(up).kept == 16 * 16 * (2 + 4)
    assert kept(linears(linear("mlp.up_proj", 8, 16))).kept == ATTENTION
    # With dropout the base's product is computed again, in float32, with a weight that is cast for it, unpacked or not.
    dropped = kept(with_magnitudes, dropout=0.1).kept - kept(up, dropout=0.1).kept
    assert dropped == 16 * 16 * (4 + 4) + 8 * 16 * 4
    in_16_bits = replace(with_magnitudes.linears[0], adapter_dtype="bfloat16")
    weight = [kept(linears(in_16_bits), dropout=0.1, packed=packed).kept for packed in (True, False)]
    assert weight[0] - weight[1] == 8 * 16 * 2
    # Selective keeps results of products, among them the two that make B @ A of a matrix of ones.
    assert kept(with_magnitudes).products - kept(up).products == 8 * (2 + 16) * 4
    assert kept(with_magnitudes, dropout=0.1).products - kept(up).products == 8 * (2 + 16) * 4 + 16 * 16 * 2


def test_adapters_in_the_type_of_the_base() -> None:
    up = linears(linear("mlp.up_proj", 8, 16, rank=2))
    # The input as it comes, and the input of B.
    assert kept(up, fused=True).kept - ATTENTION == 16 * 8 * 2 + 16 * 2 * 2
    assert kept(up, fused=True, packed=True).kept - ATTENTION == 16 * 8 * 2 + 16 * 2 * 2
    assert kept(up, fused=True, dropout=0.1).kept - ATTENTION == 16 * 8 * 2 + 16 * 8 + 16 * 2 * 2
    # Of Selective: attention's result and its sums, the base's result and that of A. The sum is written into the base's; next to
    # a packed base it has memory of its own.
    results = 16 * 4 * (2 * 2 + 4) + 16 * 16 * 2 + 16 * 2 * 2
    assert kept(up, fused=True).products == results
    assert kept(up, fused=True, packed=True).products == results + 16 * 16 * 2


def test_blocks() -> None:
    down, up, gate = linear("mlp.down_proj", 16, 8), linear("mlp.up_proj", 8, 16), linear("mlp.gate_proj", 8, 16)
    assert kept(linears(up, down)).kept - ATTENTION == 16 * 16 * 2
    # Gated: the input of the activation, its result, and the other factor.
    assert kept(linears(gate, up, down)).kept - ATTENTION == 3 * 16 * 16 * 2
    assert kept(linears(up, down), activation="gelu_new").kept - ATTENTION == 4 * 16 * 16 * 2
    assert kept(linears(linear("self_attn.o_proj", 8, 8))).kept == ATTENTION


def test_experts() -> None:
    stack = (
        ParameterShape("mlp.experts.gate_up_proj", (2, 32, 8), "bfloat16", is_trained=False),
        ParameterShape("mlp.experts.down_proj", (2, 8, 16), "bfloat16", is_trained=False),
    )
    # Each token goes to 2 experts of width 16: gate and up, the activation, and the result of 8 values.
    assert kept(replace(EMPTY, experts=stack)).kept - ATTENTION == 32 * (3 * 16 + 8) * 2


def test_what_selective_recomputation_keeps() -> None:
    # Attention's result and sums; the layer's result, and those of both factors of its adapter in float32.
    up = linears(linear("mlp.up_proj", 8, 16, rank=2))
    assert kept(up).products == 16 * 4 * (2 * 2 + 4) + 16 * 16 * 2 + 16 * (2 + 16) * 4


def test_the_input_of_a_layer_has_the_type_of_what_layers_hand_on() -> None:
    assert kept().boundary == 16 * 8 * 2
    autocast = Elements("float32", "bfloat16", None, "float32", casts_parameters=False)
    assert kept(elements=autocast).boundary == 16 * 8 * 4


def test_gradients_that_live_at_once() -> None:
    assert kept().backward == 16 * (3 * 8 + 8) * 2
    assert kept(linears(linear("mlp.down_proj", 16, 8))).backward == 16 * (3 * 16 + 8) * 2

"""What autograd keeps of a layer until its backward pass, by the operations of transformers' layers.

Rules of torch's derivatives.yaml: a product keeps what the gradient of its *trained* factors needs, so a frozen linear layer
keeps nothing, and an adapter on it its input and the input of its second matrix; normalisation, activation and attention keep
their inputs in any case. A tensor that several layers keep counts once. The layers come from layers.py; estimate.py adds up what
they keep, loss.py what is behind them. Checked against the bytes that autograd keeps of real models
(tests/unit/finetune_memory/test_activations.py, bench/memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.inputs import Attention
from finetune_job.plan.element_types import VALUE_BYTES, Elements
from finetune_memory.layers import Layer, Linear, Norm
from finetune_memory.model_shape import ArchitectureFacts, Workload

FUSED_ATTENTION = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj"})
PYTHON_ACTIVATIONS = {"gelu_new": 4, "gelu_fast": 4, "gelu_python": 3, "quick_gelu": 3, "relu2": 2}
"""Tensors kept by activations that are written in Python; torch's own keep their input alone."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one layer."""

    kept: int
    """Without checkpointing."""
    products: int
    """What Selective keeps of them: results of products and attention."""
    boundary: int
    """Its input, which every kind of checkpointing keeps."""
    backward: int
    """Gradients that live at once in its backward pass, less what of `kept` has gone by then."""


@dataclass(frozen=True)
class TrainingPass:
    """A forward and backward pass over one micro-batch."""

    facts: ArchitectureFacts
    work: Workload
    elements: Elements
    attention: Attention
    dropout: float
    """On the input of adapters."""
    is_packed: bool = False
    """Whether the base's weights are unpacked for each product."""

    fuses_adapters: bool = False
    """Whether adapters compute in the type of products, and cast their factors instead of their input."""
    is_compiled: bool = False
    """Whether each layer is one compiled graph, which computes again what takes no product."""

    def adapter_bytes(self, held: str) -> int:
        """Of a value that an adapter computes with."""
        return self.elements.product if self.fuses_adapters else self.elements.adapter(held)

    def copies_input(self, held: str) -> bool:
        """Whether each adapter keeps a copy of its input in another element type."""
        return self.elements.layers_copy_input if self.fuses_adapters else self.elements.adapter_copies_input(held)

    @property
    def scores(self) -> int:
        """Attention scores of all heads."""
        return self.work.rows * self.facts.num_heads * self.work.length * self.work.length

    @property
    def is_unfused(self) -> bool:
        """Whether torch has no fused attention for it, and computes it in float32: a CPU's has no dropout, nor values of another
        size than keys.
        """
        facts = self.facts
        has_fused = self.work.on_gpu or (not facts.attention_dropout and facts.value_head_size == facts.head_size)
        return self.attention is Attention.SDPA and not has_fused

    @property
    def keeps_scores(self) -> bool:
        """Whether the scores of all pairs of tokens are kept."""
        return self.attention is Attention.EAGER or self.is_unfused


def layer_activations(layer: Layer, during: TrainingPass, *, is_first: bool) -> Activations:
    """`is_first`: nothing before this layer is trained, so what stands before its first adapter keeps nothing."""
    kept = sum(_norm(norm, during) for norm in layer.norms[1 if is_first else 0 :])
    kept += _inputs(layer, during) + _attention(layer, during) + _blocks(layer, during) + _experts(layer, during)
    return Activations(
        kept=kept,
        products=_products(layer, during),
        boundary=during.work.tokens * during.facts.hidden_size * during.elements.stream,
        backward=_backward(layer, during),
    )


def _norm(norm: Norm, during: TrainingPass) -> int:
    facts, tokens = during.facts, during.work.tokens
    # A norm over each head's values has one weight for all heads.
    heads = {"q_norm": facts.num_heads, "k_norm": facts.num_key_value_heads}.get(norm.name.rpartition(".")[2], 1)
    repeats = heads if norm.size == facts.head_size else 1
    values = tokens * norm.size * repeats
    if norm.has_bias:
        return values * during.elements.stream + tokens * repeats * 8
    if during.is_compiled:
        return values * during.elements.stream + tokens * repeats * 4
    # RMSNorm in float32: its input, the root, and the normalised values where the weight is trained.
    return values * 4 + tokens * repeats * 4 + (values * during.elements.stream if norm.is_trained else 0)


def _inputs(layer: Layer, during: TrainingPass) -> int:
    """Inputs of trained layers and of adapters; layers of a block that read the same input keep it once."""
    elements, tokens, total = during.elements, during.work.tokens, 0
    groups: dict[tuple[str, int, bool], list[Linear]] = {}
    for linear in layer.linears:
        groups.setdefault((linear.parent, linear.inputs, linear.is_output), []).append(linear)
    for (_, width, is_output), members in groups.items():
        values, is_shared = tokens * width, False
        for linear in members:
            size = during.adapter_bytes(linear.adapter_dtype)
            if linear.is_trained and elements.layers_copy_input and not is_output:
                total += values * elements.product
            elif linear.is_trained:
                is_shared = True
            if linear.rank:
                total += tokens * linear.rank * size
            if linear.rank and during.dropout:
                # What is left, and the mask: a byte for each value on a GPU, a value on a CPU.
                total += values * size + values * (1 if during.work.on_gpu else size)
            elif linear.rank and during.copies_input(linear.adapter_dtype):
                total += values * size
            elif linear.rank:
                is_shared = True
            if linear.has_magnitude:
                # The base's result and the adapter's, which the magnitude scales; after dropout both in the adapter's type.
                total += tokens * linear.outputs * (size + (size if during.dropout else elements.product))
            if linear.has_magnitude and during.dropout and (during.is_packed or size != VALUE_BYTES[elements.load]):
                # What dropout left is multiplied by the weight, too, unpacked or cast for this: it is kept whole.
                total += linear.inputs * linear.outputs * size
        reads_attention = is_output and members[0].is_attention and not during.keeps_scores
        if is_shared and not reads_attention:
            total += values * (elements.product if is_output else elements.stream)
    return total


def _attention(layer: Layer, during: TrainingPass) -> int:
    facts, work, size = during.facts, during.work, during.elements.product
    tokens, heads, shared = work.tokens, facts.num_heads, facts.num_key_value_heads
    queries, values = heads * facts.head_size, heads * facts.value_head_size
    if during.is_unfused:
        # Softmax of the scores, and what dropout leaves of it with its mask, all in float32.
        return (tokens * (2 * queries + values) + during.scores * (3 if facts.attention_dropout else 1)) * 4
    if during.keeps_scores:
        # Queries, keys and values of all heads; the scores' softmax in float32, and as the product with the values reads it.
        kept = tokens * (2 * queries + values) * size + during.scores * (4 + (size if size != 4 else 0))
        kept += during.scores * size if facts.score_softcap else 0
        return kept + (2 * during.scores * size if facts.attention_dropout else 0)
    is_repeated = work.has_mask and shared < heads
    key_heads = heads if is_repeated else shared
    kept = tokens * (queries + key_heads * facts.head_size) * size
    fused = next((linear for linear in layer.linears if linear.last in FUSED_ATTENTION), None)
    if fused is not None and not is_repeated:
        # The values are a part of the whole result, which stays; so are queries and keys where nothing rotates them.
        whole = tokens * fused.outputs * size
        kept = kept + whole if facts.rotates_positions else whole
    else:
        kept += tokens * _value_storage(layer, facts, key_heads, is_repeated=is_repeated) * size
    # Result, and the logarithm of the sums in float32.
    kept += tokens * values * size + tokens * heads * 4
    # torch turns a mask of truth values into one of summands, again in each layer.
    return kept + (work.rows * work.length * work.length * size if work.has_mask else 0)


def _value_storage(layer: Layer, facts: ArchitectureFacts, key_heads: int, *, is_repeated: bool) -> int:
    """Values of a token that the tensor with the attention's values takes: a view keeps all that it was cut from."""
    latent = next((linear for linear in layer.linears if linear.last == "kv_b_proj"), None)
    return latent.outputs if latent is not None and not is_repeated else key_heads * facts.value_head_size


def _blocks(layer: Layer, during: TrainingPass) -> int:
    """Activation functions, and the products of gated blocks."""
    facts, tokens, total = during.facts, during.work.tokens, 0
    for output in layer.linears:
        if not output.is_output or output.is_attention:
            continue
        before = sum(each.outputs for each in layer.linears if each.parent == output.parent and not each.is_output)
        is_gated = before == 2 * output.inputs
        factor = PYTHON_ACTIVATIONS.get(facts.activation, 1) + (2 if is_gated else 0)
        if during.is_compiled:
            factor = 2 if is_gated else 1
        total += tokens * output.inputs * factor * during.elements.product
        if output.parent.endswith("shared_expert"):
            # Times a gate of one value.
            total += tokens * facts.hidden_size * during.elements.product
    # Masks of the dropout after attention and after the block.
    return total + (
        2 * tokens * facts.hidden_size * (1 if during.work.on_gpu else during.elements.stream) if facts.residual_dropout else 0
    )


def _experts(layer: Layer, during: TrainingPass) -> int:
    if not layer.experts:
        return 0
    hidden, size, rows = during.facts.hidden_size, during.elements.product, during.work.tokens * during.facts.experts_per_token
    is_trained, is_adapted = any(each.is_trained for each in layer.experts), layer.expert_factors > 0
    width = _expert_width(layer, hidden)
    # Gate and up in one, the activation, and the results before they are weighted.
    total = rows * (3 * width + hidden) * size
    if is_trained or is_adapted:
        total += rows * (hidden + width) * size
    if is_adapted:
        # PEFT adds the update to all experts' weights in every forward pass, with factors in the weights' type.
        total += sum(each.numel for each in layer.experts) * size
        if during.elements.param is None and VALUE_BYTES[layer.factor_dtype] != size:
            total += layer.expert_factors * size
    return total


def _expert_width(layer: Layer, hidden: int) -> int:
    return sum(each.numel for each in layer.experts) // (layer.experts[0].shape[0] * 3 * hidden)


def _products(layer: Layer, during: TrainingPass) -> int:
    facts, tokens, size = during.facts, during.work.tokens, during.elements.product
    total = tokens * facts.num_heads * (facts.value_head_size * size + 4)
    for linear in layer.linears:
        total += tokens * linear.outputs * size
        if linear.rank:
            # A fused adapter's second product is added in place, to what the base computed, of which a copy is kept; not to what
            # bitsandbytes computed.
            of_second = 0 if during.fuses_adapters and not during.is_packed else linear.outputs
            total += tokens * (linear.rank + of_second) * during.adapter_bytes(linear.adapter_dtype)
        if linear.has_magnitude:
            # PEFT computes B @ A as layers, of a matrix of ones: products like any other.
            total += linear.inputs * (linear.rank + linear.outputs) * during.adapter_bytes(linear.adapter_dtype)
            total += tokens * linear.outputs * size if during.dropout else 0
    return total


def _backward(layer: Layer, during: TrainingPass) -> int:
    """The gradients of the widest place of a layer: of a gated block's three tensors, or of the scores."""
    hidden, tokens, size = during.facts.hidden_size, during.work.tokens, during.elements.product
    widest = max((linear.inputs for linear in layer.linears if linear.is_output), default=hidden)
    block = tokens * (3 * widest + hidden) * size
    if layer.experts:
        block = max(block, tokens * during.facts.experts_per_token * (3 * _expert_width(layer, hidden) + hidden) * size)
    if layer.expert_factors:
        # The gradient of all experts' second matrices; when that of the first, twice as wide, comes, it has gone with its
        # weights.
        block += sum(each.numel for each in layer.experts) // 3 * size
    scores = during.scores * 8 if during.is_unfused else during.scores * (8 + size) if during.keeps_scores else 0
    # The block comes after attention, so its activations have gone when the gradients of the scores are computed.
    return max(block, scores - _blocks(layer, during) - _experts(layer, during))

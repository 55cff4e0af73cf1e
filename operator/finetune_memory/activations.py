"""The bytes that autograd keeps for a layer until its backward pass, derived from the operations of transformers' layers.

The rules are those of torch's derivatives.yaml: a product keeps what the gradient of its *trained* factors needs. So a frozen
linear layer keeps nothing, and an adapter on it keeps its input and the input of its second matrix. Normalisation, activation
functions and attention keep their inputs in any case. A tensor that several layers keep counts once. The layers come from
layers.py; estimate.py adds up what they keep, and loss.py what comes after them. Tests compare these numbers with the bytes that
autograd keeps for real models (tests/unit/finetune_memory/test_activations.py, bench/memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.inputs import Attention
from finetune_job.plan.element_types import VALUE_BYTES, Elements
from finetune_memory.layers import Layer, Linear, Norm
from finetune_memory.model_shape import ArchitectureFacts, Workload

FUSED_ATTENTION = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj"})
PYTHON_ACTIVATIONS = {"gelu_new": 4, "gelu_fast": 4, "gelu_python": 3, "quick_gelu": 3, "relu2": 2}
"""Number of tensors that an activation function written in Python keeps; torch's own functions keep only their input."""


@dataclass(frozen=True)
class Activations:
    """Bytes of memory for one layer's activations and gradients."""

    kept: int
    """Bytes that are kept without checkpointing."""
    products: int
    """Bytes that Selective checkpointing keeps: results of products and attention."""
    boundary: int
    """Bytes of the layer's input, which every kind of checkpointing keeps."""
    backward: int
    """Bytes of the gradients held at once in the layer's backward pass, less the part of `kept` that has been freed by then."""


@dataclass(frozen=True)
class TrainingPass:
    """A forward and backward pass over one micro-batch."""

    facts: ArchitectureFacts
    work: Workload
    elements: Elements
    attention: Attention
    dropout: float
    """Dropout on the input of adapters."""
    is_packed: bool = False
    """Whether the base's weights are unpacked for each product."""
    fuses_adapters: bool = False
    """Whether adapters compute in the element type of matrix products, and cast their factors instead of their input."""
    is_compiled: bool = False
    """Whether each layer is one compiled graph, which recomputes in the backward pass what needs no matrix product."""

    def adapter_bytes(self, dtype: str) -> int:
        """Return the size in bytes of one value in an adapter's computation."""
        return self.elements.product if self.fuses_adapters else self.elements.adapter(dtype)

    def copies_input(self, dtype: str) -> bool:
        """Whether each adapter keeps a copy of its input in another element type."""
        return self.elements.layers_copy_input if self.fuses_adapters else self.elements.adapter_copies_input(dtype)

    @property
    def scores(self) -> int:
        """Number of attention scores of all heads."""
        return self.work.rows * self.facts.num_heads * self.work.length * self.work.length

    @property
    def is_unfused(self) -> bool:
        """Whether torch computes the attention in float32 because it has no fused kernel: a CPU has none for dropout, or for
        values whose size differs from that of the keys.
        """
        facts = self.facts
        has_fused = self.work.on_gpu or (not facts.attention_dropout and facts.value_head_size == facts.head_size)
        return self.attention is Attention.SDPA and not has_fused

    @property
    def keeps_scores(self) -> bool:
        """Whether the scores of all pairs of tokens are kept."""
        return self.attention is Attention.EAGER or self.is_unfused


def layer_activations(layer: Layer, during: TrainingPass, *, is_first: bool) -> Activations:
    """Count the bytes of one layer.

    is_first: whether nothing before this layer is trained; then the operations before its first adapter keep nothing.
    """
    hidden, tokens, size = during.facts.hidden_size, during.work.tokens, during.elements.product
    norms = sum(_norm(norm, during) for norm in layer.norms[1 if is_first else 0 :])
    after_attention = _blocks(layer, during) + _experts(layer, during)
    # The backward pass holds most gradients where the layer is widest: at a gated block's three tensors, or at the scores.
    widest = max((linear.inputs for linear in layer.linears if linear.is_output), default=hidden)
    block = tokens * (3 * widest + hidden) * size
    if layer.experts:
        block = max(block, tokens * during.facts.experts_per_token * (3 * _expert_width(layer, hidden) + hidden) * size)
    if layer.expert_factors:
        # Add the gradient of all experts' second matrices. It is freed, together with those weights, before the gradient of
        # the first matrices, which is twice as large, is computed.
        block += sum(stack.numel for stack in layer.experts) // 3 * size
    scores = during.scores * 8 if during.is_unfused else during.scores * (8 + size) if during.keeps_scores else 0
    return Activations(
        kept=norms + _inputs(layer, during) + _attention(layer, during) + after_attention,
        products=_products(layer, during),
        boundary=tokens * hidden * during.elements.stream,
        # The block follows attention, so its activations are freed before the gradients of the scores are computed.
        backward=max(block, scores - after_attention),
    )


def _norm(norm: Norm, during: TrainingPass) -> int:
    facts, tokens = during.facts, during.work.tokens
    # A norm over each head's values has one weight for all heads, and is applied to each head.
    heads = {"q_norm": facts.num_heads, "k_norm": facts.num_key_value_heads}.get(norm.name.rpartition(".")[2], 1)
    repeats = heads if norm.size == facts.head_size else 1
    values = tokens * norm.size * repeats
    if norm.has_bias:
        return values * during.elements.stream + tokens * repeats * 8
    if during.is_compiled:
        return values * during.elements.stream + tokens * repeats * 4
    # RMSNorm in float32 keeps its input, the root, and, if its weight is trained, the normalised values.
    return values * 4 + tokens * repeats * 4 + (values * during.elements.stream if norm.is_trained else 0)


def _inputs(layer: Layer, during: TrainingPass) -> int:
    """Count the inputs that trained layers and adapters keep; layers of a block that read the same input share one copy."""
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
                # The input after dropout is kept, and the mask: one byte for each value on a GPU, and a whole value on a CPU.
                total += values * size + values * (1 if during.work.on_gpu else size)
            elif linear.rank and during.copies_input(linear.adapter_dtype):
                total += values * size
            elif linear.rank:
                is_shared = True
            if linear.has_magnitude:
                # The results of base and adapter, which the magnitude scales; with dropout, both have the adapter's type.
                total += tokens * linear.outputs * (size + (size if during.dropout else elements.product))
            if linear.has_magnitude and during.dropout and (during.is_packed or size != VALUE_BYTES[elements.load]):
                # The base's weight also multiplies the input after dropout; the copy unpacked or cast for this is kept whole.
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
        # The softmax of the scores; with dropout also its mask and result; all in float32.
        return (tokens * (2 * queries + values) + during.scores * (3 if facts.attention_dropout else 1)) * 4
    if during.keeps_scores:
        # Queries, keys and values of all heads; softmax of the scores in float32, and cast for the product with the values.
        kept = tokens * (2 * queries + values) * size + during.scores * (4 + (size if size != 4 else 0))
        kept += during.scores * size if facts.score_softcap else 0
        return kept + (2 * during.scores * size if facts.attention_dropout else 0)
    is_repeated = work.has_mask and shared < heads
    key_heads = heads if is_repeated else shared
    kept = tokens * (queries + key_heads * facts.head_size) * size
    fused = next((linear for linear in layer.linears if linear.last in FUSED_ATTENTION), None)
    if fused is not None and not is_repeated:
        # The values are a part of the layer's whole result, which is kept; so are queries and keys if nothing rotates them.
        whole = tokens * fused.outputs * size
        kept = kept + whole if facts.rotates_positions else whole
    else:
        # A view keeps the whole tensor of which it is a slice.
        latent = next((linear for linear in layer.linears if linear.last == "kv_b_proj" and not is_repeated), None)
        kept += tokens * (key_heads * facts.value_head_size if latent is None else latent.outputs) * size
    # The result, and the log-sum-exp of each row of scores in float32.
    kept += tokens * values * size + tokens * heads * 4
    # Each layer converts the boolean mask again, into an additive mask.
    return kept + (work.rows * work.length * work.length * size if work.has_mask else 0)


def _blocks(layer: Layer, during: TrainingPass) -> int:
    """Count the bytes that activation functions and the products of gated blocks keep."""
    facts, tokens, total = during.facts, during.work.tokens, 0
    for output in layer.linears:
        if not output.is_output or output.is_attention:
            continue
        before = sum(linear.outputs for linear in layer.linears if linear.parent == output.parent and not linear.is_output)
        is_gated = before == 2 * output.inputs
        factor = PYTHON_ACTIVATIONS.get(facts.activation, 1) + (2 if is_gated else 0)
        if during.is_compiled:
            factor = 2 if is_gated else 1
        total += tokens * output.inputs * factor * during.elements.product
        if output.parent.endswith("shared_expert"):
            # The block's result is kept, because it is multiplied by a gate of one value per token.
            total += tokens * facts.hidden_size * during.elements.product
    if facts.residual_dropout:
        # Masks of the dropout after attention and after the block.
        total += 2 * tokens * facts.hidden_size * (1 if during.work.on_gpu else during.elements.stream)
    return total


def _experts(layer: Layer, during: TrainingPass) -> int:
    if not layer.experts:
        return 0
    hidden, size, rows = during.facts.hidden_size, during.elements.product, during.work.tokens * during.facts.experts_per_token
    is_trained, is_adapted = any(stack.is_trained for stack in layer.experts), layer.expert_factors > 0
    width = _expert_width(layer, hidden)
    # The joint result of gate and up, the result of the activation function, and the experts' results before weighting.
    total = rows * (3 * width + hidden) * size
    if is_trained or is_adapted:
        total += rows * (hidden + width) * size
    if is_adapted:
        # PEFT adds the update to all experts' weights in every forward pass, with factors in the weights' type.
        total += sum(stack.numel for stack in layer.experts) * size
        if during.elements.param is None and VALUE_BYTES[layer.factor_dtype] != size:
            total += layer.expert_factors * size
    return total


def _expert_width(layer: Layer, hidden: int) -> int:
    return sum(stack.numel for stack in layer.experts) // (layer.experts[0].shape[0] * 3 * hidden)


def _products(layer: Layer, during: TrainingPass) -> int:
    facts, tokens, size = during.facts, during.work.tokens, during.elements.product
    total = tokens * facts.num_heads * (facts.value_head_size * size + 4)
    for linear in layer.linears:
        total += tokens * linear.outputs * size
        if linear.rank:
            # A fused adapter adds its second product in place to the base's result, a copy of which is kept anyway. It does not
            # do so with a result of bitsandbytes.
            of_second = 0 if during.fuses_adapters and not during.is_packed else linear.outputs
            total += tokens * (linear.rank + of_second) * during.adapter_bytes(linear.adapter_dtype)
        if linear.has_magnitude:
            # PEFT computes B @ A by applying its layers to an identity matrix; these products are kept like any other.
            total += linear.inputs * (linear.rank + linear.outputs) * during.adapter_bytes(linear.adapter_dtype)
            total += tokens * linear.outputs * size if during.dropout else 0
    return total

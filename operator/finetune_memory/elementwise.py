"""What a layer computes besides matrix products and attention, in bytes that its kernels read and write."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_memory.layers import Layer, Norm
from finetune_memory.model_shape import ArchitectureFacts


@dataclass(frozen=True)
class Cost:
    """Of an operation in eager mode, forward and backward."""

    forward: int
    backward: int
    """Bytes of a value."""
    kernels: int
    """Forward; twice as many backward."""


# Values of 16 bits; transformers computes RMSNorm in float32, in six operations.
RMS_NORM = Cost(36, 60, 6)
LAYER_NORM = Cost(4, 8, 1)
ROTATION = Cost(20, 20, 8)
GATED = Cost(10, 18, 2)
UNGATED = Cost(4, 6, 1)
ADDITION = Cost(6, 6, 1)
COMPILED = {RMS_NORM: Cost(4, 8, 1), ROTATION: Cost(4, 4, 0), GATED: Cost(6, 10, 1), ADDITION: Cost(0, 0, 0)}
"""What is left of them in one kernel with their neighbours."""


def operations(layer: Layer, facts: ArchitectureFacts, *, is_compiled: bool) -> list[tuple[Cost, int]]:
    """Each with the values of a token that it is computed of."""
    found = [(LAYER_NORM if norm.has_bias else RMS_NORM, _norm_values(norm, facts)) for norm in layer.norms]
    if facts.rotates_positions:
        found.append((ROTATION, (facts.num_heads + facts.num_key_value_heads) * facts.head_size))
    for output in layer.linears:
        if output.is_output and not output.is_attention:
            before = sum(each.outputs for each in layer.linears if each.parent == output.parent and not each.is_output)
            found.append((GATED if before == 2 * output.inputs else UNGATED, output.inputs))
    if layer.experts:
        width = sum(each.numel for each in layer.experts) // (layer.experts[0].shape[0] * 3 * facts.hidden_size)
        found.append((GATED, width * facts.experts_per_token))
    # Two residual sums; and the gradients of an input that three and two products read, in the backward pass alone.
    found += [(ADDITION, facts.hidden_size)] * 2
    if is_compiled:
        found = [(COMPILED.get(cost, cost), values) for cost, values in found]
    found.append((Cost(0, ADDITION.backward, 0), 3 * facts.hidden_size))
    return found


def _norm_values(norm: Norm, facts: ArchitectureFacts) -> int:
    """A norm over each head's values has one weight for all heads."""
    heads = {"q_norm": facts.num_heads, "k_norm": facts.num_key_value_heads}
    repeats = heads.get(norm.name.rpartition(".")[2], 1) if norm.size == facts.head_size else 1
    return norm.size * repeats

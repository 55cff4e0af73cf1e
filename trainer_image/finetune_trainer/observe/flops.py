"""Number of floating-point operations that training needs according to the model's mathematics.

The output layer is included. Recomputation to save memory, padding of documents inside attention, norms, activations and
embeddings (lookups, not products) are not. So model FLOPs utilisation (MFU; Chowdhery et al., 2022, appendix B) can compare runs
that save memory in different ways.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_REPLACED = ".original_module."
"""Name under which PEFT keeps the frozen original of a layer in modules_to_save. PEFT does not compute this original."""


@dataclass(frozen=True)
class ModelCost:
    """The quantities from which the cost of a step is computed."""

    matmul_parameters: float
    """Number of values in all matrices that a token is multiplied with, including adapters and output layer, without embeddings.
    Only as many experts count as a token is routed to.
    """
    trained_matmul_parameters: float
    """Number of values in `matmul_parameters` that are trained."""
    attention_layers: int
    attention_width: int
    """Number of attention heads times the dimension of each head."""

    def step_flops(self, tokens: int, squared_document_lengths: int) -> float:
        """Return the number of operations in an optimizer step over documents with `tokens` tokens in total.

        Matrices: two operations (multiply, add) per value and token forward; two in the backward pass for the gradient of the
        input; two more for the gradient of the matrix itself where it is trained. So 6 per value in full fine-tuning (Kaplan et
        al., 2020, section 2.1), and 4 for a frozen base plus 6 for its adapters.

        Attention over a document of L tokens: scores and weighted values are two products of 2 L^2 `attention_width` operations
        per layer, and the backward pass has two gradients for each of them: 12 L^2 `attention_width` (Chowdhery et al., 2022,
        appendix B), whether the base is frozen or not. A causal mask halves this number. Attention windows narrower than a
        document are ignored.
        """
        matrices = (4 * self.matmul_parameters + 2 * self.trained_matmul_parameters) * tokens
        return matrices + 6 * self.attention_layers * self.attention_width * squared_document_lengths


def model_cost(model: nn.Module, config: Any) -> ModelCost:
    """Count the matrices of an unsharded model, on any device; `config` is the model's transformers configuration."""
    config = config.get_text_config()
    # Tokens go to only some of the experts. Configurations in transformers use several names for the number of experts.
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    active = chosen / experts if chosen and experts else 1.0
    total = trained = 0.0
    for name, module in model.named_modules():
        if _REPLACED in f".{name}.":
            continue
        is_expert = bool(_EXPERTS.search(name))
        share = active if is_expert else 1.0
        for values, is_trained in _matrices(module, is_expert=is_expert):
            total += values * share
            trained += values * share * is_trained
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer_types = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    return ModelCost(total, trained, sum("attention" in kind and "linear" not in kind for kind in layer_types), heads * head_dim)


def _matrices(module: nn.Module, *, is_expert: bool) -> list[tuple[int, bool]]:
    """Return the sizes of the module's own matrices, and whether they are trained."""
    if isinstance(module, nn.Linear):
        # The declared size is used, since 4-bit weights are stored in another shape.
        return [(module.in_features * module.out_features, module.weight.requires_grad)]
    if isinstance(module, nn.Embedding):
        return []
    # Routers and GPT-2's layers are not nn.Linear; all experts of a layer may be one parameter [experts, rows, columns].
    dims = (2, 3) if is_expert else (2,)
    return [
        (parameter.numel(), parameter.requires_grad) for parameter in module.parameters(recurse=False) if parameter.dim() in dims
    ]

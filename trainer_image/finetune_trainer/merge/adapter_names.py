"""Parses each tensor name in a LoRA adapter file into a module of the base model and a part of the adapter.

peft 0.21.2 writes these names (get_peft_model_state_dict): `base_model.model.<module>.lora_A.weight` and similar names are
factors, `<module>.token_adapter.trainable_tokens_delta` holds trained rows, and `<module>.base_layer.<parameter>` and
`<module>.<parameter>` hold whole parameters (embeddings, biases, modules_to_save). If several parameters of one module are
adapted (target_parameters), PEFT nests its layers: `<module>.base_layer.lora_A.weight` is one level deeper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.weights.errors import AdapterTensorError
from finetune_trainer.weights.headers import TensorHeader

Key = TypeVar("Key")
CLASSIFIER_HEADS = ("score", "classifier", "qa_outputs")
"""Names of transformers' output layers for tasks other than next-token prediction. PEFT saves these whole with an adapter."""
TOKENS_PART = "token_adapter.trainable_tokens_delta"
FACTOR_PARTS: Mapping[str, str] = {
    "lora_A.weight": "lora_A",
    "lora_B.weight": "lora_B",
    "lora_B.bias": "lora_B.bias",
    "lora_embedding_A": "lora_embedding_A",
    "lora_embedding_B": "lora_embedding_B",
    "lora_magnitude_vector": "lora_magnitude_vector",
    "lora_magnitude_vector.weight": "lora_magnitude_vector",
}
"""Name of a part in adapter files, including those of older PEFT versions -> the kind of the part."""

TOKENS_BASE = "token_adapter.base_layer"
"""Prefix of a module's whole parameters if they are saved in addition to the module's trained rows."""
WRAPPERS = ("modules_to_save", TOKENS_BASE, "base_layer")
"""Names that PEFT inserts between a module's name and the name of its parameter."""

_NESTED = re.compile(r"(?P<module>.+?)(?P<nesting>(\.base_layer)*)\.(?P<part>(?:lora_|token_adapter\.|modules_to_save\.).+)")


@dataclass
class ParsedAdapter:
    """The tensors of one adapter file, grouped by kind. Modules are named as in the base model."""

    factors: dict[tuple[str, int], dict[str, TensorHeader]] = field(default_factory=dict)
    """Factors by module and nesting depth, then by kind (a value of FACTOR_PARTS)."""
    tokens: dict[str, TensorHeader] = field(default_factory=dict)
    """Trained rows by module."""
    whole: dict[tuple[str, str], TensorHeader] = field(default_factory=dict)
    """Whole parameters by module and by the parameter's name in that module."""
    base_copies: dict[tuple[str, str], TensorHeader] = field(default_factory=dict)
    """Whole parameters of base layers that an adapter wraps: the values that the base had in training, or trained biases."""


def parse_names(adapter: Mapping[str, TensorHeader]) -> ParsedAdapter:
    """Group an adapter's tensors by parsing their names. Raises AdapterTensorError, which names the tensor."""
    parsed = ParsedAdapter()
    for name, tensor in adapter.items():
        if not name.startswith(INSIDE_PEFT):
            raise AdapterTensorError(
                f"adapter tensor {name}: PEFT's names begin with {INSIDE_PEFT!r}. Save the adapter with PEFT's save_pretrained."
            )
        path = name.removeprefix(INSIDE_PEFT)
        match = _NESTED.fullmatch(path)
        module, _, parameter = path.rpartition(".")
        if module.endswith(f".{TOKENS_BASE}"):
            _claim(parsed.base_copies, (module.removesuffix(f".{TOKENS_BASE}"), parameter), tensor)
        elif match is None:
            owners = parsed.base_copies if module.endswith(".base_layer") else parsed.whole
            _claim(owners, (module.removesuffix(".base_layer"), parameter), tensor)
            if not module or not parameter or ".base_layer" in module.removesuffix(".base_layer"):
                raise _unnamed(name)
        elif match["part"] in FACTOR_PARTS:
            key = (match["module"], match["nesting"].count(".base_layer"))
            _claim(parsed.factors.setdefault(key, {}), FACTOR_PARTS[match["part"]], tensor)
        elif match["part"] == TOKENS_PART and not match["nesting"]:
            _claim(parsed.tokens, match["module"], tensor)
        elif match["part"].startswith("lora_"):
            raise AdapterTensorError(
                f"adapter tensor {name}: {match['part']} is not a part of a LoRA, rsLoRA or DoRA adapter. Publish the adapter "
                "alone (merge.enabled: false)."
            )
        else:
            raise _unnamed(name)
    for key in parsed.whole.keys() & parsed.base_copies.keys():
        raise _duplicate(parsed.whole[key], parsed.base_copies[key])
    return parsed


def whole_parameter(name: str) -> str | None:
    """Return the path of the base parameter that this tensor stores whole; None if the tensor is only a part of an adapter."""
    if ".lora_" in name or not name.endswith((".weight", ".bias")):
        return None
    module, _, parameter = name.removeprefix(INSIDE_PEFT).rpartition(".")
    wrapper = next((wrapper for wrapper in WRAPPERS if module.endswith(f".{wrapper}")), None)
    return f"{module.removesuffix(f'.{wrapper}') if wrapper else module}.{parameter}"


def absent_in_base(name: str, path: str) -> AdapterTensorError:
    """Return the error for the adapter tensor `name`, whose parameter `path` does not exist in the base model."""
    module = path.rpartition(".")[0]
    if module.rpartition(".")[2] in CLASSIFIER_HEADS:
        return AdapterTensorError(
            f"adapter tensor {name} belongs to a classifier's output layer, which a language model does not have, so there is "
            "nothing to merge it into. Merge it with PEFT: load the base with AutoModelForSequenceClassification (or the "
            "AutoModel class for the adapter's task), then PeftModel.from_pretrained and merge_and_unload."
        )
    return AdapterTensorError(
        f"adapter tensor {name}: the base model has no parameter {path}. The adapter was trained on another model or another "
        "revision; use that one as the base."
    )


def _claim(owners: dict[Key, TensorHeader], key: Key, tensor: TensorHeader) -> None:
    if key in owners:
        raise _duplicate(owners[key], tensor)
    owners[key] = tensor


def _duplicate(first: TensorHeader, second: TensorHeader) -> AdapterTensorError:
    names = sorted((first.name, second.name))
    return AdapterTensorError(f"adapter tensors {names[0]} and {names[1]} are the same part of the adapter. Save it again.")


def _unnamed(name: str) -> AdapterTensorError:
    return AdapterTensorError(
        f"adapter tensor {name} is not named as PEFT saves LoRA adapters. Save the adapter with PEFT's save_pretrained."
    )

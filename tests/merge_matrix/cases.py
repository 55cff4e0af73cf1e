"""The combinations of the matrix. A new method or option is a line in METHODS, combined with every architecture that it fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, VeraConfig

from tests.merge_matrix.architectures import ARCHITECTURES, Architecture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Embeddings(StrEnum):
    """How a method changes input and output embeddings, which decides with what a tied model's merge is compared."""

    UNTOUCHED = "Untouched"
    APART = "Apart"
    """It changes one of them, or both in different ways: a tied model becomes an untied one."""
    TOGETHER = "Together"
    """It changes both alike, and PEFT's merge is right."""
    TOGETHER_TWICE = "TogetherTwice"
    """It changes both alike, but PEFT's merge adds the change twice."""


@dataclass(frozen=True)
class Method:
    """Adapters of one kind, merged in order."""

    name: str
    adapters: Callable[[Architecture], list[PeftConfig]]
    fits: Callable[[Architecture], bool] = lambda _: True
    embeddings: Embeddings = Embeddings.UNTOUCHED
    adapter_dtype: torch.dtype | None = None
    """Dtype of the adapter's file; None: the dtype in which PEFT trains."""
    num_added_tokens: int = 0
    """Number of tokens for which the embeddings are resized before the training."""


@dataclass(frozen=True)
class Case:
    """One combination."""

    architecture: Architecture
    method: Method
    dtype: str
    base_in_shards: bool
    output_in_shards: bool

    @property
    def name(self) -> str:
        shards = f"{'many' if self.base_in_shards else 'one'}-to-{'many' if self.output_in_shards else 'one'}"
        return f"{self.architecture.name}-{self.method.name}-{self.dtype}-{shards}"

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the embeddings in training; None: as many as the base has."""
        added = self.method.num_added_tokens
        return self.architecture.config.get_text_config().vocab_size + added if added else None


def _lora(**settings: Any) -> Callable[[Architecture], list[PeftConfig]]:
    """Return one LoRA adapter. Values that are functions are called with the architecture."""

    def adapters(architecture: Architecture) -> list[PeftConfig]:
        defaults = {"r": 6, "lora_alpha": 13, "target_modules": _attention}
        return [LoraConfig(**_resolved({**defaults, **settings}, architecture))]

    return adapters


def _sequence(*settings: Mapping[str, Any]) -> Callable[[Architecture], list[PeftConfig]]:
    return lambda architecture: [config for one in settings for config in _lora(**one)(architecture)]


def _resolved(settings: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    return {key: value(architecture) if callable(value) else value for key, value in settings.items()}


def _attention(architecture: Architecture) -> list[str]:
    return list(architecture.attention)


def _all_linear(architecture: Architecture) -> list[str]:
    return [*architecture.attention, *architecture.further]


def _is_decoder(architecture: Architecture) -> bool:
    return not architecture.is_encoder_decoder


def _has_no_conv1d(architecture: Architecture) -> bool:
    # These methods of PEFT do not know Conv1D.
    return architecture.config.model_type != "gpt2"


def _has_biases(architecture: Architecture) -> bool:
    return architecture.has_biases


def _has_experts(architecture: Architecture) -> bool:
    return bool(architecture.parameters)


def _embedding(architecture: Architecture) -> list[str]:
    return [*architecture.attention, architecture.embedding]


def _head(architecture: Architecture) -> list[str]:
    return [*architecture.attention, architecture.head]


def _both(architecture: Architecture) -> list[str]:
    return [architecture.embedding, architecture.head]


def _is_tied_decoder(architecture: Architecture) -> bool:
    # PEFT recognises embeddings by name for ensure_weight_tying.
    return architecture.is_tied and architecture.embedding == "embed_tokens"


LORA_METHODS = (
    Method("lora", _lora()),
    Method("lora_all", _lora(r=8, target_modules=_all_linear)),
    Method("rslora", _lora(r=5, lora_alpha=7, use_rslora=True, target_modules=_all_linear)),
    Method("dora", _lora(use_dora=True, target_modules=_all_linear)),
    Method(
        "patterns",
        _lora(
            target_modules=_all_linear,
            rank_pattern=lambda a: {a.attention[0]: 3, rf".*\.1\..*{a.further[-1]}": 9},
            alpha_pattern=lambda a: {a.further[0]: 5, rf".*\.0\..*{a.attention[-1]}": 21},
        ),
    ),
    Method("one_layer", _lora(layers_to_transform=[1]), _is_decoder),
    Method("regular_expression", _lora(target_modules=lambda a: rf".*\.({'|'.join(a.attention)})")),
    Method("modules_to_save", _lora(modules_to_save=lambda a: [a.whole])),
    Method("bias_all", _lora(bias="all"), _has_biases),
    Method("bias_lora_only", _lora(bias="lora_only"), _has_biases),
    Method("lora_bias", _lora(lora_bias=True), _has_biases),
    Method("bf16_file", _lora(target_modules=_all_linear), adapter_dtype=torch.bfloat16),
    Method("fp16_dora_file", _lora(use_dora=True), adapter_dtype=torch.float16),
    Method(
        "two_adapters",
        _sequence({"r": 4, "target_modules": _all_linear}, {"r": 7, "lora_alpha": 3, "target_modules": _all_linear}),
    ),
    Method("dora_then_rslora", _sequence({"use_dora": True}, {"use_rslora": True})),
    Method("embedding", _lora(target_modules=_embedding), _is_decoder, Embeddings.APART),
    Method("embedding_dora", _lora(target_modules=_embedding, use_dora=True), _is_decoder, Embeddings.APART),
    Method("head", _lora(target_modules=_head), _is_decoder, Embeddings.APART),
    Method("embedding_and_head", _lora(target_modules=_both), _is_decoder, Embeddings.APART),
    Method(
        "embeddings_twice", _sequence({"target_modules": _both}, {"r": 3, "target_modules": _both}), _is_decoder, Embeddings.APART
    ),
    Method("saved_embedding", _lora(modules_to_save=lambda a: [a.embedding]), _is_decoder, Embeddings.APART),
    Method("saved_embedding_and_head", _lora(modules_to_save=_both), _is_decoder, Embeddings.APART),
    Method("saved_together", _lora(modules_to_save=_both, ensure_weight_tying=True), _is_tied_decoder, Embeddings.TOGETHER),
    Method(
        "adapted_together", _lora(target_modules=_both, ensure_weight_tying=True), _is_tied_decoder, Embeddings.TOGETHER_TWICE
    ),
    Method("tokens", _lora(trainable_token_indices=[3, 9, 44]), embeddings=Embeddings.TOGETHER),
    Method("added_tokens", _lora(), embeddings=Embeddings.TOGETHER, num_added_tokens=5),
    Method("added_tokens_saved", _lora(modules_to_save=_both), _is_decoder, Embeddings.APART, num_added_tokens=7),
    Method(
        "tokens_apart",
        _lora(trainable_token_indices=lambda a: {a.embedding: [3, 44], a.head: [9]}),
        _is_decoder,
        Embeddings.APART,
    ),
)
"""LoRA, rsLoRA and DoRA with their options."""

EXPERT_METHODS = (
    Method("experts", _lora(r=4, target_modules=[], target_parameters=lambda a: list(a.parameters)), _has_experts),
    Method(
        "expert_patterns",
        _lora(
            target_parameters=lambda a: list(a.parameters),
            use_rslora=True,
            rank_pattern=lambda a: {a.parameters[0]: 2, rf".*\.1\..*{a.parameters[1]}": 5},
            alpha_pattern=lambda a: {a.parameters[1]: 17},
        ),
        _has_experts,
    ),
    Method("router", _lora(target_parameters=lambda a: ["gate.weight", a.parameters[0]]), _has_experts),
    Method("one_expert_parameter", _lora(r=3, target_parameters=lambda a: list(a.parameters[1:])), _has_experts),
    Method(
        "experts_twice",
        _sequence(
            {"r": 4, "target_parameters": lambda a: list(a.parameters)},
            {"r": 2, "use_rslora": True, "target_parameters": lambda a: list(a.parameters)},
        ),
        _has_experts,
    ),
)
"""Adapters on parameters that hold several experts."""

OTHER_METHODS = (
    Method("ia3", lambda a: [IA3Config(target_modules=_all_linear(a), feedforward_modules=[a.further[-1]])]),
    Method("loha", lambda a: [LoHaConfig(r=3, alpha=5, target_modules=_attention(a))], _has_no_conv1d),
    Method("lokr", lambda a: [LoKrConfig(r=3, alpha=5, target_modules=_attention(a))], _has_no_conv1d),
    Method("oft", lambda a: [OFTConfig(r=0, oft_block_size=8, target_modules=_attention(a))], _has_no_conv1d),
    Method("vera", lambda a: [VeraConfig(r=8, target_modules=_attention(a))]),
)
"""Methods outside LoRA's family, which PEFT's own layers merge."""

METHODS = (*LORA_METHODS, *EXPERT_METHODS, *OTHER_METHODS)


def all_cases() -> list[Case]:
    """Every architecture with every method that fits it, in two of the three dtypes each; shards alternate.

    So each pair of architecture and method, of dtype and any of the two, and of shards and any of the others is there.
    """
    dtypes = list(DTYPES)
    cases = []
    for row, architecture in enumerate(ARCHITECTURES):
        for column, method in enumerate(METHODS):
            if method.fits(architecture):
                for further in range(2):
                    number = row + column + further
                    many = (row + 2 * column + further) % 4
                    cases.append(Case(architecture, method, dtypes[number % 3], bool(many & 1), bool(many & 2)))
    return cases

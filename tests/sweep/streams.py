"""The fixed list of cases, and slices of the random stream."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from tests.sweep.case import UNSET, Case
from tests.sweep.covering import covering_array, distinct, products, random_cases
from tests.sweep.dimensions import BY_NAME

FIXED_SEED = 6
Settings = tuple[str, tuple[str, ...]]
"""A dimension and some of its values."""
_DTYPES = ("bfloat16", "float32")
PRODUCTS: tuple[dict[str, Sequence[str]], ...] = (
    # What FSDP 1 puts into one flat parameter.
    {
        "method": ("LoRA", "DoRA", "QLoRA"),
        "stored": _DTYPES,
        "version": ("1",),
        "wrap": (UNSET, "SIZE_BASED_WRAP", "NO_WRAP"),
        "use_orig": (UNSET, "true", "false"),
        "peft_wrap": (UNSET, "true", "false"),
        "autocast_adapter": (UNSET, "false"),
    },
    {
        "method": ("Full", "IA3", "VeRA", "OFT", "LNTuning"),
        "stored": _DTYPES,
        "version": ("1",),
        "wrap": (UNSET, "NO_WRAP"),
        "use_orig": (UNSET, "true", "false"),
        "peft_wrap": (UNSET, "true", "false"),
    },
    # What is cast, and when.
    {
        "method": ("LoRA", "DoRA", "QLoRA", "Full"),
        "stored": _DTYPES,
        "version": ("1", "2"),
        "precision": (UNSET, "bf16", "fp32"),
        "param_dtype": (UNSET, "bfloat16", "float32"),
    },
    # How packed weights lie in memory.
    {
        "method": ("QLoRA", "QDoRA"),
        "stored": ("bfloat16",),
        "version": ("1", "2"),
        "storage": (UNSET, "bfloat16", "float32", "uint8"),
        "compute": (UNSET, "bfloat16", "float32"),
        "validation": (UNSET, "some"),
    },
    # Parameters that two modules share, or that are trained whole.
    {
        "method": ("LoRA", "DoRA"),
        "architecture": ("llama", "llama_tied", "gpt2"),
        "version": ("1", "2"),
        "targets": ("attention", "embedding", "head", "embedding and head"),
        "saved": (UNSET, "head", "embedding", "head and embedding"),
    },
    # Rows of added tokens, and what else is done to the modules that have them.
    {
        "method": ("LoRA", "DoRA", "QLoRA", "Full", "TrainableTokens"),
        "architecture": ("llama", "llama_tied"),
        "added": ("ordinary", "special"),
        "version": ("1", "2"),
        "precision": (UNSET, "fp32"),
    },
    {
        "method": ("LoRA", "QLoRA"),
        "architecture": ("llama", "llama_tied"),
        "added": ("special",),
        "targets": ("attention", "embedding", "head"),
        "saved": (UNSET, "head", "embedding", "head and embedding"),
        "tokens": (UNSET, "some"),
    },
    # Biases beside frozen weights.
    {
        "method": ("LoRA",),
        "architecture": ("llama_biased", "gpt2", "qwen2"),
        "stored": _DTYPES,
        "version": ("1", "2"),
        "bias": ("all", "lora_only"),
        "use_orig": (UNSET, "true"),
    },
)


def fixed_cases() -> Iterator[Case]:
    """The same list every time: pairs first, then products, both in a shuffled order, so that any part of it is varied."""
    pairs, rest = covering_array(FIXED_SEED), products(PRODUCTS)
    draw = random.Random(FIXED_SEED)
    draw.shuffle(pairs)
    draw.shuffle(rest)
    mixed = [case for both in itertools.zip_longest(pairs, rest) for case in both if case is not None]
    return distinct(mixed)


def settings_of(text: str) -> Settings:
    """Of `name=value,value`. Raises ValueError where there is no such dimension or value."""
    name, _, values = text.partition("=")
    dimension = BY_NAME.get(name)
    if dimension is None:
        raise ValueError(f"{name!r} is not one of {', '.join(BY_NAME)}")
    chosen = tuple(values.split(","))
    if unknown := [value for value in chosen if value not in dimension.values]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(dimension.values)}")
    return name, chosen


def with_settings(cases: Iterable[Case], wanted: Sequence[Settings]) -> Iterator[Case]:
    """Those that have one of the values of each dimension."""
    return (case for case in cases if all(case.of(name) in values for name, values in wanted))


def random_stream(seed: int, without: set[str]) -> Iterator[Case]:
    """New ones of the stream of a seed."""
    return (case for case in distinct(random_cases(seed)) if case.id not in without)

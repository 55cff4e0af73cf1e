"""Values of settings that the command line also offers as options, before it loads the models and pydantic."""

from enum import StrEnum

LARGEST_SHARD = "5GB"
"""Default maximum size of a shard of merged weights."""


class Dtype(StrEnum):
    """Element types, by the names torch gives them."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class MergeBase(StrEnum):
    """Weights that the adapter is added to. The rule book says why the last two are refused."""

    ORIGINAL = "Original"
    """The base as stored, before any quantisation."""
    DEQUANTIZED = "Dequantized"
    """QLoRA and QDoRA only: the 4-bit values that the adapter was trained on, written in 16 bits."""
    QUANTIZED = "Quantized"
    """The packed weights that the adapter was trained on: refused."""
    TRAINED = "Trained"
    """The model in memory at the end of the training, sharded as it is: refused."""

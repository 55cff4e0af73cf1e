"""PEFT's methods that are not supported, the reasons, and the nearest supported methods.

A manifest may name them, so that validation can give the reason, and jobs of earlier releases stay readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_job.api.method import MethodType


@dataclass(frozen=True)
class Unsupported:
    """Why a method is not supported, and which one to use instead."""

    reason: str
    """The reason, worded to follow "METHOD is not supported:"."""
    nearest: MethodType


_M = MethodType
_RARE = "it is rarely used, and is not tested here"
_SHARED = "its layers share one trained parameter, which two FSDP units cannot both hold: every rank would hold the whole model"
_PERMUTES = "it draws a permutation of every weight matrix on each rank, which takes long for large models"
_PROMPT = (
    "it puts virtual tokens before each sequence: they shift the labels, and of the documents packed into a sequence only the "
    "first would see them"
)
_PREFIX = (
    "it puts virtual tokens before the keys of each sequence: of the documents packed into it, only the first would see them"
)
_OWN_ATTENTION = (
    "it replaces the model's attention by code of PEFT's own, which exists only for Llama, Mistral and GPT-2 and cannot be "
    "expressed as weights: its adapter cannot be merged"
)
_MOVES_RANKS = (
    "after every step it moves ranks between layers, with a state of its own that no checkpoint holds; without these moves its "
    "matrices keep their initial rank"
)
_MEAN_OF_BATCH = (
    "its layers choose among their matrices by the mean over all tokens of a batch: a document's result depends on what is "
    "packed or padded with it, and on its own later tokens, which do not exist yet when the model generates"
)
_MADE_AGAIN = (
    "its file lacks the matrices that belong to its projections: PEFT makes them again from the base's weights wherever the "
    "adapter is loaded, and with two threads instead of one they come out so different that the weights are off by 9 %"
)
_DECOMPOSES = "it decomposes the base's weights again wherever its adapter is loaded, and the result depends on the element type"

UNSUPPORTED: Mapping[MethodType, Unsupported] = {
    _M.ADALORA: Unsupported(_MOVES_RANKS, _M.LORA),
    _M.FOURIERFT: Unsupported(_PERMUTES, _M.VERA),
    _M.RANDLORA: Unsupported("its weights after a few steps depend on the number of ranks, by far more than rounding", _M.VERA),
    _M.VBLORA: Unsupported(_SHARED, _M.VERA),
    _M.XLORA: Unsupported("it mixes adapters that have already been trained, and computes every batch twice", _M.LORA),
    _M.HIRA: Unsupported(_RARE, _M.LOHA),
    _M.SHIRA: Unsupported(_PERMUTES, _M.LORA),
    _M.C3A: Unsupported(_RARE, _M.LOKR),
    _M.WAVEFT: Unsupported(_PERMUTES, _M.VERA),
    _M.OSF: Unsupported(
        "it projects gradients with the whole matrix, but a rank holds a part: two ranks give different weights from one", _M.LORA
    ),
    _M.DELORA: Unsupported(_RARE, _M.DORA),
    _M.GRALORA: Unsupported(_RARE, _M.LORA),
    _M.ROAD: Unsupported(_RARE, _M.OFT),
    _M.GLORA: Unsupported(_RARE, _M.LORA),
    # Measured: packing changes a document's gradients by up to a tenth of their norm.
    _M.LILY: Unsupported(_MEAN_OF_BATCH, _M.LORA),
    _M.PVERA: Unsupported(_RARE, _M.VERA),
    # Measured with 8 layers of 1024 x 1024 random float32 weights.
    _M.FROD: Unsupported(_MADE_AGAIN, _M.VERA),
    _M.UNILORA: Unsupported(_SHARED, _M.VERA),
    _M.ADAMSS: Unsupported("it clusters the weights with scikit-learn, which the trainer image does not have", _M.LORA),
    _M.BEFT: Unsupported("it trains biases alone, which most models do not have", _M.LN_TUNING),
    _M.TINYLORA: Unsupported(_SHARED, _M.VERA),
    _M.PSOFT: Unsupported(_DECOMPOSES, _M.OFT),
    _M.PEANUT: Unsupported(_RARE, _M.LORA),
    _M.SHADOW: Unsupported("it passes objects other than tensors between layers, which losses and FSDP cannot read", _M.LORA),
    _M.SUPERTUNING: Unsupported(_RARE, _M.LORA),
    _M.DEFT: Unsupported(_RARE, _M.LORA),
    _M.POLY: Unsupported("it needs the number of a task with each record, which records do not have", _M.LORA),
    _M.PROMPT_TUNING: Unsupported(_PROMPT, _M.LORA),
    _M.MULTITASK_PROMPT_TUNING: Unsupported(_PROMPT, _M.LORA),
    _M.P_TUNING: Unsupported(_PROMPT, _M.LORA),
    _M.PREFIX_TUNING: Unsupported(_PREFIX, _M.LORA),
    _M.CPT: Unsupported(_PROMPT, _M.LORA),
    _M.CARTRIDGE: Unsupported(_PREFIX, _M.LORA),
    _M.ADAPTION_PROMPT: Unsupported(_OWN_ATTENTION, _M.LORA),
}
"""PEFT method that is not supported -> the reason and the nearest supported method."""

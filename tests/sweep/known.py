"""Mismatches that are understood as far as this page says, and not mended yet. They are counted and printed apart; any other fails
the sweep."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (
    (r"architecture=mamba", "Mamba reads weights of its layers itself: adapters there get no gradient, packed ones have no shape"),
    (r"method=DeLoRA.*float16.*nan", "DeLoRA's normalisation overflows where it computes in float16"),
    (r"method=Lily.*lily_B", "Lily's shared matrices beside a module that is saved whole: gradients are not those of PEFT alone"),
    (r"method=DoRA.*lm_head\.lora_magnitude", "the magnitude of DoRA on an output layer, whose loss is computed in parts"),
    (
        r"architecture=(mixtral|qwen3_moe).*(mlp\.gate\.|logits of the merged model)",
        "routers choose other experts in 16 bits, which the bounds do not know",
    ),
    (
        r"method=FRoD.*merge verification FAILED",
        "merges of FRoD beside units by size are not the adapter: the gate keeps them",
    ),
    (
        r"dropout=0\.1.*qlora-storage-not-param-dtype",
        "nothing that packed values could spoil is compared where dropout draws noise",
    ),
    (r"saved=adapted.*different steps", "two mistakes at once, of which the trainer meets the other one first"),
    (r"two-16-bit-types", "LoRA can compute in another 16-bit type than its base's, DoRA and biases cannot; all are refused"),
    (r"selective-recomputation-of-units", "some combinations of units inside recomputed layers work; all are refused"),
    (r"orthogonal-odd-rank", "an odd rank in a pattern is refused although the module that it names gets no adapter"),
    (r"Dequantized.*logits of the merged model", "the bound of packed values that are unpacked in float16"),
)
"""Regular expression over a result's text, and what is known of it."""


def what_is_known(text: str) -> str | None:
    """What is known of a mismatch; None: nothing."""
    return next((said for pattern, said in KNOWN if re.search(pattern, text, re.DOTALL)), None)

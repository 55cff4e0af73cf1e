"""Mismatches that are understood as far as this page says, and not mended yet. They are counted and printed apart; any other fails
the sweep."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"method=DeLoRA.*bfloat16.*delora_lambda",
        "the gradient of DeLoRA's one scale is a difference of nearly equal sums, of which bfloat16 leaves little",
    ),
    (
        r"method=PVeRA.*param_dtype=float16.*never get a gradient.*pvera_lambda_d",
        "PVeRA in float16 without loss scaling: a gradient rounds to nothing, which float16-without-loss-scaling warns of",
    ),
    (
        r"method=Full.*version=1.*peft_wrap=true.*fsdp1-flat-weight-decay",
        "PEFT's policy gives each weight of full fine-tuning a unit of its own, where decay is right unless a layer has biases",
    ),
)
"""Regular expression over a result's text, and what is known of it."""


def what_is_known(text: str) -> str | None:
    """What is known of a mismatch; None: nothing."""
    return next((said for pattern, said in KNOWN if re.search(pattern, text, re.DOTALL)), None)

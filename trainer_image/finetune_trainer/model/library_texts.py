"""Error texts of libraries that this product matches, where the exception's class does not distinguish errors.

If a release changes the wording, a message gets less helpful, but nothing breaks. A test makes the library raise each text.
"""

from __future__ import annotations

import re

UNKNOWN_ATTENTION = re.compile(r"attn_implementation")
"""transformers: the architecture lacks the requested attention (`_check_and_adjust_attn_implementation`)."""
STACKED_WEIGHTS = re.compile(r"ParamWrapper")
"""PEFT: its adapter for stacked weights does not support a setting, such as dropout (`peft.tuners.lora.layer.ParamWrapper`)."""
REFUSED_MODULE = re.compile(r"Module '([^']+)' is incompatible with")
"""PEFT: a module is refused because of the last part of its name (`tuners_utils._check_lora_target_modules_mamba`)."""
REFUSED_CLASS = re.compile(r"Target module (\w+)\(|arget modules? of type <class '(?:\w+\.)*(\w+)'>")
"""PEFT: the method has no adapter for modules of a class, such as GPT-2's Conv1D (`_create_new_module` of the methods)."""
NOT_DIVISIBLE = re.compile(r"must be divisible by (\w+)")
"""PEFT: a setting does not divide the sizes of a layer (`update_layer` of BOFT)."""
BEYOND_LAYER = re.compile(r"`(r)` \(\d+\) must be less than or equal")
"""PEFT: a setting is larger than a layer can take (`update_layer` of MiSS)."""
NO_DEFAULT_TARGETS = re.compile(r"Please specify `target_modules`")
"""PEFT: it has no default targets for this kind of model."""

"""Checks the adapter before it is published: is it what was trained, does PEFT find its base, and which engines can serve it?

Only headers and settings are checked: digests prove the bytes, and export has checked that the values are finite. The rules are
those of vLLM 0.22 to 0.33 (vllm/lora/peft_helper.py, lora_model.py, model_manager.py, utils.py, vllm/config/lora.py),
and of llama.cpp (convert_lora_to_gguf.py, src/llama-adapter.h).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import MANIFEST_FILE, read_own
from finetune_trainer.inspection.base_name import base_name
from finetune_trainer.weights.headers import ADAPTER_CONFIG_FILE, ADAPTER_FILE, read_header
from finetune_trainer.weights.rounding import READ_DTYPES

TENSORS_KEY = "tensors"
"""Key in a trained adapter's manifest under which the element type and shape of each tensor in training are kept, by name."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank accepts."""
PEFT_PREFIX = "base_model."
"""Prefix of every tensor name that a PeftModel stores; in the names of a module's tensors, `model.` follows."""
_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.(lora_(?P<side>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))")
_SHOWN = 3
_HINT = "delete it and train again: training resumes from the last checkpoint"


def tensor_descriptions(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries for these tensors, by name."""
    names = {dtype: name for name, dtype in READ_DTYPES.items()}
    return {name: {"dtype": names[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in sorted(tensors.items())}


def check_adapter(directory: Path, plan: RunPlan, base_model: Path) -> ServingReport:
    """Check that names, shapes and element types are the same as in training, and that PEFT finds the base.

    Returns a report of how engines serve the adapter. Raises CheckpointError, BrokenCheckpointError.
    """
    header = read_header(directory / ADAPTER_FILE)
    stored = {tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in header}
    settings = json.loads(read_own(directory / ADAPTER_CONFIG_FILE))
    trained = json.loads(read_own(directory / MANIFEST_FILE)).get(TENSORS_KEY, {})
    wrong = sorted(name for name in {*stored, *trained} if stored.get(name) != trained.get(name))
    if wrong or not stored:
        raise CheckpointError(
            f"{directory / ADAPTER_FILE} holds {len(stored)} tensors, but {len(trained)} were trained; the first that differ: "
            f"{wrong[:3]}",
            _HINT,
        )
    if unprefixed := sorted(name for name in stored if not name.startswith(PEFT_PREFIX)):
        raise CheckpointError(
            f"{directory / ADAPTER_FILE}: PEFT would not find {unprefixed[:3]}: names begin with {PEFT_PREFIX}", _HINT
        )
    # Older releases did not read config.json and wrote the plan's name, so both names are accepted.
    names = dict.fromkeys((base_name(plan.model.name, base_model), plan.model.name))
    expected: dict[str, list[str | None]] = {"base_model_name_or_path": [*names], "revision": [plan.model.revision]}
    for key, allowed in expected.items():
        if settings.get(key) not in allowed:
            named = " or ".join(repr(value) for value in allowed)
            raise CheckpointError(
                f"{directory / ADAPTER_CONFIG_FILE}: {key} is {settings.get(key)!r}, but plan and base say {named}", _HINT
            )
    return serving_report(settings, {tensor.name: tensor.shape for tensor in header})


@dataclass(frozen=True)
class ServingReport:
    """How engines serve the adapter: whether they load it and compute what was trained."""

    reasons: tuple[str, ...]
    """Reasons why vLLM does not serve the adapter; empty if it does."""
    max_lora_rank: int | None
    """Smallest --max-lora-rank that suffices; None if vLLM does not serve the adapter."""
    notes: tuple[str, ...] = ()
    """Further conditions under which vLLM serves the adapter."""
    is_for_llama_cpp: bool = False
    """Whether llama.cpp's script converts the adapter into a file with which llama.cpp computes what was trained."""

    @property
    def is_served(self) -> bool:
        return not self.reasons

    def text(self) -> str:
        """Describe in one line, for reports, whether vLLM serves the adapter."""
        if self.is_served:
            return f"loads with --max-lora-rank {self.max_lora_rank}"
        return f"is not served: {'; '.join(self.reasons)}"


def serving_report(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ServingReport:
    """Report how engines serve an adapter.

    settings: content of adapter_config.json. shapes: shapes of the tensors in adapter_model.safetensors, by name.
    """
    if settings.get("peft_type") != "LORA":
        return ServingReport((f"it supports only LoRA, and this is {settings.get('peft_type')}",), None)
    factors = [(match, shape) for name, shape in shapes.items() if (match := _FACTOR.fullmatch(name)) is not None]
    reasons = _refusals(settings, shapes)
    # The rank of a module is the number of rows of A (lora_A, or lora_embedding_A).
    ranks = {match["module"]: shape[0] for match, shape in factors if "A" in (match["side"], match["embedding"]) and shape}
    # PEFT scales the product of the factors by these `scales`; keys of alpha_pattern match the end of the module's name.
    alpha, root = settings.get("lora_alpha", 0), math.sqrt if settings.get("use_rslora") else float
    alphas = (settings.get("alpha_pattern") or {}).items()
    scales = {
        module: next((value for key, value in alphas if re.match(rf"(.*\.)?({key})$", module)), alpha) / root(rank)
        for module, rank in ranks.items()
    }
    # llama.cpp scales every module by lora_alpha over the module's rank; its files hold no other scale.
    is_for_llama_cpp = not reasons and all(math.isclose(scale, alpha / ranks[module]) for module, scale in scales.items())
    largest = max((*ranks.values(), *(settings.get("rank_pattern") or {}).values(), settings.get("r", 0)))
    needed = next((rank for rank in VLLM_RANKS if rank >= largest), None)
    if needed is None:
        reasons.append(f"its rank is {largest}, and the highest --max-lora-rank is {VLLM_RANKS[-1]}")
    if reasons:
        return ServingReport(tuple(reasons), None, is_for_llama_cpp=is_for_llama_cpp)
    notes = ["vLLM's class of the base model must support adapters on every module that this adapter changes"]
    if any("lora_embedding_" in name for name in shapes):
        notes.append("vLLM supports an adapter on an embedding only if its class of the base model names the embedding modules")
    # Up to version 0.31, vLLM ignored the patterns: it scaled every module by the global lora_alpha and r.
    common = alpha / root(settings["r"])
    if others := [(module, scale) for module, scale in scales.items() if not math.isclose(scale, common)]:
        difference = f"rank_pattern or alpha_pattern make the scale {others[0][1]:g} for {others[0][0]} and {common:g} elsewhere"
        notes.append(f"{difference}: use vLLM 0.32 or later")
    return ServingReport((), needed, tuple(notes), is_for_llama_cpp)


def _refusals(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the reasons why vLLM does not serve an adapter, apart from its rank."""
    reasons = []
    if settings.get("use_dora"):
        reasons.append("it does not support DoRA")
    if settings.get("modules_to_save"):
        reasons.append(f"it replaces no whole modules, and modules_to_save names {', '.join(settings['modules_to_save'])}")
    if settings.get("bias", "none") != "none":
        reasons.append(f"it supports no biases, and bias is {settings['bias']}")
    if parameters := settings.get("target_parameters"):
        # For models that vLLM does not know, it guesses the layout of fused expert weights; llama.cpp's script finds no layer
        # with such a name.
        named = ", ".join(parameters)
        reasons.append(f"its support for adapters of parameters depends on the model, and target_parameters names {named}")
    unknown, sides = [], dict[str, set[str]]()
    for name in shapes:
        if match := _FACTOR.fullmatch(name):
            sides.setdefault(match["module"], set()).add(match["side"] or match["embedding"])
        elif not name.endswith("lora_magnitude_vector"):
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        reasons.append(f"it knows no tensors called {', '.join(sorted(unknown)[:_SHOWN])}{more}")
    if alone := sorted(module for module, both in sides.items() if len(both) == 1):
        reasons.append(f"{alone[0]} has only one of lora_A and lora_B")
    return reasons

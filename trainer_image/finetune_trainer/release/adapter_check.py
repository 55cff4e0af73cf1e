"""Checks of the trained adapter before it is published: it is what was trained, PEFT finds its base, and which engines serve it.

Only headers and settings are checked: digests prove its bytes, and its values were finite when they were written. The rules are
those of vLLM, read in 0.22 to 0.33 (vllm/lora/peft_helper.py, lora_model.py, model_manager.py, utils.py, vllm/config/lora.py),
and of llama.cpp (convert_lora_to_gguf.py, src/llama-adapter.h).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
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
"""Key in the manifest of a trained adapter: element type and shape by name, as in training."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank accepts."""
PEFT_PREFIX = "base_model."
"""Prefix of every stored name of a PeftModel; names of one module's tensors continue with `model.`."""
_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.(lora_(?P<side>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))")
_SHOWN = 3
_HINT = "delete it and train again: training resumes from the last checkpoint"


def tensor_descriptions(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """The manifest's entries for tensors, by name."""
    names = {dtype: name for name, dtype in READ_DTYPES.items()}
    return {name: {"dtype": names[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in sorted(tensors.items())}


def check_adapter(directory: Path, plan: RunPlan, base_model: Path) -> ServingReport:
    """Check that names, shapes and element types are those of training, and that PEFT finds the base; returns how engines serve
    it.

    Raises CheckpointError, BrokenCheckpointError.
    """
    header = read_header(directory / ADAPTER_FILE)
    stored = {tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in header}
    settings = json.loads(read_own(directory / ADAPTER_CONFIG_FILE))
    trained = json.loads(read_own(directory / MANIFEST_FILE)).get(TENSORS_KEY, {})
    wrong = sorted(name for name in {*stored, *trained} if stored.get(name) != trained.get(name))
    if wrong or not stored:
        raise CheckpointError(
            f"{directory / ADAPTER_FILE}: holds {len(stored)} tensors, {len(trained)} were trained; first that differ: "
            f"{wrong[:3]}",
            _HINT,
        )
    if strange := sorted(name for name in stored if not name.startswith(PEFT_PREFIX)):
        raise CheckpointError(
            f"{directory / ADAPTER_FILE}: PEFT would not find {strange[:3]}: names begin with {PEFT_PREFIX}", _HINT
        )
    # Releases that did not read config.json have written the plan's name.
    names = dict.fromkeys((base_name(plan.model.name, base_model), plan.model.name))
    expected: dict[str, list[str | None]] = {"base_model_name_or_path": [*names], "revision": [plan.model.revision]}
    for key, allowed in expected.items():
        if settings.get(key) not in allowed:
            named = " or ".join(repr(value) for value in allowed)
            raise CheckpointError(
                f"{directory / ADAPTER_CONFIG_FILE}: {key} is {settings.get(key)!r}, by plan and base it is {named}", _HINT
            )
    return serving_report(settings, {tensor.name: tensor.shape for tensor in header})


@dataclass(frozen=True)
class ServingReport:
    """Whether vLLM loads the adapter and computes what was trained."""

    reasons: tuple[str, ...]
    """Reasons why it does not; empty if it does."""
    max_lora_rank: int | None
    """Smallest --max-lora-rank; None if vLLM does not serve the adapter."""
    notes: tuple[str, ...] = ()
    """Further conditions."""
    is_for_llama_cpp: bool = False
    """Whether llama.cpp's script converts it into a file that computes what was trained."""

    @property
    def is_served(self) -> bool:
        return not self.reasons

    def text(self) -> str:
        """One line for reports."""
        if self.is_served:
            return f"loads with --max-lora-rank {self.max_lora_rank}"
        return f"is not served: {'; '.join(self.reasons)}"


def serving_report(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ServingReport:
    """How engines serve an adapter. settings: adapter_config.json. shapes: of the tensors of adapter_model.safetensors by
    name.
    """
    if settings.get("peft_type") != "LORA":
        return ServingReport((f"it takes LoRA alone, and this is {settings.get('peft_type')}",), None)
    ranks = _ranks(shapes)
    reasons = [*_features(settings), *_names(shapes)]
    is_for_llama_cpp = not reasons and _is_scaled_by_own_ranks(settings, ranks)
    largest = max((*ranks.values(), *(settings.get("rank_pattern") or {}).values(), settings.get("r", 0)))
    needed = next((rank for rank in VLLM_RANKS if rank >= largest), None)
    if needed is None:
        reasons.append(f"its rank is {largest}, and the highest --max-lora-rank is {VLLM_RANKS[-1]}")
    if reasons:
        return ServingReport(tuple(reasons), None, is_for_llama_cpp=is_for_llama_cpp)
    return ServingReport((), needed, (*_notes(shapes), *_scaling(settings, ranks)), is_for_llama_cpp)


def _features(settings: Mapping[str, Any]) -> list[str]:
    reasons = []
    if settings.get("use_dora"):
        reasons.append("it has no DoRA")
    if settings.get("modules_to_save"):
        reasons.append(f"it replaces no whole modules, and modules_to_save names {', '.join(settings['modules_to_save'])}")
    if settings.get("bias", "none") != "none":
        reasons.append(f"it takes no biases, and bias is {settings['bias']}")
    if parameters := settings.get("target_parameters"):
        # For joined weights of experts vLLM guesses the layout in models that it does not know; llama.cpp's script finds no layer
        # of that name.
        named = ", ".join(parameters)
        reasons.append(f"what it makes of adapters of parameters depends on the model, and target_parameters names {named}")
    return reasons


def _names(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    matches = {name: _FACTOR.fullmatch(name) for name in shapes}
    unknown = sorted(name for name, match in matches.items() if match is None and not name.endswith("lora_magnitude_vector"))
    reasons = []
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        reasons.append(f"it knows no tensors called {', '.join(unknown[:_SHOWN])}{more}")
    sides: dict[str, set[str]] = {}
    for match in matches.values():
        if match is not None:
            sides.setdefault(match["module"], set()).add(match["side"] or match["embedding"])
    alone = sorted(module for module, both in sides.items() if len(both) == 1)
    if alone:
        reasons.append(f"{alone[0]} has one of lora_A and lora_B alone")
    return reasons


def _ranks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Rank by module: the number of rows of A."""
    matches = ((match, shape) for name, shape in shapes.items() if (match := _FACTOR.fullmatch(name)) is not None)
    return {match["module"]: shape[0] for match, shape in matches if "A" in (match["side"], match["embedding"]) and shape}


def _scaling(settings: Mapping[str, Any], ranks: Mapping[str, int]) -> list[str]:
    """Note if modules have different scales. Until 0.31 vLLM scaled every module by lora_alpha and r of the settings, whatever
    the patterns.
    """
    common = settings["lora_alpha"] / _root(settings)(settings["r"])
    for module, scale in _scales(settings, ranks).items():
        if not math.isclose(scale, common):
            difference = f"rank_pattern or alpha_pattern make the scale {scale:g} for {module} and {common:g} elsewhere"
            return [f"{difference}: take vLLM 0.32 or later"]
    return []


def _is_scaled_by_own_ranks(settings: Mapping[str, Any], ranks: Mapping[str, int]) -> bool:
    """Whether llama.cpp scales rightly. It scales every module by lora_alpha over the module's rank; its files have nothing
    else.
    """
    scales = _scales(settings, ranks)
    return all(math.isclose(scale, settings["lora_alpha"] / ranks[module]) for module, scale in scales.items())


def _scales(settings: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, float]:
    """The factor, by module, with which PEFT multiplies the product of factors."""
    alphas, root = settings.get("alpha_pattern") or {}, _root(settings)
    return {module: _first_match(alphas, module, settings["lora_alpha"]) / root(rank) for module, rank in ranks.items()}


def _root(settings: Mapping[str, Any]) -> Callable[[float], float]:
    return math.sqrt if settings.get("use_rslora") else float


def _first_match(pattern: Mapping[str, int], module: str, otherwise: int) -> int:
    """The value for a module, which PEFT looks up by the end of the module's name."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _notes(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    notes = ["vLLM's class of the base model must take adapters on every module that this adapter changes"]
    if any("lora_embedding_" in name for name in shapes):
        notes.append("vLLM takes an adapter on an embedding only if its class of the base model names the embedding modules")
    return notes

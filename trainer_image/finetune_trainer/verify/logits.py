"""Logits of base + adapter through PEFT against the merged model, on given prompts. One model in memory at a time.

In: three directories and token ids. Out: LogitFigures. Called by run.py. Nothing of the merge's code takes part, so this
also catches what merge and tensor check might get wrong in the same way: names, orientation, scaling, ties.
Reference logits wait on disk, since positions times vocabulary can exceed the models.
"""

import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune_trainer.verify.gate import UNIT_ROUNDOFF, LogitFigures

POSITIONS_AT_ONCE = 64
"""Positions whose softmax over the vocabulary is held in fp64 at a time."""


def compare_logits(base: Path, adapter: Path, merged: Path, prompts: Sequence[Sequence[int]], scratch: Path) -> LogitFigures:
    """prompts: token ids, each at least one token. scratch: where reference logits are kept meanwhile.

    Raises ValueError without prompts or with an empty one.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"prompts: {len(prompts)} given, each must hold at least one token id, or nothing is compared.")
    figures = _Sums()
    with tempfile.TemporaryDirectory(prefix="verify-", dir=scratch) as name:
        directory = Path(name)
        model = _load(base)
        tie_tolerance = 2 * UNIT_ROUNDOFF[str(model.dtype).removeprefix("torch.")]
        adapted = _with_adapter(model, adapter)
        for number, prompt in enumerate(prompts):
            reference = _logits(adapted, prompt)
            with adapted.disable_adapter():
                figures.effect_kl += float(_kl(reference, _logits(adapted, prompt)).sum())
            np.save(directory / f"{number}.npy", reference.numpy())
        del model, adapted
        gc.collect()
        model = _load(merged)
        tie_tolerance = max(tie_tolerance, 2 * UNIT_ROUNDOFF[str(model.dtype).removeprefix("torch.")])
        for number, prompt in enumerate(prompts):
            path = directory / f"{number}.npy"
            figures.add(torch.from_numpy(np.load(path)), _logits(model, prompt), tie_tolerance)
            path.unlink()
    return LogitFigures(
        num_prompts=len(prompts),
        num_positions=figures.num_positions,
        max_abs_difference=figures.max_abs_difference,
        max_abs_logit=figures.max_abs_logit,
        mean_kl=figures.kl / figures.num_positions,
        effect_mean_kl=figures.effect_kl / figures.num_positions,
        top1_agreement=figures.num_agreeing / figures.num_positions,
    )


class _Sums:
    def __init__(self) -> None:
        self.num_positions = self.num_agreeing = 0
        self.kl = self.effect_kl = self.max_abs_difference = self.max_abs_logit = 0.0

    def add(self, reference: torch.Tensor, merged: torch.Tensor, tie_tolerance: float) -> None:
        """reference, merged: fp32 (positions, vocabulary)."""
        difference = (reference - merged).abs().max()
        # max() of Python drops a NaN that comes second; torch keeps it.
        self.max_abs_difference = float(torch.maximum(torch.tensor(self.max_abs_difference), difference))
        self.max_abs_logit = max(self.max_abs_logit, float(reference.abs().max()))
        self.kl += float(_kl(reference, merged).sum())
        best = reference.max(dim=1).values
        chosen = reference.gather(1, merged.argmax(dim=1, keepdim=True)).squeeze(1)
        self.num_agreeing += int((best - chosen <= tie_tolerance * best.abs()).sum())
        self.num_positions += reference.shape[0]


def _kl(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) per position, in nats, from logits (positions, vocabulary)."""
    parts = []
    for start in range(0, reference.shape[0], POSITIONS_AT_ONCE):
        first = reference[start : start + POSITIONS_AT_ONCE].double().log_softmax(dim=1)
        second = other[start : start + POSITIONS_AT_ONCE].double().log_softmax(dim=1)
        parts.append((first.exp() * (first - second)).sum(dim=1))
    return torch.cat(parts)


def _logits(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(prompt)]), use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True, use_safetensors=True).eval()


def _with_adapter(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter)).eval()

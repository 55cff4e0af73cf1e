"""Computes first values of adapters that start from the base's weights: PiSSA (Meng et al., 2024), OLoRA (Buyukakyuz, 2024).

They are computed once for a run and kept on its workspace: another machine or number of threads would give other bits, so a
restart that computed them again would not continue the same training. A checkpoint records the file's digest.

`python -m finetune_trainer.model.first_values` computes them for preflight, before a GPU is allocated: it reads the plan from
standard input and writes the digest to standard output.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from finetune_job.api.method import LoraInit
from finetune_job.module_names import ADAPTER
from finetune_job.plan.digest import learning_sha256
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.adapters import FIRST_VALUES
from finetune_trainer.checkpoint.manifest import read_manifest
from finetune_trainer.checkpoint.start import START_FIELD, START_HINT
from finetune_trainer.errors import CheckpointError, InvariantError, ModelError
from finetune_trainer.files import TEMPORARY_MARK, file_sha256, open_regular, sync_directory, sync_file, temporary_beside
from finetune_trainer.model.adapters import attach, lora_layers
from finetune_trainer.model.dtypes import resolve_dtypes
from finetune_trainer.model.load import build_with_lazy_zeros, load_base_model, stored_dtype
from finetune_trainer.model.load_shards import base_name, read_into, stored_by_name, tied_headers
from finetune_trainer.processes.start import die_with, end

log = logging.getLogger(__name__)
_RUN = "learning_sha256"
"""Key in the file's metadata for the run that the values belong to."""


def ensure_first_values(plan: RunPlan, base_model: Path, path: Path, start: Path | None = None) -> str:
    """Return the SHA-256 of `path`, the file with this run's first values, after writing the file if it is missing.

    At most the adapter and one whole weight are in memory. start: a checkpoint of another run from which this one begins. Its
    parameters are relative to that run's first values, which are copied to `path`. Raises ModelError, CheckpointError, OSError.
    """
    if start is not None:
        _copy_from(start, path)
    elif _run_of(path) != learning_sha256(plan):
        tensors = _decomposed(plan, base_model)
        # Only one entry of metadata, since safetensors writes several in any order, and equal values must have equal digests.
        _write(path, lambda temporary: save_file(tensors, temporary, metadata={_RUN: learning_sha256(plan)}))
    return file_sha256(path)


def _copy_from(start: Path, path: Path) -> None:
    """Copy the first values of the run that wrote the checkpoint `start` to `path`, unless they are already there.

    Once the values are there, the checkpoint is no longer needed.
    """
    try:
        wanted = read_manifest(start, None).origin.first_values
    except CheckpointError:
        if _run_of(path) is None:
            raise
        return
    if _run_of(path) is not None and file_sha256(path) == wanted:
        return
    source = start.parents[1] / path.name
    if wanted is None or _run_of(source) is None or file_sha256(source) != wanted:
        raise CheckpointError(f"{START_FIELD}: {source} does not hold the first values that {start} was trained from", START_HINT)
    _write(path, lambda temporary: shutil.copyfile(source, temporary))


def _run_of(path: Path) -> str | None:
    try:
        # Opening a pipe at this path would block, and a link would lead to another file.
        open_regular(path, follow=False).close()
        with safe_open(path, framework="pt") as file:
            run: str | None = (file.metadata() or {}).get(_RUN)
            return run
    except (OSError, SafetensorError):
        return None


def _write(path: Path, save: Callable[[Path], object]) -> None:
    for leftover in path.parent.glob(f"{path.name}{TEMPORARY_MARK}*"):
        leftover.unlink(missing_ok=True)
    temporary = temporary_beside(path)
    try:
        save(temporary)
        sync_file(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _decomposed(plan: RunPlan, base_model: Path) -> dict[str, torch.Tensor]:
    """Return the first values by their names in PEFT's files, in the element type in which the base is loaded."""
    if plan.method.lora is None:
        raise InvariantError(f"{plan.method.type.value} has no first values")
    loaded = resolve_dtypes(plan, stored_dtype(base_model)).load
    base = build_with_lazy_zeros(plan, base_model)
    headers = None if plan.model.allow_remote_code else stored_by_name(base, base_model)
    if headers is None:
        log.info("the whole model is loaded: its files do not hold the parameters as %s does", type(base).__name__)
        unpacked = plan.model_copy(update={"method": plan.method.model_copy(update={"quantization": None})})
        base = load_base_model(unpacked, base_model, torch.device("cpu"))
    else:
        headers = {**headers, **tied_headers(base, headers)}
    values: dict[str, torch.Tensor] = {}
    layers = lora_layers(attach(base, plan))
    for number, (name, layer) in enumerate(layers.items(), start=1):
        base_layer = layer.get_base_layer()
        weight = torch.empty(base_layer.weight.shape, dtype=torch.float32)
        if headers is None:
            weight.copy_(base_layer.weight.detach())
        else:
            read_into(headers[base_name(f"{name}.base_layer.weight")], 0, weight.view(-1), loaded)
        began = time.monotonic()
        a, b = decompose(
            weight.T if isinstance(base_layer, Conv1D) else weight,
            plan.method.lora.init_lora_weights,
            layer.r[ADAPTER],
            layer.scaling[ADAPTER],
            plan.training.seed,
        )
        if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ModelError(
                f"spec.method.lora.initLoraWeights: the weight of {base_name(name)} cannot be decomposed: values are not finite",
                "check the model's files, or remove initLoraWeights",
            )
        values[f"{name}.lora_A.weight"] = a.to(loaded).contiguous()
        values[f"{name}.lora_B.weight"] = b.to(loaded).contiguous()
        log.info("first values of %s, %d of %d, in %.1f s", base_name(name), number, len(layers), time.monotonic() - began)
    return values


def decompose(weight: torch.Tensor, init: LoraInit, rank: int, scaling: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [rank, inputs] and B [outputs, rank] of `weight` [outputs, inputs], all in float32.

    They are computed as in peft (LoraLayer.pissa_init, olora_init), but without the columns and rows of OLoRA that are not used.
    """
    if init is LoraInit.OLORA:
        columns, _ = torch.linalg.qr(weight[:, :rank])
        return columns.T @ weight, columns
    if init is LoraInit.PISSA:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            left, values, columns = torch.svd_lowrank(weight, rank, niter=int(init.value.rpartition("_")[2]))
        right = columns.T
    root = (values[:rank] / scaling).sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def start_from(model: PeftModel, path: Path) -> None:
    """Set each adapter, and the frozen adapter that is subtracted from it, to the values in the file. Call this before sharding.

    Both get the same bits, so training starts from the base model. Raises InvariantError if the file belongs to another model.
    """
    with safe_open(path, framework="pt") as file, torch.no_grad():
        names = set(file.keys())
        for name, layer in lora_layers(model).items():
            for kind, factors in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                stored = f"{name}.{kind}.weight"
                if stored not in names:
                    raise InvariantError(f"{path} holds no first values of {stored}")
                values = file.get_tensor(stored)
                for adapter in (FIRST_VALUES, ADAPTER):
                    if factors[adapter].weight.shape != values.shape:
                        raise InvariantError(f"{path}: {stored} has shape {tuple(values.shape)}")
                    factors[adapter].weight.copy_(values)


def main() -> int:
    """Run as a child process of preflight, which does not import torch itself."""
    arguments = argparse.ArgumentParser()
    for name in ("--parent", "--model", "--to"):
        arguments.add_argument(name, required=True)
    arguments.add_argument("--start", type=Path)
    parsed = arguments.parse_args()
    die_with(int(parsed.parent))
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Output of libraries must not mix with the answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    plan = RunPlan.model_validate_json(sys.stdin.read())
    answer.write(ensure_first_values(plan, Path(parsed.model), Path(parsed.to), parsed.start))
    answer.flush()
    return 0


if __name__ == "__main__":
    end(main())

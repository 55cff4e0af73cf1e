"""`observe(case)`: run a case on its ranks next to a single process with the same global batch, and compare."""

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.pitfalls.lab import cache
from tests.pitfalls.lab.case import STAGES, Case
from tests.pitfalls.lab.observation import Observation
from tests.pitfalls.lab.ranks import RankResult, run_on_kept_ranks
from tests.pitfalls.lab.work import SEQUENCES_PER_RANK, work


def observe(case: Case) -> Observation:
    """What the libraries make of these settings; kept until the case, the lab or a library changes.

    Raises TimeoutError where ranks hang, RuntimeError where a rank dies or the single process fails.
    """
    key = cache.digest(dataclasses.asdict(case))
    kept = cache.load(key)
    if isinstance(kept, Observation):
        return kept
    with tempfile.TemporaryDirectory() as scratch:
        results = run_on_kept_ranks(work, case, SEQUENCES_PER_RANK * case.world_size, scratch, world_size=case.world_size)
        observation = _observation(case, results, Path(scratch))
    cache.keep(key, observation)
    return observation


def single_process(case: Case) -> Path:
    """The directory that one unsharded process leaves that trains the case on the same global batch."""
    last = min(case.until, "save", key=STAGES.index)
    plain = dataclasses.replace(
        Case(model=case.model, config=case.config, dtype=case.dtype, bits=case.bits, compute=case.compute, method=case.method),
        adapter=case.adapter,
        autocast=case.autocast,
        unpacked=case.bits == 4,
        kbit_preparation=case.kbit_preparation,
        compute_autocast=case.compute_autocast,
        version=None,
        world_size=1,
        steps=case.steps,
        until=last,
    )
    sequences = SEQUENCES_PER_RANK * case.world_size
    place = cache.directory() / "single" / cache.digest([dataclasses.asdict(plain), sequences])
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=place.parent))
    (result,) = run_on_kept_ranks(work, plain, sequences, str(made), world_size=1)
    if result.failed:
        shutil.rmtree(made)
        raise RuntimeError(f"one process fails too, in {result.stage}: {result.trace}")
    try:
        made.rename(place)
    except OSError:
        shutil.rmtree(made)
    return place


def _observation(case: Case, results: list[RankResult], scratch: Path) -> Observation:
    failed = next((result for result in results if result.failed), None)
    if failed is not None:
        if failed.stage not in STAGES:
            raise RuntimeError(f"{case}: {failed.error}\n{failed.trace}")
        return Observation(failed_in=failed.stage, error=failed.error, trace=failed.trace)
    first = results[0].value
    found = {name: first[name] for name in ("units", "trained")}
    found |= {name: first[name] for name in ("resume_error", "merge_error", "merge_effect") if name in first}
    if case.reaches("backward") and case.version is not None:
        plain = single_process(case)
        found |= _gradients(_tensors(scratch / "gradients"), _tensors(plain / "gradients"))
        if case.reaches("save") and case.method is not None:
            found |= _adapter(scratch, plain)
    if "losses" in first:
        found["losses"] = tuple(result.value["losses"] for result in results)
    return Observation(**found)


def _tensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def _gradients(found: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """How far gradients are from those of one process."""
    without = tuple(
        name for name, value in right.items() if bool(value.any()) and (name not in found or not bool(found[name].any()))
    )
    size = max((float(value.abs().max()) for value in right.values()), default=0.0)
    worst = 0.0
    for name, value in right.items():
        if name not in found:
            continue
        difference = float((found[name] - value).abs().max())
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return {"gradient_error": worst / size if size else worst, "without_gradient": without}


def _adapter(scratch: Path, plain: Path) -> dict[str, Any]:
    """What the saved file holds next to what one process saves, and whether it is what was trained."""
    path = scratch / "adapter" / "adapter_model.safetensors"
    saved = _tensors(path) if path.is_file() else {}
    right = {name: tuple(value.shape) for name, value in _tensors(plain / "adapter" / "adapter_model.safetensors").items()}
    shapes = {name: tuple(value.shape) for name, value in saved.items()}
    trained = {_stored_name(name): value for name, value in _tensors(scratch / "trained").items()}
    both = [name for name in saved if name in trained and saved[name].shape == trained[name].shape]
    return {
        "saved": shapes,
        "save_missing": tuple(sorted(name for name, shape in right.items() if shapes.get(name) != shape)),
        "save_extra": tuple(sorted(set(shapes) - set(right))),
        "save_error": max((float((saved[name].float() - trained[name]).abs().max()) for name in both), default=math.inf),
    }


def _stored_name(name: str) -> str:
    """The name under which PEFT stores a parameter: without that of the adapter."""
    return ".".join(part for part in name.replace("modules_to_save.default", "").split(".") if part not in ("default", ""))

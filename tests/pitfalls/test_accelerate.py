"""Adapters on FSDP 2 as accelerate shards, saves and loads them; this trainer does it by itself."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.pitfalls.lab.accelerate_path import load, prepared, save, stand_in
from tests.pitfalls.lab.build import adapted, load_base
from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.gather import whole_parameters
from tests.pitfalls.lab.ranks import RankResult, run_ranks
from tests.pitfalls.manifests import findings


def model_with(case: Case, accelerator: Any, value: float, recompute: bool) -> Any:
    """A prepared model all of whose adapter values are `value`."""
    import torch
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    model = adapted(case, load_base(case))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(value)
    if recompute:
        accelerator.state.fsdp_plugin.activation_checkpointing = True
        accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
        model = fsdp2_apply_ac(accelerator, model)
    return prepared(accelerator, model)


def saved_and_loaded(rank: int, case: Case, form: str, recompute: bool, directory: str) -> float:
    """How far the values are after loading from those that were saved, at worst."""
    accelerator = stand_in(case, form)
    trained = model_with(case, accelerator, 1.0, recompute)
    names = {name for name, value in trained.named_parameters() if value.requires_grad}
    save(accelerator, trained, Path(directory))
    fresh = model_with(case, accelerator, 2.0, recompute)
    load(accelerator, fresh, Path(directory))
    plain = {name.replace("_checkpoint_wrapped_module.", "") for name in names}
    found = whole_parameters(case, fresh, plain)
    assert set(found) == plain
    return max(float((value - 1.0).abs().max()) for value in found.values())


def run(case: Case, form: str, directory: Path, recompute: bool = False) -> RankResult:
    return run_ranks(saved_and_loaded, case, form, recompute, str(directory))[0]


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_an_adapter_is_saved_and_loaded_whole(form, tmp_path):
    assert run(Case(version=2), form, tmp_path).value == 0.0


def test_a_full_checkpoint_of_an_adapter_on_bytes_cannot_be_loaded(tmp_path):
    assert "KeyError" in run(Case(version=2, bits=4), "FULL_STATE_DICT", tmp_path / "bytes").error
    assert run(Case(version=2, bits=4), "SHARDED_STATE_DICT", tmp_path / "sharded").value == 0.0
    floats = Case(version=2, bits=4, storage="bfloat16", dtype="bfloat16")
    assert run(floats, "FULL_STATE_DICT", tmp_path / "floats").value == 0.0


def test_recomputed_layers_are_not_restored_from_a_sharded_checkpoint(tmp_path):
    assert run(Case(version=2), "SHARDED_STATE_DICT", tmp_path / "sharded", recompute=True).value == 1.0
    assert run(Case(version=2), "FULL_STATE_DICT", tmp_path / "full", recompute=True).value == 0.0


def packed_elements(rank: int, case: Case) -> tuple[int, int, list[str]]:
    """Bytes of packed weights that this rank holds, those of the whole model, and what accelerate says."""
    import torch

    model = adapted(case, load_base(case))
    packed = [name for name, value in model.named_parameters() if value.dtype is torch.uint8]
    whole = sum(model.get_parameter(name).numel() for name in packed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = prepared(stand_in(case), model)
    held = [model.get_parameter(name) for name in packed]
    local = sum((value.to_local() if hasattr(value, "to_local") else value).numel() for value in held)
    return local, whole, [str(warning.message) for warning in caught]


def test_accelerate_leaves_bytes_unsharded():
    held, whole, said = run_ranks(packed_elements, Case(version=2, bits=4))[0].value
    assert held == whole > 0
    assert any("Excluding from FSDP2 sharding" in text for text in said)
    assert "fsdp2-qlora-integer-storage" in findings({"version": 2}, type="QLoRA", quantization={"quantStorage": "uint8"})
    assert "fsdp2-qlora-integer-storage" not in findings({"version": 2}, type="QLoRA")

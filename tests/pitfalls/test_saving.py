"""Adapter files that a script writes from a sharded model: empty, broken or whole."""

import math

import pytest

from tests.pitfalls.lab.case import Case
from tests.pitfalls.lab.expect import fails
from tests.pitfalls.lab.observe import observe


@pytest.mark.parametrize("save", ["naive", "gathered"])
@pytest.mark.parametrize(
    "settings", [{"policy": "peft"}, {"policy": "transformer", "use_orig_params": True}], ids=["peft", "layers"]
)
def test_pefts_save_finds_no_tensor_under_fsdp_1(save, settings):
    """Neither as in one process nor with a gathered state dict: it looks for names that hold those of the wrappers."""
    found = observe(Case(save=save, until="save", **settings))
    assert not found.failed
    assert found.saved == {}
    assert set(found.save_missing)
    assert found.save_error == math.inf


def test_fsdp_2_saves_what_was_gathered_and_nothing_else():
    fails(
        Case(version=2, save="naive", until="save"), "save", "Attempted to access the data pointer on an invalid python storage"
    )
    whole = observe(Case(version=2, until="save"))
    assert (whole.save_missing, whole.save_extra, whole.save_error) == ((), (), 0.0)
    assert whole.saved


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("adapter", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_torchs_own_state_dicts_resume_exactly(version, adapter):
    found = observe(Case(version=version, adapter=adapter, until="resume"))
    assert not found.failed, found.trace
    assert found.resume_error == 0.0

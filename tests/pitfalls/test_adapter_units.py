"""Adapters outside LoRA's family in FSDP units, in our trainer: apart from the base, or next to it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pitfalls.manifests import plans
from tests.pitfalls.our_ranks import Trained, plan_of, train
from tests.support.method_settings import SETTINGS
from tests.support.tiny_model import write_tiny_llama

F = "parallelism.fsdp."
PAIR = {"parallelism.processesPerNode": 2}
FIRST = {**PAIR, F + "version": 1}
FLAT = {**FIRST, F + "useOrigParams": False}
LEAVES = {**FIRST, F + "peftWrapPolicy": True}
PARTED = {"OFT": LEAVES, "LNTuning": LEAVES}
TOLERANCE = 1e-5


def method(name: str) -> dict[str, Any]:
    return {"method.type": name, "method.settings": SETTINGS.get(name, {})}


UNIT = plans("fsdp1-adapter-unit", {**method("LoHa"), **FLAT})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pair(base: Path) -> dict[str, Trained]:
    parted = {name: plan_of({**method(name), **fsdp}) for name, fsdp in PARTED.items()}
    return train({"flat": UNIT[0], "LoHa": UNIT[1], **parted}, base)


@pytest.fixture(scope="module")
def alone(base: Path) -> dict[str, Trained]:
    return train({name: plan_of(method(name)) for name in ("LoHa", *PARTED)}, base, world_size=1)


def test_parameters_that_are_no_modules_need_original_ones(pair: dict[str, Trained], alone: dict[str, Trained]):
    """`fsdp1-adapter-unit`; preflight says the same of units that may or may not be small enough."""
    assert "ConfigError: spec.parallelism.fsdp.useOrigParams: false cannot shard" in pair["flat"].error
    assert "trained and frozen parameters" in pair["flat"].error
    assert pair["LoHa"].distance(alone["LoHa"]) < TOLERANCE


@pytest.mark.parametrize("name", PARTED)
def test_parameters_in_units_of_their_own_lie_flat(name: str, pair: dict[str, Trained], alone: dict[str, Trained]):
    assert pair[name].distance(alone[name]) < TOLERANCE


def test_adapters_in_16_bits_stand_still(tmp_path: Path):
    """At the default learning rate: a vector that starts at 1 has no neighbour that is near enough."""
    wrong, right = plans("fsdp1-adapter-16-bit", {**method("IA3"), **FIRST, "model.dtype": "bfloat16"})
    found = train({"wrong": wrong, "right": right}, write_tiny_llama(tmp_path, torch.bfloat16), rate=wrong.training.learning_rate)
    assert not any(each.error for each in found.values()), found
    assert not found["wrong"].has_moved
    assert found["right"].has_moved

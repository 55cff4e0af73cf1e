"""Writes what goes with the weights, in an order that lets a reader trust SHA256SUMS: it is there only when all else is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from finetune_job.layout import OutputLayout
from finetune_trainer.files import file_sha256, write_durably
from finetune_trainer.release.build import hashed_weights, is_sealed_with, unseal, write_checksums
from finetune_trainer.release.card import adapter_card, model_card
from finetune_trainer.release.facts import RunFacts
from finetune_trainer.release.places import CARD, Places
from finetune_trainer.release.provenance import encode, stated_plan, statement


def write_release_files(output: OutputLayout, facts: RunFacts) -> dict[str, str]:
    """Card, provenance and checksums beside the weights; their digests, by the names of the report's facts.

    What stands there already is left alone. Raises OSError, CheckpointError.
    """
    places = facts.places
    if places.needs_adapter_card:
        _write(output, output.adapter / CARD, adapter_card(facts))
    _write(output, output.model_card, model_card(facts))
    weights = {places.at_destination(name): sha256 for name, sha256 in hashed_weights(output, places).items()}
    _write(output, output.provenance, encode(statement(facts, weights)).decode())
    write_checksums(output, places)
    return release_digests(output)


def is_complete(output: OutputLayout, places: Places, plan_sha256: str, digests: Mapping[str, str]) -> bool:
    """Whether the results of this very plan are complete and hold files of these digests, by their names in the results."""
    if not is_sealed_with(output, places, digests):
        return False
    return output.provenance.is_file() and stated_plan(output.provenance.read_bytes()) == plan_sha256


def release_digests(output: OutputLayout) -> dict[str, str]:
    """Of what describes complete results. Raises OSError."""
    described = {"model_card": output.model_card, "provenance": output.provenance, "checksums": output.checksums}
    return {f"{name}_sha256": file_sha256(path) for name, path in described.items()}


def _write(output: OutputLayout, path: Path, text: str) -> None:
    content = text.encode()
    if path.is_file() and path.read_bytes() == content:
        return
    unseal(output)
    write_durably(path, content)

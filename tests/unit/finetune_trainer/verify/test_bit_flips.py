"""Single flipped bits: refused by the readers, without meaning, or caught by a checksum or the verification; counted and printed.

What an adapter says with other bits that still read well can only be known by its checksum, which training writes and the merge
role checks. The base's files have the checksums that preflight records, from the fetch or by reading them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import MANIFEST_FILE, FileDigests, file_sha256
from finetune_trainer.merge.inputs import read_adapter_headers
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.merge.plan import merge_plan, plan_digest
from finetune_trainer.roles.merge import check_trained
from finetune_trainer.verify.gate import GATES
from finetune_trainer.verify.tensors import check_tensors, manifest_faults
from finetune_trainer.verify.verification import verify_merge
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import CONFIG_FILE, SINGLE_FILE, read_checkpoint, read_json
from finetune_trainer.weights.read_model import read_stored_model
from tests.support.examples import examples
from tests.unit.finetune_trainer.merge import tiny

PROMPTS = [[1, 5, 9, 200, 17, 33, 250, 4], [2, 3, 4]]
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
READ_ERRORS = (MergeError, ValueError, KeyError, TypeError, AttributeError)


@pytest.fixture(scope="module")
def triple(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    directory = tmp_path_factory.mktemp("triple")
    config = tiny.llama()
    config.num_hidden_layers = 1
    base = tiny.save_base(directory / "base", config, torch.bfloat16)
    adapter = tiny.save_adapter(directory / "adapter", base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    files = {path.name: {"sha256": file_sha256(path)} for path in adapter.iterdir() if path.is_file()}
    (adapter / MANIFEST_FILE).write_text(json.dumps({"plan_sha256": "of this plan", "step": 3, "files": files}))
    merge_adapter(MergeOptions(base, (adapter,), directory / "merged", None, 1 << 30))
    return base, adapter, directory / "merged"


def flips(original: bytes, path: Path, bits: Iterator[int]) -> Iterator[int]:
    """Each bit in turn, flipped in the file while the caller looks."""
    try:
        with path.open("r+b", buffering=0) as file:
            for bit in bits:
                place, mask = divmod(bit, 8)
                file.seek(place)
                file.write(bytes([original[place] ^ (1 << mask)]))
                yield bit
                file.seek(place)
                file.write(original[place : place + 1])
    finally:
        path.write_bytes(original)


STEP = examples(3, 1)
"""One bit in so many: over three bytes every one of the eight."""


def header_bits(content: bytes) -> range:
    return range(0, 8 * (8 + int.from_bytes(content[:8], "little")), STEP)


class Meaning:
    """What a merge of an adapter into a base would do."""

    def __init__(self, base: Path) -> None:
        self._tensors, self._config = read_checkpoint(base).tensors, read_json(base / CONFIG_FILE)
        self._model = read_stored_model(read_checkpoint(base), self._config)

    def of(self, adapter: Path) -> str:
        plan = merge_plan(
            base=self._tensors,
            base_config=self._config,
            model=self._model,
            adapters=[read_adapter_headers(adapter, self._model)],
            dtype=None,
            max_shard_bytes=1 << 30,
        )
        return plan_digest(plan, {})


@pytest.mark.parametrize("name", [ADAPTER_FILE, ADAPTER_CONFIG])
def test_flips_all_over_an_adapters_header_or_settings(name: str, triple: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, trained, merged = triple
    adapter = shutil.copytree(trained, tmp_path / "adapter")
    meaning = Meaning(base)
    right = meaning.of(adapter)
    content = (adapter / name).read_bytes()
    bits = header_bits(content) if name == ADAPTER_FILE else range(0, 8 * len(content), STEP)
    outcome: Counter[str] = Counter()
    for _ in flips(content, adapter / name, iter(bits)):
        with pytest.raises(CheckpointError):
            check_trained(adapter, "of this plan")
        outcome["by the checksum of training"] += 1
        try:
            is_same = meaning.of(adapter) == right
        except READ_ERRORS:
            outcome["and refused by the readers"] += 1
            continue
        if is_same:
            outcome["and without meaning for the merge"] += 1
            continue
        assert check_tensors(base, [adapter], merged).faults
        outcome["and caught by the tensors of a merge before it"] += 1
    print(f"\n{name}, {len(bits)} flips: {dict(outcome)}")
    assert outcome["by the checksum of training"] == len(bits)
    assert outcome["and refused by the readers"] > 0


def test_flips_all_over_a_bases_header(triple: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, merged = shutil.copytree(triple[0], tmp_path / "base"), *triple[1:]
    path = base / SINGLE_FILE
    content = path.read_bytes()
    expected = {name: (t.dtype, t.shape, t.offset) for name, t in read_checkpoint(base).tensors.items()}
    config = read_json(base / CONFIG_FILE)
    paths = tuple(read_stored_model(read_checkpoint(base), config).parameters)
    outcome: Counter[str] = Counter()
    verified: list[int] = []
    for bit in flips(content, path, iter(header_bits(content))):
        try:
            found = read_checkpoint(base)
        except READ_ERRORS:
            outcome["refused by the readers"] += 1
            continue
        if {name: (t.dtype, t.shape, t.offset) for name, t in found.tensors.items()} == expected:
            outcome["without meaning"] += 1
            continue
        # The name of a tensor is another one: nothing fills a parameter of the model.
        assert any(read_stored_model(found, config).parameter(name) is None for name in paths)
        outcome["leaves a parameter without values"] += 1
        if len(verified) < 8 and outcome["leaves a parameter without values"] % 31 == 1:
            verified.append(bit)
    print(f"\nbase header, {len(header_bits(content))} flips: {dict(outcome)}")
    assert outcome["refused by the readers"] > 0
    assert len(verified) >= 5
    for number, _ in enumerate(flips(content, path, iter(verified))):
        output = tmp_path / f"merged-{number}"
        assert not is_merged_and_passes(base, adapter, output)
    assert check_tensors(base, [adapter], merged).faults == []


def is_merged_and_passes(base: Path, adapter: Path, output: Path) -> bool:
    try:
        merge_adapter(MergeOptions(base, (adapter,), output, None, 1 << 30))
        report = verify_merge(
            base=base,
            adapters=[adapter],
            merged=output,
            prompts=PROMPTS,
            gate=GATES["bfloat16"],
            report_path=output.with_suffix(".json"),
        )
    except MergeError:
        return False
    return report.passed


def sampled(content: bytes, count: int, seed: int) -> Iterator[int]:
    return iter(random.Random(seed).sample(range(header_bits(content).stop, 8 * len(content)), count))


def test_sampled_flips_in_weights(triple: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, trained, made = triple
    adapter, merged = shutil.copytree(trained, tmp_path / "adapter"), shutil.copytree(made, tmp_path / "merged")
    content = (adapter / ADAPTER_FILE).read_bytes()
    for _ in flips(content, adapter / ADAPTER_FILE, sampled(content, 64, 1)):
        with pytest.raises(CheckpointError):
            check_trained(adapter, "of this plan")
    content = (merged / SINGLE_FILE).read_bytes()
    for _ in flips(content, merged / SINGLE_FILE, sampled(content, 24, 2)):
        assert any("sha256" in fault for fault in manifest_faults(merged, FileDigests()))
    print("\nweights: 64 of 64 flips in the adapter by training's checksum, 24 of 24 in the merged model by the merge's")


def test_sampled_flips_in_a_base_after_the_merge(triple: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, merged = shutil.copytree(triple[0], tmp_path / "base"), *triple[1:]
    content = (base / SINGLE_FILE).read_bytes()
    known = {SINGLE_FILE: file_sha256(base / SINGLE_FILE)}
    changed = read_checkpoint(base).tensors["model.layers.0.self_attn.q_proj.weight"]
    outcome: Counter[str] = Counter()
    for bit in flips(content, base / SINGLE_FILE, sampled(content, 32, 3)):
        is_untouched = not changed.offset <= bit // 8 < changed.offset + changed.num_bytes
        found = bool(check_tensors(base, [adapter], merged).faults)
        assert found or not is_untouched
        outcome["by comparison with the merged model" if found else "by the checksum of preflight alone"] += 1
        report = verify_merge(
            base=base,
            adapters=[adapter],
            merged=merged,
            prompts=PROMPTS,
            gate=GATES["bfloat16"],
            report_path=tmp_path / "r",
            base_sha256=known,
        )
        assert any("that preflight recorded" in fault for fault in report.faults)
    print(f"\nbase weights after the merge, 32 flips: {dict(outcome)}")
    assert outcome.total() == 32

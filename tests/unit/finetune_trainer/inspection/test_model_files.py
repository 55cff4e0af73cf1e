"""A model's directory whose files cannot be chosen, listed or read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_trainer.errors import ModelError
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.inspection.special_files import require_links_inside

INDEX = "model.safetensors.index.json"


def test_one_file_and_an_index_together_are_refused(model: Path) -> None:
    assert (model / INDEX).exists()
    (model / "model.safetensors").write_bytes(b"")
    (finding,) = inspect_model_files(model, "pvc://models/tiny").findings
    assert (finding.rule, finding.severity, finding.value) == ("model-weights-ambiguous", "error", "pvc://models/tiny")
    (model / "model.safetensors").unlink()
    assert inspect_model_files(model, "pvc://models/tiny").findings == ()


def test_a_directory_that_cannot_be_listed_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may list every directory, so the refusal of the file system is played.
    def refused(path: Path) -> list[Path]:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    (finding,) = inspect_model_files(model, "pvc://models/tiny").findings
    assert (finding.rule, finding.severity) == ("model-directory-unreadable", "error")
    assert "Permission denied" in finding.message


def test_a_link_that_leads_out_of_the_claim_is_named_with_its_target(model: Path) -> None:
    claim, secret = model.parent, model.parent.parent / "secret"
    secret.write_text("secret")
    (model / "config.json").rename(claim / "shared-config.json")
    (model / "config.json").symlink_to("../shared-config.json")
    assert inspect_model_files(model, "pvc://models/tiny", claim).findings == ()
    (model / "tokenizer.json").unlink(missing_ok=True)
    (model / "tokenizer.json").symlink_to(secret)
    (finding,) = inspect_model_files(model, "pvc://models/tiny", claim).findings
    assert (finding.rule, finding.severity, finding.value) == ("model-file-unusable", "error", "tokenizer.json")
    assert finding.message == f"tokenizer.json is a link to {secret}, which is outside {claim}"
    assert finding.fix == "replace the link by the file itself, or put its target on the same claim"
    with pytest.raises(ModelError, match=f"spec.model.source: {model}/tokenizer.json is a link to {secret}"):
        require_links_inside(model, claim)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("value", ["NaN", '{"__float__": "NaN"}'])
def test_settings_that_no_reader_takes_are_refused_before_they_are_copied(model: Path, name: str, value: str) -> None:
    (model / name).write_text(f'{{"temperature": {value}}}')
    (finding,) = inspect_model_files(model, "pvc://models/tiny").findings
    assert (finding.rule, finding.value) == ("model-file-unusable", name)
    assert "NaN is not a value of a setting" in finding.message


def without_weights(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()


def pickled(model: Path) -> None:
    without_weights(model)
    (model / "pytorch_model.bin").write_bytes(b"\x80")


def cut_and_missing(model: Path) -> None:
    first, second, *_ = sorted(model.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()


def in_another_shard(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = next(name for name in shards if name != index["weight_map"]["lm_head.weight"])
    (model / INDEX).write_text(json.dumps(index))


def shard(content: bytes) -> Callable[[Path], int]:
    return lambda model: min(model.glob("*.safetensors")).write_bytes(content)


def index(content: str) -> Callable[[Path], int]:
    return lambda model: (model / INDEX).write_text(content)


def configured(**more: object) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | more))

    return write


PACKED = {"quantization_config": {"load_in_4bit": True}}
FIRST, SECOND = "model-00001-of", "model-00002-of"


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (without_weights, [("model-weights-missing", "")]),
        (pickled, [("model-pickle-only", "pytorch_model.bin")]),
        (cut_and_missing, [("model-shard-broken", FIRST), ("model-shard-broken", SECOND)]),
        (shard(b""), [("model-shard-broken", FIRST)]),
        (shard(b"\x08\0\0\0\0\0\0\0[1, 2, 3"), [("model-shard-broken", FIRST)]),
        (shard(b'\x10\0\0\0\0\0\0\0{"a": {"x": 1}} '), [("model-shard-broken", FIRST)]),
        (shard(b"\xa5" * 64), [("model-shard-broken", FIRST)]),
        (in_another_shard, [("model-index-broken", "lm_head.weight")]),
        (index("{"), [("model-index-broken", "")]),
        (index("{}"), [("model-index-broken", "")]),
        (index('{"weight_map": {"a": "../a.safetensors"}}'), [("model-index-broken", "")]),
        (configured(**PACKED), [("model-already-quantized", "")]),
        (configured(text_config=PACKED), [("model-already-quantized", "")]),
        (configured(quantization_config=None), []),
    ],
)
def test_weights_that_cannot_be_read_are_refused(
    model: Path, damage: Callable[[Path], object], found: list[tuple[str, str]]
) -> None:
    damage(model)
    findings = inspect_model_files(model, "pvc://models/tiny").findings
    assert [finding.rule for finding in findings] == [rule for rule, _ in found]
    assert all(finding.value.startswith(value) for finding, (_, value) in zip(findings, found, strict=True))

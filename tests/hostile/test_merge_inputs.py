"""Hostile adapters and bases through the whole merge: it ends in a reason that names the file, or in a merged model."""

import json
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_trainer.errors import TrainerError
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.roles import merge_command as command
from finetune_trainer.weights.errors import MergeError
from tests.hostile.mutations import WHOLE_FILES, spoilt_bytes, spoilt_values
from tests.hostile.test_model_files import HEADER_SECRETS, cases, special
from tests.unit.finetune_trainer.merge import tiny

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    base = tiny.save_base(directory / "base", tiny.llama(), torch.bfloat16)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], rank_pattern={"up_proj": 2})
    tiny.save_adapter(directory / "adapter", base, lora)
    return directory


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "pair"))


def merged(pair: Path) -> str:
    """`merged`, or the class of the error that says why not. Anything else is a crash."""
    output = pair / "merged"
    try:
        merge_adapter(MergeOptions(pair / "base", (pair / "adapter",), output, None, 1 << 30))
    except (MergeError, TrainerError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = "merged"
    assert output.exists() is (reason == "merged")
    if reason != "merged":
        assert any(named in reason for named in (str(pair), CONFIG, "tensor", ".weight")), reason
        return reason.partition(":")[0]
    shutil.rmtree(output)
    return reason


def spoilt(path: Path, content: bytes, seed: int) -> bytes:
    if path.name == ADAPTER:
        end = 8 + struct.unpack("<Q", content[:8])[0]
        if seed % 2:
            header = spoilt_values(json.loads(content[8:end]), seed)
            return struct.pack("<Q", len(header)) + header + content[end:]
        return spoilt_bytes(content[:end], seed) + content[end:]
    return spoilt_values(json.loads(content), seed) if seed % 2 else spoilt_bytes(content, seed)


@pytest.mark.parametrize("name", [CONFIG, ADAPTER])
@cases(120)
def test_spoilt_adapters_end_in_a_reason_or_are_merged(pair: Path, name: str, seeds: Any) -> None:
    path, outcomes = pair / "adapter" / name, Counter[str]()
    content = path.read_bytes()
    for seed in seeds:
        path.write_bytes(spoilt(path, content, seed))
        try:
            outcomes[merged(pair)] += 1
        except Exception as error:
            error.add_note(f"seed {seed}: {path.read_bytes()[:1500]!r}")
            raise
    assert outcomes.total() > outcomes["merged"]


@pytest.mark.parametrize("content", WHOLE_FILES, ids=lambda content: repr(content[:12]))
@pytest.mark.parametrize("name", [CONFIG, ADAPTER])
def test_an_adapter_that_is_something_else_is_refused(pair: Path, name: str, content: bytes) -> None:
    (pair / "adapter" / name).write_bytes(content)
    assert merged(pair) != "merged"


@pytest.mark.parametrize("kind", ["pipe", "socket", "loop", "device", "directory"])
@pytest.mark.parametrize("place", [f"adapter/{CONFIG}", f"adapter/{ADAPTER}", "base/config.json", "base/model.safetensors"])
def test_special_files_are_refused_without_waiting(pair: Path, place: str, kind: str) -> None:
    special(pair / place, kind)
    assert merged(pair) != "merged"


@pytest.mark.parametrize("header", ["length-2-64", "deep", "huge-dimensions", "overlap"])
def test_the_command_says_in_words_what_is_wrong(pair: Path, capsys: pytest.CaptureFixture[str], header: str) -> None:
    content = HEADER_SECRETS[header]
    if content.startswith(b"{"):
        content = struct.pack("<Q", len(content)) + content + b"\0" * 16
    (pair / "adapter" / ADAPTER).write_bytes(content)
    arguments = ["--base", str(pair / "base"), "--adapter", str(pair / "adapter"), "--output", str(pair / "merged")]
    code = command.main(arguments)
    said = capsys.readouterr().err
    assert code in set(EXIT_CODES.values()) - {0, EXIT_CODES[FailureClass.INTERNAL]}
    assert ADAPTER in said
    assert "Traceback" not in said
    assert not (pair / "merged").exists()

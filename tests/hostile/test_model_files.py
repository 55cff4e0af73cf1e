"""Hostile model directories: preflight ends with findings to act on, in bounded time and memory, and never crashes."""

import json
import os
import socket
import struct
from pathlib import Path

import pytest

from finetune_job.failures import Outcome
from finetune_trainer.errors import ModelError
from finetune_trainer.inspection.model_files import inspect_model_files
from finetune_trainer.model.load import stored_dtype
from finetune_trainer.preflight.model_process import check_model
from finetune_trainer.processes import sandbox
from finetune_trainer.processes.sandbox import SandboxEndedError, run_sandboxed
from finetune_trainer.roles.preflight import run
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import read_adapter, read_checkpoint, read_header
from tests.hostile.mutations import WHOLE_FILES, spoilt_bytes, spoilt_values

INDEX = "model.safetensors.index.json"


def cases(number):
    def counted(function):
        function.cases = number
        return function

    return counted


def assert_sensible(findings):
    for finding in findings:
        assert finding.field.startswith("spec.")
        assert finding.message
        assert finding.fix
        finding.model_dump_json()


@pytest.fixture
def tight(monkeypatch):
    """Bounds that a test can wait for."""
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 20)
    monkeypatch.setattr(sandbox, "DATA_BYTES", 1 << 30)


@pytest.mark.parametrize("name", ["config.json", INDEX, "shard"])
@cases(150)
def test_spoilt_bytes_of_a_file_are_found_or_harmless(model, name, seeds):
    path = min(model.glob("*.safetensors")) if name == "shard" else model / name
    whole = path.read_bytes()
    head = whole[: 8 + struct.unpack("<Q", whole[:8])[0]] if name == "shard" else whole
    for seed in seeds:
        path.write_bytes(spoilt_bytes(head, seed) + whole[len(head) :])
        found = inspect_model_files(model, "pvc://models/tiny-llama")
        assert bool(found.findings) is not bool(found.digest)
        assert_sensible(found.findings)
        if name == "shard" and found.digest:
            read_checkpoint(model)


@pytest.mark.parametrize("content", WHOLE_FILES, ids=lambda content: repr(content[:12]))
@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json"])
def test_a_file_that_is_something_else_ends_in_findings(context, model, name, content):
    (model / name).write_bytes(content)
    result = run(context())
    assert result.outcome in (Outcome.REFUSED, Outcome.SUCCEEDED)
    assert_sensible(result.findings)
    assert len(result.envelope().encode()) <= 4096


@cases(40)
def test_odd_values_in_config_json_end_in_findings(context, model, tight, seeds):
    config = json.loads((model / "config.json").read_text())
    plan = context().plan
    for seed in seeds:
        (model / "config.json").write_bytes(spoilt_values(config, seed))
        if inspect_model_files(model, "pvc://models/tiny-llama").findings:
            continue
        try:
            assert_sensible(run_sandboxed(lambda: check_model(plan, model)[1]))
        except SandboxEndedError as error:  # the bounds of the process: a report, and no crash of preflight
            assert "CPU time" in str(error) or "memory" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**12},
        {"vocab_size": 10**15},
        {"hidden_size": 10**12, "vocab_size": 10**12},
        {"num_attention_heads": 0},
        {"num_attention_heads": 10**18},
        {"head_dim": -1},
        {"rope_scaling": {"rope_type": "no-such"}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": "NaN"}},
        {"layer_types": ["full_attention"] * 100_000},
        {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        {"model_type": "../../etc/passwd"},
        {"model_type": "t5"},
        {"model_type": "bert"},
        {"architectures": 7},
        {"dtype": "float7"},
        {"transformers_weights": "/etc/passwd"},
        {"max_position_embeddings": 10**30},
    ],
    ids="-".join,
)
def test_a_configuration_that_asks_for_the_impossible_is_refused_or_harmless(context, model, tight, values):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))
    plan = context().plan
    found = inspect_model_files(model, "pvc://models/tiny-llama")
    assert_sensible(found.findings)
    if found.digest:
        assert_sensible(run_sandboxed(lambda: check_model(plan, model)[1]))


def test_more_layers_than_tensors_are_refused_without_building_them(context, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    (finding,) = run(context()).findings
    assert finding.rule == "model-weights-incomplete"
    assert "1000000000" in finding.message


def special(path, kind):
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            here = Path.cwd()
            os.chdir(path.parent)  # names of sockets have 108 bytes at most
            try:
                listening.bind(path.name)
            finally:
                os.chdir(here)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(700 << 20)


@pytest.mark.parametrize("kind", ["pipe", "socket", "loop", "device", "directory", "hole"])
@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json", "tokenizer.json"])
def test_a_special_file_is_named_and_never_opened(context, model, name, kind):
    special(model / name, kind)
    result = run(context())
    assert result.outcome is Outcome.REFUSED
    assert_sensible(result.findings)
    assert {finding.value for finding in result.findings if finding.rule == "model-file-unusable"} == {name}


HEADER_SECRETS = {
    "length-10-GB": struct.pack("<Q", 10 << 30) + b"{}",
    "length-2-64": struct.pack("<Q", 2**64 - 1) + b"{}",
    "list": b"\x02\0\0\0\0\0\0\0[]",
    "deep": struct.pack("<Q", 400_000) + b"[" * 400_000,
    "many-dimensions": json.dumps({"a": {"dtype": "F32", "shape": [2] * 100_000, "data_offsets": [0, 4]}}).encode(),
    "huge-dimensions": json.dumps({"a": {"dtype": "F32", "shape": [10**300] * 60, "data_offsets": [0, 4]}}).encode(),
    "negative": json.dumps({"a": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}).encode(),
    "truth-value": json.dumps({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}).encode(),
    "fraction": json.dumps({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}).encode(),
    "overlap": json.dumps({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}).encode(),
    "text-offsets": json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": "04"}}).encode(),
}


@pytest.mark.parametrize("name", HEADER_SECRETS)
def test_a_header_that_lies_is_refused_by_preflight_and_by_the_merge(tmp_path, model, name):
    content = HEADER_SECRETS[name]
    if content.startswith(b"{"):
        content = struct.pack("<Q", len(content)) + content + b"\0" * 16
    path = min(model.glob("*.safetensors"))
    path.write_bytes(content)
    assert {finding.rule for finding in inspect_model_files(model, "pvc://models/m").findings} == {"model-shard-broken"}
    with pytest.raises(MergeError):
        read_header(path)
    with pytest.raises(ModelError):
        stored_dtype(model)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(MergeError):
        read_adapter(tmp_path)

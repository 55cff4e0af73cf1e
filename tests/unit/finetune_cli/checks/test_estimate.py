"""`finetune estimate`: a manifest and a model's configuration in, a table out; never torch."""

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.checks.estimate import EstimateOptions, estimate
from finetune_job.finding import FieldChange
from finetune_job.rules.rule import with_changes
from finetune_memory.verdict import MemoryVerdict, memory_finding
from tests.support.builders import JobBuilder, a_job
from tests.support.cases import table
from tests.unit.finetune_cli.manifests import ACCEPTED
from tests.unit.finetune_memory.configs import CONFIGS

RUNNER = CliRunner()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**CONFIGS["Llama-3.1-8B"], "dtype": "bfloat16"}))
    return path


def manifest(tmp_path: Path, job: JobBuilder) -> str:
    document = {**job.document, "metadata": {"name": "tune", "namespace": "team"}}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_a_table_with_total_limit_and_change(tmp_path: Path, config: Path) -> None:
    job = a_job().spec("training.microBatchSize", 8).spec("data.maxSequenceLength", 4096).spec(FULL, "None")
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, job), "--model", str(config), "--gpu-memory", "80Gi"])
    assert result.exit_code == 1, result.output
    rows = [line.split("  ") for line in result.output.splitlines()]
    assert "frozen weights" in result.output
    assert result.output.count("<- largest") == 1
    assert any("activations" in line and "<- largest" in line for line in result.output.splitlines())
    assert "limit                   80.0 GiB  --gpu-memory" in result.output
    assert "It fits with" in result.output
    assert rows


@pytest.mark.parametrize(("options", "limit"), table(__file__, "test_a_device_that_is_known_by_its_name_limits_a_rank"))
def test_a_device_that_is_known_by_its_name_limits_a_rank(tmp_path: Path, config: Path, options: list[str], limit: str) -> None:
    (tmp_path / "profile.yaml").write_text(PRICED)
    given = [str(tmp_path / "profile.yaml") if each == "PRICED" else each for each in options]
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config), *given])
    assert result.exit_code == 0, result.output
    assert "device memory of one rank" in result.output
    assert re.search(rf"limit +{limit}\n  fits  ", result.output), result.output


def test_an_unknown_device_is_refused_with_the_known_ones_unless_its_memory_is_given(tmp_path: Path, config: Path) -> None:
    options = ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config), "--gpu", "foo"]
    result = RUNNER.invoke(app, options)
    assert result.exit_code == 2
    assert "--gpu foo: no such device is known; give --gpu-memory, or one of GB200, B200, " in result.output
    assert "MI300X" in result.output
    result = RUNNER.invoke(app, [*options, "--gpu-memory", "24Gi"])
    assert result.exit_code == 0, result.output
    assert "limit                   24.0 GiB  --gpu-memory" in result.output
    assert "no peak rates of 'foo' are known" in result.output


@pytest.mark.parametrize("name", ["h100", "H100", "nvidia-h100-80gb-hbm3"])
def test_the_name_of_a_device_is_read_without_regard_to_case_and_hyphens(tmp_path: Path, config: Path, name: str) -> None:
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config), "--gpu", name])
    assert f"79.0 GiB  of one {name}" in result.output


def test_json_adds_up(tmp_path: Path, config: Path) -> None:
    result = RUNNER.invoke(
        app, ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config.parent), "-o", "json", "--gpu-memory", "800Gi"]
    )
    assert result.exit_code == 0, result.output
    (job,) = json.loads(result.output)["jobs"]
    assert job["fits"] is True
    assert job["alternative"] is None
    assert sum(term["bytes"] for term in job["terms"]) == job["total"] < job["limit"] == 800 * 2**30


def test_what_the_memory_of_a_rank_decides_is_shown_with_its_reason(tmp_path: Path, config: Path) -> None:
    job = a_job().processes_per_node(2).spec("training.microBatchSize", 1).spec("data.maxSequenceLength", 1024).spec(FULL, "None")
    options = ["estimate", "-f", manifest(tmp_path, job), "--model", str(config), "--gpu-memory", "80Gi"]
    text = RUNNER.invoke(app, options).output
    assert text.splitlines()[1] == "  2 ranks, each on one GPU"
    assert "Not set in the manifest, so chosen:\n    training.precision  " in text
    assert "    parallelism.fsdp.reshardAfterForward  false   with all weights" in text
    (job_found,) = json.loads(RUNNER.invoke(app, [*options, "-o", "json"]).output)["jobs"]
    precision, attention, choice = job_found["choices"]
    assert (precision["field"], precision["value"]) == ("spec.training.precision", "bf16")
    # Without a profile it is the command that says on what the job trains.
    assert (attention["field"], attention["value"]) == ("spec.model.attention", "varlen")
    assert (choice["field"], choice["value"]) == ("spec.parallelism.fsdp.reshardAfterForward", False)
    assert choice["reason"].endswith("of 80.0 GiB (--gpu-memory), of which 10 % are kept free")


PRICED = """apiVersion: finetune.dev/v1alpha1
kind: FineTuneProfile
metadata: {name: default}
spec:
  trainerImage: registry/trainer@sha256:0
  gpu: {memory: 80Gi, pricePerHour: "2.5"}
  nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
"""


def test_time_and_cost_of_a_run_follow_from_device_and_price(tmp_path: Path, config: Path) -> None:
    (tmp_path / "profile.yaml").write_text(PRICED)
    job = a_job().processes_per_node(2).spec("training", {"epochs": 2, "globalBatchSize": 8})
    options = ["estimate", "-f", manifest(tmp_path, job), "--model", str(config), "--profile", str(tmp_path / "profile.yaml")]
    unknown = RUNNER.invoke(app, options).output
    place = "2 ranks, each on one nvidia.com/gpu of 80Gi, NVIDIA-H100-80GB-HBM3 (profile default)"
    assert f"  {place}\n  matrix products in bfloat16 (chosen, see below)\n" in unknown
    assert re.search(r"^    training\.precision +bf16 +the base model is stored in it$", unknown, re.MULTILINE)
    assert "Time of a step on NVIDIA-H100-80GB-HBM3, calculated. Assumed: 70% of its published peak" in unknown
    assert "not known  give --tokens" in unknown
    (job_found,) = json.loads(RUNNER.invoke(app, [*options, "--tokens", "10000000", "-o", "json"]).output)["jobs"]
    found = job_found["time"]
    # 10,000,000 tokens are 4,883 sequences of 2,048; two passes in steps of 8; two devices at 2.5 an hour.
    assert found["runSeconds"] == pytest.approx(1221 * found["stepSeconds"])
    assert found["cost"] == pytest.approx(found["runSeconds"] / 3600 * 2 * 2.5)
    assert (found["assumed"]["flops"], found["tokensPerSecond"]) == (0.7, pytest.approx(8 * 2048 / found["stepSeconds"]))
    text = RUNNER.invoke(app, [*options, "--tokens", "10000000", "--gpu", "A100"]).output
    assert "Time of a step on A100" in text
    exact = yaml.safe_dump(job.spec("training.precision", "fp32").document)
    (told,) = estimate(exact, profile=PRICED, claims=tmp_path, options=EstimateOptions(config))
    assert told.precision == "float32 (spec.training.precision), never rounded to TF32"
    assert told.pace_problem.startswith("the job computes in float32")
    assert "device hours; costs " in text
    assert (
        "Time: not calculated, because no peak rates of 'P4' are known"
        in RUNNER.invoke(app, [*options, "--gpu", "P4", "--gpu-memory", "8Gi"]).output
    )


@pytest.mark.parametrize(
    ("fields", "stored", "computed", "value", "reason", "is_cast"), table(__file__, "test_precision_on_a_gpu_is_that_of_the_base")
)
def test_precision_on_a_gpu_is_that_of_the_base(
    tmp_path: Path, config: Path, fields: dict[str, Any], stored: str, computed: str, value: str, reason: str, is_cast: bool
) -> None:
    config.write_text(json.dumps({**CONFIGS["Llama-3.1-8B"], "dtype": stored}))
    job = a_job()
    for field, given in fields.items():
        job = job.spec(field, given)
    (found,) = estimate(yaml.safe_dump(job.document), profile=PRICED, claims=tmp_path, options=EstimateOptions(config))
    (choice,) = [one for one in found.verdict.choices if one.field == "spec.training.precision"]
    assert (choice.value, choice.reason) == (value, reason)
    assert found.precision.partition(",")[0] == f"{computed} (chosen"
    plan = found.verdict.plan
    assert (plan.training.precision, plan.parallelism.fsdp.param_dtype) == (("bf16", "bfloat16") if is_cast else (None, None))


def test_precision_that_is_given_or_is_for_processors_is_no_choice(tmp_path: Path, config: Path) -> None:
    job = a_job().spec("method.type", "DoRA")
    (found,) = estimate(yaml.safe_dump(job.document), profile=None, claims=tmp_path, options=EstimateOptions(config))
    assert found.precision == "bfloat16 (as the base model is stored)"
    exact = yaml.safe_dump(job.spec("training.precision", "bf16").document)
    (found,) = estimate(exact, profile=PRICED, claims=tmp_path, options=EstimateOptions(config))
    assert found.precision == "bfloat16 (spec.training.precision)"


FULL = "training.activationCheckpointing"
TEMPLATE = {"volumeClaimTemplate": {"storage": "10Gi"}}
EIGHT_BITS = {"method.type": "QLoRA", "method.quantization.bits": 8}


@pytest.mark.parametrize(
    ("written", "gib", "changed"),
    [
        # Without the rules it would be Selective, sixteen nodes alone, and four.
        ({"training.compile": True, "training.microBatchSize": 1, "training.precision": "bf16", FULL: "None"}, 28, FULL),
        ({"workspace": TEMPLATE}, 8, "workspace.volumeClaimTemplate.accessMode"),
        (EIGHT_BITS | {"training.microBatchSize": 1, "data.maxSequenceLength": 2048}, 12, "data.maxSequenceLength"),
    ],
)
def test_the_change_that_fits_is_one_that_the_rules_accept(
    tmp_path: Path, config: Path, written: dict[str, Any], gib: int, changed: str
) -> None:
    job = a_job()
    for field, value in written.items():
        job = job.spec(field, value)
    file = manifest(tmp_path, job)
    options = ["--model", str(config), "--gpu-memory", f"{gib}Gi", "-o", "json"]
    first = RUNNER.invoke(app, ["estimate", "-f", file, *options])
    assert first.exit_code == 1, first.output
    (found,) = json.loads(first.output)["jobs"]
    changes = [FieldChange.model_validate(change) for change in found["alternative"]["changes"]]
    assert f"spec.{changed}" in {change.field for change in changes}
    Path(file).write_text(yaml.safe_dump(with_changes(yaml.safe_load(Path(file).read_text()), changes)))
    second = RUNNER.invoke(app, ["estimate", "-f", file, *options])
    assert second.exit_code == 0, second.output


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("Llama-3.1-8B", "LoRA"), ("Llama-3.1-70B", "LoRA"), ("Llama-3.1-70B", "QLoRA"), ("Qwen3-8B", "QLoRA")),
        *(("Qwen3-30B-A3B", "QLoRA"), ("Mixtral-8x7B", "LoRA"), ("Gemma-2-9B", "QLoRA")),
        *(
            pytest.param(name, method, marks=pytest.mark.nightly)
            for name, method in (
                *(("Llama-3.1-8B", "QLoRA"), ("Qwen3-8B", "LoRA"), ("Qwen3-30B-A3B", "LoRA")),
                *(("Mixtral-8x7B", "QLoRA"), ("Gemma-2-9B", "LoRA")),
            )
        ),
    ],
)
def test_a_manifest_of_model_data_and_method_fits_or_what_is_told_makes_it_fit(tmp_path: Path, name: str, method: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIGS[name], "dtype": "bfloat16"}))
    written = yaml.safe_load(ACCEPTED)
    written["spec"] = {part: written["spec"][part] for part in ("data", "output", "workspace")}
    written["spec"] |= {"model": {"source": "pvc://models/base"}, "method": {"type": method}, "training": {"epochs": 1}}

    def estimated(document: dict[str, Any], gib: float) -> MemoryVerdict:
        text, mib = yaml.safe_dump(document), math.ceil(gib * 1024)
        (found,) = estimate(text, profile=None, claims=tmp_path, options=EstimateOptions(config, f"{mib}Mi"))
        return found.verdict

    for gib in (24, 48, 80):
        verdict = estimated(written, gib)
        assert {choice.field for choice in verdict.batches} == {
            "spec.training.precision",
            "spec.model.attention",
            "spec.training.microBatchSize",
            "spec.training.activationCheckpointing",
        }
        if verdict.fits:
            continue
        would = verdict.alternative or verdict.leanest
        assert would is not None, gib
        needed = gib if verdict.alternative else would.estimate.total / 2**30
        assert needed >= gib
        changed = estimated(with_changes(written, would.changes), needed)
        assert changed.fits, (gib, would.text)
        words = memory_finding(verdict)
        assert words is not None
        assert would.text in words.fix


@pytest.mark.parametrize(
    ("written", "said"), [("80", "is 80 B"), ("0", "is 0 B"), ("80GB", "is not a quantity"), ("-1Gi", "is not")]
)
def test_a_device_has_a_size_with_a_unit(tmp_path: Path, config: Path, written: str, said: str) -> None:
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config), "--gpu-memory", written])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "--gpu-memory" in result.stderr
    assert "80Gi" in result.stderr


def test_a_model_on_a_claim_is_found(tmp_path: Path, config: Path) -> None:
    claims = tmp_path / "claims"
    (claims / "models").mkdir(parents=True)
    config.parent.rename(claims / "models" / "base")
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, a_job()), "--claims", str(claims)])
    assert result.exit_code == 0, result.output
    assert "no limit is known" in result.output


def test_a_model_of_the_hub_has_to_be_given(tmp_path: Path) -> None:
    job = a_job().spec("model", {"source": "hf://org/name", "revision": "0" * 40})
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, job)])
    assert result.exit_code == 2
    assert "--model" in result.output


def test_a_model_with_an_encoder_is_told_to_be_the_wrong_kind(tmp_path: Path, config: Path) -> None:
    """Its safetensors files would not help."""
    config.write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True, "d_model": 512}))
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config)])
    assert result.exit_code == 2
    assert "'t5' has an encoder and a decoder, which this product does not train" in result.output
    assert "safetensors" not in result.output


def test_a_refused_job_is_not_estimated(tmp_path: Path, config: Path) -> None:
    job = a_job().spec("training.globalBatchSize", 7).processes_per_node(2)
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, job), "--model", str(config)])
    assert result.exit_code == 1
    assert "globalBatchSize" in result.output


def test_an_unknown_family_is_read_from_its_weights(tmp_path: Path, config: Path) -> None:
    settings = {**json.loads(config.read_text()), "model_type": "novel", "num_hidden_layers": 2, "vocab_size": 8}
    config.write_text(json.dumps(settings))
    job = manifest(tmp_path, a_job().spec("method.lora", {"targetModules": ["q_proj"]}))
    refused = RUNNER.invoke(app, ["estimate", "-f", job, "--model", str(config)])
    assert refused.exit_code == 2
    assert "'novel'" in refused.output
    shapes = {
        "model.embed.weight": [8, 64],
        "model.layers.0.attn.q_proj.weight": [64, 64],
        "model.layers.1.attn.q_proj.weight": [64, 64],
        # A layer after the last predicts further tokens: transformers does not load it.
        "model.layers.2.attn.q_proj.weight": [64, 64],
    }
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    encoded = json.dumps(header).encode()
    # The header alone: no weight is read.
    (config.parent / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    result = RUNNER.invoke(app, ["estimate", "-f", job, "--model", str(config.parent), "-o", "json"])
    assert result.exit_code == 0, result.output
    terms = {term["name"]: term["bytes"] for term in json.loads(result.output)["jobs"][0]["terms"]}
    assert terms["frozen weights"] == position - 2 * 64 * 64
    assert terms["trained weights"] == 2 * 4 * 16 * 2 * 64


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "model_type"),
        (b'{"model_type": "llama"}', "num_hidden_layers is None"),
        (b'{"model_type": "llama", "vocab_size": "x", "hidden_size": 4, "num_attention_heads": 0}', "config.json"),
        (b'{"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_attention_heads": 2}', "num_hidden_layers is None"),
        (b'{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers is 1000000000"),
        (b'{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": "4"}', "config.json: a setting of llama"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_broken_configuration_is_named(tmp_path: Path, config: Path, content: bytes, said: str) -> None:
    config.write_bytes(content)
    result = RUNNER.invoke(app, ["estimate", "-f", manifest(tmp_path, a_job()), "--model", str(config)])
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)


def test_a_missing_model_is_named_once(tmp_path: Path, config: Path) -> None:
    job = manifest(tmp_path, a_job())
    result = RUNNER.invoke(app, ["estimate", job, "--model", str(tmp_path / "none")])
    assert result.exit_code == 2
    reason = "cannot be read (No such file or directory); give a model's directory or its config.json"
    assert result.output == f"tune: {tmp_path}/none {reason}\n"
    assert RUNNER.invoke(app, ["estimate", job, "--model", str(config)]).exit_code == 0

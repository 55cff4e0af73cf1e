"""provenance.json against the published structure of in-toto statements and SLSA provenance, and what it says."""

import json
from typing import Any

import jsonschema
import pytest

from finetune_trainer.observe.goodput import AttemptStarted, TimeSpent
from finetune_trainer.release.write import BUILD_TYPE, encode_statement, provenance_statement, write_release_files
from tests.support.cases import table
from tests.unit.finetune_trainer.release.example import BASE_COMMIT, DATA_COMMIT, FROM_HUB, IMAGE, example

STATEMENT: dict[str, Any] = table(__file__, "STATEMENT")
"""The fields of https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1 as their specifications list them."""


def written(tmp_path, changes: dict[str, Any]) -> dict[str, Any]:
    made = example(tmp_path, changes)
    write_release_files(made.context.output, made.results())
    return json.loads(made.context.output.provenance.read_bytes())


@pytest.mark.parametrize(
    "changes", [FROM_HUB | {"output.destination": "hf://team/tuned"}, {"merge.enabled": False}, {"method.type": "Full"}], ids=str
)
def test_it_has_the_published_structure(tmp_path, changes):
    jsonschema.Draft202012Validator(STATEMENT).validate(written(tmp_path, changes))


def test_every_weight_file_is_a_subject_under_its_published_name(tmp_path):
    made = example(tmp_path, FROM_HUB | {"output.destination": "hf://team/tuned"})
    write_release_files(made.context.output, made.results())
    subjects = {
        entry["name"]: entry["digest"]["sha256"] for entry in json.loads(made.context.output.provenance.read_bytes())["subject"]
    }
    listed = dict(reversed(line.split("  ")) for line in made.context.output.checksums.read_text().splitlines())
    assert subjects == {name: sha256 for name, sha256 in listed.items() if name.endswith(".safetensors")}
    assert set(subjects) == {"model-00001.safetensors", "model-00002.safetensors", "adapter/adapter_model.safetensors"}


def test_base_data_and_image_are_named_with_their_digests(tmp_path):
    predicate = written(tmp_path, FROM_HUB)["predicate"]
    found = {(entry["name"], entry["uri"]): entry.get("digest") for entry in predicate["buildDefinition"]["resolvedDependencies"]}
    assert found == {
        ("base model", "hf://maker/base"): {"gitCommit": BASE_COMMIT, "modelDigest": "c" * 64},
        ("train data", "hf://datasets/maker/records/train/a.jsonl"): {"sha256": "e" * 64, "gitCommit": DATA_COMMIT},
        ("train data", "hf://datasets/maker/records/train/b.jsonl"): {"sha256": "f" * 64, "gitCommit": DATA_COMMIT},
        ("trainer image", f"oci://{IMAGE}"): {"sha256": "a" * 64},
    }
    assert predicate["runDetails"]["metadata"]["invocationId"] == "team/tuned/0123456789"
    assert predicate["buildDefinition"]["buildType"] == BUILD_TYPE
    assert predicate["buildDefinition"]["externalParameters"]["training"]["learning_rate"] > 0


def test_each_attempt_is_named_with_its_steps_ranks_and_device(tmp_path):
    made = example(tmp_path, {"training.reduction": "Ordered", "parallelism.nodes": 1, "parallelism.processesPerNode": 4})
    started = AttemptStarted(attempt=0, time=1.0, step=0, world_size=4, device="cpu")
    records = [
        started,
        TimeSpent(attempt=0, time=2.0, step=6, seconds={}),
        TimeSpent(attempt=0, time=3.0, step=8, seconds={}),
        AttemptStarted(attempt=1, time=4.0, step=6, world_size=2, device="cpu"),
        TimeSpent(attempt=1, time=5.0, step=10, seconds={}),
    ]
    old = json.dumps({"kind": "started", "attempt": 2, "time": 6.0, "step": 10})
    made.context.workspace.accounts.write_text("".join(f"{each.model_dump_json()}\n" for each in records) + old)
    write_release_files(made.context.output, made.results())
    inner = json.loads(made.context.output.provenance.read_bytes())["predicate"]["buildDefinition"]["internalParameters"]
    assert (inner["reduction"], inner["virtualRanks"]) == ("Ordered", 4)
    assert inner["attempts"] == [
        {"attempt": 0, "firstStep": 0, "lastStep": 8, "worldSize": 4, "device": "cpu"},
        {"attempt": 1, "firstStep": 6, "lastStep": 10, "worldSize": 2, "device": "cpu"},
        {"attempt": 2, "firstStep": 10, "lastStep": 10, "worldSize": None, "device": None},
    ]
    fast = written(tmp_path / "fast", {})["predicate"]["buildDefinition"]["internalParameters"]
    assert (fast["reduction"], fast["virtualRanks"], fast["attempts"]) == ("Fast", None, [])


def test_equal_runs_give_equal_bytes_and_no_place_of_a_machine(tmp_path):
    texts = [
        encode_statement(provenance_statement(example(tmp_path / name).facts(), {"model.safetensors": "0" * 64}))
        for name in ("one", "two")
    ]
    assert texts[0] == texts[1]
    assert str(tmp_path).encode() not in texts[0]

"""The checkpoint that a job is to begin with, as preflight looks at it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_job.plan.run_plan import AddedTokenPlan
from finetune_trainer.checkpoint.manifest import MANIFEST, decode_manifest
from finetune_trainer.checkpoint.start import origin_of
from finetune_trainer.preflight.inspection import Inspection
from finetune_trainer.preflight.job_steps import check_start
from tests.support.tiny_model import plan_of, run_context, tiny_spec, write_tiny_llama
from tests.unit.finetune_trainer.checkpoint.test_checkpoints import STATE, OneRank

STEP = 7
PLACE = "other/checkpoints/step-0000000007"


def started(tmp_path: Path, place: str = PLACE, **changes: Any) -> tuple[OneRank, Inspection, dict[str, tuple[int, ...]]]:
    """A run with a checkpoint, and a job that is to begin with it, on the same claim."""
    other = OneRank(tmp_path / "made", **changes)
    other.checkpoints.save(STEP, STATE)
    context = run_context(tmp_path, tiny_spec(training={"startFrom": place}))
    root = context.claims_root / context.plan.workspace.claim
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "other").exists():
        (root / "other").mkdir()
        other.context.workspace.checkpoints.rename(root / "other" / "checkpoints")
    trained = {name: tuple(parameter.shape) for name, parameter in other.model.named_parameters() if parameter.requires_grad}
    structure: Any = SimpleNamespace(trainable=trained, batches=())
    return other, Inspection(context, structure=structure), trained


def directory_of(seen: Inspection) -> Path:
    return seen.context.claims_root / seen.context.plan.workspace.claim / PLACE


def test_a_whole_checkpoint_of_the_same_parameters_is_accepted(tmp_path: Path) -> None:
    _, seen, _ = started(tmp_path)
    assert list(check_start(seen)) == []


def test_a_checkpoint_that_is_gone_is_not_missed_once_the_job_has_its_own(tmp_path: Path) -> None:
    _, seen, _ = started(tmp_path)
    shutil.rmtree(directory_of(seen))
    assert [finding.rule for finding in check_start(seen)] == ["start-not-usable"]
    (seen.context.workspace.checkpoints / "step-0000000001").mkdir(parents=True)
    assert list(check_start(seen)) == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("missing", "manifest.json cannot be read"),
        ("changed", "has sha256"),
        ("cut", "bytes,"),
        ("other name", "is of another model or method: it holds"),
        ("other shape", "is of another model or rank:"),
        ("link", "is a link to"),
    ],
)
def test_a_checkpoint_that_cannot_be_started_from_is_refused(tmp_path: Path, fault: str, expected: str) -> None:
    _, seen, trained = started(tmp_path)
    directory, name = directory_of(seen), next(iter(trained))
    file = next(path for path in directory.iterdir() if path.name != MANIFEST)
    if fault == "missing":
        (directory / MANIFEST).unlink()
    elif fault == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif fault == "other name":
        trained[f"{name}.other"] = trained.pop(name)
    elif fault == "other shape":
        trained[name] = (*trained[name], 1)
    else:
        outside = tmp_path / "outside"
        directory.parent.rename(outside)
        directory.parent.symlink_to(outside, target_is_directory=True)
    (finding,) = check_start(seen)
    assert (finding.rule, finding.severity, finding.field) == ("start-not-usable", "error", "spec.training.startFrom")
    assert finding.value == PLACE
    assert expected in finding.message
    assert "same base model and method" in finding.fix


@pytest.mark.parametrize(
    ("there", "here", "is_taken"),
    [(["<a>", "<b>"], ["<a>", "<b>"], True), (["<b>", "<a>"], ["<a>", "<b>"], False), (["<a>"], [], False), ([], ["<a>"], False)],
)
def test_rows_of_added_tokens_keep_their_meaning(tmp_path: Path, there: list[str], here: list[str], is_taken: bool) -> None:
    """Rows have the same shapes whatever their tokens are."""
    _, seen, _ = started(tmp_path, **({"model": {"addedTokens": [{"content": each} for each in there]}} if there else {}))
    origin = json.loads((directory_of(seen) / MANIFEST).read_text())["origin"]
    assert origin.get("added_tokens", []) == there
    assert ("added_tokens" in origin) is bool(there), "releases that knew none read what they would have written themselves"
    tokens = tuple(AddedTokenPlan(content=each) for each in here)
    model = seen.context.plan.model.model_copy(update={"added_tokens": tokens})
    seen = replace(seen, context=replace(seen.context, plan=seen.context.plan.model_copy(update={"model": model})))
    problems = [finding.message for finding in check_start(seen)]
    assert (problems == []) is is_taken
    assert is_taken or "holds rows of other added tokens, or in another order" in problems[0]


LORA = {"type": "LoRA", "lora": {"r": 4, "loraAlpha": 8, "targetModules": ["q_proj"]}}


@pytest.mark.parametrize(
    ("there", "here", "expected"),
    [
        ({}, {}, None),
        ({}, {"loraDropout": "0.1", "loraPlusRatio": "4"}, None),
        ({}, {"loraAlpha": 16}, "with lora_alpha 8, here it is 16"),
        ({}, {"useRslora": True}, "with use_rslora False, here it is True"),
        ({"initLoraWeights": "pissa"}, {"initLoraWeights": "pissa"}, None),
        ({"initLoraWeights": "pissa"}, {}, "from first values of the base model"),
        ({}, {"initLoraWeights": "olora"}, "from zero"),
        ({"initLoraWeights": "pissa"}, {"initLoraWeights": "olora"}, "with init_lora_weights pissa, here it is olora"),
    ],
)
def test_settings_that_give_parameters_their_meaning_are_the_same(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], expected: str | None
) -> None:
    method, own = ({**LORA, "lora": LORA["lora"] | changes} for changes in (there, here))
    first_values = "0" * 64 if there.get("initLoraWeights") else None
    _, seen, _ = started(tmp_path, first_values=first_values, method=method)
    seen = replace(seen, context=replace(seen.context, plan=plan_of(tiny_spec(method=own, training={"startFrom": PLACE}))))
    messages = [finding.message for finding in check_start(seen)]
    assert [expected in message for message in messages if expected is not None] == [True] * (expected is not None)
    assert len(messages) == (expected is not None)


LOHA = {"targetModules": ["q_proj", "v_proj"], "r": 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"targetModules": ["v_proj", "q_proj"], "rankDropout": "0.1", "initWeights": False}, None),
        ({"alpha": 8}, None),
        ({"alpha": 16}, "with alpha 8, here it is 16"),
    ],
)
def test_settings_of_other_methods_are_compared_by_their_meaning(
    tmp_path: Path, changes: dict[str, Any], expected: str | None
) -> None:
    method = {"type": "LoHa", "settings": LOHA, "lora": None}
    _, seen, _ = started(tmp_path, method=method)
    own = {**method, "settings": LOHA | changes}
    seen = replace(seen, context=replace(seen.context, plan=plan_of(tiny_spec(method=own, training={"startFrom": PLACE}))))
    messages = [finding.message for finding in check_start(seen)]
    assert [expected in message for message in messages if expected is not None] == [True] * (expected is not None)
    assert len(messages) == (expected is not None)


@pytest.mark.parametrize("kind", ["same", "other", "older release"])
def test_checkpoint_of_another_base_is_refused(tmp_path: Path, kind: str) -> None:
    _, seen, _ = started(tmp_path, with_base=True)
    write_tiny_llama(seen.context.source_model, **({"initializer_range": 0.03} if kind == "other" else {}))
    path = directory_of(seen) / MANIFEST
    manifest = decode_manifest(path.read_bytes())
    assert manifest.origin.base_sha256 is not None
    if kind == "older release":
        older = {"base_sha256": None, "method": {}}
        path.write_bytes(manifest.model_copy(update={"origin": manifest.origin.model_copy(update=older)}).encode())
    messages = [finding.message for finding in check_start(seen)]
    assert ["another base model" in message for message in messages] == [True] * (kind == "other")


def test_base_that_cannot_be_identified_ends_no_training(tmp_path: Path) -> None:
    _, seen, _ = started(tmp_path)
    model = seen.context.source_model
    model.mkdir(parents=True, exist_ok=True)
    (model / "model.safetensors").write_bytes(b"not a header")
    assert origin_of(seen.context).base_sha256 is None

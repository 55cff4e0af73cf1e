"""The merge role over a real trained adapter: what is published, and what a failed verification leaves."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, TerminationReport, parse_envelope
from finetune_trainer.__main__ import main
from finetune_trainer.context import RunContext
from finetune_trainer.errors import CheckpointError, ModelError
from finetune_trainer.files import file_sha256
from finetune_trainer.inspection.model_files import file_digests
from finetune_trainer.release.checksums import read_release
from finetune_trainer.roles.merge import check_trained, merge, publish_copy
from finetune_trainer.roles.torchrun import Launch
from finetune_trainer.roles.train import supervise
from tests.support.finished_run import finished_run
from tests.support.forked_ranks import run_gang
from tests.support.tiny_model import run_context, tiny_spec
from tests.unit.finetune_trainer.release.example import model_report

RELEASED = {"README.md", "provenance.json", "report.html", "report.json", "SHA256SUMS"}
VERIFIED = {"verification.json", "verification.md"}
DESCRIBED = {"model_card_sha256", "report_sha256", "provenance_sha256", "checksums_sha256"}


BASE_FILES = {
    "README.md": "---\nlicense: apache-2.0\n---\n# Base\n",
    "LICENSE": "terms",
    "COPYING.txt": "more terms",
    "SHA256SUMS": "of the base\n",
    ".hidden": "",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "words.tiktoken": "tokens",
    "tokenizer_code.py": "",
}


Trained = Callable[..., RunContext]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """(claims, changes of the spec) -> a run in these claims, copied from one that was trained for all."""
    made: dict[str, RunContext] = {}

    def copied(claims: Path, **changes: dict[str, Any]) -> RunContext:
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("trained"), **changes)
        shutil.copytree(made[key].claims_root, claims, dirs_exist_ok=True)
        return replace(made[key], claims_root=claims)

    return copied


def train(claims: Path, **changes: dict[str, Any]) -> RunContext:
    spec = tiny_spec(training={"maxSteps": 2, "microBatchSize": 4}, parallelism={"processesPerNode": 1}, **changes)
    context = run_context(claims, spec)
    for name, text in BASE_FILES.items():
        (context.base_model / name).parent.mkdir(exist_ok=True)
        (context.base_model / name).write_text(text)
    assert run_gang(context) == [0]
    return context


def run_merge(context: RunContext) -> tuple[int, TerminationReport]:
    log = context.claims_root / "termination-log"
    arguments = {
        "--plan": context.workspace.root / "plan.json",
        "--plan-sha256": context.plan_sha256,
        "--claims-root": context.claims_root,
        "--termination-log": log,
    }
    code = main(["merge", *(str(part) for pair in arguments.items() for part in pair)])
    report = parse_envelope(log.read_text())
    assert report is not None
    return code, report


def killed(*_arguments: object, **_named: object) -> None:
    raise RuntimeError("ends here")


def check_sums(context: RunContext) -> None:
    checked = subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=context.output.root, check=False)
    assert checked.returncode == 0


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_adapter_and_verified_model_are_published_and_a_second_run_changes_nothing(trained: Trained, tmp_path: Path) -> None:
    context = trained(tmp_path)
    code, report = run_merge(context)
    assert (code, report.outcome) == (0, Outcome.SUCCEEDED)
    assert {"adapter_sha256", "merged_manifest_sha256", "kl", "top1", "max_abs", "vllm", *DESCRIBED} <= set(report.facts)
    assert names(context.output.root) == {"adapter", "merged", *VERIFIED, *RELEASED}
    assert report.facts["vllm"] == "loads with --max-lora-rank 8"
    check_sums(context)
    assert json.loads(context.output.verification.read_text())["passed"] is True
    settings = json.loads((context.output.adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "pvc://models/tiny"
    assert str(tmp_path.parent) not in (context.output.adapter / "adapter_config.json").read_text()
    before = content(context.output.root)
    again, second = run_merge(context)
    assert again == 0
    assert second.facts == report.facts
    assert content(context.output.root) == before
    card = context.output.model_card.read_text()
    assert "| mean KL divergence of 90% of positions, nats |" in card
    assert "2 optimizer steps" in card
    assert "license: apache-2.0" in card
    page = context.output.report.read_text()
    assert "The merged model passed its verification" in page
    assert page.count("Held-out record ") == page.count("<dt>Tuned model</dt>") == 3
    for directory in (context.output.adapter, context.output.merged):
        assert (directory / "LICENSE").read_text() == "terms"
        assert (directory / "COPYING.txt").read_text() == "more terms"
        assert (directory / "words.tiktoken").read_text() == "tokens"
        assert AutoTokenizer.from_pretrained(directory).chat_template == {"tool_use": "{{ tools }}"}
        assert not (directory / "tokenizer_code.py").exists()


def test_a_base_that_changed_after_preflight_is_found(trained: Trained, tmp_path: Path) -> None:
    context = trained(tmp_path)
    report = model_report(context).model_copy(update={"model_files": file_digests(context.base_model)})
    context.workspace.model_report.write_text(report.model_dump_json())
    with (context.base_model / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        last = file.read(1)
        file.seek(-2, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    code, end = run_merge(context)
    assert code == EXIT_CODES[FailureClass.VERIFICATION_FAILED]
    assert "base file model.safetensors does not have the sha256 that preflight recorded" in end.message
    assert "merged.quarantined" in names(context.output.root)


def test_a_model_that_fails_its_verification_is_quarantined(trained: Trained, tmp_path: Path) -> None:
    context = trained(tmp_path)
    assert run_merge(context)[0] == 0
    path = context.output.merged / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = -tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    # The size is unchanged, so the merge takes the finished model for its own; only verification can see the difference.
    code, report = run_merge(context)
    assert code == EXIT_CODES[FailureClass.VERIFICATION_FAILED]
    assert report.failure is FailureClass.VERIFICATION_FAILED
    # Nothing says any more that this is complete.
    assert names(context.output.root) == {"adapter", "merged.quarantined", *VERIFIED, "report.html", "report.json"}
    assert not (context.output.adapter / "README.md").exists()
    page = context.output.report.read_text()
    assert "The merged model failed its verification" in page
    assert "passed its verification" not in page
    assert "vllm serve" not in page
    assert json.loads(context.output.verification.read_text())["passed"] is False
    assert "FAILED" in context.output.verification_page.read_text()
    assert run_merge(context)[0] == 0
    check_sums(context)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"type": "VeRA", "lora": None, "settings": {"r": 8}}},
        {"method": {"type": "QLoRA"}},
        {"method": {"type": "QLoRA"}, "merge": {"base": "Dequantized"}},
    ],
    ids=["shared projections", "packed base", "unpacked base"],
)
def test_other_methods_and_packed_bases_are_merged_and_verified(
    changes: dict[str, dict[str, Any]], trained: Trained, tmp_path: Path
) -> None:
    context = trained(tmp_path, **changes)
    code, report = run_merge(context)
    assert (code, report.message) == (0, "")
    assert json.loads(context.output.verification.read_text())["passed"] is True
    check_sums(context)


def test_a_fully_trained_model_is_published_as_it_is(trained: Trained, tmp_path: Path) -> None:
    context = trained(tmp_path, method={"type": "Full", "lora": None})
    code, report = run_merge(context)
    assert code == 0
    assert set(report.facts) == {"merged_manifest_sha256", *DESCRIBED}
    assert names(context.output.root) == {"merged", *RELEASED}
    assert context.output.report.read_text().count("<dt>Tuned model</dt>") == 3
    assert names(context.output.merged) & set(BASE_FILES) == {"COPYING.txt", "LICENSE", "words.tiktoken", "tokenizer_code.py"}
    assert AutoTokenizer.from_pretrained(context.output.merged).chat_template == {"tool_use": "{{ tools }}"}
    check_sums(context)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "manifest.json"} <= names(
        context.output.merged
    )


def test_without_merging_the_adapter_alone_is_published(trained: Trained, tmp_path: Path) -> None:
    context = trained(tmp_path, merge={"enabled": False})
    assert run_merge(context)[0] == 0
    assert names(context.output.root) == {"adapter", *RELEASED}
    assert context.output.report.read_text().count("<dt>Tuned model</dt>") == 3
    check_sums(context)


def test_the_merged_model_alone_is_released_where_the_adapter_is_not_wanted(trained: Trained, tmp_path: Path) -> None:
    context = trained(tmp_path, output={"destination": "hf://team/tiny", "adapter": False})
    code, report = run_merge(context)
    assert code == 0
    assert "adapter_sha256" not in report.facts
    assert names(context.output.root) == {"merged", *VERIFIED, *RELEASED}
    release = read_release(context)
    assert {"model.safetensors", "config.json", "README.md"} <= {file.name for file in release.files}
    assert all(file_sha256(file.local) == file.sha256 for file in release.files)


STEPS = {
    "copied": "finetune_trainer.roles.merge.merge_adapter",
    "merged": "finetune_trainer.roles.merge.verify_merge",
    "verified": "finetune_trainer.verify.verification.publish_directory",
    "renamed": "finetune_trainer.roles.merge.run_facts",
    "described": "finetune_trainer.release.write.encode_statement",
    "stated": "finetune_trainer.release.write.write_checksums",
}


def test_a_run_that_ends_anywhere_is_not_taken_for_complete_and_the_next_one_completes_it(
    trained: Trained, tmp_path: Path, monkeypatch: Any
) -> None:
    context = trained(tmp_path)
    for target in STEPS.values():
        with monkeypatch.context() as patch:
            patch.setattr(target, killed)
            assert run_merge(context)[0] != 0
        assert not context.output.checksums.exists()
    assert run_merge(context)[0] == 0
    check_sums(context)
    first = content(context.output.root)
    # From nothing, in one go: the same bytes, but for what the verification says of its time.
    shutil.rmtree(context.output.root)
    assert run_merge(context)[0] == 0
    second = content(context.output.root)
    assert {name for name in first if first[name] != second[name]} <= {*VERIFIED, "report.html", "report.json", "SHA256SUMS"}
    assert set(first) == set(second)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_adapter_is_not_published(trained: Trained, tmp_path: Path, damage: str) -> None:
    context = trained(tmp_path)
    path = context.workspace.adapter / "adapter_model.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
    code, report = run_merge(context)
    assert (code, report.failure) == (EXIT_CODES[FailureClass.CHECKPOINT_INVALID], FailureClass.CHECKPOINT_INVALID)
    assert not context.output.adapter.exists()


def test_a_link_among_what_was_trained_is_not_published(tmp_path: Path) -> None:
    trained, final = tmp_path / "trained", tmp_path / "results" / "adapter"
    trained.mkdir()
    final.parent.mkdir()
    (tmp_path / "secret").write_text("secret")
    secret_sha256 = hashlib.sha256(b"secret").hexdigest()
    (trained / "manifest.json").write_text(json.dumps({"plan_sha256": "p", "step": 1, "files": {}}))
    assert check_trained(trained, "p") == 1
    (trained / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a pipe, .* or a link"):
        publish_copy(trained, final)
    assert not list(final.parent.iterdir())
    for name in ("tokenizer.json", "../secret"):
        files = {name: {"sha256": secret_sha256}}
        (trained / "manifest.json").write_text(json.dumps({"plan_sha256": "p", "step": 1, "files": files}))
        with pytest.raises(CheckpointError, match=r"link|leads out"):
            check_trained(trained, "p")


@pytest.mark.parametrize(
    "role", [merge, lambda context: supervise(context, Launch(Path("plan.json"), 0, "localhost", 1, 0))], ids=["merge", "train"]
)
def test_no_role_opens_a_base_whose_links_lead_out_of_its_claim(
    tmp_path: Path, role: Callable[[RunContext], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    context = finished_run(tmp_path, "oci://registry.example/team/model:v1")
    context.base_model.mkdir(parents=True)
    (context.base_model / "tokenizer.json").symlink_to(tmp_path / "plan.json")
    with pytest.raises(ModelError, match=r"spec\.model\.source: .*tokenizer\.json is a link to .*plan\.json, which is outside"):
        role(context)

"""`python -m finetune_trainer.roles.merge_command`: progress, one report, exit codes by class, a name only for what passed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from finetune_job.failures import EXIT_CODES, FailureClass
from finetune_trainer.errors import ConfigError
from finetune_trainer.merge.chunks import common_cuts
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.roles import merge_command as command
from finetune_trainer.verify import verification
from finetune_trainer.verify.verification import verify_merge
from tests.unit.finetune_trainer.merge import tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    base = tiny.save_base(directory / "base", tiny.llama(), torch.bfloat16)
    return base, tiny.save_adapter(directory / "adapter", base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def run(pair: tuple[Path, Path], output: Path, *more: str) -> int:
    return command.main(["--base", str(pair[0]), "--adapter", str(pair[1]), "--output", str(output), *more])


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


def test_a_verified_merge_has_a_report_and_its_name(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "merged"
    assert run(pair, output) == 0
    lines, _ = printed(capsys)
    progress = [line for line in lines if "written" in line]
    assert progress[-1]["written"] == progress[-1]["total"] > 0
    report = lines[-1]["report"]
    assert report["output"] == str(output)
    assert report["verification"]["passed"] is True
    assert Path(report["verification_page"]).read_text()
    assert (output / "manifest.json").exists()
    assert not output.with_name("merged.unverified").exists()


def test_added_tokens_are_among_the_prompts_that_a_merge_is_verified_with(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    adapter = tiny.save_adapter(tmp_path / "adapter", pair[0], settings, num_rows=tiny.VOCABULARY + 3)
    seen: list[set[int]] = []

    def verified(prompts: list[list[int]], **others: Any) -> Any:
        seen.extend(set(prompt) for prompt in prompts)
        return verify_merge(prompts=prompts, **others)

    monkeypatch.setattr(verification, "verify_merge", verified)
    assert run((pair[0], adapter), tmp_path / "merged") == 0
    lines, _ = printed(capsys)
    assert lines[-1]["report"]["num_rows"] == 323
    assert lines[-1]["report"]["verification"]["passed"] is True
    assert {320, 321, 322} <= set.union(*seen) <= set(range(323))


def test_a_merge_that_fails_its_verification_never_has_the_name(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unverified = tmp_path / "merged.unverified"
    merge_adapter(MergeOptions(pair[0], (pair[1],), unverified, None, 5_000_000_000))
    path = unverified / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.weight"] = load_file(pair[0] / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    save_file(tensors, path, {"format": "pt"})
    size = next(entry for entry in json.loads((unverified / "manifest.json").read_text())["files"] if entry["name"] == path.name)
    assert path.stat().st_size == size["num_bytes"]
    assert run(pair, tmp_path / "merged") == EXIT_CODES[FailureClass.VERIFICATION_FAILED]
    assert "q_proj" in printed(capsys)[1]
    assert (tmp_path / "merged.quarantined").is_dir()
    assert not (tmp_path / "merged").exists()
    assert not unverified.exists()


@pytest.mark.parametrize(
    ("more", "failure", "said"),
    [
        (("--device", "cuda"), FailureClass.USER_CONFIG, "device cuda"),
        (("--max-shard-size", "many"), FailureClass.USER_CONFIG, "'many' is not a size"),
        (("--quantization", "{"), FailureClass.USER_CONFIG, "--quantization {"),
    ],
)
def test_what_cannot_be_is_refused_with_its_class(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    failure: FailureClass,
    said: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(pair, tmp_path / "merged", "--no-verify", *more) == EXIT_CODES[failure]
    lines, err = printed(capsys)
    assert not [line for line in lines if "written" not in line]  # progress at most
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_prompts_are_text_or_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("[1, 2, 3]\n\n[4]\n")
    assert command.read_prompts(path, tmp_path) == [[1, 2, 3], [4]]
    path.write_text("[1]\nWhy is the sky blue?\n")
    with pytest.raises(ConfigError, match="line 2 is text"):
        command.read_prompts(path, tmp_path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        command.read_prompts(path, tmp_path)


def test_rows_are_cut_where_all_steps_allow_it() -> None:
    cuts = common_cuts([[(0, 2), (2, 4), (4, 6), (6, 9)], [(0, 4), (4, 9)], [(0, 1), (1, 4), (4, 5), (5, 9)]])
    assert [cut.rows for cut in cuts] == [(0, 4), (4, 9)]
    assert cuts[0].blocks == (((0, 2), (2, 4)), ((0, 4),), ((0, 1), (1, 4)))
    assert cuts[1].blocks == (((4, 6), (6, 9)), ((4, 9),), ((4, 5), (5, 9)))
    assert [cut.rows for cut in common_cuts([[(0, 2), (2, 9)], [(0, 9)]])] == [(0, 9)]


_MERGE_AND_WAIT_WITH_TORCH = """
import runpy, sys, threading
from finetune_trainer.merge import merge_adapter
from finetune_trainer.merge.shard_file import ShardFile
from finetune_trainer.processes import start
from finetune_trainer.roles import merge_command

print(*sys.modules)
written, append = threading.Event(), ShardFile.append


class Gate:
    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "torch._utils":  # the first that torch asks for
            assert written.wait(60), "nothing was copied before torch was there"


def note(*given: object) -> None:
    append(*given)
    written.set()


ShardFile.append = note
start.end = print
sys.meta_path.insert(0, Gate)
del sys.modules[merge_command.__name__]
runpy.run_module(merge_command.__name__, run_name="__main__")
"""


def test_a_merge_imports_only_what_it_needs_and_torch_beside_its_first_bytes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Imports are half of a small model's merge."""
    given = ["--base", str(pair[0]), "--adapter", str(pair[1]), "--output", str(tmp_path / "merged"), "--no-verify"]
    command = [sys.executable, "-c", _MERGE_AND_WAIT_WITH_TORCH, *given]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[0].split()
    assert "finetune_trainer.merge.stream" in loaded
    assert not {"torch", "numpy", "finetune_job.plan.run_plan", "transformers", "peft"}.intersection(loaded)
    assert done.stdout.splitlines()[-1] == "0"
    here = merge_adapter(MergeOptions(pair[0], (pair[1],), tmp_path / "again", None, 5_000_000_000))
    assert json.loads(done.stdout.splitlines()[-2])["report"]["sha256"] == here.sha256

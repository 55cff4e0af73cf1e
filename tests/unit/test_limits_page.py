"""The page on limits: what it says is not there is refused, with the words and the advice of the page."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_cli.checks.estimate import EstimateOptions, estimate
from finetune_cli.checks.validate import validate
from finetune_cli.exit_codes import LocalError
from finetune_job.api.base import ClaimPath
from finetune_job.api.inputs import DataFormat
from finetune_memory.verdict import memory_finding
from finetune_trainer.data.findings import SplitSource, wrong_records
from finetune_trainer.data.read import RecordProblem, read_file
from tests.support.builders import a_job
from tests.unit.finetune_cli.manifests import ACCEPTED, edited
from tests.unit.finetune_memory.jobs import judged
from tests.unit.finetune_trainer.data.record_files import write

PAGE = Path(__file__).parents[2] / "docs/reference/limits.md"


def rows() -> dict[str, tuple[str, str]]:
    """First cell -> how it is told, and what to take instead."""
    text = PAGE.read_text().partition("\n## When to use another tool\n")[2].partition("\n## ")[0]
    cells = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    return {first: (told, instead) for first, told, instead in cells[1:]}


def written(path: str, value: Any) -> Callable[[Path], str]:
    """What `finetune validate` says of a manifest with this setting."""
    return lambda _directory: "\n".join(
        f"{finding.rule}: {finding.message}: {finding.fix}"
        for verdict in validate(edited(f"spec.{path}", value)).verdicts
        for finding in verdict.findings
        if finding.severity == "error"
    )


def recorded(record: dict[str, Any], data_format: DataFormat) -> Callable[[Path], str]:
    """What preflight and `finetune data` say of such records."""

    def told(directory: Path) -> str:
        problems = read_file(write(directory / "a.jsonl", [record]), data_format)
        wrong = [(problem, 1) for problem in problems if isinstance(problem, RecordProblem)]
        source = SplitSource("train", ClaimPath(claim="data"), directory, "spec.data.source", "pvc://data")
        return "\n".join(f"{each.rule}: {each.message}: {each.fix}" for each in wrong_records(source, wrong))

    return told


def packed_mixture(_directory: Path) -> str:
    """Mixtral 8x7B as QLoRA on one device of 80 GiB."""
    finding = memory_finding(judged(a_job().spec("training.globalBatchSize", 16).spec("method.type", "QLoRA"), "Mixtral-8x7B"))
    assert finding is not None
    return f"{finding.rule}: {finding.message}: {finding.fix}"


def encoder_and_decoder(directory: Path) -> str:
    (directory / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true, "d_model": 512}')
    with pytest.raises(LocalError) as told:
        estimate(ACCEPTED, profile=None, claims=directory, options=EstimateOptions(directory, "80Gi"))
    return str(told.value)


IMAGE = {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, {"role": "assistant", "content": "a"}]}
ASKED: dict[str, tuple[Callable[[Path], str], str, str]] = {
    # First words of the row: how it is asked for, what the page quotes of the answer, and what the answer advises.
    "training on preferences": (
        recorded({"prompt": "q", "chosen": "good", "rejected": "bad"}, DataFormat.PROMPT_COMPLETION),
        "data-preference-pairs",
        "such as TRL's DPOTrainer",
    ),
    "rewards and": (written("rl", "grpo"), "supervised fine-tuning is all there is", "with TRL, and merge its adapter"),
    "images and": (recorded(IMAGE, DataFormat.CHAT), "data-record-invalid", 'of the type "image", not "text"'),
    "a sequence over": (
        written("context_parallel_size", 2),
        "each sequence is on one rank",
        "shorten spec.data.maxSequenceLength",
    ),
    "packages for flash": (written("model.attention", "flash_attention_2"), "torch has such kernels itself", "write varlen"),
    "8-bit and paged": (written("training.optimizer", "adamw_8bit"), "8-bit and paged optimizers are not offered", "write AdamW"),
    "a 4-bit base": (
        packed_mixture,
        "memory-estimate-exceeds-gpu",
        "set spec.parallelism.processesPerNode: 2, spec.method.type: LoRA",
    ),
    "an 8-bit base": (
        written("method", {"type": "QLoRA", "quantization": {"bits": 8}}),
        "quantization-bits",
        "set method.quantization.bits to 4",
    ),
    "prompt learning": (written("method", {"type": "PromptTuning"}), "method-not-supported", "set method.type to LoRA"),
    "training an adapter": (
        written("adapter_name_or_path", "saves/run"),
        "an adapter is not trained further",
        "merge it with `finetune merge`",
    ),
    "encoder-decoder": (encoder_and_decoder, "has an encoder and a decoder", "which this product does not train"),
}


@pytest.mark.parametrize("first", ASKED)
def test_what_is_not_there_is_refused_with_the_advice_of_the_page(tmp_path: Path, first: str) -> None:
    ask, quoted, advice = ASKED[first]
    (row,) = [cells for title, cells in rows().items() if title.startswith(first)]
    assert quoted in row[0]
    assert row[1], "what to take instead"
    said = ask(tmp_path)
    assert quoted in said
    assert advice in said


def test_every_row_is_asked_for() -> None:
    assert [title for title in rows() if not title.startswith(tuple(ASKED))] == []

"""After a merge outside a job: verify it, and give it its name if it passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune_job.api.output import MergeBase
from finetune_trainer.errors import ConfigError, VerificationError
from finetune_trainer.files import publish_directory
from finetune_trainer.merge.changes import Quantization
from finetune_trainer.merge.run import MergeOptions
from finetune_trainer.verify.element_types import gate_of
from finetune_trainer.verify.prompts import default_prompts
from finetune_trainer.verify.run import quarantine, verify_merge


def verify_and_name(options: MergeOptions, output: Path, prompts: Path | None, quantization: Quantization | None) -> dict[str, Any]:
    """Verify the model at `options.output` and rename it to `output`. What to add to the report.

    prompts: file with a prompt on each line, as text or as a JSON array of token ids; None: sequences made from the vocabulary.
    quantization: how the training packed the base, if it did. Raises VerificationError, and the model is then kept under another
    name.
    """
    report_path = output.with_name(f"{output.name}.verification.json")
    page_path = report_path.with_suffix(".md")
    report = verify_merge(
        base=options.base,
        adapters=options.adapters,
        merged=options.output,
        prompts=default_prompts(options.base) if prompts is None else read_prompts(prompts, options.output),
        gate=gate_of(options.base, options.dtype),
        report_path=report_path,
        page_path=page_path,
        quantization=quantization,
        merged_onto=MergeBase.DEQUANTIZED if options.quantization else MergeBase.ORIGINAL,
    )
    if not report.passed:
        kept = quarantine(options.output, output.with_name(f"{output.name}.quarantined"))
        raise VerificationError(report.text(), f"the merged model is kept as {kept}, and what was found in {report_path}")
    if options.output != output:
        publish_directory(options.output, output)
    return {"verification": json.loads(report_path.read_text(encoding="utf-8")), "verification_page": str(page_path)}


def read_prompts(path: Path, tokenizer: Path) -> list[list[int]]:
    """Token ids of the prompts in a file. tokenizer: directory of the one that turns text into ids. Raises ConfigError."""
    prompts: list[list[int]] = []
    texts = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        ids = _ids(line)
        if ids is None:
            if texts is None:
                from transformers import AutoTokenizer

                try:
                    texts = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
                except (OSError, ValueError) as error:
                    raise ConfigError(
                        f"--prompts {path}, line {number}: is text, and neither base nor adapter has a tokenizer: {error}",
                        "write JSON arrays of token ids",
                    ) from error
            ids = list(texts(line)["input_ids"])
        if ids:
            prompts.append(ids)
    if not prompts:
        raise ConfigError(f"--prompts {path}: holds no prompt", "write one on each line")
    return prompts


def _ids(line: str) -> list[int] | None:
    """The token ids of a JSON array, None for text."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    is_ids = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    return value if is_ids else None

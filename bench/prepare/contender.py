"""`python -m bench.prepare.contender NAME RECORDS MODEL OUTPUT PROCESSES`: one way of preparing, in a process of its own.

Both read the same file with the same tokenizer and give the same ids and masks; the last line of the output says how many, and
how many seconds it took once the libraries were there. What is ours also packs, digests and makes durable what it writes;
datasets.map does none of that.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

MAX_LENGTH = 2048


def main(name: str, records: str, model: str, output: str, processes: str) -> None:
    result = {"ours": ours, "datasets": with_datasets}[name](Path(records), Path(model), Path(output), int(processes))
    print(json.dumps(result))


def ours(records: Path, model: Path, output: Path, processes: int) -> dict[str, float]:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    # As the role that prepares does: what it imports besides counts as memory.
    from finetune_trainer.processes.start import keep_torch_out

    keep_torch_out()
    import finetune_trainer.roles.preflight  # noqa: F401
    from finetune_job.api.base import ClaimPath
    from finetune_job.api.inputs import DataFormat, LossOn
    from finetune_job.plan.run_plan import DataPlan, DatasetPlan
    from finetune_trainer.data.prepare import prepare
    from finetune_trainer.data.tokenizer import load_tokenizer

    started = time.monotonic()
    tokenizer, _ = load_tokenizer(model, allow_remote_code=False)
    location = ClaimPath(claim=records.parent.name, path=records.name)
    plan = DataPlan(
        train=(DatasetPlan(location=location, source=str(records), field="spec.data.source", weight=1.0),),
        validation=None,
        format=DataFormat.PROMPT_COMPLETION,
        chat_template=None,
        max_sequence_length=MAX_LENGTH,
        packing=True,
        loss_on=LossOn.COMPLETION,
    )
    with prepare(plan, records.parent.parent, model, tokenizer, output, num_workers=processes) as data:
        data.publish()
        facts = data.splits["train"]
    return {
        "seconds": time.monotonic() - started,
        "records": facts.num_occurrences,
        "tokens": facts.num_tokens,
        "supervised_tokens": facts.num_supervised_tokens,
        "filled": facts.num_tokens / (facts.num_sequences * MAX_LENGTH),
    }


def with_datasets(records: Path, model: Path, output: Path, processes: int) -> dict[str, float]:
    os.environ["HF_DATASETS_CACHE"] = str(output)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import numpy as np
    from transformers import AutoTokenizer

    started = time.monotonic()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.eos_token_id

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        prompts = tokenizer(batch["prompt"])["input_ids"]
        wholes = tokenizer([p + c for p, c in zip(batch["prompt"], batch["completion"], strict=True)])["input_ids"]
        ids, masks = [], []
        for prompt, whole, completion in zip(prompts, wholes, batch["completion"], strict=True):
            joined = whole if whole[: len(prompt)] == prompt else prompt + tokenizer(completion)["input_ids"]
            joined = [*joined, end]
            if len(joined) > MAX_LENGTH:
                continue
            ids.append(joined)
            first = max(len(prompt), 1)
            masks.append([0] * first + [1] * (len(joined) - first))
        return {"input_ids": ids, "completion_mask": masks}

    loaded = datasets.load_dataset("json", data_files=str(records), split="train", cache_dir=str(output))
    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32")), "completion_mask": datasets.List(datasets.Value("int8"))}
    )
    mapped = loaded.map(
        tokenise,
        batched=True,
        num_proc=processes,
        remove_columns=loaded.column_names,
        features=features,
        load_from_cache_file=False,
    )
    seconds = time.monotonic() - started
    tokens = supervised = 0
    for batch in mapped.with_format("arrow").iter(10_000):
        masks = batch.column("completion_mask").combine_chunks().flatten()
        tokens += len(masks)
        supervised += int(np.asarray(masks).sum(dtype=np.int64))
    return {"seconds": seconds, "records": len(mapped), "tokens": tokens, "supervised_tokens": supervised}


if __name__ == "__main__":
    main(*sys.argv[1:])

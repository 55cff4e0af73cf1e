"""One contender's rank in a process of its own: `python -m bench.trainer.contender NAME DIRECTORY METHOD RANK WORLD_SIZE`.

Writes a JSON file: at the start of each step and at the end of the last the time (CLOCK_MONOTONIC) and the processor time, the
loss of each step, tokens counted by the contender itself, and the peak resident memory.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from bench.trainer import workload
from finetune_trainer.context import RunContext

Figures = dict[str, Any]


def ours(directory: Path, method: str, rank: int, world_size: int, reduction: str = "Fast") -> Figures:
    """The real training run with everything that it does: observation, history, checkpoint and export."""
    from tests.support.tiny_model import run_context

    steps = len(json.loads((directory / "counts.json").read_text()))
    spec = workload.plan_spec(method, steps, world_size, workload.size_in(directory), reduction)
    return trained_as_a_job(run_context(directory, spec), directory, rank, world_size)


def ordered(directory: Path, method: str, rank: int, world_size: int) -> Figures:
    """The same with gradients added up in order."""
    return ours(directory, method, rank, world_size, "Ordered")


def trained_as_a_job(context: RunContext, directory: Path, rank: int, world_size: int) -> Figures:
    """A rank as a pod runs it. directory: where ranks meet."""
    from finetune_trainer.inspection.report import with_choices_of_preflight
    from finetune_trainer.termination import exit_code
    from finetune_trainer.train import step as step_module
    from finetune_trainer.train.rank import run_rank

    starts, busy, losses, counts = [], [], [], []
    ends: list[float] = []
    original = step_module.optimizer_step

    def timed(*arguments: Any, **named: Any) -> Any:
        starts.append(time.monotonic())
        busy.append(time.process_time())
        result = original(*arguments, **named)
        losses.append(result.loss)
        counts.append(result.supervised_tokens)
        ends[:] = time.monotonic(), time.process_time()
        return result

    # The loop looks it up in its module at each step.
    step_module.optimizer_step = timed
    report = run_rank(
        context,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        node_rank=0,
        observe_port=0,
        init_method=f"file://{directory}/store",
    )
    if exit_code(report):
        raise RuntimeError(f"training failed: {report.message}")
    figures: Figures = {
        "starts": [*starts, ends[0]], "busy": [*busy, ends[1]], "losses": losses, "supervised_tokens": sum(counts),
    }  # fmt: skip
    if world_size > 1:
        plan = with_choices_of_preflight(context.plan, context.workspace.model_report)
        freed = plan.parallelism.fsdp.reshard_after_forward is not False
        figures["distribution"] = (
            f"FSDP 2, gathered parameters {'are freed' if freed else 'stay'} by the choice of the memory plan"
        )
    return figures


def bare(directory: Path, method: str, rank: int, world_size: int) -> Figures:
    """What one writes by hand: transformers, PEFT, AdamW, clipping, and FSDP 2 where there are several ranks."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    steps = torch.load(directory / f"batches-{rank}.pt", weights_only=True)
    counts = json.loads((directory / "counts.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "models/tiny", dtype=torch.float32)
    if method == "LoRA":
        torch.manual_seed(workload.SEED)
        model = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=workload.RANK, lora_alpha=workload.ALPHA, target_modules="all-linear")
        )
    if world_size > 1:
        for layer in [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=workload.RATE, weight_decay=0.0)
    starts, busy, losses, supervised = [], [], [], 0
    for batches, (_, count) in zip(steps, counts, strict=True):
        starts.append(time.monotonic())
        busy.append(time.process_time())
        total = torch.zeros(())
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            targets = batch["labels"][:, 1:].flatten()
            supervised += int((targets != -100).sum())
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum") / count
            (loss * world_size).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world_size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    starts.append(time.monotonic())
    busy.append(time.process_time())
    if world_size > 1:
        whole = torch.tensor(supervised)
        dist.all_reduce(whole)
        supervised = int(whole)
        dist.destroy_process_group()
    return {"starts": starts, "busy": busy, "losses": losses, "supervised_tokens": supervised}


def trl(directory: Path, method: str, rank: int, world_size: int) -> Figures:
    """SFTTrainer on the same documents with its own best-fit packing, which flattens a batch into one row."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    if world_size > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=(directory / "port").read_text(),
        )  # fmt: skip
    starts: list[float] = []
    busy: list[float] = []
    losses: list[float] = []
    counted = {"tokens": 0, "supervised_tokens": 0}

    class Times(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(time.monotonic())
            busy.append(time.process_time())

        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

        on_train_end = on_step_begin

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            counted["tokens"] += inputs["input_ids"].numel()
            counted["supervised_tokens"] += int((inputs["labels"][:, 1:] != -100).sum())
            return super().compute_loss(model, inputs, *arguments, **named)

    size = workload.size_in(directory)
    settings = SFTConfig(
        output_dir=str(directory / "trl"), per_device_train_batch_size=size.micro_batch, num_train_epochs=1,
        gradient_accumulation_steps=size.global_batch // size.micro_batch // world_size,
        learning_rate=workload.RATE, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch", max_length=size.length, packing=True, packing_strategy="bfd", use_cpu=True, bf16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=workload.SEED,
        dataloader_num_workers=0, ddp_backend="gloo" if world_size > 1 else None,
    )  # fmt: skip
    adapter = LoraConfig(task_type="CAUSAL_LM", r=workload.RANK, lora_alpha=workload.ALPHA, target_modules="all-linear")
    trainer = Counting(
        model=AutoModelForCausalLM.from_pretrained(directory / "models/tiny", dtype=torch.float32, attn_implementation="sdpa"),
        args=settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in (directory / "documents.jsonl").open()]),
        processing_class=AutoTokenizer.from_pretrained(directory / "models/tiny"),
        peft_config=adapter if method == "LoRA" else None,
        callbacks=[Times()],
    )
    trainer.train()
    return {
        "starts": starts, "busy": busy, "losses": losses, **counted,
        "attention": trainer.model.config._attn_implementation,  # noqa: SLF001
        "packing": "best-fit decreasing, rows flattened with position_ids",
        "distribution": "DDP" if world_size > 1 else "one process",
    }  # fmt: skip


def peak_resident_bytes() -> int:
    """VmHWM of this process. Not ru_maxrss, which a child inherits from its parent across exec."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM; peak memory can only be measured on Linux")
    return int(found[1]) * 1024


def main() -> None:
    name, directory, method, rank, world_size = sys.argv[1:]
    contender = {"ours": ours, "ordered": ordered, "bare": bare, "trl": trl}[name]
    figures = contender(Path(directory), method, int(rank), int(world_size))
    figures["peak_resident_bytes"] = peak_resident_bytes()
    (Path(directory) / f"figures-{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # As the trainer's ranks do: threads of collective libraries must not hold up the end.
    os._exit(0)

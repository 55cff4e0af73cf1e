"""The tiers of `make gpu-check`: each is given what there is to run on, adds rows of figures, and returns what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton

from bench.gpu.calibration import calibration_rows
from bench.gpu.faults import Hungry, Silent, TracedAlone, WithoutCompiler
from bench.gpu.kernels import REFUSED, kernel_rows
from bench.gpu.paths import paths
from bench.gpu.scale import Rows, Scale, Tier
from bench.gpu.speed import long, longest, settings, throughput
from bench.gpu.waits import wait_rows
from bench.memory import __main__ as memory
from bench.merge.model import write_adapter, write_base
from finetune_cli.local.launch import free_port
from finetune_job.failures import FailureClass, TerminationReport
from finetune_job.names import Role
from finetune_trainer.context import RunContext
from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from finetune_trainer.ranks.reports import rank_report_name, read_rank_reports, root_cause
from finetune_trainer.ranks.stalls import flight_recorder_name
from finetune_trainer.verify.gate import GATES, gate_failures
from finetune_trainer.verify.logits import Reference, compare_logits
from finetune_trainer.verify.prompts import default_prompts
from finetune_trainer.verify.skeleton import HOST
from tests.support.forked_ranks import Disturbance, Fault, run_gang, trained_files
from tests.support.memory_cases import CASES, measured_peak, predicted_peak
from tests.support.tiny_model import GPU_PROFILE, run_context, tiny_spec

METHODS: dict[str, dict[str, Any]] = {
    name: {"type": name, "lora": None if name == "Full" else {"r": 4}} for name in ("LoRA", "QLoRA", "DoRA", "Full")
}
STEPS, KILLED_IN = 4, 3
POD_SECONDS = 100.0
STEP_TIMEOUT = 10
LAUNCHER_SCRIPT = Path(__file__).parents[2] / "trainer_image" / "layers" / "build-launcher.sh"
SAME_LOSS = 2e-2
"""Relative, between versions of FSDP in 16 bits; measured on CPUs in float32 they differ by less than 2e-5."""


def job(directory: Path, scale: Scale, ranks: int, method: str = "LoRA", version: int = 2, **changes: Any) -> RunContext:
    """A tiny job of a few steps; with a GPU in 16 bits, and with attention by the bounds of documents."""
    training: dict[str, Any] = {"maxSteps": STEPS, "globalBatchSize": 4, "microBatchSize": 2, **changes}
    training |= {} if scale.is_toy else {"precision": "bf16"}
    spec = tiny_spec(
        model={"attention": "varlen"},
        data={"validation": None},
        method=METHODS[method],
        training=training,
        parallelism={"processesPerNode": ranks, "fsdp": {"version": version}},
        checkpoint={"everySteps": 1},
    )
    return run_context(directory, spec, dtype=torch.float32 if scale.is_toy else torch.bfloat16, profile=GPU_PROFILE)


def losses_of(context: RunContext) -> list[float]:
    lines = [json.loads(line) for line in context.workspace.history.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def kernels(scale: Scale, rows: Rows) -> str:
    """Attention by bounds and by a mask on the device, next to float32 with a mask on the CPU."""
    rows += kernel_rows(scale.device)
    far = [str(row["model"]) for row in rows if not row["is_within_bound"]]
    otherwise = [str(row["model"]) for row in rows if ("refused" in row) != (row["model"] in REFUSED)]
    wrong = [f"further from float32 on the CPU than they may be: {', '.join(far)}"] if far else []
    return "; ".join([*wrong, *([f"refused or taken against expectation: {', '.join(otherwise)}"] if otherwise else [])])


def waits(scale: Scale, rows: Rows) -> str:
    """A step waits for the device once, or torch raises."""
    rows += wait_rows(scale.device)
    wrong = [
        f"{row['model']}: {row['problem'] or row['reads']}" for row in rows if row.get("problem") or row.get("reads", 1) != 1
    ]
    return "; ".join(wrong)


def methods(scale: Scale, rows: Rows) -> str:
    """Every method trains under both versions of FSDP and comes to the same losses."""
    for method in ("LoRA",) if scale.is_quick else METHODS:
        for version in (2,) if scale.is_quick or scale.ranks == 1 else (1, 2):
            with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
                context = job(Path(place), scale, scale.ranks, method, version)
                codes = run_gang(context)
                found = losses_of(context) if not any(codes) else []
            rows.append({"method": method, "fsdp": version, "ranks": scale.ranks, "exit codes": codes, "last loss": found[-1:]})
    wrong = [f"{row['method']} under FSDP {row['fsdp']}" for row in rows if not row["last loss"]]
    for method in METHODS:
        last = [row["last loss"][0] for row in rows if row["method"] == method and row["last loss"]]  # type: ignore[index]
        if last and max(last) - min(last) > SAME_LOSS * abs(max(last)):
            wrong.append(f"{method}: {last}")
    if scale.ranks == 1:
        rows.append({"not shown": "FSDP, which takes a second GPU"})
    return "; ".join(wrong)


def resume(scale: Scale, rows: Rows) -> str:
    """A run that is killed and resumed has the bytes of an undisturbed one; and what kernels that promise this cost."""
    files: dict[str, dict[str, bytes]] = {}
    ranks = 1 if scale.is_toy else scale.ranks
    runs: dict[str, list[Disturbance]] = {"undisturbed": [], "killed": [Fault("train.step:optimizer_step", call=KILLED_IN)]}
    if not scale.is_quick:
        runs["free kernels"] = []
    for name, faults in runs.items():
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
            context, began = job(Path(place), scale, ranks, deterministic=name != "free kernels"), time.monotonic()
            codes = [run_gang(context, faults)]
            if name == "killed":
                codes.append(run_gang(context))
            whole = [0] * ranks
            was_killed = name != "killed" or -9 in codes[0]
            if codes[-1] != whole or not was_killed:
                return f"{name}: exit codes {codes}, not {whole} in the end"
            files[name] = trained_files(context)
            rows.append({"run": name, "seconds": time.monotonic() - began, "losses": losses_of(context)})
    return "" if files["killed"] == files["undisturbed"] else "the bytes of the resumed run are others"


def pod(scale: Scale, rows: Rows) -> str:
    """The role as a container runs it: a supervisor, torchrun's agent and ranks, each a fork of the one before."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        context = job(Path(place), scale, scale.ranks)
        launch = {
            "--plan": context.workspace.root / "plan.json", "--plan-sha256": context.plan_sha256, "--claims-root": place,
            "--master-address": "127.0.0.1", "--master-port": free_port(), "--observe-port": 0,
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "finetune_trainer",
            Role.TRAIN.value,
            *(str(part) for pair in launch.items() for part in pair),
        ]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=POD_SECONDS, check=False)
        losses = losses_of(context) if done.returncode == 0 else []
    rows.append(
        {"exit code": done.returncode, "ranks": scale.ranks, "seconds": time.monotonic() - began, "last loss": losses[-1:]}
    )
    return "" if len(losses) == STEPS else f"{len(losses)} of {STEPS} steps: {(done.stdout + done.stderr)[-4000:]}"


def launcher(scale: Scale, rows: Rows) -> str:
    """Compiled layers without a compiler, as in the image: Triton starts kernels through a module that was made before."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        made = Path(place, "launcher")
        (Path(place) / "python3.11").symlink_to(sys.executable)
        environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}
        nvidia = Path(triton.__file__).parent / "backends" / "nvidia"
        subprocess.run(["sh", LAUNCHER_SCRIPT, nvidia, made], env=environment, check=True)
        context = job(Path(place, "claims"), scale, 1, compile=not scale.is_quick)
        # On a CPU a compiler would be needed after all.
        traced = [TracedAlone()] if scale.is_toy else []
        codes = run_gang(context, [WithoutCompiler(made, Path(place, "cache")), *traced])
        found = losses_of(context) if not any(codes) else []
        rows.append({"modules": [path.name for path in made.iterdir()], "exit codes": codes, "last loss": found[-1:]})
    return "" if rows[-1]["modules"] and len(found) == STEPS else f"{len(found)} of {STEPS} steps"


def calibration(scale: Scale, rows: Rows) -> str:
    """What the planner assumes of peaks, and what the device reaches: figures to replace the assumptions with."""
    rows += calibration_rows(scale.device)
    return ""


def planner(scale: Scale, rows: Rows) -> str:
    """The planner's estimate next to what torch counts as allocated."""
    cases = [
        (case.name, predicted, measured)
        for case in (CASES[:1] if scale.is_toy else memory.gpu_cases())
        for predicted, measured in [
            (predicted_peak(case), measured_peak(case))
            if scale.is_toy
            else (memory.predicted_allocation(case), memory.measured_allocation(case))
        ]
    ]
    rows += [
        {"case": name, "predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        for name, predicted, measured in cases
    ]
    if scale.is_toy:
        # What a device would be compared with.
        rows += [{"case": case.name, "predicted": memory.predicted_allocation(case)} for case in memory.gpu_cases()]
    wrong = [name for name, predicted, measured in cases if abs(predicted / measured - 1) > memory.TOLERANCE]
    return f"wrong by more than {memory.TOLERANCE:.0%}: {', '.join(wrong)}" if wrong else ""


def out_of_memory(scale: Scale, rows: Rows) -> str:
    """Memory that is not there ends a rank with its class."""
    wanted = FailureClass.HOST_OUT_OF_MEMORY if scale.is_toy else FailureClass.DEVICE_OUT_OF_MEMORY
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        context = job(Path(place), scale, 1)
        codes = run_gang(context, [Hungry()])
        path = context.workspace.reports(Role.TRAIN.value, context.attempt) / rank_report_name(0)
        report = TerminationReport.model_validate_json(path.read_text())
    rows.append({"exit code": codes[0], "class": report.failure, "message": report.message[:100], "hint": report.hint})
    return "" if report.failure is wanted else f"the class is {report.failure}, not {wanted}"


def stall(scale: Scale, rows: Rows) -> str:
    """A rank that waits forever is named, the others end with it, and what each had sent is on the workspace."""
    ranks = scale.ranks
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        context, began = job(Path(place), scale, ranks, stepTimeoutSeconds=STEP_TIMEOUT), time.monotonic()
        codes = run_gang(context, [Silent(ranks)])
        cause = root_cause(read_rank_reports(context.workspace.reports(Role.TRAIN.value, context.attempt)))
        records = [context.workspace.stacks(context.attempt) / flight_recorder_name(rank) for rank in range(ranks)]
        recorded = [len(json.loads(each.read_bytes())["entries"]) if each.exists() else None for each in records]
    found = {"class": cause.failure, "rank": cause.rank, "message": cause.message} if cause is not None else {}
    rows.append({"exit codes": codes, "seconds": time.monotonic() - began, "collectives on record": recorded, **found})
    wrong = [] if cause is not None and cause.failure is FailureClass.STALLED else ["the class is not Stalled"]
    wrong += [] if cause is not None and cause.rank == ranks - 1 else [f"rank {ranks - 1} is not named"]
    wrong += ["a rank ended as if nothing had happened"] if 0 in codes else []
    wrong += ["collectives are not on record"] if ranks > 1 and not all(recorded) else []
    return "; ".join(wrong)


def verification(scale: Scale, rows: Rows) -> str:
    """Logits of base, base + adapter and merged model on the device, next to the same on the CPU."""
    size = "0.1B" if scale.is_toy else "1.1B"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        base, adapter, merged = (Path(place, name) for name in ("base", "adapter", "merged"))
        write_base(base, size)
        write_adapter(adapter, size, base)
        merge_adapter(MergeOptions(base, (adapter,), merged, None, 1 << 40))
        for device in dict.fromkeys((HOST, scale.device)):
            began = time.monotonic()
            reference = Reference(base, [adapter], device=device)
            (figures,) = compare_logits([reference], merged, default_prompts(base), Path(place))
            faults = gate_failures(figures, GATES["bfloat16"])
            rows.append(
                {
                    "device": device.type,
                    "seconds": time.monotonic() - began,
                    "relative difference": figures.relative_difference,
                    "divergence": figures.mean_kl,
                    "faults": list(faults),
                }
            )
            if device.type == "cuda" and not torch.cuda.max_memory_allocated():
                return "nothing was computed on the device"
    return "; ".join(fault for row in rows for fault in row["faults"])  # type: ignore[attr-defined]


TIERS = {
    "kernels": Tier(kernels, 60, "torch's kernels of attention in bfloat16, and how far they are from float32"),
    "calibration": Tier(calibration, 30, "which part of its published peaks a device reaches"),
    "throughput": Tier(throughput, 420, "tokens per second and MFU of an 8B Llama at 4,096 packed tokens, next to TRL"),
    "waits": Tier(waits, 60, "that torch raises nothing if each wait of a step for the device but one is an error"),
    "paths": Tier(paths, 150, "the kernels of compiled layers, 4 bits, adapters and experts, and how far they are from float32"),
    "resume": Tier(resume, 120, "equal bytes after SIGKILL with deterministic kernels, and the time that these take"),
    "methods": Tier(methods, 150, "LoRA, QLoRA, DoRA and Full in bfloat16 over NCCL, under FSDP 1 and 2"),
    "out-of-memory": Tier(out_of_memory, 60, "torch's own error of a device without memory, and its failure class"),
    "pod": Tier(pod, 120, "ranks that are forks of forks use the device"),
    "launcher": Tier(launcher, 120, "compiled layers start kernels without a compiler on the machine"),
    "planner": Tier(planner, 120, "the error of the memory planner against peaks of allocated memory of a device, for 30 plans"),
    "verification": Tier(
        verification, 90, "how long a device takes to compare a merged model's logits, and how near they are there"
    ),
    "stall": Tier(stall, 90, "NCCL's operations that never end, and its flight recorder, which take a second GPU"),
    "settings": Tier(settings, 165, "tokens per second of the same with deterministic kernels"),
    "long": Tier(long, 330, "the same at 32,768 tokens"),
    "longest": Tier(longest, 300, "the same at 131,072 tokens"),
}
"""In the order in which they run: on a device time may be over before the last."""

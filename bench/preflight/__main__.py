"""`python -m bench.preflight`: time and memory of preflight's look at models that no test machine could load.

The models are declared, not made: real configurations, files whose headers name every tensor, and holes for weights. Each
measurement is `finetune_trainer.preflight.model_process` as preflight starts it, in a process of its own; beside it, in the same
run, a process that only imports torch, transformers and peft. Prints CPU and wall seconds, peak resident memory and the ratio of
both to the bare imports, writes them to bench/results/preflight.json, and fails where one passes the limits, or was refused.

    python -m bench.preflight --models llama-70b --methods LoRA,QLoRA
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.data.cpus import available_cpus
from tests.support.declared_model import LLAMA_70B, MIXTRAL_8X22B, QWEN3_235B, declare_model
from tests.support.quickstart import make_tokenizer
from tests.support.tiny_model import plan_of, tiny_spec

RESULT = Path(__file__).parents[1] / "results" / "preflight.json"
LIMIT_SECONDS, LIMIT_BYTES = 20.0, 1 << 30
MODELS = {"llama-70b": LLAMA_70B, "mixtral-8x22b": MIXTRAL_8X22B, "qwen3-235b": QWEN3_235B}
METHODS_MEASURED = ("LoRA", "QLoRA", "DoRA", "Full", "LoHa", "VeRA", "IA3", "OFT")
SETTINGS: dict[str, dict[str, Any]] = {"OFT": {"oftBlockSize": 32, "r": 0}}
"""Where PEFT's default does not fit the method's own rules."""
BARE = "import torch, transformers, peft; from transformers import AutoModelForCausalLM; from peft import LoraConfig"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-70b", help=f"of {', '.join(MODELS)}, with commas, or all")
    parser.add_argument("--methods", default=",".join(METHODS_MEASURED), help="with commas, or all")
    parser.add_argument("--fsdp-version", type=int, default=2)
    arguments = parser.parse_args()
    models = list(MODELS) if arguments.models == "all" else arguments.models.split(",")
    supported = [kind.value for kind, method in METHODS.items() if not method.refused]
    methods = supported if arguments.methods == "all" else arguments.methods.split(",")
    bare = measured([sys.executable, "-c", BARE], b"")
    print(f"{'imports alone':<28}{bare['seconds']:>7.1f} s {bare['cpu_seconds']:>7.1f} s CPU {bare['peak_bytes'] >> 20:>6} MiB")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-preflight-") as name:
        for model in models:
            directory = Path(name, model)
            declared = declare_model(directory, MODELS[model])
            make_tokenizer(["some text"]).save_pretrained(directory)
            for method in methods:
                found[f"{model} {method}"] = figures = look(directory, method, arguments.fsdp_version, bare)
                print(
                    f"{model + ' ' + method:<28}{figures['seconds']:>7.1f} s {figures['cpu_seconds']:>7.1f} s CPU "
                    f"{figures['peak_bytes'] >> 20:>6} MiB, {figures['ratio_seconds']:.1f} and {figures['ratio_bytes']:.1f} times "
                    f"the imports; {figures['findings'] or 'accepted'}; weights of {declared / 1e9:.0f} GB",
                    flush=True,
                )
    RESULT.parent.mkdir(exist_ok=True)
    described = {
        "machine": platform.machine(),
        "num_cpus": available_cpus(),
        "versions": {library: version(library) for library in ("torch", "transformers", "peft")},
        "fsdp_version": arguments.fsdp_version,
        "imports": bare,
        "models": found,
    }
    RESULT.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    large = [name for name, each in found.items() if each["cpu_seconds"] > LIMIT_SECONDS or each["peak_bytes"] > LIMIT_BYTES]
    refused = [name for name, each in found.items() if each["findings"]]
    print(f"above {LIMIT_SECONDS:g} s of CPU or {LIMIT_BYTES >> 20} MiB: {', '.join(large) or 'none'}")
    print(f"refused: {', '.join(refused) or 'none'}")
    return 1 if large or refused else 0


def plan(method: str, fsdp_version: int) -> RunPlan:
    """A job of this method for the declared models."""
    settings = None
    if METHODS[MethodType(method)].family.value == "method.settings":
        settings = SETTINGS.get(method, {})
    spec = tiny_spec(
        method={"type": method, "lora": {} if "LoRA" in method or method == "DoRA" else None},
        parallelism={"processesPerNode": 8, "fsdp": {"version": fsdp_version}},
        training={"globalBatchSize": 8},
    )
    if METHODS[MethodType(method)].family.value != "method.lora":
        spec["method"] = {"type": method, **({"settings": settings} if settings is not None else {})}
    return plan_of(spec)


def look(directory: Path, method: str, fsdp_version: int, bare: dict[str, Any]) -> dict[str, Any]:
    """One measurement, and how it compares."""
    command = [sys.executable, "-m", "finetune_trainer.preflight.model_process", str(os.getpid()), str(directory)]
    figures = measured(command, plan(method, fsdp_version).model_dump_json().encode())
    answer = json.loads(figures.pop("said") or "[null, []]")
    return {
        **figures,
        "ratio_seconds": round(figures["cpu_seconds"] / bare["cpu_seconds"], 2),
        "ratio_bytes": round(figures["peak_bytes"] / bare["peak_bytes"], 2),
        "findings": [finding["rule"] for finding in answer[1] if finding["severity"] == "error"],
    }


def measured(command: list[str], said: bytes) -> dict[str, Any]:
    """Seconds, CPU seconds and peak resident memory of a process, and what it answered."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as answer:
        told.write(said)
        told.seek(0)
        start = time.monotonic()
        process = subprocess.Popen(command, stdin=told, stdout=answer, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
        answer.seek(0)
        return {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "peak_bytes": usage.ru_maxrss * 1024,
            "said": answer.read().decode(),
        }


if __name__ == "__main__":
    sys.exit(main())

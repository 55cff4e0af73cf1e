"""`python -m bench.preflight`: time and memory of preflight's look at models that no test machine could load.

The models are declared, not made: real configurations, files whose headers name every tensor, and holes for weights. Each
measurement is `finetune_trainer.preflight.model_process` as preflight starts it, in a process of its own; next to it, in the same
run, a process that only imports torch, transformers and peft. Prints CPU and wall seconds, peak resident memory and the ratio of
both to the bare imports, and fails where one passes the limits, or was refused. One that passes four times the limit is ended.

All methods that the rules take are measured; bench/results/preflight.json keeps what was measured before with the same versions,
so that a long run can be made in parts.

    python -m bench.preflight --models llama-70b --methods LoRA,QLoRA
"""

import argparse
import json
import os
import platform
import resource
import signal
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
from tests.support.tiny_model import plan_of, tiny_spec
from tools.quickstart import make_tokenizer

RESULT = Path(__file__).parents[1] / "results" / "preflight.json"
LIMIT_SECONDS, LIMIT_BYTES = 20.0, 1 << 30
MODELS = {"llama-70b": LLAMA_70B, "mixtral-8x22b": MIXTRAL_8X22B, "qwen3-235b": QWEN3_235B}
SUPPORTED = tuple(kind.value for kind, method in METHODS.items() if not method.refused)
SETTINGS: dict[str, dict[str, Any]] = {"OFT": {"oftBlockSize": 32, "r": 0}, "TrainableTokens": {"tokenIndices": [1, 2, 3]}}
"""Where PEFT's defaults do not fit the method's own rules, or the merge."""
GIVEN_UP = 4
"""Times the limit."""
BARE = "import torch, transformers, peft; from transformers import AutoModelForCausalLM; from peft import LoraConfig"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-70b", help=f"of {', '.join(MODELS)}, with commas, or all")
    parser.add_argument("--methods", default=",".join(SUPPORTED), help="with commas")
    parser.add_argument("--fsdp-version", type=int, default=2)
    arguments = parser.parse_args()
    models = list(MODELS) if arguments.models == "all" else arguments.models.split(",")
    methods = arguments.methods.split(",")
    versions = {library: version(library) for library in ("torch", "transformers", "peft")}
    bare = measured([sys.executable, "-c", BARE], b"")
    del bare["said"]
    print(f"{'imports alone':<28}{bare['seconds']:>7.1f} s {bare['cpu_seconds']:>7.1f} s CPU {bare['peak_bytes'] >> 20:>6} MiB")
    found = earlier(versions, arguments.fsdp_version)
    now: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-preflight-") as place:
        for model in models:
            directory = Path(place, model)
            declared = declare_model(directory, MODELS[model])
            make_tokenizer(["some text"]).save_pretrained(directory)
            for method in methods:
                name = f"{model} {method}"
                now.append(name)
                found[name] = figures = look(directory, method, arguments.fsdp_version, bare)
                print(
                    f"{name:<28}{figures['seconds']:>7.1f} s {figures['cpu_seconds']:>7.1f} s CPU "
                    f"{figures['peak_bytes'] >> 20:>6} MiB, {figures['ratio_seconds']:.1f} and {figures['ratio_bytes']:.1f} "
                    "times "
                    f"the imports; {figures['ended'] or figures['findings'] or 'accepted'}; weights of {declared / 1e9:.0f} GB",
                    flush=True,
                )
                keep(found, bare, versions, arguments.fsdp_version)
    large = [name for name in now if found[name]["cpu_seconds"] > LIMIT_SECONDS or found[name]["peak_bytes"] > LIMIT_BYTES]
    refused = [name for name in now if found[name]["findings"] or found[name]["ended"]]
    print(f"above {LIMIT_SECONDS:g} s of CPU or {LIMIT_BYTES >> 20} MiB: {', '.join(large) or 'none'}")
    print(f"refused: {', '.join(refused) or 'none'}")
    return 1 if large or refused else 0


def earlier(versions: dict[str, str], fsdp_version: int) -> dict[str, dict[str, Any]]:
    """What was measured before, with the same versions."""
    if not RESULT.exists():
        return {}
    kept: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    same = kept["versions"] == versions and kept["fsdp_version"] == fsdp_version
    found: dict[str, dict[str, Any]] = kept["models"] if same else {}
    return {name: figures for name, figures in found.items() if name.split(" ")[1] in SUPPORTED and "ended" in figures}


def keep(found: dict[str, dict[str, Any]], bare: dict[str, Any], versions: dict[str, str], fsdp_version: int) -> None:
    """Write what is known so far."""
    described = {
        "machine": platform.machine(),
        "num_cpus": available_cpus(),
        "versions": versions,
        "fsdp_version": fsdp_version,
        "limits": {"cpu_seconds": LIMIT_SECONDS, "peak_bytes": LIMIT_BYTES},
        "imports": bare,
        "models": {name: found[name] for name in sorted(found)},
    }
    RESULT.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


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
    command = [sys.executable, "-m", "finetune_trainer.preflight.model_process", "--parent", str(os.getpid())]
    command += ["--model", str(directory)]
    figures = measured(command, plan(method, fsdp_version).model_dump_json().encode())
    answer = json.loads(figures.pop("said") or "[null, []]")
    return {
        **figures,
        "ratio_seconds": round(figures["cpu_seconds"] / bare["cpu_seconds"], 2),
        "ratio_bytes": round(figures["peak_bytes"] / bare["peak_bytes"], 2),
        "findings": [finding["rule"] for finding in answer[1] if finding["severity"] == "error"],
    }


def measured(command: list[str], said: bytes) -> dict[str, Any]:
    """Seconds, CPU seconds and peak resident memory of a process, what it answered, and how it ended where that was not well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as answer:
        told.write(said)
        told.seek(0)
        start = time.monotonic()
        process = subprocess.Popen(command, env=environment, preexec_fn=bounded, stdin=told, stdout=answer)  # noqa: PLW1509 - no threads here
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        code = process.returncode = os.waitstatus_to_exitcode(status)
        answer.seek(0)
        return {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "peak_bytes": usage.ru_maxrss * 1024,
            "load": round(os.getloadavg()[0], 1),
            "ended": "" if code == 0 else signal.Signals(-code).name if code < 0 else f"status {code}",
            "said": answer.read().decode(),
        }


def bounded() -> None:
    """In the process to be measured, before it begins: nothing is worth waiting for that is far above the limits."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(GIVEN_UP * LIMIT_SECONDS),) * 2)
    resource.setrlimit(resource.RLIMIT_DATA, (GIVEN_UP * LIMIT_BYTES,) * 2)


if __name__ == "__main__":
    sys.exit(main())

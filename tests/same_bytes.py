"""`python -m tests.same_bytes COMMIT`: whether this tree trains, saves and merges the same bytes as another commit.

For changes that must not change a result. Each case is a small job, run from its manifest to the merged model by `finetune run`,
once with the sources of COMMIT (in a temporary directory) and once with these. Compared is the SHA-256 of each weight file:
trained adapter or model, checkpoints, merged model. Prints a line for each case and ends with 1 if any differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.quickstart import make_claims

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("models-out", "workspace")
"""Claims that runs write to."""
LORA = {"r": 4, "loraDropout": "0.1"}
FSDP_1 = {"version": 1, "useOrigParams": True}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "lora-fsdp2": ({"type": "LoRA", "lora": LORA}, 2, {"version": 2}),
    "lora-fsdp1": ({"type": "LoRA", "lora": LORA}, 2, FSDP_1),
    "lora-one-rank": ({"type": "LoRA", "lora": LORA}, 1, {"version": 2}),
    "qlora-fsdp2": ({"type": "QLoRA", "lora": LORA, "quantization": {"bits": 4}}, 2, {"version": 2}),
    "qlora-one-rank": ({"type": "QLoRA", "lora": LORA, "quantization": {"bits": 4}}, 1, {"version": 2}),
    "dora-fsdp2": ({"type": "DoRA", "lora": LORA}, 2, {"version": 2}),
    "dora-one-rank": ({"type": "DoRA", "lora": LORA}, 1, {"version": 2}),
    "full-fsdp2": ({"type": "Full"}, 2, {"version": 2}),
    "full-fsdp1": ({"type": "Full"}, 2, FSDP_1),
    "ia3-fsdp2": ({"type": "IA3"}, 2, {"version": 2}),
    "loha-fsdp2": ({"type": "LoHa", "settings": {"r": 4}}, 2, {"version": 2}),
    "loha-one-rank": ({"type": "LoHa", "settings": {"r": 4}}, 1, {"version": 2}),
}
"""Name -> method, ranks, FSDP settings."""


def manifest(name: str) -> str:
    """The job of a case as JSON, with the claims of the quick start."""
    method, ranks, fsdp = CASES[name]
    spec = {
        "model": {"source": "pvc://models/tiny-llama"},
        "data": {
            "source": "pvc://data/train.jsonl",
            "validation": {"source": "pvc://data/validation.jsonl"},
            "format": "PromptCompletion",
            "maxSequenceLength": 128,
        },
        "method": method,
        "training": {"maxSteps": 6, "globalBatchSize": 4, "learningRate": "1e-2"},
        "parallelism": {"nodes": 1, "processesPerNode": ranks, "fsdp": fsdp},
        "checkpoint": {"everySteps": 3},
        "preflight": {"rehearsal": "Skip"},
        "output": {"destination": f"pvc://models-out/{name}"},
        "workspace": {"claimName": "workspace"},
    }
    job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}, "spec": spec}
    return json.dumps(job)


def digests(tree: Path, name: str, claims: Path) -> dict[str, str]:
    """Path below the claims -> SHA-256 of every weight file that the sources in `tree` make of a case. Raises RuntimeError."""
    # What an earlier run has left would be compared with itself.
    for claim in RESULTS:
        shutil.rmtree(claims / claim)
        (claims / claim).mkdir()
    path = claims.parent / f"{name}.yaml"
    path.write_text(manifest(name))
    environment = os.environ | {"PYTHONPATH": f"{tree / 'operator'}{os.pathsep}{tree / 'trainer_image'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "finetune_cli", "run", str(path), "--claims", str(claims), "--fresh"]
    done = subprocess.run(command, cwd=claims.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: the run ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    made = [file for claim in RESULTS for file in sorted((claims / claim).rglob("*.safetensors"))]
    found = {str(file.relative_to(claims)): hashlib.sha256(file.read_bytes()).hexdigest() for file in made}
    if not found:
        raise RuntimeError(f"{name}: the run made no weight file")
    return found


@contextmanager
def sources_of(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["git", "archive", commit, "operator", "trainer_image"]
        archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
        yield Path(directory)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    options = parser.parse_args()
    differing = 0
    with sources_of(options.commit) as before, tempfile.TemporaryDirectory() as directory:
        claims = Path(directory) / "claims"
        make_claims(claims)
        for name in options.only:
            wanted, found = digests(before, name, claims), digests(ROOT, name, claims)
            wrong = sorted(file for file in wanted.keys() | found.keys() if wanted.get(file) != found.get(file))
            print(
                f"{name}: {len(found)} files, {'the same bytes' if not wrong else 'DIFFERENT: ' + ', '.join(wrong)}", flush=True
            )
            differing += bool(wrong)
    print(f"{len(options.only)} cases, {differing} different from {options.commit}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())

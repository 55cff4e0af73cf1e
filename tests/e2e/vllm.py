"""vLLM's own reading of LoRA adapters and of `vllm serve`, without a GPU: an environment with the package and as much around it
as that imports.
"""

import json
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cluster.cache import cache_root

VERSION = "0.33.0"
_AROUND = (
    *("apache-tvm-ffi==0.1.15.post2", "cachetools==8.0.2", "cbor2==6.3.0", "cloudpickle==3.1.3", "einops==0.8.2"),
    *("fastapi==0.165.0", "importlib-metadata==10.2.0", "llguidance==1.9.1", "msgspec==0.22.0", "openai==3.57.0"),
    *("openai-harmony==0.0.8", "opentelemetry-api==1.45.2", "opentelemetry-sdk==1.45.2"),
    *("opentelemetry-semantic-conventions==0.66b2", "partial-json-parser==0.2.1.1.post7", "pillow==13.0.0"),
    *("py-cpuinfo==9.0.0", "pybase64==1.5.1", "pyzmq==27.3.0", "sniffio==1.3.1", "starlette==1.10.0", "uvloop==0.23.0"),
    *("xgrammar==0.2.8", "zipp==4.1.2"),
)
"""What it imports besides what the tests have; its wheel asks for a torch of its own and for kernels."""
_SERVE = """
import json, sys
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
# Options have defaults that depend on the device.
vllm.platforms.current_platform = vllm.platforms._current_platform = CpuPlatform()
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

found = make_arg_parser(FlexibleArgumentParser()).parse_args(json.load(sys.stdin))
validate_parsed_serve_args(found)
adapters = {each.name: each.path for each in found.lora_modules or ()}
names = found.served_model_name
print(json.dumps({"model": found.model_tag, "adapters": adapters, "most_rank": found.max_lora_rank, "names": names}))
"""
_LOAD = """
import json, logging, sys
from types import SimpleNamespace
import vllm.lora.lora_model as loading
from vllm.lora.peft_helper import PEFTHelper

logging.disable(logging.CRITICAL)
loading.PIN_MEMORY = False  # which takes a driver
for directory, most_rank, modules in json.load(sys.stdin):
    try:
        helper = PEFTHelper.from_local_dir(directory, None)
        helper.validate_legal(SimpleNamespace(max_lora_rank=most_rank))
        found = loading.LoRAModel.from_local_checkpoint(directory, set(modules), helper, lora_model_id=1, device="cpu")
    except ValueError as error:
        print(json.dumps({"refused": str(error), "scales": {}}))
    else:
        print(json.dumps({"refused": None, "scales": {name: lora.scaling for name, lora in found.loras.items()}}))
"""


@dataclass(frozen=True)
class Loaded:
    """What vLLM said of an adapter."""

    refused: str | None
    scales: dict[str, float]
    """By module."""


def load_adapters(given: Sequence[tuple[Path, int, Sequence[str]]]) -> list[Loaded]:
    """given: of each adapter the directory, what --max-lora-rank is, and the names of the modules that a model lets adapt."""
    order = [[str(directory), most_rank, list(modules)] for directory, most_rank, modules in given]
    return [Loaded(**answer) for answer in _answers(_LOAD, order)]


def parse_serve(line: str) -> dict[str, Any]:
    """What `vllm serve` understands of a line: its model, adapters by name, the highest rank, and names of the model."""
    program, verb, *arguments = shlex.split(line)
    assert (program, verb) == ("vllm", "serve")
    (found,) = _answers(_SERVE, arguments)
    return found


def _answers(program: str, order: Sequence[Any]) -> list[dict[str, Any]]:
    command = [str(_ensure_environment() / "bin" / "python"), "-P", "-c", program]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(answer) for answer in done.stdout.splitlines() if answer.startswith("{")]


def _ensure_environment() -> Path:
    """Made if the cache lacks it: a download of 330 MB. Raises CalledProcessError."""
    made = cache_root() / f"vllm-{VERSION}"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent, prefix="building-") as name:
        target, uv = Path(name, "made"), (sys.executable, "-m", "uv")
        subprocess.run([*uv, "venv", "--quiet", "--relocatable", target], check=True)
        install = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", target, f"vllm=={VERSION}", *_AROUND]
        subprocess.run(install, check=True)
        (packages,) = (target / "lib").glob("python*/site-packages")
        (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        target.rename(made)
    return made

"""Results that are kept between runs, under a key of everything that could change them.

That is the case, every source of the lab, the versions of the libraries, and the processor (4-bit kernels differ between them). A
result made by other sources is never found; `FINETUNE_LAB_CACHE=off` finds none at all.
"""

import functools
import hashlib
import json
import os
import pickle
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors")


def directory() -> Path:
    """Where results and models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "finetune-operator" / "lab"


@functools.cache
def surroundings() -> str:
    """Digest of what every result depends on besides its case."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    for library in LIBRARIES:
        digest.update(f"{library} {version(library)}".encode())
    digest.update(platform.python_version().encode() + _processor().encode())
    return digest.hexdigest()


def _processor() -> str:
    """Name and instruction sets of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return "".join(next((line for line in lines if line.startswith(word)), "") for word in ("model name", "flags"))


def digest(value: Any) -> str:
    """Digest of plain data and of everything that results depend on."""
    return hashlib.sha256(f"{surroundings()}\n{json.dumps(value, sort_keys=True, default=str)}".encode()).hexdigest()


def load(key: str) -> Any:
    """The result kept under this key, or None."""
    if os.environ.get("FINETUNE_LAB_CACHE") == "off":
        return None
    try:
        return pickle.loads((directory() / "results" / key).read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None


def keep(key: str, result: Any) -> None:
    """Keep a result; readers see all of it or nothing."""
    place = directory() / "results" / key
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(pickle.dumps(result))
    Path(file.name).replace(place)

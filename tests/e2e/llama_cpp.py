"""llama.cpp, built from the sources that its Python package carries, and the scripts there that convert models for it.

A build takes ten processor minutes on two cores and is kept in the cache.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.cluster.cache import cache_root
from tools.cluster.requirements import install_packages

VERSION = "0.3.36"
_ADDRESS = (
    "https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
    f"llama_cpp_python-{VERSION}.tar.gz"
)
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_PACKAGES = ("sentencepiece==0.2.3", "protobuf==7.36.2")
"""Of the scripts, besides what the tests have."""
_BUILD = {"CMAKE_ARGS": "-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
_TRAIN = """
import sys, sentencepiece
sentencepiece.SentencePieceTrainer.train(
    input=sys.argv[1], model_prefix=sys.argv[2], vocab_size=int(sys.argv[3]), model_type="bpe", byte_fallback=True,
    unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
)
"""
_LOGITS = Path(__file__).with_name("llama_cpp_logits.py")


@dataclass(frozen=True)
class LlamaCpp:
    """An environment with the library, and its sources."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    @property
    def scripts(self) -> Path:
        return self.directory / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"

    def run(self, line: str, folder: Path) -> None:
        """A line of bash that calls one of the scripts as `python SCRIPT`, in a folder."""
        script = line.replace("python ", f"{self.python} {self.scripts}/", 1)
        done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"

    def write_tokenizer(self, directory: Path, size: int) -> None:
        """Of the kind that the first Llamas have: the script knows the others by the tokens of the published ones."""
        text = Path(__file__).parents[2] / "README.md"
        command = [self.python, "-c", _TRAIN, text, directory / "tokenizer", str(size)]
        subprocess.run(command, check=True, capture_output=True)

    def logits(self, model: Path, ids: Sequence[int], adapter: Path | None = None) -> npt.NDArray[np.float32]:
        """(positions, vocabulary). model, adapter: GGUF files."""
        command = [self.python, "-P", _LOGITS, model, *([] if adapter is None else [adapter])]
        done = subprocess.run(command, input=json.dumps(list(ids)).encode(), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        found: npt.NDArray[np.float32] = np.load(io.BytesIO(done.stdout))
        return found


def ensure_llama_cpp() -> LlamaCpp:
    """What is in the cache, or is built now. Raises OSError, CalledProcessError, ClusterError."""
    made = LlamaCpp(cache_root() / f"llama-cpp-{VERSION}")
    if made.directory.exists():
        return made
    install_packages([] if shutil.which("g++") else ["g++"])
    made.directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.directory.parent, prefix="building-") as name:
        _build(LlamaCpp(Path(name, "made")))
        Path(name, "made").rename(made.directory)
    return made


def _build(target: LlamaCpp) -> None:
    target.directory.mkdir()
    with urllib.request.urlopen(_ADDRESS, timeout=300) as found:
        content = found.read()
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise OSError(f"{_ADDRESS} is not the file with the SHA-256 {_SHA256}")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(target.directory, filter="data")
    uv = (sys.executable, "-m", "uv")
    subprocess.run([*uv, "venv", "--quiet", "--relocatable", target.python.parent.parent], check=True)
    sources = (target.scripts.parent.parent, target.scripts / "gguf-py")
    install = [*uv, "pip", "install", "--quiet", "--python", target.python, *_PACKAGES, *sources]
    subprocess.run(install, check=True, env={**os.environ, **_BUILD})
    (packages,) = (target.python.parent.parent / "lib").glob("python*/site-packages")
    # torch and transformers, which the scripts read models with.
    (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

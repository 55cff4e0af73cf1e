"""One run in a process of its own: `python -m bench.merge.contender ours|peft|copy|torch BASE ADAPTER OUTPUT`.

Prints one JSON line: when the last byte was on disk (CLOCK_MONOTONIC, shared with the parent), the peak memory, the bytes of
files that it read and wrote by its own account, and what the kernel counted.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COPY_BYTES = 8 << 20


def ours(base: Path, adapter: Path, output: Path) -> dict[str, int]:
    """What `finetune merge --no-verify` starts."""
    from finetune_trainer.processes.start import keep_bitsandbytes_out
    from finetune_trainer.roles.merge_command import parser, run

    keep_bitsandbytes_out()
    paths = ["--base", str(base), "--adapter", str(adapter), "--output", str(output)]
    report = run(parser().parse_args([*paths, "--no-verify", "--max-shard-size", "5GB"]))
    return {name: report[name] for name in ("bytes_read", "bytes_written")}


def peft(base: Path, adapter: Path, output: Path) -> dict[str, int]:
    """What PEFT's documentation says to do, and an fsync so that both end with the model on disk."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=False)
    merged.save_pretrained(output)
    for path in output.iterdir():
        sync(path)
    return {}


def copy(base: Path, _adapter: Path, output: Path) -> dict[str, int]:
    """The base's bytes to another directory, in large blocks, with an fsync: what the disk allows anybody."""
    output.mkdir()
    buffer = memoryview(bytearray(COPY_BYTES))
    total = 0
    for path in sorted(base.iterdir()):
        with path.open("rb", buffering=0) as source, (output / path.name).open("wb", buffering=0) as target:
            while count := source.readinto(buffer):
                target.write(buffer[:count])
                total += count
            os.fsync(target.fileno())
    sync(output)
    return {"bytes_read": total, "bytes_written": total}


def torch(_base: Path, _adapter: Path, _output: Path) -> dict[str, int]:
    """Only imports torch: what the memory of all who use it begins with."""
    __import__("torch")
    return {}


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def peak_resident_bytes() -> int:
    """VmHWM of this process. Not ru_maxrss, which a child inherits from its parent across exec."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM; peak memory can only be measured on Linux")
    return int(found[1]) * 1024


def counted_by_the_kernel() -> dict[str, int]:
    """Bytes of read and write calls of this process, whatever file or cache they went to."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return {"kernel_bytes_read": int(fields["rchar"]), "kernel_bytes_written": int(fields["wchar"])}


CONTENDERS: dict[str, Callable[[Path, Path, Path], dict[str, int]]] = {"ours": ours, "peft": peft, "copy": copy, "torch": torch}


def main(name: str, *paths: str) -> dict[str, Any]:
    figures = CONTENDERS[name](*(Path(path) for path in paths))
    return {"finished": time.monotonic(), "peak_resident_bytes": peak_resident_bytes(), **counted_by_the_kernel(), **figures}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

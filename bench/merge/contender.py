"""One merge in a process of its own: `python -m bench.merge.contender ours|peft BASE ADAPTER OUTPUT`.

Prints one JSON line: when the last byte was on disk (CLOCK_MONOTONIC, shared with the parent) and the peak memory.
"""

import json
import os
import re
import sys
import time
from pathlib import Path


def ours(base: Path, adapter: Path, output: Path) -> None:
    from finetune_trainer.merge.run import MergeOptions, merge_adapter

    merge_adapter(MergeOptions(base, adapter, output, None, 5_000_000_000))


def peft(base: Path, adapter: Path, output: Path) -> None:
    """What PEFT's documentation says to do, and an fsync so that both end with the model on disk."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=False)
    merged.save_pretrained(output)
    for path in output.iterdir():
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


if __name__ == "__main__":
    contender, *paths = sys.argv[1:]
    {"ours": ours, "peft": peft}[contender](*(Path(path) for path in paths))
    print(json.dumps({"finished": time.monotonic(), "peak_resident_bytes": peak_resident_bytes()}))

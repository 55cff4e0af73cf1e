"""Checks the files of the model directory: that they exist, are complete and safe to open. Weights are read only for digests.

Preflight calls this before any library opens files of the directory. There is one finding for each broken file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_job.catalogue.book import make_finding
from finetune_job.finding import Finding
from finetune_trainer.fetch.staging import read_manifest
from finetune_trainer.files import file_sha256, link_root
from finetune_trainer.inspection.special_files import FIELD, MAX_BYTES, UNUSABLE_FILE, check_entries
from finetune_trainer.likely_name import likely_address
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.headers import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TensorHeader,
    read_checkpoint,
    read_header,
    read_json,
)

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of files that can run arbitrary code when they are loaded."""
_PARSED_ELSEWHERE = frozenset({CONFIG_FILE, INDEX_FILE, "tokenizer.json", "vocab.json"})
"""Files that other code checks. The tokenizer library, which reads the large ones, also refuses NaN."""
COPY_AGAIN = "copy the file to the claim again"
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys under which configurations give the number of layers. Each layer has its own weights."""


@dataclass(frozen=True)
class ModelFiles:
    """The findings about the directory, and the digest and size of its weights. `digest` is empty if there are findings."""

    findings: tuple[Finding, ...]
    digest: str = ""
    weight_bytes: int = 0


def inspect_model_files(directory: Path, address: str, claim: Path | None = None) -> ModelFiles:
    """Check the model in `directory`, which the user knows as `address` (`pvc://claim/path`). claim: mount of the claim."""
    if not directory.is_dir():
        others = sorted(path.name for path in directory.parent.iterdir() if path.is_dir()) if directory.parent.is_dir() else []
        shown = f"; next to it are {', '.join(others[:8])}" if others else ""
        likely = likely_address(address, others)
        fix = "correct the path" if likely is None else f"set {FIELD}: {likely}"
        message = f"is not a directory on its claim{shown}"
        return ModelFiles((_finding("model-directory-missing", address, message, f"{fix}, or put the model there"),))
    try:
        findings = check_entries(directory, link_root(directory, claim))
    except OSError as error:
        message = f"the directory cannot be listed ({error.strerror})"
        fix = "let the group of the pods (the profile's fsGroup) read it"
        return ModelFiles((_finding("model-directory-unreadable", address, message, fix),))
    if findings:
        return ModelFiles(tuple(findings))
    config = _json(directory / CONFIG_FILE, address, findings)
    text = config.get("text_config") if config is not None else None
    # Null means no quantization; transformers reads and writes it with this meaning.
    if any(isinstance(part, dict) and part.get("quantization_config") for part in (config, text)):
        message = (
            f"{CONFIG_FILE} has a quantization_config, but a base must have float32, float16 or bfloat16 weights, since nothing "
            "can be merged exactly into quantised ones"
        )
        fix = "give the original 16-bit model, and method QLoRA if it is to be quantised while it trains"
        findings.append(_finding("model-already-quantized", address, message, fix))
    findings += _broken_json(directory)
    names, index = _weight_files(directory, address, findings)
    headers: dict[str, list[TensorHeader]] = {}
    for name in names:
        try:
            headers[name] = read_header(directory / name)
        except MergeError as error:
            findings.append(_finding("model-shard-broken", name, str(error), COPY_AGAIN))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            findings.append(_finding("model-shard-broken", name, f"{name}: its header is malformed ({error!r})", COPY_AGAIN))
        except OSError as error:
            message = f"{name} cannot be read ({error.strerror})"
            findings.append(_finding("model-shard-broken", name, message, "copy it again, readable"))
    if index is not None and len(headers) == len(names):
        findings += _index_problems(index, headers)
    if config is not None and not findings:
        findings += _layers_without_weights(config, sum(len(tensors) for tensors in headers.values()))
    if findings:
        return ModelFiles(tuple(findings))
    sizes = {name: (directory / name).stat().st_size for name in names}
    return ModelFiles((), _digest(directory, headers, sizes), sum(sizes.values()))


def _broken_json(directory: Path) -> list[Finding]:
    """Return findings about settings files that some programs cannot read, as with NaN. They are published with the results."""
    findings = []
    for name in sorted(set(MAX_BYTES) & {path.name for path in directory.glob("*.json")} - _PARSED_ELSEWHERE):
        try:
            read_json(directory / name)
        except (MergeError, OSError) as error:
            findings.append(_finding(UNUSABLE_FILE, name, str(error), f"copy {name} to the claim again"))
    return findings


def file_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of configuration and weight files, from the manifest if the model was fetched, or else computed."""
    manifest = read_manifest(directory)
    known = {file.path: file.sha256 for file in manifest.files} if manifest is not None else {}
    names = (CONFIG_FILE, *read_checkpoint(directory).file_bytes)
    return {name: known.get(name) or file_sha256(directory / name) for name in names}


def _weight_files(directory: Path, address: str, findings: list[Finding]) -> tuple[list[str], dict[str, str] | None]:
    """Return the names of the safetensors files and, if there is an index, its map from tensors to files."""
    single, index_path = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index_path.exists():
        message = f"holds both {SINGLE_FILE} and {INDEX_FILE}: libraries differ in which of the two they read"
        findings.append(_finding("model-weights-ambiguous", address, message, "remove the one that does not belong to the model"))
    elif index_path.exists():
        index = _json(index_path, address, findings)
        weight_map = None if index is None else index.get("weight_map")
        if isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values()):
            names = sorted(set(weight_map.values()))
            outside = [name for name in names if Path(name).name != name]
            if not outside:
                return names, weight_map
            message = f"{INDEX_FILE}: {outside[0]!r} points outside the model"
            findings.append(_finding("model-index-broken", outside[0], message, "copy it again"))
        elif index is not None:
            findings.append(_finding("model-index-broken", INDEX_FILE, f"{INDEX_FILE} holds no weight_map", "copy it again"))
    elif single.exists():
        return [SINGLE_FILE], None
    elif pickled := sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED_SUFFIXES):
        message = f"the weights exist only as pickles ({', '.join(pickled[:4])}), which run code when they are opened"
        fix = "convert them once, where you trust them: AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)"
        findings.append(_finding("model-pickle-only", pickled[0], message, fix))
    else:
        message = f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"
        fix = "copy the whole model directory, weights included"
        findings.append(_finding("model-weights-missing", address, message, fix))
    return [], None


def _index_problems(index: Mapping[str, str], headers: Mapping[str, list[TensorHeader]]) -> list[Finding]:
    file_of = {tensor.name: name for name, tensors in headers.items() for tensor in tensors}
    absent = sorted(name for name, file in index.items() if file_of.get(name) != file)
    extra = sorted(set(file_of) - set(index))
    fix = "copy index and shards of the same save"
    findings = []
    if absent:
        message = f"{INDEX_FILE} places {len(absent)} tensors in files that do not hold them, such as {absent[0]}"
        findings.append(_finding("model-index-broken", absent[0], message, fix))
    if extra:
        message = f"{file_of[extra[0]]} holds {extra[0]}, which {INDEX_FILE} does not list ({len(extra)} such tensors)"
        findings.append(_finding("model-index-broken", extra[0], message, fix))
    return findings


def _layers_without_weights(config: Mapping[str, Any], num_tensors: int) -> list[Finding]:
    """Report a configuration with more layers than there are tensors, since building all layers would take far too long."""
    parts = {"": config} | {f"{name}.": part for name, part in config.items() if isinstance(part, dict)}
    for prefix, part in parts.items():
        for name in LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int) and count > num_tensors:
                message = f"{CONFIG_FILE}: {prefix}{name} is {count}, and the weight files hold {num_tensors} tensors in all"
                return [_finding("model-weights-incomplete", f"{count}", message, "copy all files of one and the same model")]
    return []


def _digest(directory: Path, headers: Mapping[str, list[TensorHeader]], sizes: Mapping[str, int]) -> str:
    index = directory / INDEX_FILE
    identity = {
        "config": file_sha256(directory / CONFIG_FILE),
        "index": file_sha256(index) if index.exists() else None,
        "files": {
            name: [sizes[name], [[tensor.name, tensor.dtype, tensor.shape, tensor.offset] for tensor in tensors]]
            for name, tensors in headers.items()
        },
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _json(path: Path, address: str, findings: list[Finding]) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (MergeError, OSError, UnicodeDecodeError) as error:
        rule = "model-config-unreadable" if path.name == CONFIG_FILE else "model-index-broken"
        findings.append(_finding(rule, address, str(error), f"copy {path.name} to the claim again"))
        return None


def _finding(rule: str, value: str, message: str, fix: str) -> Finding:
    return make_finding(rule, field=FIELD, value=value, message=message, fix=fix)

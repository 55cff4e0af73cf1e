"""Recognises adapters and models that other tools have stored in layouts other than PEFT's, and says how to convert them.

Tensor names are not repaired on reading, because verification loads the same files with PEFT, which would skip such tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from finetune_job.methods import INSIDE_PEFT

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
LFS_POINTER = b"version https://git-lfs"
"""Beginning of a Git LFS pointer, a file whose content was not fetched."""
_PICKLED_ADAPTERS = ("adapter_model.bin", "adapter_model.pt")
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "module.": "DistributedDataParallel",
}
"""Text that a wrapper inserts into a model's tensor names -> the wrapper. The last text occurs only at the start of a name."""
_WITH_ADAPTER_NAME = re.compile(r"\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)\.([A-Za-z0-9_-]+)(\.weight|\.bias)?$")
"""Pattern of tensor names that contain the name of the adapter. state_dict() writes such names, save_pretrained() does not."""
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B)\b")
_MLX = re.compile(r"\.lora_[ab]$")
_OTHER_FILES = {
    "adapters.safetensors": "MLX, whose matrices are transposed; train the adapter again with PEFT, or fuse it with mlx-lm",
    "adapters.npz": "MLX; train the adapter again with PEFT, or fuse it with mlx-lm",
    "pytorch_lora_weights.safetensors": "diffusers, which is for models of images",
}
"""Name of a file -> the tool that reads it, and what to do."""
_JOIN = (
    "from glob import glob; from safetensors.torch import load_file, save_file; save_file({n: t for f in "
    f"glob('adapter_model-*.safetensors') for n, t in load_file(f).items()}}, '{ADAPTER_FILE}', {{'format': 'pt'}})"
)
_SAVE = "Load it with the program that wrote it, and save the adapter with PEFT's save_pretrained."
_OTHER_STATES = {
    "adapter_model-*.safetensors": f'a part of an adapter. Join the parts in that directory: python -c "{_JOIN}"',
    "*.distcp": f"a part of a sharded checkpoint of torch, as FSDP saves it. {_SAVE}",
    "*/*.distcp": f"a part of a sharded checkpoint of torch, as FSDP saves it. {_SAVE}",
    "global_step*": f"a checkpoint of DeepSpeed, whose zero_to_fp32.py makes a state dict of it. {_SAVE}",
    "iter_*": f"a checkpoint of Megatron. {_SAVE}",
    "*.nemo": f"an archive of NeMo. {_SAVE}",
    "adapter_*.pt": "of torchtune. Save the adapter with a checkpointer for the format of Hugging Face, which writes both files.",
}
"""Pattern of a file or directory with the state of a training run -> what it is, and what to do."""


def no_adapter_file(directory: Path) -> str:
    """Explain why a directory holds no adapter weights, and what to do."""
    for name in _PICKLED_ADAPTERS:
        if (directory / name).exists():
            convert = f"save_file(load({name!r}, weights_only=True), {ADAPTER_FILE!r}, {{'format': 'pt'}})"
            return (
                f"{directory}: {ADAPTER_FILE} is missing, and {name} is a pickle, which is never loaded here. Convert it in that "
                f'directory: python -c "from torch import load; from safetensors.torch import save_file; {convert}"'
            )
    for name, owner in _OTHER_FILES.items():
        if (directory / name).exists():
            return f"{directory}: {ADAPTER_FILE} is missing, and {name} belongs to {owner}."
    for pattern, text in _OTHER_STATES.items():
        if (first := min(directory.glob(pattern), default=None)) is not None:
            return f"{directory}: {ADAPTER_FILE} is missing, and {first.relative_to(directory)} is {text}"
    if next(directory.glob("*.gguf"), None) is not None:
        return f"{directory} holds a GGUF file, which llama.cpp reads. Name the directory that PEFT saved."
    below = sorted(path.parent for path in directory.glob(f"*/{ADAPTER_CONFIG_FILE}"))
    if below:
        shown = ", ".join(path.name for path in below[:8])
        return f"{directory} holds no adapter itself, but its directories do: {shown}. Name one of them."
    if (directory / "config.json").exists() and not (directory / ADAPTER_CONFIG_FILE).exists():
        return f"{directory} is a whole model, not an adapter, so there is nothing to merge."
    return f"{directory}: {ADAPTER_FILE} is missing. Save the adapter with safe_serialization=True."


def foreign_names(path: Path, names: Collection[str]) -> str | None:
    """Explain how the names of an adapter's tensors differ from PEFT's, and how to convert them; None if they are PEFT's."""
    if any(_MLX.search(name) for name in names):
        return (
            f"{path}: its tensors have the names of MLX, and are transposed. Fuse the adapter with mlx-lm, or train it with PEFT."
        )
    reasons, convert, repaired = [], "n", list(names)
    for mark, wrapper in _WRAPPERS.items():
        if mark == "module." and any(name.startswith(mark) for name in repaired):
            reasons.append(f"{wrapper} had wrapped the model")
            convert, repaired = f"{convert}.removeprefix({mark!r})", [name.removeprefix(mark) for name in repaired]
        elif mark != "module." and any(mark in name for name in repaired):
            reasons.append(f"{wrapper} had wrapped the model")
            convert, repaired = f"{convert}.replace({mark!r}, '')", [name.replace(mark, "") for name in repaired]
    if any(name.startswith(INSIDE_PEFT * 2) for name in repaired):
        reasons.append("the model was wrapped by PEFT twice")
        convert += f".replace({INSIDE_PEFT * 2!r}, {INSIDE_PEFT!r})"
    adapters = {
        match[1] for name in repaired if (match := _WITH_ADAPTER_NAME.search(name)) and match[1] not in ("weight", "bias")
    }
    has_base = any(".base_layer." in name for name in repaired) and bool(adapters)
    if has_base or len(adapters) > 1:
        # Converting the names would mix several adapters, or leave weights of the base among those of the adapter.
        content = "weights of the base" if has_base else f"several adapters ({', '.join(sorted(adapters))})"
        return (
            f"{path} holds {content} under the names of a state_dict(). Load it into the PEFT model, and save one adapter: "
            f"model.save_pretrained(directory, selected_adapters=[{min(adapters)!r}])."
        )
    for adapter in sorted(adapters):
        reasons.append(f"they hold {adapter!r}, the name of the adapter in the program that saved them")
        convert += f".replace('.{adapter}.weight', '.weight').replace('.{adapter}.bias', '.bias').removesuffix('.{adapter}')"
    if any(map(_LORA.search, repaired)) and not any(INSIDE_PEFT in name for name in repaired):
        reasons.append(f"they do not begin with {INSIDE_PEFT!r}")
        convert = f"{INSIDE_PEFT!r} + {convert}"
    if not reasons:
        return None
    file = path.name
    saved = f"save_file({{{convert}: t for n, t in load_file({file!r}).items()}}, {file!r}, {{'format': 'pt'}})"
    return (
        f"{path}: its tensors do not have the names that PEFT's save_pretrained gives them: {' and '.join(reasons)}. Convert it "
        f'in its directory: python -c "from safetensors.torch import load_file, save_file; {saved}"'
    )

"""Shell commands, one line each, that fetch, serve or convert the results; the model card and the report share them.

Directories in the commands are relative to a local copy of the results. Names that users choose are quoted.
"""

from __future__ import annotations

import re

from finetune_job.api.base import HUB_NAME_PATTERN, BucketPath, HubPath, RegistryPath, adapter_repository, parse_destination
from finetune_trainer.markdown import one_line
from finetune_trainer.release.facts import RunFacts
from finetune_trainer.release.files import ADAPTER, MERGED


def address(facts: RunFacts, part: str) -> str:
    """Return the address by which loaders find a result: its repository on the Hub, or its directory in a local copy."""
    return hub_repository(facts, part) or local_directory(facts, part)


def local_directory(facts: RunFacts, part: str) -> str:
    """Return the directory of a result in a local copy of what was published."""
    return "." if facts.layout.top == part else f"./{part}"


def base_address(facts: RunFacts) -> str:
    """Return the address by which loaders find the base: its name on the Hub, or the directory where users must put it."""
    name = facts.plan.model.name
    return name if re.match(HUB_NAME_PATTERN, name) else "./base"


def hub_repository(facts: RunFacts, part: str) -> str | None:
    """Return the repository on the Hub that has this result at its top; None if results are not published to the Hub."""
    destination = None if facts.plan.publish is None else parse_destination(facts.plan.publish.destination)
    if not isinstance(destination, HubPath):
        return None
    return (destination if facts.layout.top == part else adapter_repository(destination)).repository


def copy_command(facts: RunFacts) -> str | None:
    """Return the command that copies what was published; None if the results are on a claim."""
    if facts.plan.publish is None:
        return None
    destination = parse_destination(facts.plan.publish.destination)
    if isinstance(destination, HubPath):
        copies = [f"hf download {quoted(destination.repository)} --local-dir ."]
        if facts.layout.needs_adapter_card:
            copies.append(f"hf download {quoted(adapter_repository(destination).repository)} --local-dir {ADAPTER}")
        return " && ".join(copies)
    if isinstance(destination, RegistryPath):
        return f"oras pull {destination.registry}/{destination.repository}:{destination.tag}"
    return f"aws s3 cp --recursive {quoted(facts.plan.publish.destination)} ." if isinstance(destination, BucketPath) else None


def serve_merged(facts: RunFacts) -> str:
    """Return the command that serves the merged or fully trained model with vLLM."""
    return f"vllm serve {quoted(address(facts, MERGED))}"


def serve_adapter(facts: RunFacts, separator: str = " ") -> str | None:
    """Return the command that serves the adapter on its base with vLLM; None if vLLM does not serve the adapter.

    The adapter comes from the Hub or a local copy. separator: text between the two parts of the command.
    """
    if facts.serving is None or not facts.serving.is_served:
        return None
    options = f"--enable-lora --max-lora-rank {facts.serving.max_lora_rank}"
    module = f"{quoted(facts.plan.job.name)}={quoted(address(facts, ADAPTER))}"
    return f"vllm serve {quoted(base_address(facts))} {options}{separator}--lora-modules {module}"


def convert_merged(facts: RunFacts) -> str:
    """Return the command that converts a local copy of the merged model for llama.cpp, using a script from its source."""
    outfile = quoted(f"{facts.plan.job.name}.gguf")
    return f"python convert_hf_to_gguf.py {quoted(local_directory(facts, MERGED))} --outfile {outfile}"


def convert_adapter(facts: RunFacts) -> str | None:
    """Return the command that converts the adapter for llama.cpp's --lora; None if llama.cpp would not compute what was trained.

    The command expects a copy of the base in ./base.
    """
    if facts.serving is None or not facts.serving.is_for_llama_cpp:
        return None
    outfile = quoted(f"{facts.plan.job.name}-lora.gguf")
    return f"python convert_lora_to_gguf.py --base ./base {quoted(local_directory(facts, ADAPTER))} --outfile {outfile}"


def quoted(text: str) -> str:
    """Quote the text as a single shell word on one line."""
    plain = one_line(text)
    return plain if re.fullmatch(r"[A-Za-z0-9_./:@=-]+", plain) else "'" + plain.replace("'", "'\\''") + "'"

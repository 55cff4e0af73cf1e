"""`python -m tools.plain_load DIR`: load a merged model as its user would, with transformers alone, and generate."""

import gc
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import cast

ABSENT = ("peft", "finetune_trainer", "finetune_job")


class _WithoutAbsent:
    """Wraps a finder, and hides the packages in ABSENT as if they were not installed."""

    def __init__(self, finder: object) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        finder = cast("MetaPathFinder", self._finder)
        return None if name.split(".", maxsplit=1)[0] in ABSENT else finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> object:
        return getattr(self._finder, name)


def main(directory: str) -> None:
    """Load model and tokenizer, generate a few tokens, and print the result."""
    gc.disable()  # the libraries have a million objects, none of which this short process frees
    sys.meta_path[:] = [cast("MetaPathFinder", _WithoutAbsent(finder)) for finder in sys.meta_path]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer("Return the", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text = tokenizer.decode(generated[0], skip_special_tokens=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert not [name for name in ABSENT if name in sys.modules]
    print(f"{type(model).__name__} with {parameters} parameters loads without PEFT and generates {text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    # Unloading torch's modules would take a second.
    os._exit(0)

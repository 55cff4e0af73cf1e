"""`python -m tools.quickstart DIR`: create the claims that examples/quickstart.yaml names, as directories under DIR.

    DIR/models/tiny-llama    a Llama of one million random parameters in three safetensors shards, with its tokenizer
    DIR/data/*.jsonl         pairs of a function's signature and its docstring's first sentence, from the standard library
    DIR/models-out           empty: results
    DIR/workspace            empty: prepared data, checkpoints, logs

Nothing is downloaded, and the same Python and libraries give the same files. Takes about ten seconds.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import json
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune_trainer.processes.start import end

MODEL_CLAIM, DATA_CLAIM, OUTPUT_CLAIM, WORKSPACE_CLAIM = "models", "data", "models-out", "workspace"
MODEL_NAME = "tiny-llama"
VOCABULARY_SIZE = 1024
NUM_PAIRS = 640
"""Number of pairs: few, so that the whole quick start takes well under a minute on two cores."""
HELD_OUT_SHARE = 8
"""One pair in this many is held out."""
_HOLD_STATEMENTS = ast.stmt, ast.excepthandler, ast.match_case
END_OF_TEXT = "<|endoftext|>"
TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.12,
}
"""LlamaConfig without its vocabulary: small enough for two cores, with grouped-query attention like real models.

The initial weights are larger than usual: with the usual ones, the logits are so flat that no adapter can change them much.
"""


def make_claims(directory: Path) -> None:
    """Create everything that the quick start needs, below `directory`."""
    pairs = docstring_pairs(NUM_PAIRS)
    train, held_out = split(pairs)
    for claim in (MODEL_CLAIM, DATA_CLAIM, OUTPUT_CLAIM, WORKSPACE_CLAIM):
        (directory / claim).mkdir(parents=True, exist_ok=True)
    write_json_lines(directory / DATA_CLAIM / "train.jsonl", train)
    write_json_lines(directory / DATA_CLAIM / "validation.jsonl", held_out)
    make_model(directory / MODEL_CLAIM / MODEL_NAME, [f"{pair['prompt']}{pair['completion']}" for pair in train])


def docstring_pairs(limit: int) -> list[dict[str, str]]:
    """Return at most `limit` pairs {prompt, completion}, chosen by the digest of the prompt and thus from the whole library."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
    pairs: dict[str, str] = {}
    for path in sorted(library.rglob("*.py")):
        if not skipped.intersection(path.relative_to(library).parts):
            pairs.update(_pairs(path))
    chosen = sorted(pairs, key=lambda prompt: hashlib.sha256(prompt.encode()).hexdigest())[:limit]
    return [{"prompt": prompt, "completion": pairs[prompt]} for prompt in chosen]


def split(pairs: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training pairs and held-out pairs; `pairs` are in random order already."""
    num_held_out = len(pairs) // HELD_OUT_SHARE
    return pairs[num_held_out:], pairs[:num_held_out]


def write_json_lines(path: Path, records: list[dict[str, str]]) -> None:
    """Write one record per line."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def make_model(directory: Path, texts: list[str], config: dict[str, Any] | None = None, max_shard_size: str = "2MB") -> None:
    """Write a Llama with random weights (seed 0) and a tokenizer trained on `texts`; `config` overrides TINY_LLAMA."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            **(TINY_LLAMA | (config or {})),
        )
    )
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    for path in directory.glob("*.safetensors"):
        # safetensors writes files for their owner only; a pod reads them with another user id.
        path.chmod(0o644)


def make_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE tokenizer of at most VOCABULARY_SIZE tokens on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in _functions(tree):
        sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
        if 20 <= len(sentence) <= 120 and len(signature := f"def {node.name}({ast.unparse(node.args)}):") <= 100:
            yield f"{signature}\n", f"{sentence}."


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions in the order of `ast.walk`, but without visiting expressions, which are nine of ten nodes."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        waiting.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, _HOLD_STATEMENTS))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def main() -> None:
    gc.disable()  # libraries and syntax trees have a million objects, none of which this short process frees
    parser = argparse.ArgumentParser(description="Make the claims of examples/quickstart.yaml as directories.")
    parser.add_argument("directory", type=Path)
    make_claims(parser.parse_args().directory)
    end(0)


if __name__ == "__main__":
    main()

"""Added tokens as a person adds them, with transformers alone, and which of their rows PEFT is told to train.

Nothing of the product is imported: what it takes for the tokens' ids and rows is compared with what is here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.sweep import oracle
from tests.sweep.expected import NUM_KNOWN

Token = dict[str, Any]
"""As a manifest writes it."""
ORDINARY: list[Token] = [{"content": "<step>"}, {"content": "zwei Wörter"}, {"content": " 步"}]
"""Fewer than the rows to spare of the sweep's bases."""
SPECIAL: list[Token] = [{"content": f"<|{number}|>", "special": True} for number in range(9)]
"""With the last one more than these rows."""
SPECIAL += [{"content": "<|end of turn|>", "special": True, "stop": True}]
TOKENS: dict[str, list[Token]] = {
    "ordinary": ORDINARY,
    "special": SPECIAL,
    "one twice": [*ORDINARY, ORDINARY[0]],
    "known": [*ORDINARY, {"content": "<|end|>"}],
}
"""By value of the dimension."""


def ids_of(tokens: Sequence[Token]) -> list[int]:
    """The sweep's tokenizer numbers its tokens one after the other."""
    return [*range(NUM_KNOWN, NUM_KNOWN + len(tokens))]


def write_base(source: Path, target: Path, tokens: Sequence[Token]) -> None:
    """The base in `source` with tokens and their rows, each of which is the mean of the rows of all tokens that it has had."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([AddedToken(each["content"], special=each.get("special", False)) for each in tokens])
    tokenizer.save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size), mean_resizing=False)
    set_rows(model, tokens, None)
    model.generation_config.eos_token_id = sorted(_stops(tokens))
    model.save_pretrained(target)


def set_rows(model: Any, tokens: Sequence[Token], seed: int | None) -> None:
    """Let the rows of added tokens hold the mean, or whatever this seed draws; biases of a head, too."""
    rows = ids_of(tokens)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for values in (parameter.data for parameter in module.parameters()):
            mean = values[:NUM_KNOWN].double().mean(dim=0).expand(len(rows), *values.shape[1:])
            drawn = None if seed is None else torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed))
            values[rows] = (mean if drawn is None else drawn).to(values.dtype)


def trained_rows(
    written: Sequence[int], tokens: Sequence[Token], names: tuple[str, str], taken: set[str], *, is_tied: bool
) -> list[int] | dict[str, list[int]] | None:
    """PEFT's `trainable_token_indices` that train all rows of these tokens; it takes those of no module that is adapted or saved.

    written: ids that the manifest has trained. names: of embedding and output head. taken: names of modules that are adapted or
    saved whole.
    """
    embedding, head = names
    ids = ids_of(tokens)
    if is_tied:
        # PEFT trains the rows of a head that shares the embedding's values with it.
        return sorted({*written, *ids}) if taken.isdisjoint(names) else [*written] or None
    of_module = {embedding: [*written] if embedding in taken else sorted({*written, *ids}), head: [] if head in taken else ids}
    return {name: rows for name, rows in of_module.items() if rows} or None


def tokenizer_problems(directory: Path, tokens: Sequence[Token], what: str) -> list[str]:
    """Problems with how the tokenizer in `directory` reads and writes added tokens, and where generation stops."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    problems = []
    for number, token in zip(ids_of(tokens), tokens, strict=True):
        content = token["content"]
        read = tokenizer(f"x{content}y", add_special_tokens=False)["input_ids"]
        if len(read) != 3 or read[1] != number:
            problems.append(f"{what}: {content!r} is read as {read[1:-1]}, not as {number}")
        if (tokenizer.decode([number], skip_special_tokens=True) == "") is not token.get("special", False):
            problems.append(f"{what}: {content!r} is not as special as it was said to be")
    if len(tokenizer) != NUM_KNOWN + len(tokens):
        problems.append(f"{what}: the tokenizer has {len(tokenizer)} tokens, not {NUM_KNOWN + len(tokens)}")
    return problems


def stop_problems(directory: Path, tokens: Sequence[Token], what: str) -> list[str]:
    """Whether generation with the model in `directory` stops where it is to, and at no other added token."""
    found = GenerationConfig.from_pretrained(directory).eos_token_id
    stops = {found} if isinstance(found, int) else {*(found or ())}
    wanted = _stops(tokens)
    return [] if stops == wanted else [f"{what}: generation stops at {sorted(stops)}, not at {sorted(wanted)}"]


def _stops(tokens: Sequence[Token]) -> set[int]:
    return {NUM_KNOWN - 1, *(number for number, token in zip(ids_of(tokens), tokens, strict=True) if token.get("stop", False))}


def model_problems(found: Any, wanted: Any, relative: float, what: str) -> list[str]:
    """Whether embedding and output head have all rows, and what they are to hold."""
    pairs = (
        ("embedding", found.get_input_embeddings(), wanted.get_input_embeddings()),
        ("output head", found.get_output_embeddings(), wanted.get_output_embeddings()),
    )
    return [
        problem
        for name, one, other in pairs
        for problem in oracle.compare_values({name: one.weight.detach()}, {name: other.weight.detach()}, relative, what)
    ]


def base_problems(made: Path, by_hand: Path, tokens: Sequence[Token]) -> list[str]:
    """Whether the base that the product has made is the one that a person makes, bit by bit."""
    what = "base with added tokens"
    one, other = (AutoModelForCausalLM.from_pretrained(each, dtype="auto").state_dict() for each in (made, by_hand))
    problems = oracle.compare_bits(one, other, what)
    rows = [AutoConfig.from_pretrained(each).vocab_size for each in (made, by_hand)]
    if rows[0] != rows[1]:
        problems.append(f"{what}: config.json says {rows[0]} rows, not {rows[1]}")
    return [*problems, *tokenizer_problems(made, tokens, what), *stop_problems(made, tokens, what)]

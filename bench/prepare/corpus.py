"""Text with the statistics of a natural language, records made of it, and a tokenizer trained on it. The same each time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_WORDS = 60_000
"""Different words; their frequencies follow Zipf's law."""
ZIPF_EXPONENT, ZIPF_SHIFT = 1.07, 2.7
"""Mandelbrot's form, with constants as commonly fitted to English."""
TOKENS = 32_000
TRAINED_ON_BYTES = 24_000_000
DISTINCT_BYTES = 1 << 29
"""Beyond, the records repeat: nothing that prepares remembers one, and making them takes as long as preparing them."""
LOG_LENGTHS = (3.3, 4.3)
"""Of prompt and completion, in words: records of 1 kB on average."""
COPY_BYTES = 1 << 24
END, UNKNOWN = "<|end|>", "<|unknown|>"
BPE, WORDS = "bpe", "words"
SYLLABLES = [
    a + b + c for a in ["", *"bcdfghlmnprstvw", "st", "th", "pr", "tr"] for b in "aeiou" for c in ["", *"nrstl", "nd", "ng"]
]


def words(random: np.random.Generator) -> np.ndarray:
    """Distinct words, frequent ones short."""
    found: dict[str, None] = {}
    while len(found) < VOCABULARY_WORDS:
        length = 1 + int(np.log2(1 + len(found) / 40) * random.uniform(0.2, 0.45))
        found["".join(random.choice(SYLLABLES, length))] = None
    return np.array(list(found), dtype=object)


def write_records(path: Path, num_bytes: int, seed: int = 0) -> None:
    """JSON Lines of prompts and completions, at least `num_bytes` long. Lengths are log-normal, as of instructions and
    answers.
    """
    _write_distinct(path, min(num_bytes, DISTINCT_BYTES), seed)
    distinct = path.stat().st_size
    with path.open("ab") as file:
        while file.tell() < num_bytes:
            with path.open("rb") as source:
                for start in range(0, distinct, COPY_BYTES):
                    file.write(source.read(min(COPY_BYTES, distinct - start)))


def _write_distinct(path: Path, num_bytes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    vocabulary = words(random)
    frequencies = 1 / (np.arange(VOCABULARY_WORDS) + ZIPF_SHIFT) ** ZIPF_EXPONENT
    cumulative = np.cumsum(frequencies / frequencies.sum())
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            lengths = np.minimum(random.lognormal(LOG_LENGTHS, [0.8, 0.9], (512, 2)).astype(int) + 4, 1200)
            drawn = vocabulary[np.minimum(np.searchsorted(cumulative, random.random(int(lengths.sum()))), VOCABULARY_WORDS - 1)]
            at, lines = 0, []
            for prompt, completion in lengths.tolist():
                texts = sentences(drawn[at : at + prompt]), sentences(drawn[at + prompt : at + prompt + completion])
                lines.append(json.dumps({"prompt": texts[0] + "\n", "completion": texts[1]}))
                at += prompt + completion
            written += file.write("\n".join(lines) + "\n")
            if written >= num_bytes:
                return


def sentences(drawn: np.ndarray) -> str:
    """Words with capitals, commas, full stops and line breaks."""
    parts = []
    for start in range(0, len(drawn), 13):
        sentence = list(drawn[start : start + 13])
        if len(sentence) > 8:
            sentence[6] += ","
        parts.append(" ".join(sentence).capitalize() + ("." if start % 4 else ".\n"))
    return " ".join(parts)


def write_tokenizer(directory: Path, records: Path, kind: str) -> None:
    """A tokenizer of at most 32,000 tokens, trained on the beginning of `records`.

    kind: BPE is byte-level; WORDS makes each word a token, which is several times faster and leaves the memory as it is.
    """
    if kind == BPE:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=TOKENS, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(vocab_size=TOKENS, special_tokens=[END, UNKNOWN], show_progress=False)
    texts = []
    num_bytes = 0
    with records.open("rb") as file:
        for line in file:
            record = json.loads(line)
            texts.append(record["prompt"] + record["completion"])
            num_bytes += len(line)
            if num_bytes > TRAINED_ON_BYTES:
                break
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(directory)

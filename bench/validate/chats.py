"""A job on a disk whose model has a tokenizer as large as those of today, and whose data are chats; both made from the sources of
Python's standard library, which are on every machine.
"""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_CHATS = 1000
_TURNS, _WORDS = 4, 45
"""Of a chat, and of a turn: some 200 tokens a chat."""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_job(directory: Path, manifest: Path, vocabulary: int) -> Path:
    """The manifest of a job like that of `manifest`, beside its claims `models` and `data`. vocabulary: tokens at most."""
    paths = [path for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")) if "site-packages" not in path.parts]
    sources = [path.read_text(errors="replace") for path in paths]
    model, data = directory / "models/base", directory / "data"
    for path in (model, data):
        path.mkdir(parents=True)
    _tokenizer(sources, vocabulary).save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    words = [word for source in sources[:50] for word in source.split() if word.isalpha()]
    drawn = random.Random(1)
    with (data / "train.jsonl").open("w") as file:
        for _ in range(NUM_CHATS):
            turns = [" ".join(drawn.choices(words, k=_WORDS)) for _ in range(_TURNS)]
            messages = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
            file.write(json.dumps({"messages": messages}) + "\n")
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["model"] = {"source": "pvc://models/base"}
    job["spec"]["data"] = {"source": "pvc://data/train.jsonl", "format": "Chat"}
    job["spec"]["training"]["learningRate"] = "0.01"  # YAML of another version writes 1e-2 without quotes
    del job["spec"]["evaluation"]
    path = directory / "chats.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def _tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer

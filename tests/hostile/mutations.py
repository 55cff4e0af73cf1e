"""Bytes and JSON values spoilt in every way that a file can be: cut, doubled, flipped, huge, deep, or not text at all."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

HUGE_NUMBERS = (0, -1, 2**31, 2**63 - 1, 2**63, 10**12, 10**15, 10**400, 1e308, float("nan"), float("inf"))
ODD_VALUES: tuple[Any, ...] = (None, True, "", "x" * 5000, "\ud800", "\x00", [], {}, [[]], {"": {}}, [0] * 300, *HUGE_NUMBERS)
DEPTH = 200_000
WHOLE_FILES: tuple[bytes, ...] = (
    b"",
    b"\0" * 64,
    b"\xff\xfe\xfd" * 20,
    b"null",
    b"[]",
    b'"text"',
    b"1e999",
    b"{",
    b'{"a":' * DEPTH,
    b"[" * DEPTH + b"]" * DEPTH,
    b"\xef\xbb\xbf{}",
    b"9" * 6000,
    b'{"model_type": "llama", "model_type": "mixtral"}',
)
"""In place of a file."""


def spoilt_bytes(content: bytes, seed: int) -> bytes:
    """`content` with one accident of a random kind."""
    generator = random.Random(seed)
    place = generator.randrange(len(content) or 1)
    length = generator.randrange(1, 64)
    accidents: tuple[Callable[[], bytes], ...] = (
        lambda: content[:place],
        lambda: content[place:],
        lambda: content[:place] + bytes([content[place] ^ (1 << generator.randrange(8))]) + content[place + 1 :],
        lambda: content[:place] + content[place + length :],
        lambda: content[: place + length] + content[place:],
        lambda: content[:place] + generator.randbytes(length) + content[place:],
        lambda: content[:place] + b"\0" * length + content[place:],
        lambda: content[:place] + b"9" * 40 + content[place:],
        lambda: content[:place] + b'"' + content[place:],
        lambda: content[:place] + b"[" * 3000 + content[place:],
        lambda: content[:place] + b"\xed\xa0\x80" + content[place:],
        lambda: generator.choice(WHOLE_FILES),
    )
    return generator.choice(accidents)()


def spoilt_values(value: dict[str, Any], seed: int) -> bytes:
    """`value` as JSON with one to three of its values replaced by odd ones, wherever they stand."""
    generator = random.Random(seed)
    changed = json.loads(json.dumps(value))
    for _ in range(generator.randint(1, 3)):
        holder, key = generator.choice(list(_places(changed)))
        odd = copy.deepcopy(generator.choice(ODD_VALUES))
        holder[key] = -holder[key] if generator.random() < 0.1 and isinstance(holder[key], int) else odd
        if not changed:
            break
    return json.dumps(changed).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list) and value[key]:
            yield from _places(value[key])

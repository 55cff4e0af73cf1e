"""Manifests that nobody would write: from the schema of the definition, then spoilt, as objects and as text.

Everything follows from one random generator, so that a seed repeats it.
"""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from finetune_job.crd import job_crd, profile_crd
from finetune_job.names import API_VERSION, JOB_KIND, PROFILE_KIND

ROOT = Path(__file__).parents[2]
Document = dict[str, Any]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PLAIN: Document = {
    "model": {"source": "pvc://models/base"},
    "data": {"source": "pvc://data/train.jsonl"},
    "training": {"maxSteps": 10},
    "output": {"destination": "pvc://out/result"},
    "workspace": {"claimName": "workspace"},
}
TEXTS: dict[str, tuple[str, ...]] = {
    "source": (
        "pvc://models/base", "pvc://data/train.jsonl", "pvc://c", "hf://org/name", "hf://org/name/sub", "hf://datasets/org/set",
        "hf://datasets/org/set/a.csv", "s3://bucket/key", "s3://bucket", "pvc://data/../x", "hf://datasets/org", "hf://datasets",
        "pvc://data/.", "s3://buc..ket/a=b", "pvc://a/b//c", "hf://./..",
    ),
    "destination": (
        "pvc://out/result", "pvc://models/base/x", "hf://org/model", "hf://datasets/x", "s3://bucket/a", "oci://registry/a/b:v1",
        "oci://registry:99999/a/b", "oci://a/b", "s3://bucket/..",
    ),
    "revision": (COMMIT, "0" * 40),
    "storage": ("10Gi", "9999999999Ti", "1Ki"),
    "maxShardSize": ("5GB", "1B", "512Mi", "9999999999Ti"),
    "claimName": ("workspace", "a", "models"),
    "name": ("secret", "a.b-c"),
    "key": ("token", "A_b.c"),
}  # fmt: skip
DECIMALS = ("0", "1", "0.5", "1e-8", "2e-4", "1.0", "0.0", "1e99", "1e-99", "100", "100.000000000000000001",
            "0.99999999999999999999", "1.00000000000000000001", "00.1", "9e9", "0e0", "1E+02",
            "12345678901234567890123")  # fmt: skip
NAMES = (
    "q_proj",
    "all-linear",
    "lm_head",
    "",
    " ",
    "a b",
    "a,b",
    "A.B",
    "LlamaDecoderLayer",
    "\u00a0",
    "\u2003",
    "é",
    "x" * 200,
    "(",
    "\x1f",
)
ODD: tuple[Callable[[Random], Any], ...] = (
    lambda random: None,
    lambda random: True,
    lambda random: random.choice((0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 10**30)),
    lambda random: random.choice((0.5, 1.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"))),
    lambda random: random.choice(
        ("", " ", "null", "true", "2e-4", "nan", "Infinity", "-1", "\u202e", "\ud800", "\x00", "日本", "a\nb")
    ),
    lambda random: "x" * random.choice((64, 513, 5000, 70_000)),
    lambda random: random.choice(DECIMALS),
    lambda random: random.choice(NAMES),
    lambda random: [],
    lambda random: {},
    lambda random: [random.choice(NAMES)] * random.choice((1, 3, 300)),
    lambda random: {"source": "pvc://data/x", "": None, "a": [{}]},
    lambda random: functools.reduce(
        lambda inner, _: random.choice(([inner], {"a": inner})), range(random.choice((3, 30, 90))), 1
    ),
)


def schema_of(crd: Document, part: str) -> Document:
    """The structural schema of `spec` or `status`."""
    schema: Document = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][part]
    return schema


@functools.cache
def spec_schema() -> Document:
    return schema_of(job_crd(), "spec")


@functools.cache
def status_schema() -> Document:
    return schema_of(job_crd(), "status")


@functools.cache
def profile_schema() -> Document:
    return schema_of(profile_crd(), "spec")


def profile_of(random: Random) -> Document:
    """A FineTuneProfile with some of its fields, or with values for many; half of them are spoilt."""
    spec = value_of(random, profile_schema())
    if random.random() < 0.5:
        spec = {key: spec[key] for key in random.sample(sorted(spec), min(len(spec), 2))}
    document: Document = {"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": {"name": "tried"}, "spec": spec}
    if random.random() < 0.5:
        spoil(random, document)
    return document


def value_of(random: Random, schema: Document, name: str = "", depth: int = 0) -> Any:
    """A value that a schema allows, apart from patterns now and then."""
    if "enum" in schema:
        return random.choice(schema["enum"])
    match schema.get("type"):
        case "boolean":
            return random.random() < 0.5
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 2**40)
            return random.choice(
                (low, high, min(low + 1, high), random.randint(low, min(high, low + 64)), min(max(2, low), high))
            )
        case "string":
            return _text(random, schema, name)
        case "array":
            number = random.choice((schema.get("minItems", 0), 1, 2, min(4, schema.get("maxItems", 4))))
            return [value_of(random, schema["items"], name, depth + 1) for _ in range(number)]
        case "object" if "properties" in schema:
            needed = schema.get("required", [])
            chosen = [key for key in schema["properties"] if key in needed or random.random() < 0.35]
            return {key: value_of(random, schema["properties"][key], key, depth + 1) for key in chosen}
        case "object" if "additionalProperties" in schema:
            keys = random.sample(NAMES, random.randint(0, 3))
            return {key: value_of(random, schema["additionalProperties"], name, depth + 1) for key in keys}
        case _:
            return {
                key: random.choice(ODD)(random) for key in random.sample(("r", "alpha", "targetModules", "a_b", "saveIndices"), 2)
            }


def _text(random: Random, schema: Document, name: str) -> str:
    if name in TEXTS and random.random() < 0.95:
        return random.choice(TEXTS[name])
    if "eE" in schema.get("pattern", ""):
        return random.choice(DECIMALS)
    if "pattern" in schema and random.random() < 0.8:
        return random.choice(("a", "abc", "a-b", "A_b", "10Gi"))
    return random.choice(NAMES)[: schema.get("maxLength", 4096)]


def spec_of(random: Random) -> Document:
    """A spec: a plain one with some of its fields set to what the schema allows, or one that is wild throughout."""
    schema = spec_schema()
    if random.random() < 0.1:
        spec: Document = value_of(random, schema)
        return spec
    spec = copy.deepcopy(PLAIN)
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 5, 8))):
        place, node = spec, schema
        while True:
            key = random.choice(list(node["properties"]))
            node = node["properties"][key]
            if "properties" not in node or random.random() < 0.1:
                place[key] = value_of(random, node, key)
                break
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
    return spec


def job_of(random: Random) -> Document:
    """A FineTuneJob; four of ten are spoilt in one to four places."""
    document: Document = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": "tried"}, "spec": spec_of(random)}
    if random.random() < 0.4:
        for _ in range(random.randint(1, 4)):
            spoil(random, document)
    return document


def spoil(random: Random, document: Any) -> None:
    """Change one place: another value, an unknown field, a field less."""
    place, key = _place(random, document)
    roll = random.random()
    if roll < 0.15 and isinstance(place, dict):
        place.pop(key, None)
    elif roll < 0.3 and isinstance(place, dict):
        place[random.choice(("surprise", "learning_rate", str(key).upper(), "", "é"))] = random.choice(ODD)(random)
    elif roll < 0.4 and isinstance(place, list):
        place.insert(0, random.choice(ODD)(random))
    else:
        place[key] = random.choice(ODD)(random)


def _place(random: Random, document: Any) -> tuple[Any, Any]:
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            place["x" if isinstance(place, dict) else slice(0, 0)] = 1 if isinstance(place, dict) else [1]
            keys = list(place) if isinstance(place, dict) else [0]
        key = random.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or random.random() < 0.2:
            return place, key
        place = inner


TOKENS = (
    "&a ", "*a", "<<: *a", "<<: {a: 1}", "!!binary ", "!!timestamp ", "!!set ", "!!python/object:os.system ", "!!int ",
    "!!float ", "!!str ", "!!omap ", "\t", "\n---\n", "\n...\n", "%YAML 1.3\n", "0o17", "017", "1e400", ".nan", "-.inf",
    "\x00", "\ufeff",
    "\r\n", "\r", "\x85", "\u2028", "{", "[", "}", "]", "|", ">-\n", "'", '"', "#", ": ", "- ", "? ", ",", "@", "`", "~", "yes",
    "2026-01-01", "2026-01-01T00:00:00Z", "1:30:00", "0x7f", "0b11", "1_000", "=",
    "\\ud800", '"\\ud800"', "9" * 400, "0x" + "f" * 5000,
    "{a: [" * 40, "[" * 2000, "- " * 300, "x: " + "y" * 9000, "a: &b [*b]", "\u202e", "é", "\x7f", "\ud7ff", "💥",
)  # fmt: skip


def bomb(random: Random) -> str:
    """Text that stands for far more than it holds."""
    kind = random.choice(("aliases", "merges", "deep", "keys", "anchors"))
    levels, width = random.randint(4, 12), random.randint(4, 10)
    match kind:
        case "aliases":
            rows = ["x0: &x0 [a]", *(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * width)}]" for n in range(1, levels))]
        case "merges":
            merged = (f"x{n}: &x{n} {{k{n}: 1, <<: [{', '.join([f'*x{n - 1}'] * width)}]}}" for n in range(1, levels))
            rows = ["x0: &x0 {a: 1}", *merged]
        case "deep":
            opening, closing = random.choice((("[", "]"), ("{a: ", "}")))
            rows = ["x: " + opening * 5000 + "1" + closing * random.choice((0, 5000))]
        case "keys":
            rows = [f"{random.choice(('k', 'é'))}{n % 997}: {n}" for n in range(2000)]
        case _:
            rows = [f"x{n}: &x{n} {n}" for n in range(2000)]
    return "\n".join([f"apiVersion: {API_VERSION}", f"kind: {JOB_KIND}", *rows])


@functools.cache
def example_texts() -> tuple[str, ...]:
    """The manifests of the examples."""
    return tuple(path.read_text() for path in sorted((ROOT / "examples").rglob("*.yaml")))


def text_of(random: Random) -> str:
    """A manifest as text: an example or a generated one, with bytes changed; or something that is none."""
    roll = random.random()
    if roll < 0.01:
        return bomb(random)
    if roll < 0.03:
        return random.choice(
            ("", "\n", "---\n---\n", "# nothing", "null", "[]", "{}", "a", "- kind: FineTuneJob", "kind: [FineTuneJob]")
        )
    text = random.choice(example_texts()) if roll < 0.6 else _written(random)
    for _ in range(random.choice((0, 1, 1, 2, 3, 6))):
        text = _mutated(random, text)
    return text


def _written(random: Random) -> str:
    document = job_of(random)
    try:
        if random.random() < 0.3:
            return json.dumps(document, ensure_ascii=random.random() < 0.5)
        return str(
            yaml.safe_dump(document, default_flow_style=random.choice((True, False, None)), allow_unicode=random.random() < 0.5)
        )
    except (RecursionError, yaml.YAMLError):
        return json.dumps(document)


def _mutated(random: Random, text: str) -> str:
    place = random.randint(0, len(text))
    match random.randint(0, 6):
        case 0:
            return text[:place] + random.choice(TOKENS) + text[place:]
        case 1:
            return text[:place] + text[place + random.randint(1, 12) :]
        case 2:
            lines = text.splitlines(keepends=True) or [""]
            number = random.randrange(len(lines))
            return "".join([*lines[:number], lines[number], *lines[number:]])
        case 3:
            lines = text.splitlines(keepends=True) or [""]
            random.shuffle(lines)
            return "".join(lines)
        case 4:
            raw = bytearray(text.encode(errors="replace"))
            for _ in range(random.randint(1, 4)):
                if raw:
                    raw[random.randrange(len(raw))] = random.randrange(256)
            return raw.decode(errors="surrogateescape" if random.random() < 0.1 else "replace")
        case 5:
            return text[:place]
        case _:
            lines = text.splitlines(keepends=True) or [""]
            number = random.randrange(len(lines))
            head, colon, _ = lines[number].partition(": ")
            lines[number] = f"{head}{colon}{random.choice(TOKENS)}\n"
            return "".join(lines)

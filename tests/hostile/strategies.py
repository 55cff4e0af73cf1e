"""Strategies that draw manifests from the structural schema of the definition, so that a failing one shrinks to what matters.

A job is a plain one with a few edits (a field set to what its schema allows) and a few accidents (a value of another kind, an
unknown field, a field less), each of which hypothesis can leave out or make simpler.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from finetune_job.names import API_VERSION, JOB_KIND
from tests.hostile.manifests import DECIMALS, NAMES, PLAIN, TEXTS, Document, spec_schema

Path = tuple[str, ...]
Edit = tuple[Path, Any]
MOST_ITEMS = 4
"""Of a list, though a schema may allow more."""
WORDS = st.sampled_from(("a", "abc", "a-b", "A_b", "10Gi", *NAMES))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=40),
    st.sampled_from(DECIMALS),
    st.sampled_from(("x" * 70_000, "\ud800", "\x00", "\u202e")),
)
ODD = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6
)
"""Anything that JSON, or YAML, can say."""
DELETED = object()
UNKNOWN = ("surprise", "learning_rate", "", "é")


def values(schema: Document, name: str = "") -> st.SearchStrategy[Any]:
    """What a schema allows, apart from patterns now and then."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 2**40)
            return st.sampled_from((low, high)) | st.integers(low, high)
        case "string":
            return _text(schema, name)
        case "array":
            most = min(schema.get("maxItems", MOST_ITEMS), max(MOST_ITEMS, schema.get("minItems", 0)))
            return st.lists(values(schema["items"], name), min_size=schema.get("minItems", 0), max_size=most)
        case "object" if "properties" in schema:
            needed = schema.get("required", [])
            inner = {key: values(each, key) for key, each in schema["properties"].items()}
            return st.fixed_dictionaries(
                {key: inner[key] for key in needed}, optional={key: inner[key] for key in inner if key not in needed}
            )
        case "object" if "additionalProperties" in schema:
            return st.dictionaries(WORDS, values(schema["additionalProperties"], name), max_size=3)
        case _:
            return st.dictionaries(st.sampled_from(("r", "alpha", "targetModules", "a_b", "saveIndices")), ODD, max_size=2)


def _text(schema: Document, name: str) -> st.SearchStrategy[str]:
    if name in TEXTS:
        return st.sampled_from(TEXTS[name]) | WORDS
    if "eE" in schema.get("pattern", ""):
        return st.sampled_from(DECIMALS)
    return WORDS.map(lambda text: text[: schema.get("maxLength", 4096)])


def _paths(schema: Document, path: Path = ()) -> Iterator[tuple[Path, Document]]:
    for key, inner in schema.get("properties", {}).items():
        yield (*path, key), inner
        yield from _paths(inner, (*path, key))


@functools.cache
def _edits() -> st.SearchStrategy[Edit]:
    """A field anywhere in spec, with what its schema allows."""
    choices = {path: values(schema, path[-1]) for path, schema in _paths(spec_schema())}
    # Whole branches at a time are rarely what somebody writes, and are slow to draw.
    leaves = [path for path, schema in _paths(spec_schema()) if "properties" not in schema]
    branches = [path for path in choices if path not in set(leaves)]
    one_of = st.sampled_from(leaves * 3 + branches)
    return one_of.flatmap(lambda path: st.tuples(st.just(path), choices[path]))


@functools.cache
def _accidents() -> st.SearchStrategy[Edit]:
    paths: list[Path] = [("spec", *path) for path, _ in _paths(spec_schema())]
    paths += [("spec",), ("metadata",), ("kind",), ("apiVersion",), ("metadata", "name")]
    place = st.sampled_from(paths)
    unknown = st.tuples(place, st.sampled_from(UNKNOWN)).map(lambda both: (*both[0][:-1], both[1]))
    return st.tuples(place | unknown, ODD | st.just(DELETED))


@st.composite
def jobs(draw: st.DrawFn) -> Document:
    """A FineTuneJob."""
    document: Document = {
        "apiVersion": API_VERSION,
        "kind": JOB_KIND,
        "metadata": {"name": "tried"},
        "spec": copy.deepcopy(PLAIN),
    }
    for path, value in draw(st.lists(_edits(), max_size=5)):
        _set(document, ("spec", *path), value)
    if draw(st.integers(0, 2)) == 2:
        for path, value in draw(st.lists(_accidents(), min_size=1, max_size=3)):
            _set(document, path, value)
    return document


def _set(document: Document, path: Path, value: Any) -> None:
    """Set or delete one place; what is in the way becomes an object."""
    place: Any = document
    for key in path[:-1]:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    if value is DELETED:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value

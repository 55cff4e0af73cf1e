"""A killed process that leaves a wrong base fails the run of the kill suite."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kill import base
from tests.kill.cases import CASES

RECORD, WEIGHTS = "added-tokens.json", "base-with-added-tokens/model.safetensors"
WHOLE = {RECORD: b"whole", WEIGHTS: b"all"}


@pytest.mark.parametrize(
    ("left", "code", "problem"),
    [
        (WHOLE, 0, ""),
        ({RECORD: b"whole", WEIGHTS: b"a"}, 1, "left a record of another one"),
        ({WEIGHTS: b"all"}, 0, "says that it is there, and it is not"),
        ({}, 1, "ended with 1, and was not hit"),
        (
            {**WHOLE, "base-with-added-tokens.tmp-1/config.json": b""},
            0,
            "left next to the base: ['base-with-added-tokens.tmp-1']",
        ),
    ],
)
def test_a_base_that_is_not_the_undisturbed_one_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: dict[str, bytes], code: int, problem: str
) -> None:
    """Whatever a killed process leaves, and the last one, which nothing kills."""
    (case,) = [case for case in CASES if case.name == "LoRA, added tokens, FSDP2"]
    context = case.context(tmp_path / "claims")

    def made(*_arguments: Any) -> int:
        for name, content in left.items():
            path = context.workspace.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        return code

    monkeypatch.setattr(base, "make_base", made)
    monkeypatch.setattr(base, "MOST_ATTEMPTS", 2)
    hits, _, found = base.make_base_with_kills(context, WHOLE, tmp_path, Random(0), deadly=True, most_kills=1)
    assert (hits, bool(found)) == (0, bool(problem))
    assert problem in found

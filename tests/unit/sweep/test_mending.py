"""A case with two mistakes is right only if each of them is one by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.sweep.covering import products
from tests.sweep.gangs import GangPool
from tests.sweep.observation import Failure, Observation, Verdict
from tests.sweep.rank import Request
from tests.sweep.session import run_case

(CASE,) = products([{"saved": ("adapted",), "clipping": ("0",)}])
WORKS = Observation()
MERGE = Observation(failures=(Failure(stage="merge", kind="MergeError", text="no such base"),))
STEP = Observation(failures=(Failure(stage="step", kind="RuntimeError", text="shapes differ"),))
NO_MERGE = Verdict(preflight=("merge-impossible",), fields={"merge-impossible": ("merge.enabled",)})
NO_COPY = Verdict(preflight=("adapter-without-values",), fields={"adapter-without-values": ("method.lora.modulesToSave",)})


class Pool(GangPool):
    """A gang that says what it is told to."""

    def __init__(self, answer: Callable[[dict[str, str]], tuple[Observation, Verdict]]) -> None:
        self.answer = answer

    def ask(self, request: Request) -> list[object | None]:
        observation, verdict = self.answer(request.values)
        return [(observation, None), (Observation(), verdict)]


def merges(values: dict[str, str]) -> bool:
    return values["merge"] != "false"


def copies(values: dict[str, str]) -> bool:
    return values["saved"] == "adapted"


def two_mistakes(values: dict[str, str]) -> tuple[Observation, Verdict]:
    """Gates speak of the merge first, the trainer fails in a step first."""
    verdict = NO_MERGE if merges(values) else NO_COPY if copies(values) else Verdict()
    return STEP if copies(values) else MERGE if merges(values) else WORKS, verdict


def merge_is_no_mistake(values: dict[str, str]) -> tuple[Observation, Verdict]:
    return STEP if copies(values) else WORKS, two_mistakes(values)[1]


def copy_is_not_refused(values: dict[str, str]) -> tuple[Observation, Verdict]:
    return two_mistakes(values)[0], NO_MERGE if merges(values) else Verdict()


def merge_is_what_fails(values: dict[str, str]) -> tuple[Observation, Verdict]:
    return STEP if merges(values) else WORKS, NO_MERGE if merges(values) else Verdict()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (two_mistakes, "refused"),
        (merge_is_no_mistake, "false refusal"),
        (copy_is_not_refused, "false accept"),
        (merge_is_what_fails, "refused"),
        (lambda _: (STEP, NO_MERGE), "unexplained"),
    ],
)
def test_each_mistake_is_judged_by_itself(
    tmp_path: Path, answer: Callable[[dict[str, str]], tuple[Observation, Verdict]], kind: str
) -> None:
    result = run_case(CASE, tmp_path, Pool(answer))
    assert result.judgement.kind == kind, result.judgement.why


(HIDDEN,) = products([{"architecture": ("mixtral",), "parameters": ("unknown",)}])
NO_SUCH_NAME = "target-parameter-unknown"


def names_nothing(values: dict[str, str], then: Observation) -> tuple[Observation, Verdict]:
    """What cannot be merged is refused; a name that matches nothing hides what would come of it."""
    if values["parameters"] == "unset":
        return WORKS, Verdict()
    is_unknown = values["parameters"] == "unknown"
    verdict = Verdict(
        preflight=("merge-impossible", *(NO_SUCH_NAME,) * is_unknown),
        messages={"merge-impossible": MERGE.failures[0].text},
        fields={**NO_MERGE.fields, NO_SUCH_NAME: ("method.lora.targetParameters",)},
    )
    return WORKS if is_unknown else then, verdict


@pytest.mark.parametrize(("then", "kind"), [(MERGE, "refused"), (WORKS, "false refusal")])
def test_a_refusal_that_another_mistake_hides_is_seen_without_it(tmp_path: Path, then: Observation, kind: str) -> None:
    result = run_case(HIDDEN, tmp_path, Pool(partial(names_nothing, then=then)))
    assert result.judgement.kind == kind, result.judgement.why


ROWS = Verdict(preflight=("added-tokens-untrained",), fields={"added-tokens-untrained": ("model.addedTokens",)})
LOST = Observation(problems=("trained parameters: 1 missing",))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "false refusal"),
        ({"saved": ("head",)}, "false refusal"),
        ({"targets": ("head",)}, "refused"),
        ({"architecture": ("llama_tied",), "saved": ("head",)}, "refused"),
        ({"architecture": ("phi",), "saved": ("embedding",)}, "refused"),
        ({"architecture": ("phi",), "saved": ("head",)}, "false refusal"),
        ({"method": ("TrainableTokens",)}, "false refusal"),
        ({"method": ("IA3",)}, "refused"),
        ({"method": ("IA3",), "other_saved": ("head and embedding",)}, "false refusal"),
        ({"method": ("Full",)}, "false refusal"),
    ],
)
def test_a_trainer_that_trains_no_rows_is_not_right_to_refuse_them(
    tmp_path: Path, values: dict[str, tuple[str, ...]], kind: str
) -> None:
    """It works without added tokens, which alone would make the refusal a right one."""
    (case,) = products([{"added": ("ordinary",), **values}])
    pool = Pool(lambda drawn: (WORKS, Verdict()) if drawn["added"] == "unset" else (LOST, ROWS))
    result = run_case(case, tmp_path, pool)
    assert result.judgement.kind == kind, result.judgement.why

"""Models go through at the same time, whole ones alone; what one falls back to is prepared while nothing computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from finetune_trainer.verify.logits_of_each import logits_of_each
from finetune_trainer.verify.streaming import NotStreamableError, Prompt

PROMPTS = [Prompt((1, 2, 3))]
WITHIN_SECONDS = 5


class Model:
    """Answers with its name, by `compute`."""

    dtype = torch.float32
    computing = 0
    """Of all of them, at the time."""
    most_computing = 0

    def __init__(self, name: str, compute: Callable[[], object] = bool, *, is_whole: bool = False) -> None:
        self.name, self._compute, self.is_whole = name, compute, is_whole
        self.fell_back_from: list[Exception] = []

    def logits(self, prompts: Sequence[Prompt], directory: Path) -> dict[str, list[Path]]:
        Model.computing += 1
        Model.most_computing = max(Model.most_computing, Model.computing)
        try:
            self._compute()
        finally:
            Model.computing -= 1
        return {self.name: [directory / str(prompt.num_positions) for prompt in prompts]}

    def fall_back(self, error: Exception) -> None:
        assert Model.computing == 0
        if self.is_whole:
            raise error
        self.fell_back_from.append(error)
        self._compute, self.is_whole = bool, True


@pytest.fixture(autouse=True)
def nothing_computes() -> None:
    Model.computing = Model.most_computing = 0


def test_two_models_compute_beside_each_other_in_directories_of_their_own(tmp_path: Path) -> None:
    meeting = threading.Barrier(2, timeout=WITHIN_SECONDS)
    models = [Model("base", meeting.wait), Model("merged", meeting.wait)]
    first, second = logits_of_each(models, PROMPTS, tmp_path)
    assert [model.fell_back_from for model in models] == [[], []]  # from a barrier that broke
    assert first["base"][0].parent != second["merged"][0].parent
    assert first["base"][0].parent.is_dir()


def test_there_are_never_more_than_two(tmp_path: Path) -> None:
    logits_of_each([Model(str(number), lambda: time.sleep(0.02)) for number in range(4)], PROMPTS, tmp_path)
    assert Model.most_computing == 2


def test_a_model_that_is_loaded_whole_computes_alone(tmp_path: Path) -> None:
    models = [Model("base", lambda: time.sleep(0.02)), Model("merged", lambda: time.sleep(0.02), is_whole=True)]
    logits_of_each(models, PROMPTS, tmp_path)
    assert Model.most_computing == 1


def test_a_model_falls_back_after_the_others_have_ended_and_only_it_computes_again(tmp_path: Path) -> None:
    times = {"merged": 0}

    def fail() -> None:
        raise NotStreamableError("of the base")

    def count() -> None:
        time.sleep(0.05)
        times["merged"] += 1

    base = Model("base", fail)
    answers = logits_of_each([base, Model("merged", count)], PROMPTS, tmp_path)
    assert [list(answer) for answer in answers] == [["base"], ["merged"]]
    assert [str(error) for error in base.fell_back_from] == ["of the base"]
    assert times == {"merged": 1}


def test_an_error_that_nothing_answers_is_raised(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no other way")

    def break_off() -> None:
        raise OSError("no such file")

    with pytest.raises(RuntimeError, match="no other way"):
        logits_of_each([Model("base", fail, is_whole=True)], PROMPTS, tmp_path)
    with pytest.raises(OSError, match="no such file"):
        logits_of_each([Model("base", break_off)], PROMPTS, tmp_path)


@pytest.mark.parametrize(("is_whole", "expected"), [(False, 3), (True, 7)])
def test_each_has_its_share_of_the_processors_and_the_caller_all_of_them_again(
    is_whole: bool, expected: int, tmp_path: Path
) -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(7)
    try:
        logits_of_each([Model("base", lambda: seen.append(torch.get_num_threads()), is_whole=is_whole)], PROMPTS, tmp_path)
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
    assert seen == [expected]

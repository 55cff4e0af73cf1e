"""Trackers from outside: found by name, fed in order, and harmless whatever they do."""

import importlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.observe import trackers
from finetune_trainer.observe.trackers import Trackers, unknown_trackers
from tests.support.tiny_model import plan_of, tiny_spec

HEARD: list[Any] = []
RELEASED = threading.Event()


class Notebook:
    def start(self, run: Mapping[str, Any]) -> None:
        HEARD.append(("start", dict(run)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        HEARD.append((step, dict(values)))

    def finish(self, outcome: str) -> None:
        HEARD.append(("finish", outcome))


class Breaking(Notebook):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        HEARD.append(("broke", step))
        raise RuntimeError("no route to the tracker")


class Hanging(Notebook):
    def start(self, run: Mapping[str, Any]) -> None:
        RELEASED.wait(60)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with entry points, as pip would install it."""
    information = tmp_path / "outside-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    here = f"{__name__}:"
    names = {"notebook": "Notebook", "breaking": "Breaking", "hanging": "Hanging", "absent": "NoSuchClass"}
    lines = "".join(f"{name} = {here}{value}\n" for name, value in names.items())
    (information / "entry_points.txt").write_text(f"[finetune.trackers]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    HEARD.clear()
    RELEASED.clear()
    yield
    RELEASED.set()


RUN = {"name": "tiny"}
"""Too little for TensorBoard, which therefore turns itself off."""


def run_through(names: list[str], finish_seconds: float = 60.0, steps: int = 3) -> None:
    feeds = Trackers(names, finish_seconds)
    feeds.start(RUN)
    for step in range(steps):
        feeds.log(step, {"loss": float(step)})
    feeds.finish("Succeeded")


def test_tensorboard_alone_by_default(tmp_path: Path) -> None:
    assert plan_of(tiny_spec()).training.trackers == ()
    feeds = Trackers([])
    feeds.start({"directory": str(tmp_path), "attempt": 0, "step": 0})
    feeds.log(1, {"loss": 2.0})
    feeds.finish("Succeeded")
    assert HEARD == []
    (written,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in written.read_bytes()


def test_a_tracker_hears_everything_in_order() -> None:
    run_through(["notebook"])
    assert HEARD == [("start", RUN), (0, {"loss": 0.0}), (1, {"loss": 1.0}), (2, {"loss": 2.0}), ("finish", "Succeeded")]


@pytest.mark.parametrize("name", ["breaking", "absent", "not-installed"])
def test_a_tracker_that_raises_is_logged_once_and_turned_off(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run_through([name])
    assert caplog.text.count(f"tracker {name} failed and is off for the rest of the run") == 1
    assert [each for each in HEARD if each[0] == "broke"] == ([("broke", 0)] if name == "breaking" else [])
    assert ("finish", "Succeeded") not in HEARD


def test_a_tracker_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trackers, "WAITING_LINES", 5)
    run_through(["hanging"], finish_seconds=0.05, steps=20)
    assert "did not end within" in caplog.text
    assert "lines were dropped" in caplog.text


def test_unknown_names_are_found_before_anything_starts() -> None:
    assert unknown_trackers(plan_of(tiny_spec(training={"trackers": ["notebook"]}))) is None
    finding = unknown_trackers(plan_of(tiny_spec(training={"trackers": ["notebook", "nobody"]})))
    assert finding is not None
    assert (finding.rule, finding.severity) == ("tracker-unknown", "error")
    assert (finding.field, finding.value) == ("spec.training.trackers", "nobody")
    assert "it offers: absent, breaking, hanging, notebook, tensorboard" in finding.message
    assert finding.fix.startswith("use a trainer image with a package")
    finding = unknown_trackers(plan_of(tiny_spec(training={"trackers": ["Notebook", "nobody"]})))
    assert finding is not None
    assert finding.fix.startswith("write notebook for Notebook, or use a trainer image with a package")


def test_services_are_offered_if_their_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {"wandb", "mlflow"} & trackers.offered_trackers()
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "wandb" in trackers.offered_trackers()
    assert "mlflow" not in trackers.offered_trackers()

"""W&B and MLflow are told what they need, on the workspace unless the environment has a key. Their packages are played here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_trainer.observe import services
from finetune_trainer.observe.services import MLflow, WeightsAndBiases

RUN: dict[str, Any] = {
    "namespace": "team",
    "name": "tuned",
    "uid": "0123",
    "attempt": 1,
    "step": 5,
    "plan": {
        "method": {"type": "LoRA"},
        "model": {"name": "maker/base"},
        "training": {"seed": 3, "trackers": None, "note": "x" * 999},
    },
}


class Recorder:
    """Notes every call of every method, by name, and gives what it was told to give."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers, self.summary = answers, {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return self.answers.get(name)

        return call


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    modules: dict[str, Any] = {}
    monkeypatch.setattr(services, "import_module", modules.__getitem__)
    monkeypatch.delenv(services.WANDB_KEY, raising=False)
    monkeypatch.delenv(services.MLFLOW_ADDRESS, raising=False)
    return modules


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("secret", "online")])
def test_weights_and_biases(tmp_path: Path, played: dict[str, Any], monkeypatch: pytest.MonkeyPatch, key: str, mode: str) -> None:
    monkeypatch.setenv(services.WANDB_KEY, key)
    opened = Recorder()
    played["wandb"] = Recorder(init=opened)
    tracker = WeightsAndBiases()
    tracker.start(RUN | {"directory": str(tmp_path / "new")})
    tracker.log(6, {"loss": 0.5})
    tracker.finish("Preempted")
    (begun,) = played["wandb"].calls
    assert begun[2] == {
        "project": "team",
        "name": "tuned",
        "id": "0123",
        "resume": "allow",
        "config": RUN["plan"],
        "dir": str(tmp_path / "new"),
        "mode": mode,
    }
    assert opened.calls == [("log", ({"loss": 0.5},), {"step": 6}), ("finish", (), {"exit_code": 1})]
    assert opened.summary == {"outcome": "Preempted"}


@pytest.mark.parametrize("is_continued", [False, True])
def test_mlflow(tmp_path: Path, played: dict[str, Any], monkeypatch: pytest.MonkeyPatch, is_continued: bool) -> None:
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = Recorder(
        get_experiment_by_name=SimpleNamespace(experiment_id="7") if is_continued else None,
        create_experiment="7",
        search_runs=[run] if is_continued else [],
        create_run=run,
    )
    opened: list[str] = []
    played["mlflow.tracking"] = SimpleNamespace(MlflowClient=lambda tracking_uri: opened.append(tracking_uri) or client)
    played["mlflow.entities"] = SimpleNamespace(
        Param=lambda *values: values, Metric=lambda name, value, _now, step: (name, value, step)
    )
    tracker = MLflow()
    tracker.start(RUN | {"directory": str(tmp_path)})
    tracker.log(6, {"loss": 0.5})
    tracker.finish("Succeeded")
    assert opened == [f"sqlite:///{tmp_path}/mlflow.db"]
    names = [name for name, _, _ in client.calls]
    assert ("create_run" in names, "create_experiment" in names) == (not is_continued, not is_continued)
    batches = [(arguments, named) for name, arguments, named in client.calls if name == "log_batch"]
    settings = [("method", "LoRA"), ("model", "maker/base"), ("seed", "3"), ("note", "x" * 250)]
    assert batches == [(("r1",), {"params": settings}), (("r1",), {"metrics": [("loss", 0.5, 6)]})]
    assert client.calls[-1] == ("set_terminated", ("r1", "FINISHED"), {})
    monkeypatch.setenv(services.MLFLOW_ADDRESS, "http://mlflow.test")
    MLflow().start(RUN | {"directory": str(tmp_path)})
    assert opened[-1] == "http://mlflow.test"

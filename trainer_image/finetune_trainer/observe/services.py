"""Weights & Biases and MLflow as trackers, for trainer images that contain their packages.

With a key or an address in the environment, they send data to their service. Otherwise they write it to the workspace, from where
users can send it later. Training pods in a cluster have no network access, so there, trackers always write to the workspace.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

WANDB_KEY, MLFLOW_ADDRESS = "WANDB_API_KEY", "MLFLOW_TRACKING_URI"
UID_TAG = "finetune.uid"
MAX_SETTING = 250
"""Maximum number of characters of a setting that is sent to MLflow; every release of MLflow accepts this many."""


class WeightsAndBiases:
    """Keeps one W&B run for each job, which the next attempt continues. The run's project is the namespace."""

    def start(self, run: Mapping[str, Any]) -> None:
        """Start or continue the run. Raises errors of the package."""
        folder = Path(run["directory"])
        folder.mkdir(parents=True, exist_ok=True)
        self._run = import_module("wandb").init(
            project=run["namespace"],
            name=run["name"],
            id=run["uid"],
            resume="allow",
            config=run["plan"],
            dir=str(folder),
            mode="online" if os.environ.get(WANDB_KEY) else "offline",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one line of the history."""
        self._run.log(dict(values), step=step)

    def finish(self, outcome: str) -> None:
        """Wait until everything is sent or written."""
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "Succeeded" else 1)


class MLflow:
    """Keeps one MLflow run for each job, which the next attempt continues. The run's experiment is the namespace."""

    def start(self, run: Mapping[str, Any]) -> None:
        """Start or continue the run. Raises errors of the package."""
        self._entities = import_module("mlflow.entities")
        folder = Path(run["directory"]).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Newer releases of MLflow refuse to write to a directory of files, so a database is used.
        address = os.environ.get(MLFLOW_ADDRESS) or f"sqlite:///{folder}/mlflow.db"
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(run["namespace"])
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(run["namespace"])
        earlier = self._client.search_runs([number], f"tags.`{UID_TAG}` = '{run['uid']}'", max_results=1)
        tags = {UID_TAG: run["uid"]}
        tracked_run = earlier[0] if earlier else self._client.create_run(number, run_name=run["name"], tags=tags)
        self._id = tracked_run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        plan = run["plan"]
        settings = {"method": plan["method"]["type"], "model": plan["model"]["name"], **plan["training"]}
        parameters = [
            self._entities.Param(name, str(value)[:MAX_SETTING]) for name, value in settings.items() if value is not None
        ]
        self._client.log_batch(self._id, params=parameters)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one line of the history."""
        now = round(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._entities.Metric(name, value, now, step) for name, value in values.items()]
        )

    def finish(self, outcome: str) -> None:
        """Record how the run has ended."""
        self._client.set_tag(self._id, "finetune.outcome", outcome)
        self._client.set_terminated(self._id, "FINISHED" if outcome == "Succeeded" else "FAILED")

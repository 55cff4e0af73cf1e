"""W&B and MLflow with their real packages, which neither the image nor this environment has: in a directory of their own."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PACKAGES = ("wandb", "mlflow-skinny", "sqlalchemy", "alembic")
"""As docs/how-to/training.md has them for an image of one's own."""
ATTEMPT = """
import sys
# Behind what is locked, as the image of the page has them.
sys.path.append(sys.argv[4])
from finetune_trainer.observe.services import MLflow, WeightsAndBiases
directory, step, outcome = sys.argv[1], int(sys.argv[2]), sys.argv[3]
plan = {"method": {"type": "LoRA"}, "model": {"name": "maker/base"}, "training": {"seed": 3}}
for kind in (WeightsAndBiases, MLflow):
    tracker = kind()
    tracker.start({"namespace": "team", "name": "tuned", "uid": "0123", "plan": plan, "directory": directory})
    tracker.log(step, {"loss": 1.0 / step})
    tracker.finish(outcome)
"""


@pytest.mark.nightly
def test_two_attempts_are_one_run_on_the_workspace(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "installer"], check=True, timeout=120)
    install = [tmp_path / "installer/bin/pip", "install", "--quiet", "--target", packages, *PACKAGES]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=400, check=False)
    if installed.returncode:
        pytest.skip(f"the packages cannot be installed here: {installed.stderr[-300:]}")
    variables = {name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI")}
    variables |= {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("operator", "trainer_image")),
        "HOME": str(tmp_path),
    }
    trackers = tmp_path / "trackers"
    for step, outcome in ((1, "Preempted"), (2, "Succeeded")):
        attempt = [sys.executable, "-c", ATTEMPT, str(trackers), str(step), outcome, str(packages)]
        done = subprocess.run(attempt, env=variables, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    offline = sorted(path.name for path in (trackers / "wandb").glob("offline-run-*"))
    assert len(offline) == 2, "each attempt has a file that `wandb sync` sends to the same run"
    assert all(name.endswith("-0123") for name in offline)
    with sqlite3.connect(trackers / "mlflow.db") as database:
        assert database.execute("select name, status from runs").fetchall() == [("tuned", "FINISHED")]
        assert database.execute("select key, value, step from metrics order by step").fetchall() == [
            ("loss", 1.0, 1),
            ("loss", 0.5, 2),
        ]
        assert ("method", "LoRA") in database.execute("select key, value from params").fetchall()

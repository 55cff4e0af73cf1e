"""What the command line loads: nothing that costs time for nothing, and rich only where something is drawn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "kubernetes",
    "kopf",
    "prometheus_client",
    "aiohttp",
    "rich",
    "numpy",
    "jinja2",
}
PROGRAM = """
import json, sys
from finetune_cli.__main__ import main
sys.argv = ["finetune", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "-f", "examples/quickstart.yaml"],
        ["validate", "-f", "examples/quickstart.yaml", "-o", "json"],
        ["validate", "-f", "examples/quickstart.yaml", "--fix"],
        ["explain"],
    ],
)
def test_no_heavy_library_is_loaded(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    code, modules = json.loads(done.stderr)
    assert code in (0, None)
    assert HEAVY & set(modules) == set()
    assert "yaml" in modules


def test_the_start_does_no_needless_work() -> None:
    """No search of all distributions for plugins, and no collection of what stays loaded."""
    program = PROGRAM.replace(
        '[end.code, sorted({name.partition(".")[0] for name in sys.modules})]',
        "[sys.modules['pydantic.plugin._loader']._plugins, __import__('gc').isenabled(), __import__('gc').get_freeze_count()]",
    )
    arguments = json.dumps(["validate", "-f", "examples/quickstart.yaml"])
    done = subprocess.run(
        [sys.executable, "-c", program, arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    plugins, collects, frozen = json.loads(done.stderr)
    assert plugins is None, "pydantic looked for plugins"
    assert collects
    assert frozen > 10_000


def test_a_thousand_manifests_are_judged_in_one_call(tmp_path: Path) -> None:
    text = (ROOT / "examples/quickstart.yaml").read_text()
    many = tmp_path / "many.yaml"
    many.write_text("---\n".join(text.replace("name: quickstart", f"name: job-{number}") for number in range(1000)))
    done = subprocess.run(
        [sys.executable, "-m", "finetune_cli", "validate", "-f", str(many), "-o", "json"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    documents = json.loads(done.stdout)["documents"]
    assert [(each["outcome"], each["name"]) for each in documents] == [("accepted", f"job-{number}") for number in range(1000)]

"""The role as a process: what it loads, and what a SIGKILL in the middle costs."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from finetune_job.failures import EXIT_CODES, FailureClass, Outcome, parse_envelope
from finetune_job.names import Role
from finetune_job.plan.digest import canonical_json
from finetune_operator.children.cpu_jobs import cpu_job
from finetune_trainer.context import RunContext
from tests.support.hub import Fault, running_hub
from tests.unit.finetune_operator.children.building import ELSEWHERE, pod_spec, run_of
from tests.unit.finetune_trainer.fetch.test_hub import MODEL, content
from tools.cluster.certificates import CertificateAuthority
from tools.cluster.errors import wait_until

HEAVY = ("torch", "transformers", "peft", "numpy", "pyarrow")
"""Would make a quick copy slow to start and its pod large."""
RUN = f"""
import sys
from finetune_trainer.__main__ import main
code = main(sys.argv[1:])
print("loaded:", [name for name in {HEAVY!r} if name in sys.modules])
sys.exit(code)
"""


def start(context: RunContext, directory: Path, attempt: int = 0, **variables: str) -> subprocess.Popen[str]:
    plan = directory / "plan.json"
    plan.write_text(canonical_json(context.plan))
    arguments = ["fetch", "--plan", plan, "--plan-sha256", context.plan_sha256, "--claims-root", context.claims_root]
    arguments += ["--attempt", attempt, "--termination-log", directory / "termination.json"]
    credentials = directory / "credentials"
    (credentials / "hub").mkdir(parents=True, exist_ok=True)
    (credentials / "hub/token").write_text("hf_secret_of_the_test")
    arguments += ["--credentials", credentials]
    home = directory / "home"
    home.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *map(str, arguments)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(home)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_role_is_light_and_goes_online_from_an_offline_image(model_of, tmp_path):
    context = model_of(MODEL, token="hf_secret_of_the_test")
    output, _ = (process := start(context, tmp_path)).communicate(timeout=120)
    assert process.returncode == 0, output
    assert "loaded: []" in output
    assert list((tmp_path / "home").iterdir()) == []
    assert "hf_secret_of_the_test" not in output
    assert content(context.base_model) == MODEL
    report = parse_envelope((tmp_path / "termination.json").read_text())
    assert (report.role, report.outcome) == ("fetch", Outcome.SUCCEEDED)


def test_a_killed_fetch_resumes_with_the_missing_files(model_of, hub, tmp_path):
    context = model_of(MODEL)
    reached, released = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        released.wait(120)

    hub.fail("model-00002-of", Fault(1, before=hold, status=503))
    process = start(context, tmp_path)
    journal = context.workspace.sources / "model.tmp-fetch/complete.jsonl"
    others = len(MODEL) - 1
    try:
        assert reached.wait(120)
        wait_until(lambda: journal.exists() and journal.read_text().count("sha256") == others, "every other file", 120)
    finally:
        process.kill()
        process.communicate()
        released.set()
    assert not context.base_model.exists()
    hub.sent.clear()
    output, _ = (process := start(context, tmp_path, attempt=1)).communicate(timeout=120)
    assert process.returncode == 0, output
    assert content(context.base_model) == MODEL
    assert set(hub.sent) == {"model-00002-of-00002.safetensors"}


def test_a_hub_of_a_private_authority_is_trusted_with_the_bundle_of_the_profile_and_not_without(model_of, hub, tmp_path):
    """With the environment and the files of the pod that the operator makes for such a profile."""
    authority = CertificateAuthority(tmp_path / "authority")
    bundle = ELSEWHERE.with_profile(caBundle={"configMap": "company-ca", "key": "bundle.pem"})
    pod = pod_spec(cpu_job(run_of(bundle), Role.FETCH, 0))
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "authorities"]
    (volume,) = [one["configMap"] for one in pod["volumes"] if one["name"] == "authorities"]
    for item in volume["items"]:
        files = {"bundle.pem": authority.certificate}
        (tmp_path / item["path"]).write_text(files[item["key"]].read_text())
    variables = {one["name"]: one["value"].replace(mount["mountPath"], str(tmp_path)) for one in pod["containers"][0]["env"]}
    with running_hub(authority.server_context("127.0.0.1")) as secure:
        secure.repositories, hub.address = hub.repositories, secure.address
        context = model_of(MODEL)
        output, _ = (process := start(context, tmp_path)).communicate(timeout=60)
        assert process.returncode == EXIT_CODES[FailureClass.SOURCE_UNAVAILABLE], output
        report = parse_envelope((tmp_path / "termination.json").read_text())
        assert "certificate of the server is not trusted (unable to get local issuer certificate)" in report.message
        assert "name its certificates in spec.caBundle of the FineTuneProfile" in report.message
        trusting = {"SSL_CERT_FILE": variables["SSL_CERT_FILE"]}
        output, _ = (process := start(context, tmp_path, attempt=1, **trusting)).communicate(timeout=60)
    assert process.returncode == 0, output
    assert content(context.base_model) == MODEL

"""Which test executes which command of the pages, letter by letter; and which commands none executes, and why.

README, docs and the other pages have blocks of code, whose lines are commands of their own or are executed together (a script, a
manifest), and commands within sentences. Each is named here once, by its whole text: nothing is matched by its beginning. What a
test replaces is named: words of the page, such as the name of a job, and programs that cannot run here. That the tests do what is
said of them is checked when they have run (tests/conftest.py); that nothing is missing, by
tests/unit/test_documentation_blocks.py, which prints the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.documented import executed_by


@dataclass(frozen=True)
class By:
    """A test that executes it."""

    test: str
    stand_ins: str = ""
    """Words of the page in whose place others stand, apart by blanks."""
    played: str = ""
    """Programs in whose place others stand."""


@dataclass(frozen=True)
class PartOf:
    """`make nightly` runs it, or `make test` does: a test that did so would do all of that work twice."""

    target: str


@dataclass(frozen=True)
class No:
    """No test executes it."""

    reason: str


NIGHTLY, SUITE = PartOf("nightly"), PartOf("test")
_HERE = "tests/unit/test_documentation_blocks.py::test_commands_that_need_no_cluster_are_run_as_they_are_written"
_MAPPED = "tests/unit/test_documentation_blocks.py::test_a_block_that_no_shell_reads_is_what_it_says"
_ONE_MACHINE = "tests/e2e/test_documented_lines.py::test_lines_for_one_machine_are_run_as_they_are_written"
_WATCHED = "tests/e2e/test_documented_lines.py::test_a_run_is_followed_and_stopped_from_another_terminal"
_CLUSTER = "tests/e2e/test_documented_cluster_lines.py::test_lines_for_jobs_of_a_cluster_are_run_as_they_are_written"
_INSTALLED = "tests/e2e/test_documented_cluster_lines.py::test_lines_about_an_installed_operator_are_run_as_they_are_written"
_INSTALL = "tests/e2e/test_install_page.py::test_install_upgrade_and_uninstall_on_a_node_as_they_are_written"
_FIRST_JOB = "tests/e2e/test_first_job.py::test_readme_leads_from_nothing_to_a_verified_model"
_DEMO = "tests/e2e/test_demo.py::test_the_first_command_of_the_readme_makes_a_verified_model"
_START = "tests/e2e/test_getting_started.py::test_from_a_llama_and_a_chat_file_to_a_served_adapter"
_START_CLUSTER = "tests/e2e/test_getting_started.py::test_the_same_manifest_succeeds_on_a_cluster_and_its_results_are_downloaded"
_PAGES = "tests/integration/test_pages.py::test_"
_VALUES = f"{_PAGES}values_and_objects_of_the_pages_are_taken_by_a_cluster"
_RELEASE = "tests/e2e/test_release.py::test_"
_VERIFY = f"{_RELEASE}documented_commands_verify_signature_and_bill"
_GENERATED = "tests/unit/test_documentation_blocks.py::test_a_generator_writes_its_page_as_the_page_says"
_GPU = "a GPU of this size is not there"
_MODULE = "a program that a pod starts, named in a table of packages: it is no command for a person"
_OTHERS = "an abbreviation of a line that stands elsewhere in full"

BLOCKS: Mapping[str, By | PartOf | No] = {
    # Executed as a whole: the page, and the first line.
    "README.md: make push REGISTRY=registry.example/team": By(_FIRST_JOB, "registry.example"),
    "docs/tutorial/first-job-on-a-cluster.md: kubectl create namespace team": By(_FIRST_JOB),
    "docs/tutorial/first-job-on-a-cluster.md: profiles:": By(_VALUES),
    "README.md: apiVersion: finetune.dev/v1alpha1 quickstart": By(_MAPPED),
    "docs/explanation/architecture.md: FineTuneJob --schema, CEL--> rules --> RunPlan --> fetch --> preflight --> "
    "train, attempt 0..n --> merge + verify --> publish": No("a drawing"),
    'docs/tutorial/getting-started.md: {"messages": [{"role": "user", "content": "My parcel is late."}, '
    '{"role": "assistant", "content": "Which order is it?"}]}': By(_MAPPED),
    "docs/tutorial/getting-started.md: cat > job.yaml <<'EOF' support-bot": By(_START),
    "docs/tutorial/getting-started.md: python - <<'EOF'": By(_START),
    "docs/tutorial/getting-started.md: make environment": By(_DEMO),
    "docs/tutorial/getting-started.md: profiles:": By(_VALUES),
    "docs/tutorial/getting-started.md: kubectl create namespace support": By(_START_CLUSTER),
    "docs/tutorial/getting-started.md: kubectl wait --namespace support pod/copy --for=condition=Ready --timeout=10m": By(
        _START_CLUSTER
    ),
    "docs/tutorial/getting-started.md: kubectl wait --namespace support finetunejob/support-bot --for=condition=Finished "
    "--timeout=24h": By(_START_CLUSTER),
    "docs/tutorial/getting-started.md: kubectl apply --namespace support -f - <<'EOF' support-bot": By(_START_CLUSTER),
    "docs/reference/metrics.md: sum by (team, outcome) (": By(
        "tests/simulation/test_counters.py::test_increases_add_up_over_a_hundred_deaths_of_the_operator_and_deletions_of_jobs",
        "(team,&outcome) finetune_gpu_seconds_total 30d",
    ),
    "docs/reference/network.md: network:": By(_VALUES),
    "docs/how-to/placement.md: apiVersion: finetune.dev/v1alpha1 h100": By(_VALUES, "sha256:..."),
    "docs/how-to/platform/air-gapped.md: kubectl create namespace finetune-system": By(
        f"{_PAGES}a_cluster_without_a_way_out", played="helm"
    ),
    "docs/how-to/platform/backup.md: helm upgrade finetune charts/finetune-operator --namespace finetune-system --install "
    "--create-namespace --reset-then-reuse-values --set replicas=0": By(f"{_PAGES}backup_and_restore", played="helm"),
    "docs/how-to/platform/base-models.md: kubectl apply -f - <<'EOF' base-models-team-a": By(
        f"{_PAGES}a_base_model_that_all_read"
    ),
    "docs/how-to/platform/base-models.md: kubectl apply -f - <<'EOF' tune": By(f"{_PAGES}a_base_model_that_all_read"),
    "docs/how-to/platform/caps.md: kubectl create namespace research": By(f"{_PAGES}caps", played="helm"),
    "docs/how-to/platform/caps.md: kubectl get finetunejobs --namespace research --output wide": By(f"{_PAGES}caps"),
    "docs/how-to/platform/install.md: profiles:": By(_VALUES),
    "docs/how-to/platform/install.md: test:": By(_VALUES),
    "docs/how-to/platform/install.md: metrics:": By(_VALUES),
    "docs/how-to/platform/install.md: kubectl patch finetuneprofile default --type=json "
    """--patch='[{"op":"remove","path":"/metadata/ownerReferences"}]'""": By(_INSTALL),
    "docs/how-to/platform/install.md: apiVersion: rbac.authorization.k8s.io/v1 finetune": By(_VALUES),
    "docs/how-to/platform/install.md: apiVersion: rbac.authorization.k8s.io/v1 finetune-doctor": By(_VALUES),
    "docs/how-to/platform/operator-down.md: helm upgrade finetune charts/finetune-operator --namespace finetune-system "
    "--reset-then-reuse-values --set replicas=0": By(f"{_PAGES}the_operator_away", played="helm"),
    "docs/how-to/platform/storage.md: kubectl create namespace single": By(f"{_PAGES}storage_that_one_node_mounts"),
    "docs/how-to/release.md: kubectl krew install --manifest finetune.yaml "
    "--archive kubectl-finetune-v0.2.0-linux-amd64.tar.gz": By(
        "tests/e2e/test_krew.py::test_krew_installs_a_bundle_and_removes_all_of_it", "linux-amd64"
    ),
    "docs/how-to/release.md: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out finetune.key": By(
        f"{_RELEASE}documented_commands_make_a_release", "registry.example", "make"
    ),
    "docs/how-to/release.md: image=registry.example/team/finetune-operator@$DIGEST": By(
        f"{_RELEASE}cosign_verifies_what_was_released_and_nothing_else", "registry.example"
    ),
    "docs/how-to/release.md: set -euo pipefail": By(_VERIFY, "https://registry.example"),
    """docs/how-to/release.md: curl -fsS -H "$accept" "$url/manifests/${DIGEST/:/-}.att" | jq -r '.layers[] | """
    """select(.annotations.predicateType == "https://cyclonedx.org/bom").digest' > bill.digest""": By(_VERIFY),
    'docs/how-to/release.md: for tag in 0.2.0 "${DIGEST/:/-}.sig" "${DIGEST/:/-}.att"; do': By(
        f"{_RELEASE}mirror_takes_signatures_along", "0.2.0 mirror.example/finetune registry.example"
    ),
    "docs/how-to/results.md: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out signing.key": By(_CLUSTER),
    "docs/how-to/results.md: base64 -d SHA256SUMS.sig > SHA256SUMS.signature": By(
        "tests/integration/test_publish.py::test_signed_results_are_verified_by_the_documented_commands", "signing.pub"
    ),
    "docs/how-to/training.md: spec:": By(
        "tests/unit/finetune_trainer/preflight/test_added_tokens.py::test_the_tokens_of_the_page_are_added"
    ),
    "docs/how-to/training.md: FROM python:3.11-slim-bookworm AS trackers": No(
        "its first image comes from Docker Hub; tests/unit/finetune_trainer/observe/test_services_for_real.py installs the "
        "packages that it names, and a test compares the names"
    ),
    "tests/releases/README.md: git worktree add /tmp/release COMMIT": No(
        "for developers, at a release: COMMIT is that of a release, and a shallow clone has none"
    ),
}

LINES: Mapping[str, By | PartOf | No] = {
    # Lines of blocks, and commands within sentences.
    ".venv/bin/finetune run job.yaml": By(_ONE_MACHINE),
    "0 1 * * * make -C /path/to/this/directory nightly": No("a line of a crontab; it names `make nightly`"),
    "cosign verify-blob --key signing.pub --insecure-ignore-tlog=true --signature SHA256SUMS.sig SHA256SUMS": By(
        f"{_RELEASE}cosign_verifies_signed_results"
    ),
    "curl http://localhost:8000/v1/chat/completions --header 'Content-Type: application/json' "
    """--data '{"model": "support-bot", "messages": [{"role": "user", "content": "My parcel is late."}]}'""": By(
        _START, played="curl"
    ),
    "cat runs/claims/results/support-bot/verification.md": By(_START),
    "finetune attach NAME": By(_WATCHED, "NAME"),
    "finetune audit NAME --intervals 3": By(_ONE_MACHINE, "NAME"),
    "finetune data -f job.yaml": By(_HERE),
    "finetune data -f job.yaml --claim models=$HOME/models --claim data=$HOME/data": By(_START),
    "finetune data -f job.yaml --claims DIR": By(_HERE),
    "finetune doctor --namespace NAMESPACE": By(_INSTALLED, "NAMESPACE"),
    "finetune doctor --namespace support": By(_INSTALLED, "support"),
    "finetune doctor --namespace team": By(_INSTALLED),
    "finetune doctor --namespace team-a": By(_INSTALLED, "team-a"),
    "finetune download JOB DIR": By(_CLUSTER, "DIR JOB"),
    "finetune download support-bot results --namespace support": By(_START_CLUSTER),
    "finetune estimate -f job.yaml": By(_HERE),
    "finetune estimate -f job.yaml --model $HOME/models/Llama-3.1-8B-Instruct --gpu-memory 80Gi": By(_START),
    "finetune estimate -f job.yaml --model DIR --gpu H100": By(_HERE),
    "finetune estimate -f job.yaml --model path/to/model --gpu-memory 80Gi": By(_HERE),
    "finetune explain WORD": By(_HERE, "WORD"),
    "finetune explain audit-interval-differs": By(_HERE),
    "finetune explain job/JOB": By(_CLUSTER, "JOB"),
    "finetune fork JOB --from 400 --set training.learningRate=5e-5": By(_CLUSTER, "400 JOB"),
    "finetune fork JOB --from STEP": No(_OTHERS),
    "finetune fork JOB --set training.learningRate=1e-5": By(_CLUSTER, "JOB"),
    "finetune init": By(_ONE_MACHINE),
    "finetune list -A": By(_CLUSTER),
    "finetune logs JOB -f --rank 0": By(_CLUSTER, "JOB"),
    "finetune merge --base DIR --adapter DIR --output DIR": By(_ONE_MACHINE, "--adapter&DIR --base&DIR --output&DIR"),
    "finetune rehearse job.yaml": By(_ONE_MACHINE),
    "finetune reproduce JOB --wait": By(_CLUSTER, "JOB"),
    "finetune reproduce NAME --local": By(_ONE_MACHINE, "NAME"),
    "finetune run examples/quickstart.yaml --claims DIR": By(_ONE_MACHINE),
    "finetune run job.yaml": By(_WATCHED),
    "finetune run job.yaml --claim models=$HOME/models --claim data=$HOME/data": By(_START),
    "finetune status JOB": By(_CLUSTER, "JOB"),
    "finetune stop NAME": By(_WATCHED, "NAME"),
    "finetune submit job.yaml --watch": By(_CLUSTER),
    "finetune validate --fix -f job.yaml": By(_HERE),
    "finetune validate -f job.yaml": By(_HERE),
    "finetune validate -f job.yaml --claim models=$HOME/models --claim data=$HOME/data": By(_START),
    "finetune validate FILE": By(_HERE, "FILE"),
    "grype registry.example/team/finetune-trainer@$DIGEST --vex ...": No(
        "the line above it with another source; tests/e2e/test_scan.py scans an image in a registry"
    ),
    "grype sbom:sbom.cdx.json --vex docs/vulnerabilities.openvex.json": By(
        "tests/e2e/test_scan.py::test_scan_of_a_bill_reports_packages_of_both_kinds_and_no_others"
    ),
    "helm install finetune charts/finetune-operator --namespace finetune-system --create-namespace --wait": By(_INSTALL),
    "helm upgrade tuning charts/finetune-operator --namespace tuning-system --reset-then-reuse-values --wait "
    "--set namespaces={research}": By(_INSTALL),
    "helm install finetune charts/finetune-operator --namespace team-a-system --create-namespace --wait "
    "--set crds.enabled=false,namespaces={team-a},profiles.default=null": By(_INSTALL),
    "helm install tuning charts/finetune-operator --namespace tuning-system --create-namespace --wait --take-ownership": By(
        _INSTALL
    ),
    "helm template finetune charts/finetune-operator --namespace finetune-system --set "
    "global.imageRegistry=mirror.example:5000/team | grep -E -o "
    """'(image|"trainerImage"|trainerImage): *"?[^"]+' | sort -u""": By(f"{_PAGES}a_cluster_without_a_way_out", played="helm"),
    "helm test finetune --namespace finetune-system": By(_INSTALL),
    "helm uninstall finetune --namespace finetune-system": By(_INSTALL),
    "helm upgrade finetune charts/finetune-operator --namespace finetune-system --reset-then-reuse-values --wait": By(_INSTALL),
    "helm upgrade finetune charts/finetune-operator --namespace finetune-system --reset-then-reuse-values --wait "
    "--set profiles.default.fetch.hubEndpoint=https://hub.mirror.example --set profiles.default.fetch.allowedSources={hf://} "
    "--set profiles.default.network.destinations[0].cidr=10.20.0.0/24,profiles.default.network.destinations[0].ports={443}": By(
        f"{_PAGES}a_cluster_without_a_way_out", played="helm"
    ),
    "hf auth login": No("needs an account of the Hub; tests/pitfalls and tests/unit know the file that it writes"),
    "hf download ORG/NAME --revision COMMIT --local-dir /base-models/llama-8b": No("needs the Hub"),
    "kubectl -n NS describe finetunejob JOB": By(_CLUSTER, "JOB NS"),
    "kubectl apply --namespace support -f job.yaml": By(_START_CLUSTER),
    "kubectl apply -f job.yaml": By(_CLUSTER),
    "kubectl create clusterrolebinding prometheus-reads-finetune --serviceaccount monitoring:prometheus-k8s "
    "--clusterrole finetune-finetune-operator-finetune-system-metrics-reader": By(_INSTALL),
    "kubectl create rolebinding h100 --namespace team-a --clusterrole finetune-operator-finetune-system-profile-h100 "
    "--group team-a": By(_INSTALL),
    "kubectl explain finetunejob": By(_INSTALLED),
    "kubectl explain finetunejob.spec --recursive": By(_INSTALLED),
    "kubectl explain finetuneprofile.spec": By(_INSTALLED),
    "kubectl explain finetuneprofile.spec.pods": By(_INSTALLED),
    "kubectl finetune explain job/JOB -n NS": By(_CLUSTER, "JOB NS"),
    "kubectl finetune reproduce NAME --wait": By(_CLUSTER, "NAME"),
    "kubectl get endpointslices --namespace default --selector kubernetes.io/service-name=kubernetes": By(_INSTALLED),
    "kubectl get finetuneprofiles": By(_INSTALLED),
    "kubectl get finetuneprofiles,finetunejobs --all-namespaces --output json > finetune-backup.json": By(
        f"{_PAGES}backup_and_restore"
    ),
    "kubectl get ftj -o wide": By(_CLUSTER),
    "kubectl get ftj -w": By(_CLUSTER),
    "kubectl krew uninstall finetune": By("tests/e2e/test_krew.py::test_krew_installs_a_bundle_and_removes_all_of_it"),
    "kubectl logs POD --previous": By(
        "tests/e2e/test_same_pod.py::test_a_killed_rank_is_followed_by_an_attempt_in_the_same_pod", "POD"
    ),
    "ls runs/claims/results/support-bot/adapter runs/claims/results/support-bot/merged": By(_START),
    "make bench-gpu": NIGHTLY,
    "make bench-operator JOBS=1000": NIGHTLY,
    "make bench-spot": NIGHTLY,
    "make bench-trainer": NIGHTLY,
    "make demo": By(_DEMO),
    "make demo-cluster": No("tests/e2e/test_chain.py does the same on nodes that serve all tests"),
    "make environment": By(_DEMO),
    "make failures": NIGHTLY,
    "make generate": No("it would write into the tree that is tested; tests of each page compare it with what would be written"),
    "make gpu-check": No(_GPU),
    "make kill-test RUNS=100": NIGHTLY,
    "make kill-test-elastic RUNS=100": NIGHTLY,
    "make krew-bundle": No(_OTHERS),
    "make krew-bundle VERSION=0.2.0 URL=https://downloads.example.com/finetune": By(
        "tests/e2e/test_krew.py::test_krew_installs_a_bundle_and_removes_all_of_it", played="make"
    ),
    "make lint": SUITE,
    "make nightly": No("it is what runs at night, these tests among it"),
    "make push REGISTRY=...": No(_OTHERS),
    "make push REGISTRY=registry.example/team": By(_FIRST_JOB, "registry.example"),
    "make release": No(_OTHERS),
    "make sweep": NIGHTLY,
    "make tamper-test RUNS=100": NIGHTLY,
    "make test": No("it is what runs these tests"),
    "make test-kueue KUEUE=<manager> KUEUE_MANIFESTS=<config/components of its source>": No(
        "Kueue's manager is not among the modules that are built here; tests/integration/test_kueue.py plays it"
    ),
    "make test-unit": SUITE,
    "make types": SUITE,
    "mlflow ui --backend-store-uri sqlite:///<workspace>/<job>-<uid>/trackers/mlflow.db": No(
        "needs a package that is in no lock; tests/unit/finetune_trainer/observe/test_services_for_real.py reads that database"
    ),
    "python -P tests/releases/roll_back.py /tmp/release FILE...": No(
        "for developers, at a release: it needs that release's tree"
    ),
    "python -m bench.gpu --contenders ours compiled deterministic trl": No(_GPU),
    "python -m bench.gpu.check calibration": No(_GPU),
    "python -m bench.gpu.check resume": No(_GPU),
    "python -m bench.memory": No("a part of `make bench-memory`, which `make nightly` runs"),
    "python -m bench.spot --trace FILE": No("needs a recorded trace of a spot market, and none is here"),
    "python -m finetune_cli": No(_MODULE),
    "python -m finetune_cli.generate_coming_from > docs/reference/coming-from.md": By(_GENERATED),
    "python -m finetune_cli.generate_commands > docs/reference/commands.md": By(_GENERATED),
    "python -m finetune_cli.generate_fields > docs/reference/fields.md": By(_GENERATED),
    "python -m finetune_cli.generate_findings > docs/reference/findings.md": By(_GENERATED),
    "python -m finetune_cli.generate_rules > docs/reference/rules.md": By(_GENERATED),
    "python -m finetune_operator": No(_MODULE),
    "python -m finetune_operator.apply_profiles FILE": No(_MODULE),
    "python -m finetune_operator.check_release": No(_MODULE),
    "python -m finetune_operator.decide.failure_table > docs/reference/failures.md": By(_GENERATED),
    "python -m finetune_trainer {fetch,preflight,train,merge,publish}": No(_MODULE),
    "python -m tests.e2e.failures": No("what `make failures` runs"),
    "python -m tests.pitfalls.catalogue > docs/reference/pitfalls.md": By(_GENERATED),
    "python -m tests.sweep.methods_table": By(_GENERATED),
    "python -m tools.budget --lower": No("it would write into the tree that is tested"),
    "python -m tools.prose PACKAGE": No("`make lint` counts what it prints"),
    "sha256sum --check SHA256SUMS": By(_ONE_MACHINE),
    "tensorboard --logdir <workspace>/<job>-<uid>/trackers/tensorboard": No(
        "needs a package that is in no lock; the files are read as TensorBoard does by tests/unit/finetune_trainer/observe"
    ),
    "vllm serve $HOME/models/Llama-3.1-8B-Instruct --enable-lora "
    "--lora-modules support-bot=runs/claims/results/support-bot/adapter": By(_START, played="vllm"),
    "vllm serve runs/claims/results/support-bot/merged --served-model-name support-bot": By(_START, played="vllm"),
}

NAMES = frozenset(
    """finetune estimate --calibration
finetune estimate --gpu H100
finetune fork --from
finetune run --ranks 1
finetune validate --claims DIR
finetune validate --fix
helm test --timeout
helm upgrade --force-conflicts
helm upgrade --wait
kubectl auth can-i
kubectl delete --cascade=orphan
kubectl delete pod
kubectl finetune download
kubectl finetune logs
kubectl finetune logs -f""".splitlines()
)
"""A command and an option that a sentence speaks of: without what the command needs, nobody could run them."""


def not_executed(test: str) -> list[str]:
    """What this test should have executed and has not, or with other words in its place."""
    name = test.partition("[")[0]
    done = executed_by(name.partition("::")[0])
    found = {(one.key, one.stand_ins, one.played) for one in done}
    return [
        key
        for key, by in {**BLOCKS, **LINES}.items()
        if isinstance(by, By) and by.test == name and (key, words(by.stand_ins), words(by.played)) not in found
    ]


def words(text: str) -> frozenset[str]:
    """Of a list in one string, where & stands for a blank."""
    return frozenset(word.replace("&", " ") for word in text.split())

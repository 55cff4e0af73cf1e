# `make` prints this page. Every target installs what it needs.
.DEFAULT_GOAL := help
SHELL := /bin/bash
UV_VERSION := 0.13.9
VENV := .venv
PYTHON := $(VENV)/bin/python
# Without compiled bytecode every process compiles torch and transformers again, half a minute of CPU each time.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
RUNS ?= 7
DEMO_DIRECTORY ?= runs/demo
SEED ?=
NIGHT := $(shell date +%s)

.PHONY: help
help: ## This page
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

$(VENV)/.complete: pyproject.toml uv.lock
	@echo "Installing the locked Python dependencies into $(VENV) (about 6 GB: torch brings its CUDA libraries)"
	@python3 -m uv --version 2>/dev/null | grep -q '$(UV_VERSION)' || python3 -m pip install --quiet --root-user-action=ignore uv==$(UV_VERSION)
	python3 -m uv sync --quiet --locked --all-extras --compile-bytecode
	@touch $@

.PHONY: environment
environment: $(VENV)/.complete ## Install the Python dependencies

.PHONY: demo
demo: environment ## Fine-tune, merge and verify a small model on this machine
	$(PYTHON) -m tools.quickstart $(DEMO_DIRECTORY)/claims
	$(VENV)/bin/finetune run examples/quickstart.yaml --claims $(DEMO_DIRECTORY)/claims --fresh
	$(PYTHON) -m tools.plain_load $(DEMO_DIRECTORY)/claims/models-out/quickstart/merged

.PHONY: demo-cluster
demo-cluster: environment ## The same on a real Kubernetes node brought up for it: 2 pods x 2 ranks
	$(PYTHON) -m tools.demo_cluster

.PHONY: test
test: environment ## All tests, as in CI, with the minutes of each suite
	$(PYTHON) -m tests.suites

.PHONY: test-unit test-pitfalls test-integration test-e2e lint types
test-unit test-pitfalls test-integration test-e2e lint types: environment ## One suite
	$(PYTHON) -m tests.suites $(patsubst test-%,%,$@)

.PHONY: mutation
mutation: COUNT = 60
mutation: environment ## Break the pure packages in one place, COUNT times by cosmic-ray: counts what the unit tests notice
	$(PYTHON) -m tools.mutation --count $(COUNT) $(if $(SEED),--seed $(SEED))

.PHONY: simulate
simulate: SEEDS = 500
simulate: environment ## Walks of the operator through a simulated cluster that nobody has taken before
	$(PYTHON) -m tests.simulation --first $$(date +%s) --seeds $(SEEDS)

.PHONY: explore
explore: environment ## Property tests and hostile inputs with examples that nobody has tried before
	HYPOTHESIS_PROFILE=explore HOSTILE_SEED=$(NIGHT) $(VENV)/bin/pytest -q -n 2 --dist loadfile -m "not nightly" tests/unit tests/hostile

.PHONY: sweep
sweep: COUNT = 1500
sweep: environment ## Run COUNT combinations of settings end to end: false accepts, false refusals, unexplained
	$(PYTHON) -m tests.sweep --count $(COUNT) --record

.PHONY: failures
failures: environment ## Break ranks, pods and nodes of running jobs on two real nodes; prints and keeps the table of what follows
	$(PYTHON) -m tests.e2e.failures $(if $(ONLY),--only $(ONLY))

.PHONY: test-kueue
test-kueue: environment ## The traps of Kueue with a real one: KUEUE=<its manager> KUEUE_MANIFESTS=<config/components of its source>
	KUEUE="$(KUEUE)" KUEUE_MANIFESTS="$(KUEUE_MANIFESTS)" $(VENV)/bin/pytest -q tests/kueue

.PHONY: cluster
cluster: environment ## A real control plane and node for a person; prints its KUBECONFIG
	$(PYTHON) -m tools.cluster

.PHONY: images
images: environment ## Build both container images (no daemon needed)
	$(PYTHON) -m tools.images all

IMAGES = all
.PHONY: push
push: environment ## Push both images to REGISTRY (registry.example/team); build/images.yaml has the values with which helm installs them
	@test -n "$(REGISTRY)" || { echo "make push REGISTRY=registry.example/team: name the registry" >&2; exit 2; }
	$(PYTHON) -m tools.images $(IMAGES) --push $(REGISTRY) --values build/images.yaml $(OPTIONS)

.PHONY: release
release: environment ## Push images and chart as VERSION to REGISTRY, sign them with KEY, attach bill and provenance: docs/how-to/release.md
	@test -n "$(REGISTRY)" -a -n "$(VERSION)" -a -n "$(KEY)" || \
	  { echo "make release REGISTRY=registry.example/team VERSION=0.2.0 KEY=finetune.key: name all three" >&2; exit 2; }
	$(PYTHON) -m tools.release --registry $(REGISTRY) --version $(VERSION) --key $(KEY) --images $(IMAGES) $(OPTIONS)

.PHONY: krew-bundle
krew-bundle: environment ## kubectl finetune as VERSION for Krew, to be loaded from URL: archive and manifest in build/krew
	@test -n "$(VERSION)" -a -n "$(URL)" || \
	  { echo "make krew-bundle VERSION=0.2.0 URL=https://downloads.example.com/finetune: name both" >&2; exit 2; }
	$(PYTHON) -m tools.krew --version $(VERSION) --url $(URL) $(OPTIONS)

.PHONY: generate
generate: environment ## Write all generated files: CRDs, fields, commands, rules, findings, pitfalls, methods, table of metrics, image locks
	$(PYTHON) -m finetune_job.crd crds charts/finetune-operator/files/crds
	$(PYTHON) -m tools.values_schema
	$(PYTHON) -m tools.chart_readme
	$(PYTHON) -m tools.dashboards
	$(PYTHON) -m tools.pages.rules > docs/reference/rules.md
	$(PYTHON) -m tools.pages.findings > docs/reference/findings.md
	$(PYTHON) -m tools.pages.fields > docs/reference/fields.md
	$(PYTHON) -m tools.pages.commands > docs/reference/commands.md
	$(PYTHON) -m tools.pages.coming_from > docs/reference/coming-from.md
	$(PYTHON) -m finetune_operator.decide.failures.table > docs/reference/failures.md
	$(PYTHON) -m tests.pitfalls.catalogue > docs/reference/pitfalls.md
	$(PYTHON) -m tests.sweep.methods_table
	$(PYTHON) -m finetune_trainer.observe.metrics > docs/reference/trainer-metrics.md
	$(PYTHON) -m tools.layers_page > docs/reference/layers.md
	$(PYTHON) -m tools.demo_picture
	$(PYTHON) -m tools.diagrams
	$(PYTHON) -m tools.images.locks

.PHONY: format
format: environment ## Format the sources
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

.PHONY: chaos
chaos: JOBS = 200
chaos: environment ## Kill the operator around every write, and put it into bad weather, with JOBS jobs on a real control plane
	$(PYTHON) -m tools.cluster.binaries
	$(PYTHON) -m tests.chaos --jobs $(JOBS)

.PHONY: kill-test
kill-test: RUNS = 100
kill-test: environment ## Kill training runs at random moments, RUNS with SIGKILL and RUNS with SIGTERM, and compare their bytes
	$(PYTHON) -m tests.kill --runs $(RUNS) $(if $(SEED),--seed $(SEED))
.PHONY: kill-test-elastic
kill-test-elastic: RUNS = 100
kill-test-elastic: environment ## The same with another number of ranks in each attempt: 1, 2, 3, 4 or 8, and one result
	$(PYTHON) -m tests.kill --elastic --runs $(RUNS) $(if $(SEED),--seed $(SEED))
.PHONY: tamper-test
tamper-test: RUNS = 100
tamper-test: environment ## Change runs RUNS times, all digests included; an audit of an interval with the change must find it
	$(PYTHON) -m tests.kill.audit --runs $(RUNS) $(if $(SEED),--seed $(SEED))
.PHONY: kill-test-merge
kill-test-merge: RUNS = 100
kill-test-merge: environment ## Kill merges RUNS times; every one must end with the undisturbed bytes
	$(PYTHON) -m tests.kill.merge --runs $(RUNS) $(if $(SEED),--seed $(SEED))
.PHONY: kill-test-publish
kill-test-publish: RUNS = 100
kill-test-publish: environment ## Kill publications RUNS times for each kind of destination; no reader may see half a release
	$(PYTHON) -m tools.cluster.binaries
	$(PYTHON) -m tests.kill.publish --kills $(RUNS) $(if $(SEED),--seed $(SEED))
	$(PYTHON) -m tests.kill.publish_hub --runs $(RUNS) $(if $(SEED),--seed $(SEED))

.PHONY: bench-operator
bench-operator: JOBS = 1000
bench-operator: environment ## Pace and cost of the operator with JOBS jobs on a real API server, against bench/operator_thresholds.json
	$(PYTHON) -m tools.cluster.binaries
	$(PYTHON) -m bench.operator_pace --jobs $(JOBS) --keep-results

.PHONY: bench-merge bench-merge-7b bench-chain bench-trainer bench-gpu gpu-check bench-prepare bench-prepare-memory bench-preflight bench-memory bench-validate bench-starts bench-spot
bench-merge: environment ## Merges (Llama 1.1B, Qwen2 0.5B, GPT-2 medium) against PEFT and a plain copy: time and memory, RUNS rounds; fails below its targets
	$(PYTHON) -m bench.merge --pairs $(RUNS) --parameters 1.1B "Qwen2 0.5B" "GPT-2 medium"
bench-merge-7b: environment ## The same with 7B parameters, without PEFT: 30 GB of disk, removed afterwards
	$(PYTHON) -m bench.merge --parameters 7B --pairs 3 --without-peft
bench-chain: environment ## Seconds from apply to the first step and to Succeeded on the real node
	$(PYTHON) -m bench.chain --runs $(RUNS)
bench-trainer: environment ## Training on the CPU against TRL and a bare loop: tokens per second, memory, 1 and 2 ranks; fails below its targets
	$(PYTHON) -m bench.trainer --runs $(RUNS) --micro-batch 2 1
bench-preflight: environment ## Looking at a 70B model without its weights: seconds and memory, against importing the libraries
	$(PYTHON) -m bench.preflight
bench-memory: environment ## The memory planner against what is measured: CPU, and a GPU where there is one
	$(PYTHON) -m bench.memory
	$(PYTHON) -m bench.memory.packed_load
bench-validate: environment ## `finetune validate`: milliseconds from process start, one manifest and 1,000
	$(PYTHON) -m bench.validate
bench-starts: environment ## Seconds of each role of a local run, and from a rank's kill to the next step; fails above its limits
	$(PYTHON) -m bench.starts
bench-spot: environment ## An elastic gang on spot nodes next to one of fixed size: hours, node hours, goodput; the cluster is simulated
	$(PYTHON) -m bench.spot --runs $(RUNS) --keep-results
bench-gpu: environment ## LoRA of an 8B-class model on a GPU next to TRL; says so where there is none
	$(PYTHON) -m bench.gpu --runs $(RUNS)
gpu-check: environment ## What only a GPU can show, in tiers and ten minutes: kernels, calibration, throughput, waits, resume, methods, planner, ...; on the CPU at toy size
	$(PYTHON) -m bench.gpu.check
bench-prepare-memory: environment ## Memory of preparing 10 GB: 16 GB of disk, a quarter of an hour; fails at 1 GiB
	$(PYTHON) -m bench.prepare --bytes 10GB --runs 1 --ours-only --tokenizer words
bench-prepare: environment ## Preparing 1 GB of text against datasets.map: MB per second and memory
	$(PYTHON) -m bench.prepare --runs $(RUNS)

NIGHTLY = nightly-tests nightly-e2e nightly-hostile nightly-sweep nightly-idle nightly-pace nightly-benchmarks
.PHONY: nightly $(NIGHTLY)
nightly: environment ## What `make test` leaves out, with seeds and examples that nobody has tried before; a part that fails stops no other
	$(MAKE) --keep-going SEED=$(NIGHT) kill-test kill-test-elastic kill-test-merge kill-test-publish chaos failures mutation simulate explore sweep tamper-test $(NIGHTLY)
nightly-tests: environment
	$(VENV)/bin/pytest -q -n 2 --dist loadfile -m nightly --ignore tests/e2e --ignore tests/integration/test_hostile_objects.py tests
# One process: a machine holds one cluster with nodes.
nightly-e2e: environment
	$(VENV)/bin/pytest -q -m nightly tests/e2e
nightly-hostile: environment
	HOSTILE_SEED=$(NIGHT) HOSTILE_OBJECTS=20000 $(VENV)/bin/pytest -q -s tests/integration/test_hostile_objects.py tests/integration/test_hostile_manifests.py
nightly-sweep: environment
	$(PYTHON) -m tests.sweep --slice random --count 300 --seed $(NIGHT)
nightly-idle: environment
	$(PYTHON) -m tools.cluster.binaries
	$(PYTHON) -m tests.idle
nightly-pace: environment
	$(MAKE) bench-operator JOBS=1000
nightly-benchmarks: environment
	$(MAKE) --keep-going bench-starts bench-merge bench-trainer bench-prepare bench-chain bench-spot bench-gpu bench-memory bench-preflight bench-validate RUNS=3

.PHONY: clean
clean: ## Remove what was built here
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis

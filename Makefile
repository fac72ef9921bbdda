# The two commands to start with: make quickstart, make test.
# Everything runs in the virtual environment venv/, which is made once and again when requirements change.

PYTHON ?= python3
BIN := venv/bin
OUT ?= benchmarks
SEQUENTIAL ?= $(OUT)/sequential_1h
PARALLEL ?= $(OUT)/parallel_1h
# Small rollouts: many points on the curves of short runs, and workers for the cores that are there.
QUICK := env.num_envs=32 training.n_steps=32 training.batch_size=256 training.n_epochs=2 training.log_interval=1 \
  parallel.num_workers=null parallel.num_envs_per_worker=null
ARGS ?=
JOBS ?= auto
# Tests side by side, whose threads sleep while they wait for each other: there are more of them than cores.
TESTS := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-cluster test-faults fuzz soak lint setup doctor train train-timed train-parallel train-parallel-timed train-a2c train-a2c-parallel train-a3c-parallel train-impala train-impala-timed train-impala-parallel train-impala-parallel-timed train-distributed scaling tune profile evaluate evaluate-ppo evaluate-impala compare benchmark benchmark-quick dashboard runs tensorboard docs bench bench-peers clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-27s %s\n", $$1, $$2}'

quickstart: venv/.installed ## set up, train PPO on CoinRun for a minute, evaluate it, draw its curve
	$(BIN)/rlcb quickstart $(ARGS)

test: lint ## set up and run the tests, side by side on all cores (JOBS=0: one after the other)
	$(TESTS) $(ARGS)

test-all: lint ## all tests, also the long ones: sanitizers, larger model checks (about an hour)
	$(BIN)/python -m pytest -m 'not cluster' $(ARGS)

test-cluster: venv/.installed ## the tests on real engines: hosts, SSH, torchrun, SLURM, qsub, Ray (root; installs them)
	cluster_tests/install.sh $(BIN)/python
	$(BIN)/python -m pytest cluster_tests $(ARGS)
	$(BIN)/python -m pytest -m cluster $(ARGS)

test-faults: venv/.installed ## kill runs of every mode 300 times, and all other faults: ARGS="--kills 300 --seed 1 --jobs 2" (about an hour)
	$(BIN)/python tests/faults/kills.py $(ARGS)
	RLCB_FAULTS=long $(BIN)/python -m pytest -m 'long or not long' tests/faults

fuzz: venv/.installed ## 100,000 made-up configs, checkpoints and logs each
	RLCB_FUZZ=100000 $(BIN)/python -m pytest tests/commands/test_fuzz.py -s -o timeout=0 $(ARGS)

soak: venv/.installed ## train for an hour and watch memory, files, threads and speed every second
	$(BIN)/python bench/soak.py $(ARGS)

lint: venv/.installed ## check style, types and which folder imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

setup: venv/.installed ## make venv/ and install everything into it

venv/.installed: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

doctor: venv/.installed ## check that this machine can train
	$(BIN)/rlcb doctor

train: venv/.installed ## train PPO in one process
	$(BIN)/python train_ppo_sequential.py $(ARGS)

train-timed: venv/.installed ## the same for an hour
	$(BIN)/python train_timed.py --duration 1.0 --output-dir $(OUT)/sequential_1h $(ARGS)

train-parallel: venv/.installed ## train PPO on all cores for an hour
	$(BIN)/python train_parallel_timed.py --duration 1.0 --output-dir $(OUT)/parallel_1h $(ARGS)

train-parallel-timed: train-parallel ## the same

train-a2c: venv/.installed ## train A2C in one process
	$(BIN)/python train_a2c_sequential.py $(ARGS)

train-a2c-parallel: venv/.installed ## train A2C on all cores
	$(BIN)/python train_a2c_parallel.py $(ARGS)

scaling: venv/.installed ## measure how PPO speeds up with workers on this machine
	$(BIN)/rlcb scaling --output-dir $(OUT)/scaling $(ARGS)

tune: venv/.installed ## find the fastest setting for PPO on this machine: runs/tune/tuned.yaml
	$(BIN)/rlcb tune --config ppo_procgen_paper --overwrite $(ARGS)

profile: venv/.installed ## say where the time of PPO goes on this machine and what limits it
	$(BIN)/rlcb profile --config ppo_procgen_paper --mode parallel --overwrite $(ARGS)

train-a3c-parallel: venv/.installed ## train A3C on all cores
	$(BIN)/python train_a3c_parallel.py $(ARGS)

train-impala: venv/.installed ## train IMPALA in one process
	$(BIN)/python train_impala_sequential.py $(ARGS)

train-impala-timed: venv/.installed ## the same for half an hour
	$(BIN)/python train_impala_sequential_timed.py --duration 0.5 --output-dir $(OUT)/impala_seq_30min $(ARGS)

train-impala-parallel: venv/.installed ## train IMPALA on all cores
	$(BIN)/python train_impala_parallel.py $(ARGS)

train-impala-parallel-timed: venv/.installed ## the same for half an hour
	$(BIN)/python train_impala_parallel_timed.py --duration 0.5 --output-dir $(OUT)/impala_par_30min $(ARGS)

train-distributed: venv/.installed ## train PPO on two pretended machines here; see docs/cluster.md for real ones
	$(BIN)/rlcb launch local --nodes 2 -- train $(ARGS)

evaluate: venv/.installed ## evaluate the newest checkpoint
	$(BIN)/python evaluate.py --deterministic $(ARGS)

evaluate-ppo: venv/.installed ## evaluate the newest PPO checkpoint
	$(BIN)/python evaluate_universal.py --algorithm ppo --deterministic $(ARGS)

evaluate-impala: venv/.installed ## evaluate the newest IMPALA checkpoint
	$(BIN)/python evaluate_universal.py --algorithm impala --deterministic $(ARGS)

compare: venv/.installed ## compare the runs of train-timed and train-parallel (SEQUENTIAL=DIR PARALLEL=DIR for others)
	$(BIN)/python compare_results.py --sequential $(SEQUENTIAL) --parallel $(PARALLEL) --output $(OUT)/comparison.png $(ARGS)

benchmark: venv/.installed ## train, evaluate and compare a matrix: make benchmark ARGS="--duration 0.5 --games coinrun"
	$(BIN)/rlcb benchmark --output-dir $(OUT)/matrix $(ARGS)

benchmark-quick: venv/.installed ## PPO and A2C in both modes, two seeds: a full report in eight to ten minutes on 2 cores
	$(BIN)/rlcb benchmark --algorithms ppo a2c --modes sequential parallel --games coinrun --seeds 1 2 --duration 0.01 \
	  --episodes 16 --set $(QUICK) --output-dir $(OUT)/quick --overwrite $(ARGS)

dashboard: venv/.installed ## watch the runs in $(OUT) at http://localhost:6007
	$(BIN)/rlcb dashboard $(OUT) $(ARGS)

runs: venv/.installed ## list the runs that are there
	$(BIN)/rlcb runs $(ARGS)

tensorboard: venv/.installed ## show the logs of all runs at http://localhost:6006
	$(BIN)/tensorboard --logdir_spec logs:logs,runs:runs,benchmarks:$(OUT) $(ARGS)

docs: venv/.installed ## write docs/configuration.md anew from the config model
	$(BIN)/rlcb config --markdown > docs/configuration.md

bench: venv/.installed ## measure what the memory layout brings on this machine
	$(BIN)/python bench/memory_format.py $(ARGS)

bench-peers: venv/.installed ## the same job in Stable-Baselines3, CleanRL's setting, Sample Factory, RLlib and torchrl
	$(BIN)/python bench/peers --output-dir $(OUT)/peers $(ARGS)

clean: ## remove venv/ and caches; runs stay
	rm -rf venv .pytest_cache .mypy_cache .ruff_cache build dist

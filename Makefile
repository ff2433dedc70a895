# Two commands, and nothing before them:  make compile   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Images of containers often set it; then every process compiles the code anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: compile test quick test-gpu check audit docs install clean

compile: $(VENV)/installed  ## the main job: ResNet-18 on the digits, 40% of its latency at batch 32, in steps of 16 channels; ARGS="--help" for more
	$(BIN)/smcp-compile --model torchvision:resnet18 --data digits --batch 32 --multiple 16 --epochs 3 $(ARGS)

test: $(VENV)/installed  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup $(ARGS)

quick: $(VENV)/installed  ## one test of every file, in under 90 seconds on two cores
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --quick $(ARGS)

test-gpu: $(VENV)/installed  ## the tests that need an NVIDIA GPU, and those of TensorRT; TRT_PYTHON=... where it is elsewhere
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 0 -m gpu $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 0 tests/backends/test_tensorrt.py tests/backends/test_tensorrt_worker.py tests/backends/test_tensorrt_inspecting.py tests/backends/test_tensorrt_files.py $(ARGS)

check: $(VENV)/installed  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pip install --quiet --no-deps -e . --config-settings editable_mode=strict  # how mypy finds passes/
	$(BIN)/mypy; status=$$?; $(BIN)/pip install --quiet --no-deps -e .; exit $$status

audit: $(VENV)/installed  ## known vulnerabilities of what is installed
	$(BIN)/python tools/audit.py

docs: $(VENV)/docs-installed  ## the documentation as a site, in site/: open site/index.html
	OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict --quiet

install: $(VENV)/installed

$(VENV)/docs-installed: pyproject.toml $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "smcp_fx needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make demo   sample a tiny model through a real ComfyUI (found, or cloned into .demo/)
# make test   lint, unit tests, tests against the real ComfyUI where there is one
#             (parts of it: make lint, test-unit, test-interpreter, test-compile, test-comfy)
# make test-browser   the nodes in a real Chromium (needs Debian's chromium) on a real ComfyUI
# make test-gpu       specification and kernels on a CUDA device, in the Python that PYTHON names
#
# PYTHON    the Python to start from (3.10 or newer; the pinned test packages need 3.11)
# VENV      the test environment that is made
# PIP_ARGS  added to every pip install
# COMFYUI_PATH, COMFYUI_PYTHON, COMFYUI_REPO   which ComfyUI; see workflows/comfy_local.py

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
export PIP_ARGS

PY := $(VENV)/bin/python
# Made once the requirements are installed; an interrupted install leaves none.
STAMP := $(VENV)/.requirements-installed

.PHONY: help demo test test-unit test-interpreter test-compile test-comfy test-browser test-gpu lint clean

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

demo:
	$(PYTHON) workflows/demo.py

test: lint test-unit test-interpreter test-compile test-comfy

test-unit: $(STAMP)
	@echo "== unit tests"
	$(PY) -m pytest tests/unit

# Triton decides at import whether it interprets: two processes.
test-interpreter: $(STAMP)
	@echo "== Triton kernels, interpreted"
	TRITON_INTERPRET=1 $(PY) -m pytest -n auto tests/interpreter

test-compile: $(STAMP)
	@echo "== Kernels, compiled for GPUs that are not there"
	TRITON_INTERPRET=0 $(PY) -m pytest -n auto tests/compile

test-comfy: $(STAMP)
	@echo "== tests against the real ComfyUI"
	$(PY) -m pytest tests/comfy

test-browser: $(STAMP)
	$(PY) -m pytest -rs tests/browser

test-gpu:
	$(PYTHON) -m pytest -rs tests/gpu

lint: $(STAMP)
	@echo "== lint"
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

$(STAMP): tests/requirements.txt
	@echo "== test environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(PIP_ARGS) -r tests/requirements.txt
	@touch $@

# By their own names and never $(VENV), which may be an environment that is not ours to remove.
clean:
	rm -rf .venv .demo build .pytest_cache .ruff_cache ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

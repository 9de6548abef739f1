# Every command first makes the environment it needs: .venv for training and tests,
# .venv-aot for the TPU and CUDA compilers, .venv-torch for the PyTorch cross-check.
# A second call finds them ready, unless pyproject.toml or constraints.txt changed.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train test soak aot budget test-torch lint lock

ARGS ?=
SOAK ?=
EXTRAS ?=
PYENV_ROOT ?= $(HOME)/.pyenv
PINS := pyproject.toml constraints.txt
UV_INSTALL := .venv/bin/uv pip install --quiet --constraints constraints.txt
# A Python that uv would download is one that nobody chose.
export UV_PYTHON_DOWNLOADS := never

comma := ,
ALL_EXTRAS := test$(addprefix $(comma),$(EXTRAS))
KNOWN := $(shell sed -n '/^.project.optional/,/^.tool/s/^\([a-z-]*\) = .*/\1/p' pyproject.toml)
UNKNOWN := $(filter-out $(KNOWN),$(subst $(comma), ,$(EXTRAS)))
$(if $(UNKNOWN),$(error EXTRAS=$(EXTRAS): no extra $(UNKNOWN); choose from $(KNOWN)))
INSTALLED := .venv/.installed-$(ALL_EXTRAS)

# $(call create,FOLDER,CANDIDATES,CONDITION,NAME,VARIABLE): a virtual environment in
# FOLDER with the first candidate that meets CONDITION; VARIABLE names one by hand. Running a candidate is the only sure test:
# a pyenv shim can exist and exit 127, and a system Python can lack ensurepip.
define create
@for python in $(2); do \
    if "$$python" -c 'import ensurepip, sys; sys.exit(not ($(3)))' >/dev/null 2>&1; then \
        echo "Creating $(1) with $$("$$python" --version)"; \
        "$$python" -m venv $(1); exit; \
    fi; \
done; \
echo "No $(4) with its venv module found: install one, with pyenv or a system" \
    "package, or name it: make $(5)=/path/to/python" >&2; exit 1
endef

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile
	@echo 'ARGS="..." goes to the program; EXTRAS=cuda or EXTRAS=tpu adds an accelerator,'
	@echo 'EXTRAS=cuda,parquet,ocr,lm-eval optional packages, too.'

install: $(INSTALLED) ## Create .venv and install the package

train: $(INSTALLED) ## Train with TraceRL; the default runs on two CPU cores
	.venv/bin/python -m dllm_jax.train --config=configs/tracerl.py $(ARGS)

test: $(INSTALLED) ## Run the tests; needs no accelerator
	.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	    $(ARGS)

soak: $(INSTALLED) ## Draw many more examples of every property; SOAK=short kills three times
	.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	    -m "$(if $(SOAK),soak,property or soak)" \
	    --hypothesis-profile=soak$(addprefix -,$(SOAK)) \
	    -o norecursedirs="tests/aot tests/torch" tests $(ARGS)

aot: .venv-aot/.installed ## Compile for TPU, H100 and H200 without hardware
	DLLM_NO_SKIP=1 .venv-aot/bin/python -m pytest -q -rsP -n 2 --maxschedchunk 1 \
	    --confcutdir=tests/aot tests/aot $(ARGS)

budget: .venv-aot/.installed ## Count what every program takes, against benchmarks/budget.json
	.venv-aot/bin/python -m benchmarks.budget $(ARGS)

test-torch: $(INSTALLED) .venv-torch/.installed ## Cross-check an export with PyTorch
	DLLM_PYTHON="$(CURDIR)/.venv/bin/python" .venv-torch/bin/python -m pytest -q \
	    --confcutdir=tests/torch tests/torch $(ARGS)

lint: $(INSTALLED) ## Check format and style
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

lock: .venv/bin/uv ## Rewrite constraints.txt; ARGS=--upgrade takes newer versions
	.venv/bin/uv pip compile --quiet --universal --all-extras --no-annotate \
	    --custom-compile-command 'make lock' $(ARGS) pyproject.toml -o constraints.txt

.venv/bin/python:
	$(call create,.venv,$(or $(PYTHON),python3.12 python3.13 python3 \
	    $(wildcard $(PYENV_ROOT)/versions/3.1[2-9]*/bin/python)),sys.version_info >= (3$(comma) 12),Python >= 3.12,PYTHON)

.venv/bin/uv: | .venv/bin/python
	@.venv/bin/python -m pip install --quiet uv==0.13.8

.venv/.installed-%: $(PINS) | .venv/bin/uv
	@echo "Installing .[$*] into .venv"
	@$(UV_INSTALL) --python .venv/bin/python --editable '.[$*]'
	@touch $@

# Not in .venv: there, the plugins of two chips that are not present would greet every
# run with a traceback, and a half CUDA installation would shadow a whole one.
.venv-aot/.installed: $(PINS) | .venv/bin/uv
	@echo "Installing .[aot,test] into .venv-aot"
	@.venv/bin/uv venv --quiet --allow-existing --python .venv/bin/python .venv-aot
	@$(UV_INSTALL) --python .venv-aot/bin/python --editable '.[aot,test]'
	@touch $@

.venv-torch/bin/python:
	$(call create,.venv-torch,$(or $(PYTHON_TORCH),python3.11 \
	    $(wildcard $(PYENV_ROOT)/versions/3.11*/bin/python)),sys.version_info[:2] == (3$(comma) 11),Python 3.11,PYTHON_TORCH)

.venv-torch/.installed: | .venv-torch/bin/python
	@echo "Installing PyTorch into .venv-torch"
	@.venv-torch/bin/python -m pip install --quiet torch==2.13.0 transformers peft safetensors \
	    pytest
	@touch $@

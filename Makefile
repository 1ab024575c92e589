# EngineBay's commands. `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
PACKAGES := export builder plugins triton_repo cli

MODEL ?=
TARGET ?= ort-cpu
QUANT ?= int4
OUT ?= build/engine
REPO ?= build/repo
PROMPT ?=
CUDA_ARCH ?= 90
SUBSET ?= all
ENGINE ?= $(OUT)
ARGS ?=
EXPORTED = build/exported/$(notdir $(patsubst %/,%,$(MODEL)))

# A virtual environment holds absolute paths: where the clone was moved, install anew.
ifneq ($(file <$(VENV)/.serve),$(CURDIR))
$(shell rm -f $(VENV)/.serve $(VENV)/.dev)
endif

.DEFAULT_GOAL := help
.PHONY: help venv plugins plugins-cuda test-gpu test-gpu-ort quickstart test lint types format bench peers build-engine package serve client clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Two layers: what building and serving need, and what tests and oracles add (torch among them).
$(VENV)/.serve: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; v = sys.version_info[:2]; sys.exit(v != (3, 11) and f"EngineBay needs Python 3.11, this is {v[0]}.{v[1]}: make PYTHON=<python3.11>")'
	@echo "installing what building and serving need into $(VENV): some 700 MB, a few minutes"
	@$(PIP) -e '.[build,triton,sample]'
	@echo "$(CURDIR)" > $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "installing what tests and oracles need into $(VENV)"
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[build,triton,sample,torch,dev]'
	@touch $@

venv: $(VENV)/.dev  ## make .venv with everything

plugins: $(VENV)/.serve  ## compile the CPU plugin library
	@$(BIN)/python -m enginebay.plugins.build

plugins-cuda: $(VENV)/.serve  ## compile the CUDA kernels and their ONNX Runtime adapter; needs nvcc 13, no GPU. CUDA_ARCH=90 SUBSET=all|ci
	@$(PIP) --no-deps nvidia-cublas==13.0.2.14
	@$(BIN)/python -m enginebay.plugins.build_cuda --arch $(CUDA_ARCH) --subset $(SUBSET)
	@$(BIN)/python -m enginebay.plugins.build_ort_cuda

test-gpu: $(VENV)/.dev plugins-cuda  ## build, tests and benchmarks of the CUDA kernels, then one table; needs an NVIDIA GPU
	@$(BIN)/python -m pytest -q tests/gpu tests/plugins/test_cuda_host.py
	@$(BIN)/python benchmarks/kernels.py

# Installed for the target alone: onnxruntime-gpu takes the place of onnxruntime, which everything else uses.
ORT_GPU := build/ort-gpu-site
$(ORT_GPU)/.done: $(VENV)/.dev
	@echo "installing onnxruntime-gpu into $(ORT_GPU): some 700 MB"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(ORT_GPU) onnxruntime-gpu==1.31.1
	@touch $@

test-gpu-ort: plugins plugins-cuda $(ORT_GPU)/.done  ## the ops in onnxruntime-gpu: tests, then our ops beside its own; needs an NVIDIA GPU
	@PYTHONPATH=$(ORT_GPU) $(BIN)/python -m pytest -q tests/gpu/test_gpu_ort_adapter.py
	@PYTHONPATH=$(ORT_GPU) $(BIN)/python benchmarks/ort_cuda.py

quickstart: plugins  ## sample model -> engine -> Triton server -> two streamed answers
	@$(BIN)/enginebay quickstart

build-engine: plugins  ## MODEL=<HF folder or .gguf> TARGET=ort-cpu QUANT=int4|int8|fp8|fp16|… (docs/quantization.md) OUT=<folder>
	@test -n "$(MODEL)" || { echo "say which model: make build-engine MODEL=<Hugging Face folder> QUANT=int4 OUT=<folder>"; exit 2; }
	@$(BIN)/enginebay build "$(EXPORTED)" "$(OUT)" --target "$(TARGET)" --quant "$(QUANT)" --check-only $(ARGS)
	@$(BIN)/enginebay export "$(MODEL)" "$(EXPORTED)" --keep
	@$(BIN)/enginebay build "$(EXPORTED)" "$(OUT)" --target "$(TARGET)" --quant "$(QUANT)" --keep $(ARGS)

package: plugins  ## ENGINE=<folder> REPO=<folder>: engine -> Triton model repository
	@$(BIN)/enginebay package "$(ENGINE)" "$(REPO)" $(ARGS)

serve: plugins  ## REPO=<folder>: run the Triton server until Ctrl-C
	@$(BIN)/enginebay serve "$(REPO)" $(ARGS)

client: export PROMPT := $(value PROMPT)
client: $(VENV)/.serve  ## PROMPT="…": ask the running server
	@test -n "$$PROMPT" || { echo 'say what to ask: make client PROMPT="What is the capital of France?"'; exit 2; }
	@$(BIN)/enginebay client "$$PROMPT" $(ARGS)

test: $(VENV)/.dev plugins  ## every test, one end to end against the real server among them
	@$(BIN)/python -m pytest -q

lint: $(VENV)/.dev  ## ruff and clang-format, check only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.dev  ## ruff and clang-format, in place
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

# The import name of a folder is its path under `enginebay`; a link makes that true on disk for mypy.
types: $(VENV)/.dev  ## mypy --strict
	@mkdir -p build/typing && ln -sfn ../.. build/typing/enginebay
	@MYPYPATH=build/typing $(BIN)/mypy $(PACKAGES:%=-p enginebay.%)

bench: $(VENV)/.dev plugins  ## the engine of `make quickstart`, measured beside its peers where `make peers` has installed them
	@$(BIN)/python benchmarks/peers.py

peers:  ## .venv-peers and .venv-peers-vllm, the engines that `make bench` compares with; some 20 minutes, 5 GB
	@$(PYTHON) benchmarks/peers/prepare.py

clean:  ## remove what was built; keeps .venv
	@rm -rf build/typing build/quickstart build/objects plugins/lib *.egg-info

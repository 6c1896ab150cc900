# Greenroom: every task that a person or a machine runs. `make help` lists them.
#
# Nothing is installed by hand: each target that needs MLX, the demo model, a browser or a Python client gets it first, and a
# second run costs nothing.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

CARGO ?= cargo
ARGS ?=
# Where `make native` writes Cargo's configuration: this project, or an application that embeds it.
PROJECT ?= $(CURDIR)

# Python packages for tests live in a virtual environment under target/.
OPENAI := 2.8.0
ANTHROPIC := 2.16.0
SDK_VENV := target/sdk-venv
SDK_STAMP := $(SDK_VENV)/.openai-realtime-$(OPENAI)-anthropic-$(ANTHROPIC)
SDK_PYTHON := GREENROOM_SDK_PYTHON="$(CURDIR)/$(SDK_VENV)/bin/python3"

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: run
run: build ## set everything up, then serve the demo model with a chat page on http://127.0.0.1:8080
	@model=$$(native/model.sh) && exec target/release/greenroom serve "$$model" $(ARGS)

.PHONY: build
build: native ## target/release/greenroom
	$(CARGO) build --release

.PHONY: native
native: ## prepare MLX where it does not build itself (PROJECT=path for an application that embeds Greenroom)
	@native/setup.sh "$(PROJECT)"

.PHONY: model
model: ## fetch and verify the demo model; its path is the last line
	@native/model.sh

.PHONY: speech-model
speech-model: ## fetch and verify the demo speech model (Whisper tiny.en); its folder is the last line
	@native/speech-model.sh

# Debian's browser, for the tests of the page; elsewhere they say that they were skipped.
.PHONY: browser
browser:
	@native/browser.sh

$(SDK_STAMP):
	@native/sdk.sh $(SDK_VENV) 'openai[realtime]==$(OPENAI)' anthropic==$(ANTHROPIC)
	@touch $@

.PHONY: sdk
sdk: $(SDK_STAMP)

# What the tests need besides a toolchain.
.PHONY: test-setup
test-setup: native browser sdk
	@native/model.sh > /dev/null
	@native/speech-model.sh > /dev/null

# With the scripted engine nothing is computed: our own code is compiled without optimisation there, which saves minutes.
FAKE := --no-default-features --features fake --config profile.dev.package.greenroom.opt-level=0

.PHONY: test
test: test-setup ## all tests but the long ones
	$(CARGO) test $(FAKE)
	$(CARGO) check --no-default-features --features cpu --lib --bins --examples
	$(SDK_PYTHON) $(CARGO) test

.PHONY: test-full
test-full: test-setup ## the long tests as well
	@native/gemma.sh > /dev/null
	@native/speech-model.sh base > /dev/null
	@native/tokenizers.sh > /dev/null
	$(SDK_PYTHON) $(CARGO) test --release -- --include-ignored

# ARM's kernels under emulation: bits against plain loops, and tiny models against their goldens. Far too slow for `make test`.
ARM := aarch64-unknown-linux-gnu
ARM_GCC ?= aarch64-linux-gnu-gcc
ARM_QEMU ?= qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu

.PHONY: test-arm
test-arm: ## the CPU backend's tests for 64-bit ARM, under qemu's emulation (Linux)
	@command -v $(ARM_GCC) > /dev/null && command -v $(firstword $(ARM_QEMU)) > /dev/null || \
	  { echo "greenroom: needs a cross compiler and qemu: apt-get install gcc-aarch64-linux-gnu qemu-user" >&2; exit 69; }
	@test -d "$$(rustc --print target-libdir --target $(ARM))" || \
	  { echo "greenroom: needs Rust's library for ARM: rustup target add $(ARM)" >&2; exit 69; }
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER="$(ARM_GCC)" CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$(ARM_QEMU)" \
	  $(CARGO) test --target $(ARM) --no-default-features --features cpu --test cpu --test parity

.PHONY: bench
bench: build ## speed of the operators and of finding prefixes beside the machine's limits, then of the demo model as it is served
	$(CARGO) bench --bench operators
	$(CARGO) bench --bench prefix
	@model=$$(native/model.sh) && target/release/greenroom bench "$$model" $(ARGS)

.PHONY: versus
versus: build ## the demo model's speed beside other servers, in turns (ARGS="--help" lists peers and more)
	@python3 -B benches/versus/versus.py $(ARGS)

.PHONY: load
load: build ## many clients, long prompts and agents beside another server (ARGS="--help" lists scenarios and more)
	@python3 -B benches/load/load.py $(ARGS)

.PHONY: speech
speech: build speech-model ## a clip's speed, live text's delays, memory, chats beside a long recording (ARGS="--help" lists more)
	@python3 -B benches/speech/speech.py $(ARGS)

.PHONY: agent
agent: build ## an agent's session, cold, warm and after a restart, beside llama.cpp's slots (ARGS="--help" lists more)
	@python3 -B benches/cache/agent.py $(ARGS)

.PHONY: overhead
overhead: ## what scheduler and HTTP cost a token, with an engine that costs nothing
	$(CARGO) bench --bench overhead --no-default-features --features fake -- $(ARGS)

.PHONY: lint
lint: native ## format, clippy, documentation, licences
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy --all-targets --no-default-features --features fake -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps
	@command -v cargo-deny > /dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check licenses bans sources

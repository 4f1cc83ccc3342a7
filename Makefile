# SPDX-License-Identifier: MIT
# lk's build: every target works with BACKEND=gpu (nvcc and a device) and BACKEND=cpu (the simulator of tests/simt). `make` lists
# those that users need, `make help-all` all. Here are the variables, how a file is compiled, and the targets examples, test, bench and
# check. The rules of the others lie with what they are about: packages/rules.mk, bench/rules.mk, tests/rules.mk.

# What the command line may set.
# CUDA_HOME of the environment may be of another CUDA than NVCC= says.
home_of = $(or $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $1 2>/dev/null))),/usr/local/cuda)
ifeq ($(origin NVCC),command line)
ifneq ($(origin CUDA_HOME),command line)
CUDA_HOME := $(call home_of,$(NVCC))
endif
endif
CUDA_HOME ?= $(call home_of,nvcc)
NVCC ?= $(CUDA_HOME)/bin/nvcc
ARCH ?= native
PYTHON ?= python3
PREFIX ?= /usr/local
COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo none)
SAN ?= plain
LK_DIR ?= .

# What there is on this machine.
have_nvcc := $(shell command -v $(NVCC) 2>/dev/null)
cuda = $(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
query = $(shell nvidia-smi --query-gpu=$1 --format=csv,noheader 2>/dev/null | head -n 1)
gpu := $(call query,name)
gpu_name := $(shell echo '$(gpu)' | sed 's/^NVIDIA //' | tr 'A-Z /,' 'a-z---')
why := $(if $(have_nvcc),nvcc is here,no nvcc) and $(if $(gpu),$(gpu),no GPU)
ifeq ($(origin BACKEND),undefined)
BACKEND := $(if $(and $(have_nvcc),$(gpu)),gpu,cpu)
lib_backend := $(if $(have_nvcc),gpu,none)
else
why := asked for
lib_backend := $(BACKEND)
endif

# 9.0 -> 90a: the instructions of one architecture alone (wgmma, ...) need the a.
capability := $(if $(filter native,$(ARCH)),$(subst .,,$(call query,compute_cap)))
native := $(or $(patsubst 9%,9%a,$(patsubst 1%,1%a,$(capability))),90a)
arches := $(if $(filter native,$(ARCH)),$(native),$(ARCH))
gencode := $(foreach a,$(arches),-gencode arch=compute_$(a),code=sm_$(a))

# With lk/<op>.cuh go lk/<op>_*.cuh.
files := $(wildcard lk/*.cuh)
ops := $(patsubst lk/%.cuh,%,$(filter-out lk/lk_% $(patsubst lk/%.cuh,lk/%_%,$(files)),$(files)))
out := build/$(BACKEND)$(if $(filter cpu,$(BACKEND)),-$(SAN))$(if $(FAST),-fast)
san_plain := -O1 # compiles in 60 % of the time of -O2, and the tests run as fast
san_asan := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
san_tsan := -O1 -g -fsanitize=thread

# How a file is compiled, and a program linked.
ifeq ($(BACKEND),gpu)
compiler := NVCC
compile = $(NVCC) -std=c++17 -O3 $(gencode) -Wno-deprecated-gpu-targets -Xcompiler -Wall,-Wextra,-fPIC $(FAST) \
	-I$(LK_DIR) -I. -MMD -MP -MF $@.d
link = $(NVCC) $(gencode) -Wno-deprecated-gpu-targets -Xcompiler -pthread
link_from_c = $(CC) $(@D)/main.o $(@D)/kernels.o -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart -lstdc++ -lm -o $@
libs := -lcublasLt # linear_cross_entropy's matmuls; behind the objects, for linkers that keep only what is needed by then
cuda_include := $(CUDA_HOME)/include
else
simt := tests/simt
compiler := CXX
# #pragma unroll is for nvcc: g++ does not know it, and clang says where it could not do it.
compile = $(CXX) -std=c++17 $(san_$(SAN)) -Wall -Wextra -Wno-unknown-pragmas -Wno-pass-failed -Wno-psabi -fPIC -DLK_SIMT $(FAST) \
	-I$(LK_DIR) -I. -I$(simt) -MMD -MP -MF $@.d -x c++
link = $(CXX) $(san_$(SAN)) -pthread
engine := $(patsubst $(simt)/%.cpp,$(out)/simt/%.o,$(filter-out $(simt)/test_%,$(wildcard $(simt)/*.cpp)))
link_from_c = $(link) $(@D)/main.o $(@D)/kernels.o $(engine) -o $@
cuda_include := $(simt)
endif

# V=1 shows each command and, by tests/run, each test case.
Q := $(if $(filter 1,$(V)),,@)
say = $(if $(Q),@echo "$1 $2")

help: groups := try use
help-all: groups := try use test measure
help: ## try: lists these targets
help-all: ## try: lists all, also of those who change or measure lk
help help-all:
	@echo "lk: BACKEND=$(BACKEND) ($(why)); ops: $(ops)"
	@for group in $(groups); do echo "$$group:"; sed -n "s/^\([a-z0-9-]*\):.*## $$group: /\1\t/p" Makefile */rules.mk | \
	awk -F'\t' '{ printf "  make %-20s %s\n", $$1, $$2 }'; done
	@echo "variables: NVCC CXX ARCH CUDA_HOME BACKEND=gpu|cpu COMMIT PREFIX PYTHON V=1 (prints all)"
backend: # said once, not by `make test` again for its parts
	@$(if $(filter test-parts,$(MAKECMDGOALS)),:,echo "lk: BACKEND=$(BACKEND) ($(why))")
include packages/rules.mk bench/rules.mk tests/rules.mk

others := row_softmax from_c train_step distill parallel # examples that are no op's
examples: $(addprefix example-,$(ops) $(others)) ## try: builds and runs every example; example-<op> one
	@echo "$(words $^) examples, all as expected"
test: | backend ## try: builds and runs every test; test-<op> one; a GPU has the whole suites
	$(if $(simt),$(plan))
	@rm -rf $(out)/counts
	@TEST_OF=$(words $(programs)) V=$(or $(V),0) $(MAKE) --no-print-directory -k $(jobs) test-parts || failed=1; tests/run -t $(out)/counts $(programs) || failed=1; \
	test -z "$$failed"
bench: $(if $(simt),,$(addprefix bench-,$(ops) srms_norm_fp8 srms_norm_gated)) | backend ## try: measures every op on a GPU; bench-<op> one
	$(if $(simt),@echo $(call no_gpu,$@,$(reached)))
checks = @echo "lk: the rules of all sources, and $1; all ops take about 5 minutes on two cores, and with nvcc several more for each architecture"; \
	CXX="$(CXX)" CC="$(CC)" NVCC="$(have_nvcc)" ARCHS="$(check_archs)" TEST_TIMEOUT=2400 tests/run tests/check $1
check: | backend ## test: headers alone, all types and architectures, C11, include direction, the simulator's rules, spills; check-<op> one
	$(call checks,$(ops))
check-%: | backend
	$(call checks,$*)
clean: ## try: removes build/
	rm -rf build

example-from_c: $(out)/from_c/program | backend
	@$<
example-parallel: $(out)/examples/parallel/main | backend
	@$< $(ARGS)
example-nvrtc: # PYTHON: one that has cuda.core
	@$(PYTHON) examples/nvrtc.py
example-%: $(out)/examples/% | backend
	@$< $(ARGS)
$(out)/examples/train_step $(out)/examples/distill: $(out)/examples/kernels.o # C beside one CUDA file
# NCCL=DIR: with NCCL, from DIR/include and DIR/lib.
$(out)/nccl: always # rewritten, so that these are compiled again, when it changes
	@mkdir -p $(@D)
	@echo '$(NCCL)' | cmp -s - $@ || echo '$(NCCL)' > $@
$(out)/examples/parallel/main.o $(out)/bench/parallel.o: $(out)/nccl
$(out)/examples/parallel/main $(out)/bench/parallel: $(out)/examples/parallel/kernels.o
$(out)/examples/parallel/main.o $(out)/bench/parallel.o: nccl = $(if $(NCCL),-DWITH_NCCL -I$(NCCL)/include)
nccl_libs = $(if $(NCCL),-L$(NCCL)/lib -Xlinker -rpath=$(NCCL)/lib -Xlinker $(NCCL)/lib/libnccl.so.2)
$(out)/examples/parallel/main $(out)/bench/parallel: libs += $(nccl_libs)
# The C example vendors lk: a copy of the folder beside it, as a user's project has. gcc links it.
$(out)/from_c/program: examples/from_c/main.c examples/from_c/kernels.cu $(wildcard lk/*.cuh) $(engine)
	@mkdir -p $(@D) && rm -rf $(@D)/lk && cp -r lk examples/from_c/main.c examples/from_c/kernels.cu $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) -std=c11 -pedantic -Wall -Wextra -Werror $(filter -fsanitize%,$(san_$(SAN))) -I$(cuda_include) \
		-c $(@D)/main.c -o $(@D)/main.o
	$(call say,$(compiler),examples/from_c/kernels.cu)
	$(Q)$(subst -I$(LK_DIR) -I.,,$(compile)) -c $(@D)/kernels.cu -o $(@D)/kernels.o
	$(Q)$(link_from_c)

$(out)/%: $(out)/%.o $(engine)
	$(Q)$(link) $^ $(libs) -o $@
$(out)/%.o: %.cu
	@mkdir -p $(@D)
	$(call say,$(compiler),$<)
	$(Q)$(compile) -c $< -o $@
$(out)/%.o: %.cpp
	@mkdir -p $(@D)
	$(call say,$(compiler),$<)
	$(Q)$(compile) -c $< -o $@
$(out)/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) -std=c11 -pedantic -Wall -Wextra -Werror -fPIC $(nccl) -I. -I$(cuda_include) -MMD -MP -MF $@.d -c $< -o $@

-include $(shell find build -name '*.d' 2>/dev/null)
.PHONY: help help-all backend examples test bench check clean always
.SECONDARY:

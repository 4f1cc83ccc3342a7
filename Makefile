# SPDX-License-Identifier: MIT
# lk's build: every target works with BACKEND=gpu (nvcc and a device) and BACKEND=cpu (the simulator of tests/simt).

CUDA_HOME ?= $(or $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v nvcc 2>/dev/null))),/usr/local/cuda)
NVCC ?= $(CUDA_HOME)/bin/nvcc
ARCH ?= native
PYTHON ?= python3
PREFIX ?= /usr/local
COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo none)

have_nvcc := $(shell command -v $(NVCC) 2>/dev/null)
gpu := $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
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
capability := $(if $(filter native,$(ARCH)),$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)))
arches := $(if $(filter native,$(ARCH)),$(or $(patsubst 9%,9%a,$(patsubst 1%,1%a,$(capability))),90a),$(ARCH))
gencode := $(foreach a,$(arches),-gencode arch=compute_$(a),code=sm_$(a))
# The library: where no GPU tells, machine code of these three. Of several, the last one's PTX too, without the letter, since
# PTX of compute_100a runs on nothing but 10.0 and that of compute_100 on all that is newer: 10.3 and 12.0, say, which none of
# the three's machine code runs on. 8.6 and 8.9 run that of 80.
lib_arches := $(if $(filter native,$(or $(capability),$(ARCH))),80 90a 100a,$(arches))
lib_ptx := $(if $(word 2,$(lib_arches)),$(patsubst %a,%,$(patsubst %f,%,$(lastword $(lib_arches)))))
lib_gencode := $(foreach a,$(lib_arches),-gencode arch=compute_$(a),code=sm_$(a)) $(foreach a,$(lib_ptx),-gencode arch=compute_$(a),code=compute_$(a))

# The library's name has the minor version, since a new one may change the structs: lk/README.md.
version := $(subst $() ,.,$(shell sed -n 's/^\#define LK_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' lk/lk_base.cuh))
soname := liblk.so.$(basename $(version))
into = $(DESTDIR)$(PREFIX)

ops := $(patsubst lk/%.cuh,%,$(filter-out lk/lk_%,$(wildcard lk/*.cuh)))
SAN ?= plain
shared := lk $(if $(filter tsan,$(SAN)),,lk_check) # tests of what all ops share; lk_check has -DLK_CHECK: nothing that threads see
san_plain := -O1 # compiles in 60 % of the time of -O2, and the tests run as fast
# `make test` runs every third case of the three longest; make test-full the others too.
quick_cross_entropy := --part 0/3
quick_linear_cross_entropy := --part 0/3
quick_lk_check := --part 0/3
engine_asan := -DSIMT_ASAN
engine_tsan := -DSIMT_TSAN
san_asan := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
san_tsan := -O1 -g -fsanitize=thread
asan_schedules ?= forward random:3
tsan_args ?= # --without f16, say
check_archs ?= # those of `make check`; all where it is empty
mutate_args ?= # --part 0/4, say: every fourth mutant
full_args ?= # of make test-full: --part 0/2, say
LK_DIR ?= .
out := build/$(BACKEND)$(if $(filter cpu,$(BACKEND)),-$(SAN))$(if $(FAST),-fast)

ifeq ($(BACKEND),gpu)
compiler := NVCC
compile = $(NVCC) -std=c++17 -O3 $(gencode) -Wno-deprecated-gpu-targets -Xcompiler -Wall,-Wextra,-fPIC $(FAST) -I$(LK_DIR) -I. -MMD -MP -MF $@.d
link = $(NVCC) $(gencode) -Wno-deprecated-gpu-targets -Xcompiler -pthread
library := $(out)/liblk.so
# It looks for cublasLt where nvcc found it too, so that gcc links a program with liblk.so alone.
exports := -Xlinker --version-script=$(out)/lib/exports -Xlinker -soname=$(soname) -Xlinker -rpath=$(CUDA_HOME)/lib64
link_from_c = $(CC) $(@D)/main.o $(@D)/kernels.o -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart -lstdc++ -lm -o $@
libs := -lcublasLt # linear_cross_entropy's matmuls; behind the objects, for linkers that keep only what is needed by then
schedules := device
else
simt := tests/simt
compiler := CXX
# #pragma unroll is for nvcc: g++ does not know it, and clang says where it could not do it.
compile = $(CXX) -std=c++17 $(san_$(SAN)) -Wall -Wextra -Wno-unknown-pragmas -Wno-pass-failed -Wno-psabi -fPIC -DLK_SIMT $(FAST) -I$(LK_DIR) -I. -I$(simt) -MMD -MP -MF $@.d -x c++
link = $(CXX) $(san_$(SAN)) -pthread
engine := $(patsubst $(simt)/%.cpp,$(out)/simt/%.o,$(filter-out $(simt)/test_%,$(wildcard $(simt)/*.cpp)))
library := $(out)/liblk_simt.so
exports := -Wl,--version-script=$(out)/lib/exports
link_from_c = $(link) $(@D)/main.o $(@D)/kernels.o $(engine) -o $@
schedules ?= forward$(if $(FULL), reverse random:1 random:2)
small := $(if $(filter plain,$(SAN)),$(if $(FULL),,--small),--small)
endif
sm_80 := $(if $(and $(FULL),$(simt),$(filter plain,$(SAN))),sm_80)
quick = $(if $(and $(simt),$(filter plain,$(SAN))),$(if $(or $(FULL),$(strip $(ARGS))),,$(quick_$*)))
beside := $(if $(simt),-b)
cores := $(shell nproc 2>/dev/null || echo 1)
# A simulator's tests run side by side on all cores, unless -j says otherwise. On a GPU they would disturb one another.
jobs = $(if $(simt),$(if $(findstring -j,$(MAKEFLAGS)),,-j$(cores)))
longest := linear_cross_entropy cross_entropy $(shared) # the others fill the gaps at the end
simt_tests := $(if $(simt),test_simt test_cublaslt $(if $(filter plain,$(SAN)),test_convert))
# What a run takes, in seconds of one core: to compile, then per schedule. Measured on a core of a server.
times := $(words $(schedules))
seconds_plain := $(if $(FULL),150 + 250 + 300 * $(times),150 + 150 * $(times))
seconds_asan := 150 + 270 * $(times)
seconds_tsan := 950
minutes = $$((($(seconds_$(SAN))) / 60 / $(cores) + 1))
more = Not in it: all shapes and schedules, sm_80, two thirds of the cases of the cross entropies and of lk_check (make test-full); make sanitize; make test-mutants.
plan = @echo "lk: $(if $(small),small,all) shapes in schedules $(strip $(schedules) $(sm_80) $(patsubst %,under %,$(filter-out plain,$(SAN)))):" \
	"about $(minutes) minutes on $(cores) cores that nothing else uses. $(if $(FULL)$(filter-out plain,$(SAN)),,$(more))"
# V=1 shows each command and, by tests/run, each test case.
Q := $(if $(filter 1,$(V)),,@)
say = $(if $(Q),@echo "$1 $2")
# A build by another tool, whose output is only shown when it fails, or with V=1; a warning about lk's own files always.
quiet = @mkdir -p $(out); echo "BUILD $@"; $1 $(if $(Q),> $(out)/$@.log 2>&1 || { cat $(out)/$@.log; exit 1; }; grep -E '^[^ ]*(lk|simt|csrc|jax)/[^ /]*: warning:' $(out)/$@.log || true)
compare = $(if $(simt),@echo "lk: $(basename $(firstword $1)) measures a GPU and there is none here ($(why)); see bench/results/h200-compare.md", \
	COMMIT=$(COMMIT) $(PYTHON) bench/$1 $(ARGS))

help: ## lists the targets
	@echo "lk: BACKEND=$(BACKEND) ($(why)); ops: $(ops)"
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile | awk -F': ' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo "  variables: NVCC CXX ARCH CUDA_HOME BACKEND=gpu|cpu COMMIT PREFIX PYTHON V=1 (prints all)"
backend: # said once, not by `make test` again for its parts
	@$(if $(filter test-parts,$(MAKECMDGOALS)),:,echo "lk: BACKEND=$(BACKEND) ($(why))")

examples: $(addprefix example-,$(ops)) example-row_softmax example-from_c example-train_step example-parallel ## builds and runs every example; example-<op> one
	@echo "$(words $^) examples, all as expected"
test: | backend ## builds and runs every test; test-<op> one; a GPU has the whole suites
	$(if $(simt),$(plan))
	@rm -rf $(out)/counts
	@$(MAKE) --no-print-directory -k $(jobs) test-parts || failed=1; tests/run -t $(out)/counts $(simt_tests) $(if $(simt),test_rewrite) link $(shared) $(ops) || failed=1; test -z "$$failed"
test-parts: $(addprefix test-,$(longest) $(filter-out $(longest),$(shared) $(ops))) $(if $(simt),test-simt) test-link
test-full: ## the whole suites on the simulator too, in all schedules
	@$(MAKE) --no-print-directory -k test FULL=1 ARGS="$(ARGS) $(full_args)"
bench: $(addprefix bench-,$(ops)) ## measures every op into bench/results; bench-<op> one
check: | backend ## headers alone, all types and architectures, C11, include direction, the simulator's rules, spills
	@CXX="$(CXX)" CC="$(CC)" NVCC="$(have_nvcc)" ARCHS="$(check_archs)" TEST_TIMEOUT=2400 tests/run tests/check $(ops)
sanitize: $(if $(simt),sanitize-asan sanitize-tsan,sanitize-gpu) ## compute-sanitizer's four tools on a GPU, ASan + UBSan and TSan on the CPU
sanitize-gpu: $(addprefix $(out)/tests/,$(ops) $(shared)) | backend
	@for op in $^; do for tool in "memcheck --report-api-errors no" racecheck initcheck synccheck; do \
	tests/run compute-sanitizer --error-exitcode 1 --tool $$tool $$op --small || failed=1; done; done; test -z "$$failed"
sanitize-asan: | backend
	@$(MAKE) --no-print-directory -k test SAN=asan schedules="$(asan_schedules)" BACKEND=cpu
sanitize-tsan: | backend # linear_cross_entropy takes a quarter of an hour
	@TEST_TIMEOUT=2400 $(MAKE) --no-print-directory -k test SAN=tsan ARGS="$(ARGS) $(tsan_args)" schedules=forward BACKEND=cpu
test-mutants: | backend ## breaks each op on purpose, on the simulator: its tests must fail
	@CXX="$(CXX)" TEST_TIMEOUT=5000 tests/run tests/mutate $(mutate_args) $(ops) lk
engine: $(engine) # the simulator's objects, for tests/mutate
	@rm -f $(filter-out $(engine),$(wildcard $(out)/simt/*.o)) # of sources that are gone
test-torch: $(library) | backend ## the shared library against PyTorch; PYTHON=/usr/bin/python3 for Debian's python3-torch
	@CC="$(CC)" tests/run $(PYTHON) tests/against_torch.py $< $(if $(simt),cpu,cuda)
test-install: | backend ## CMake, pkg-config, make install, make dist, one-file headers
	@CXX="$(CXX)" CC="$(CC)" NVCC="$(have_nvcc)" tests/run tests/install
torch: | backend ## builds the PyTorch binding in its folder and tests it; PYTHON= has torch 2.11 or later
	$(call quiet,LK_BACKEND=$(BACKEND) $(PYTHON) packages/torch/setup.py build_ext --inplace)
	@PYTHONPATH=packages/torch $(PYTHON) packages/torch/test.py $(ARGS)
	@PYTHONPATH=packages/torch $(PYTHON) examples/torch/grpo.py
jax: | backend ## builds the JAX binding in its folder and tests it; PYTHON= has jax 0.10 or later
	$(call quiet,$(PYTHON) packages/jax/build.py $(BACKEND))
	@$(PYTHON) packages/jax/test.py $(ARGS)
test-fastmath: ## the tests, compiled with --use_fast_math -DNDEBUG
	@$(MAKE) --no-print-directory test FAST="$(if $(simt),,--use_fast_math )-DNDEBUG"
lib: ## one shared library with every op and type, liblk.so by nvcc, no GPU needed; BACKEND=cpu makes liblk_simt.so
install: ## copies the headers and that library below PREFIX, with what CMake and pkg-config read
install-headers: ## copies the headers and their pages alone, with what CMake reads
	install -d $(into)/include/lk $(into)/lib/cmake/lk
	install -m 644 lk/*.cuh lk/*.md lk/LICENSE $(into)/include/lk
	install -m 644 packages/cmake/*.cmake $(into)/lib/cmake/lk
uninstall: ## removes what install puts there; a library of another version stays
	cd $(into) && for link in lib/liblk.so lib/$(soname); do \
	test "$$(readlink -f $$link)" != "$$(readlink -f lib/liblk.so.$(version))" || rm -f $$link; done
	cd $(into) && rm -f lib/liblk.so.$(version) lib/liblk_simt.so lib/pkgconfig/lk.pc include/lk/LICENSE \
	$(patsubst lk/%,include/lk/%,$(wildcard lk/*.cuh lk/*.md)) $(patsubst packages/cmake/%,lib/cmake/lk/%,$(wildcard packages/cmake/*.cmake))
	cd $(into) && for folder in include/lk lib/cmake/lk; do test ! -d $$folder || rmdir --ignore-fail-on-non-empty $$folder; done
dist: ## makes a tarball of the sources and each op as one header that needs no other file, in build/dist
	@rm -rf build/dist && mkdir -p build/dist
	@{ git ls-files 2>/dev/null | grep . || find . -name build -prune -o -name .git -prune -o -type f -print; } > build/dist/files
	@tar -czf build/dist/lk-$(version).tar.gz --sort=name --owner=0 --group=0 --transform 's:^\(\./\)\?:lk-$(version)/:' -T build/dist/files
	@mkdir build/dist/lk && cp lk/*.md build/dist/lk
	@rm build/dist/files; for op in $(ops) lk_scale; do packages/cmake/one_file $$op > build/dist/lk_$${op#lk_}.h || exit 1; done
	@echo "lk: build/dist has" $$(ls build/dist)
ifeq ($(lib_backend),$(BACKEND))
lib: $(library) | backend
	@echo "lk: $< $(if $(simt),runs on the CPU and is for tests,has machine code of $(lib_arches)$(if $(lib_ptx), and PTX of $(lib_ptx)))"
install: lib install-headers
	install $(library) $(into)/lib/$(if $(simt),,liblk.so.$(version))
	$(if $(simt),,cd $(into)/lib && ln -sf liblk.so.$(version) $(soname) && ln -sf $(soname) liblk.so)
	$(if $(simt),,install -d $(into)/lib/pkgconfig && sed 's/@version@/$(version)/' packages/cmake/lk.pc.in > $(into)/lib/pkgconfig/lk.pc)
else ifeq ($(lib_backend),gpu)
lib install:
	@$(MAKE) --no-print-directory $@ BACKEND=gpu why="nvcc is here; a library needs no GPU"
else
lib install:
	@echo "lk: make $@ needs nvcc, no GPU; $(NVCC) is not there. make install-headers copies the headers alone;" \
	"make $@ BACKEND=cpu takes the CPU simulator's liblk_simt.so, which is for tests." >&2; exit 1
endif
compare: | backend ## lk_torch beside PyTorch and other libraries on a GPU (bench/requirements.txt); compare-<op> one
	$(call compare,compare.py)
compare-calls: | backend ## times the calls from Python alone
	$(call compare,compare.py --calls)
frontier: | backend ## linear_cross_entropy's time against its memory, lk at several budgets and others, on a GPU
	$(call compare,frontier.py)
compare-smoke: ## tries compare and frontier themselves on tiny CPU tensors; needs lk_torch built with LK_BACKEND=cpu
	$(PYTHON) bench/compare.py --device cpu --smoke --provider lk $(ARGS)
	$(PYTHON) bench/compare.py --device cpu --smoke --provider lk --calls $(ARGS)
	$(PYTHON) bench/frontier.py --device cpu --smoke $(ARGS)
bench-ladder: $(if $(simt),,$(addprefix $(out)/examples/,cross_entropy linear_cross_entropy)) | backend ## times each rung of the ladder on a GPU, into bench/results/<gpu>-ladder.csv
ifeq ($(BACKEND),gpu)
	@rm -f $(out)/ladder.rows; echo "op,direction,dtype,case,rung,idea,ms,gb_per_s,tflop_per_s,workspace_mb,gpu,commit" > $(out)/ladder.csv
	LADDER_CSV=$(out)/ladder.rows $(out)/examples/cross_entropy 4096 32768
	LADDER_CSV=$(out)/ladder.rows $(out)/examples/linear_cross_entropy 4096 2048 32768
	@sed 's/$$/,$(gpu_name),$(COMMIT)/' $(out)/ladder.rows >> $(out)/ladder.csv && mv $(out)/ladder.csv bench/results/$(gpu_name)-ladder.csv
	@echo "lk: wrote bench/results/$(gpu_name)-ladder.csv; make ladder-plots draws it and writes examples/README.md's tables"
else
	@echo "lk: bench-ladder measures a GPU and there is none here ($(why)); make examples runs the rungs on the CPU"
endif
scaling-plots: ## a plot of what bench-parallel measured on one GPU and on several; needs matplotlib, and no GPU
	$(PYTHON) bench/plot.py --scaling bench/results/h200-parallel.csv $(sort $(wildcard bench/results/h200-x*.csv))
ladder-plots: ## a plot and examples/README.md's tables of what bench-ladder measured; needs matplotlib, and no GPU
	$(PYTHON) bench/plot.py --ladder $(or $(firstword $(wildcard bench/results/*-ladder.csv)),bench/results/h200-ladder.csv) examples/README.md
compare-plots: ## plots and tables of what compare measured; needs matplotlib, and no GPU
	$(PYTHON) bench/plot.py bench/results/h200-compare.csv
	$(PYTHON) bench/plot.py bench/results/h100-compare.csv
reference: ## writes bench/results/reference.md, lk beside xopes, of what `compare.py --reference` measured; needs no GPU
	$(PYTHON) bench/plot.py --reference $(or $(CSV),$(lastword $(sort $(wildcard bench/results/*-reference.csv))),bench/results/h200-reference.csv) bench/results/reference.md
readme: ## writes README's tables and those of bench/results from their CSVs
	PYTHON="$(PYTHON)" bench/readme bench/results/h200.csv README.md
	bench/readme bench/results/h100.csv
clean: ## removes build/
	rm -rf build

test-simt: $(addprefix $(out)/tests/simt/,$(simt_tests)) | backend
	@for t in $^; do $(if $(FULL),,SIMT_CONVERT_SAMPLE=1) tests/run $(beside) -o $(out)/counts $$t || failed=1; done; \
	CXX="$(CXX) $(san_$(SAN))" NVCC="$(have_nvcc)" tests/run $(beside) -o $(out)/counts -n test_rewrite tests/simt/test_rewrite $(out) $(SAN) || failed=1; \
	test -z "$$failed"
test-link: $(out)/tests/link/program | backend
	@tests/run $(beside) -o $(out)/counts -n link $<
test-%: $(out)/tests/% | backend
	@tests/run $(beside) -o $(out)/counts -s "$(schedules) $(sm_80)" $< $(small) $(quick) $(ARGS)
example-from_c: $(out)/from_c/program | backend
	@$<
example-parallel: $(out)/examples/parallel/main | backend
	@$< $(ARGS)
example-%: $(out)/examples/% | backend
	@$< $(ARGS)
bench-%: | backend
ifeq ($(BACKEND),gpu)
	@$(MAKE) --no-print-directory $(out)/bench/$*
	$(out)/bench/$* $(ARGS)
else
	@echo "lk: bench-$* measures a GPU and there is none here ($(why)); what an H200 reached is in bench/results/h200.csv"
endif

# Into <gpu>-parallel.csv: a rank of 2, 4, 8 on one GPU; with ARGS=--gpus and NCCL=DIR into <gpu>-x<number of GPUs>.csv.
gpu_count = $(shell nvidia-smi -L | wc -l)
bench-parallel: | backend ## strong scaling of a head whose columns are split over ranks; NCCL=DIR ARGS=--gpus: on all GPUs
ifeq ($(BACKEND),gpu)
	@$(MAKE) --no-print-directory $(out)/bench/parallel
	@echo "op,direction,dtype,case,ranks,provider,ms,efficiency,bytes,gpu,commit" > $(out)/parallel.csv
	BENCH_CSV=$(out)/parallel.csv BENCH_GPU=$(gpu_name) COMMIT=$(COMMIT) $(out)/bench/parallel $(ARGS)
	@mv $(out)/parallel.csv bench/results/$(gpu_name)$(if $(findstring --gpus,$(ARGS)),-x$(gpu_count),-parallel).csv
else
	@echo "lk: bench-parallel measures a GPU and there is none here ($(why))"
endif

bench-parallel-peers: | backend ## adds the heads of Megatron and TransformerEngine in PyTorch to the rows of all GPUs
	$(if $(simt),@echo "lk: $@ measures GPUs and there is none here ($(why))",BENCH_CSV=bench/results/$(gpu_name)-x$(gpu_count).csv \
	BENCH_GPU=$(gpu_name) COMMIT=$(COMMIT) $(PYTHON) bench/parallel_peers.py $(ARGS))

compare-%: | backend
	$(call compare,compare.py $*)

# The engine is never instrumented: it tells the sanitizers about its fibers instead.
$(out)/simt/%.o: tests/simt/%.cpp
	@mkdir -p $(@D)
	$(call say,CXX,$<)
	$(Q)$(CXX) -std=c++17 -O2 -g -Wall -Wextra -fPIC -Itests/simt $(engine_$(SAN)) -MMD -MP -MF $@.d -c $< -o $@
# Every float against CUDA's own conversions where there is a toolkit, else a sample against a slow reference.
$(out)/tests/simt/test_convert: tests/simt/test_convert.cpp tests/simt/cuda_bf16.h tests/simt/cuda_fp16.h
	@mkdir -p $(@D)
	$(call say,CXX,$<)
	$(if $(have_nvcc),$(Q)$(CXX) -std=c++17 -O2 -DSIMT_CONVERT_CUDA -I$(CUDA_HOME)/include -c $< -o $@.cuda.o)
	$(Q)$(CXX) -std=c++17 -O2 $(if $(have_nvcc),-DSIMT_CONVERT_ALL) -Itests/simt -c $< -o $@.o
	$(Q)$(CXX) $@.o $(if $(have_nvcc),$@.cuda.o) -pthread -o $@
$(out)/bench/%: bench/%.cu
	@mkdir -p $(@D)
	$(call say,$(compiler),$<)
	$(Q)$(compile) -DBENCH_COMMIT='"$(COMMIT)"' -DBENCH_CODE='"$(shell NVCC=$(NVCC) tests/code $*)"' $< $(libs) -o $@
$(out)/examples/train_step: $(out)/examples/kernels.o # C beside one CUDA file
# NCCL=DIR: with NCCL, from DIR/include and DIR/lib.
$(out)/nccl: always # rewritten, so that these are compiled again, when it changes
	@mkdir -p $(@D)
	@echo '$(NCCL)' | cmp -s - $@ || echo '$(NCCL)' > $@
$(out)/examples/parallel/main.o $(out)/bench/parallel.o: $(out)/nccl
$(out)/examples/parallel/main $(out)/bench/parallel: $(out)/examples/parallel/kernels.o
$(out)/examples/parallel/main.o $(out)/bench/parallel.o: nccl = $(if $(NCCL),-DWITH_NCCL -I$(NCCL)/include)
$(out)/examples/parallel/main $(out)/bench/parallel: libs += $(if $(NCCL),-L$(NCCL)/lib -Xlinker -rpath=$(NCCL)/lib -Xlinker $(NCCL)/lib/libnccl.so.2)
$(out)/%: $(out)/%.o $(engine)
	$(Q)$(link) $^ $(libs) -o $@
$(out)/tests/link/program: $(addprefix $(out)/tests/link/,main.o host.o first.o second.o) $(engine)
	$(Q)$(link) $^ $(libs) -o $@
# Its second .cu file has another version of lk, a copy in which every struct that a caller fills has one more field, the first.
$(out)/tests/link/second.o: tests/link/second.cu $(wildcard lk/*.cuh)
	@mkdir -p $(@D) && rm -rf $(@D)/other && mkdir $(@D)/other && cp -r lk $(@D)/other
	$(call say,$(compiler),$<)
	$(Q)perl -0pi -e 's/(#define LK_VERSION_PATCH) .*/$$1 99/; s/(typedef struct \{)(?=[^{}]*\} \w+_args;)/$$1 int64_t of_another_version[3];/g' $(@D)/other/lk/*.cuh
	$(Q)$(subst -I$(LK_DIR) -I.,-I$(@D)/other,$(compile)) -c $< -o $@
# The C example vendors lk: a copy of the folder beside it, as a user's project has. gcc links it.
$(out)/from_c/program: examples/from_c/main.c examples/from_c/kernels.cu $(wildcard lk/*.cuh) $(engine)
	@mkdir -p $(@D) && rm -rf $(@D)/lk && cp -r lk examples/from_c/main.c examples/from_c/kernels.cu $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) -std=c11 -pedantic -Wall -Wextra -Werror $(filter -fsanitize%,$(san_$(SAN))) -I$(if $(simt),$(simt),$(CUDA_HOME)/include) -c $(@D)/main.c -o $(@D)/main.o
	$(call say,$(compiler),examples/from_c/kernels.cu)
	$(Q)$(subst -I$(LK_DIR) -I.,,$(compile)) -c $(@D)/kernels.cu -o $(@D)/kernels.o
	$(Q)$(link_from_c)
# A library exports lk's functions and nothing else: the simulator has CUDA functions of its own, which must not be taken for CUDA's.
lib_parts := $(addprefix $(out)/lib/,lk_scale $(ops))
$(library) $(lib_parts:=.o): gencode := $(lib_gencode)
$(library): $(lib_parts:=.o) $(engine) | $(out)/lib/exports
	$(Q)$(link) -shared $(exports) $^ $(libs) -o $@
$(out)/lib/exports: Makefile
	@mkdir -p $(@D)
	@echo '{ global: lk_*; local: *; };' > $@
$(lib_parts:=.cu): $(out)/lib/%.cu: Makefile
	@mkdir -p $(@D)
	@{ printf '\043include "lk/%s.cuh"\n' $*; for t in f32 f16 bf16; do \
	printf 'LK_DEFINE_%s(%s)\n' $$(echo $* | sed 's/^lk_//' | tr a-z A-Z) $$t; done; } > $@
$(out)/lib/arches: always # rewritten, so that all is compiled again, when they change
	@mkdir -p $(@D)
	@echo '$(lib_gencode)' | cmp -s - $@ || echo '$(lib_gencode)' > $@
$(lib_parts:=.o): %.o: %.cu $(out)/lib/arches
	$(call say,$(compiler),$<)
	$(Q)$(compile) -c $< -o $@
$(out)/tests/lk_check.o: tests/lk.cu
	@mkdir -p $(@D)
	$(call say,$(compiler),$< -DLK_CHECK)
	$(Q)$(compile) -DLK_CHECK -c $< -o $@
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
	$(Q)$(CC) -std=c11 -pedantic -Wall -Wextra -Werror -fPIC $(nccl) -I. -I$(if $(simt),$(simt),$(CUDA_HOME)/include) -MMD -MP -MF $@.d -c $< -o $@

-include $(shell find build -name '*.d' 2>/dev/null)
.PHONY: bench-ladder ladder-plots scaling-plots bench-parallel bench-parallel-peers engine help backend examples test test-parts test-full bench check sanitize sanitize-gpu sanitize-asan sanitize-tsan test-mutants test-torch test-fastmath lib install install-headers readme clean always
.PHONY: reference frontier compare compare-calls compare-smoke compare-plots uninstall dist test-install torch jax
.SECONDARY:

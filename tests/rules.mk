# SPDX-License-Identifier: MIT
# How the tests run: README.md says what they print. Part of the Makefile.

# What the command line may set.
asan_schedules ?= forward random:3
tsan_args ?= # --without f16, say
check_archs ?= # those of `make check`; all where it is empty
mutate_args ?= # --part 0/4, say: every fourth mutant
full_args ?= # of make test-full: --part 0/2, say
only ?= # "kl link", say: these of make test and make sanitize; all where it is empty

# Tests of what all ops share. lk_check has -DLK_CHECK: nothing that threads see.
shared := lk $(if $(filter tsan,$(SAN)),,lk_check)
parts := cross_entropy_ids linear_cross_entropy_ids linear_cross_entropy_probabilities srms_norm_fp8 srms_norm_gated # headers beside an op's that have tests and mutants of their own
longest := linear_cross_entropy cross_entropy $(shared) linear_cross_entropy_ids linear_kl # first, so that the others fill the gaps at the end
chosen = $(filter $(or $(strip $(only)),%),$(longest) $(filter-out $(longest),$(parts) $(ops)) $(if $(simt),simt) link)
programs = $(if $(filter simt,$(chosen)),$(simt_tests) test_rewrite) $(filter-out simt,$(chosen))
ifdef simt
schedules ?= forward$(if $(FULL), reverse random:1 random:2)
small := $(if $(filter plain,$(SAN)),$(if $(FULL),,--small),--small)
sm_80 := $(if $(FULL),$(if $(filter plain,$(SAN)),sm_80))
simt_tests := test_simt test_cublaslt $(if $(filter plain,$(SAN)),test_convert)
beside := -b
# Tests run side by side on all cores, unless -j says otherwise. On a GPU they would disturb one another.
jobs = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell nproc 2>/dev/null || echo 1))
# `make test` runs every third case of the longest; make test-full the others too.
thirds := cross_entropy linear_cross_entropy $(parts) kl linear_kl $(shared)
quick = $(if $(filter plain,$(SAN)),$(if $(or $(FULL),$(strip $(ARGS))),,$(if $(filter $*,$(thirds)),--part 0/3)))
else
schedules := device
endif
# Minutes, measured on two cores.
minutes_plain := $(if $(FULL),$(if $(word 2,$(schedules)),14,6),3)
minutes_asan := $(if $(word 2,$(schedules)),6,4)
minutes_tsan := 8
under := $(patsubst %,under %,$(filter-out plain,$(SAN)))
left_out := $(if $(FULL)$(under),,Not in it: all shapes and schedules, sm_80, two thirds of the cases of $(strip $(thirds)) \
	(make test-full); make sanitize; make test-mutants.)
plan = @echo "lk: $(if $(small),small,all) shapes in schedules $(strip $(schedules) $(sm_80) $(under)):" \
	"about $(minutes_$(SAN)) minutes on two cores that nothing else uses. $(left_out)"

test-parts: $(addprefix test-,$(chosen))
test-%: $(out)/tests/% | backend
	@tests/run $(beside) -o $(out)/counts -s "$(schedules) $(sm_80)" $< $(small) $(quick) $(ARGS)
test-link: $(out)/tests/link/program | backend
	@tests/run $(beside) -o $(out)/counts -n link $<
sample := $(if $(FULL),,SIMT_CONVERT_SAMPLE=1)
test-simt: $(addprefix $(out)/tests/simt/,$(simt_tests)) | backend
	@for t in $^; do $(sample) tests/run $(beside) -o $(out)/counts $$t || failed=1; done; CXX="$(CXX) $(san_$(SAN))" \
	NVCC="$(have_nvcc)" tests/run $(beside) -o $(out)/counts -n test_rewrite tests/simt/test_rewrite $(out) $(SAN) || failed=1; \
	test -z "$$failed"
test-full: ## test: the whole suites on the simulator too, in all schedules
	@$(MAKE) --no-print-directory -k test FULL=1 ARGS="$(ARGS) $(full_args)"
test-fastmath: ## test: the tests, compiled with --use_fast_math -DNDEBUG
	@$(MAKE) --no-print-directory test FAST="$(if $(simt),,--use_fast_math )-DNDEBUG"
test-mutants: | backend ## test: breaks each op on purpose, on the simulator: its tests must fail
	@CXX="$(CXX)" TEST_TIMEOUT=5000 tests/run tests/mutate $(mutate_args) $(ops) $(parts) lk
test-install: | backend ## test: CMake, pkg-config, make install, make dist, one-file headers, NVRTC
	@CXX="$(CXX)" CC="$(CC)" NVCC="$(have_nvcc)" PYTHON="$(PYTHON)" tests/run tests/install
test-aarch64: ## test: on that processor, under qemu; CUDA_LIB=DIR, its CUDA libraries: liblk.so too
	@PYTHON="$(PYTHON)" tests/run tests/aarch64 $(if $(filter command line,$(origin CUDA_LIB)),$(CUDA_LIB))
test-torch: $(library) | backend ## test: the shared library against PyTorch; PYTHON=/usr/bin/python3 for Debian's python3-torch
	@CC="$(CC)" tests/run $(PYTHON) tests/against_torch.py $< $(if $(simt),cpu,cuda)
sanitize: $(if $(simt),sanitize-asan sanitize-tsan,sanitize-gpu) ## test: sanitize-gpu, or -asan and -tsan
sanitize-gpu: $(addprefix $(out)/tests/,$(ops) $(parts) $(shared)) | backend ## test: compute-sanitizer's four tools
	@for op in $^; do for tool in "memcheck --report-api-errors no" racecheck initcheck synccheck; do \
	tests/run compute-sanitizer --error-exitcode 1 --tool $$tool $$op --small || failed=1; done; done; test -z "$$failed"
sanitize-asan: | backend ## test: ASan and UBSan, on the simulator
	@$(MAKE) --no-print-directory -k test SAN=asan schedules="$(asan_schedules)" BACKEND=cpu
sanitize-tsan: | backend ## test: TSan, on the simulator; linear_cross_entropy takes a quarter of an hour
	@TEST_TIMEOUT=2400 $(MAKE) --no-print-directory -k test SAN=tsan ARGS="$(ARGS) $(tsan_args)" schedules=forward BACKEND=cpu

plan: ## try: plan-<op>: which kernels a call launches on a card like an H200, without one; ARGS="forward bf16 4096 50257"
	@echo "lk: make plan-<op>, of $(ops); without ARGS it says which it takes"
plan-%: | backend
	@$(MAKE) -s --no-print-directory BACKEND=cpu SAN=plain build/cpu-plain/tests/plan/$*
	@SIMT_PLAN=1 SIMT_SMS=132 build/cpu-plain/tests/plan/$* $(ARGS)
$(addprefix $(out)/tests/plan/,$(ops)): $(out)/tests/plan/%: tests/plan.cpp $(engine)
	@mkdir -p $(@D)
	$(call say,$(compiler),$< for $*)
	$(Q)$(compile) -O0 -DPLAN_NAME=$$(echo $* | tr a-z A-Z) -include lk/$*.cuh -c $< -o $@.o
	$(Q)$(link) $@.o $(engine) -o $@
# The engine is never instrumented: it tells the sanitizers about its fibers instead.
engine_asan := -DSIMT_ASAN
engine_tsan := -DSIMT_TSAN
engine: $(engine) # the simulator's objects, for tests/mutate
	@rm -f $(filter-out $(engine),$(wildcard $(out)/simt/*.o)) # of sources that are gone
$(out)/simt/%.o: tests/simt/%.cpp
	@mkdir -p $(@D)
	$(call say,CXX,$<)
	$(Q)$(CXX) -std=c++17 -O2 -g -Wall -Wextra -fPIC -Itests/simt $(engine_$(SAN)) -MMD -MP -MF $@.d -c $< -o $@
# Every float against CUDA's own conversions where there is a toolkit, else a sample against a slow reference.
$(out)/tests/simt/test_convert: tests/simt/test_convert.cpp tests/simt/cuda_bf16.h tests/simt/cuda_fp16.h \
		tests/simt/cuda_fp8.h lk/lk_base.cuh $(engine)
	@mkdir -p $(@D)
	$(call say,CXX,$<)
	$(if $(have_nvcc),$(Q)$(CXX) -std=c++17 -O2 -DSIMT_CONVERT_CUDA -I$(CUDA_HOME)/include -c $< -o $@.cuda.o)
	$(Q)$(CXX) -std=c++17 -O2 $(if $(have_nvcc),-DSIMT_CONVERT_ALL) -DLK_SIMT -I. -Itests/simt -c $< -o $@.o
	$(Q)$(CXX) $@.o $(if $(have_nvcc),$@.cuda.o) $(engine) -pthread -o $@
$(out)/tests/lk_check.o: tests/lk.cu
	@mkdir -p $(@D)
	$(call say,$(compiler),$< -DLK_CHECK)
	$(Q)$(compile) -DLK_CHECK -c $< -o $@
# The program has a library, which exports what liblk.so does, and loads two plugins. All take the simulator from the program.
link_test := $(out)/tests/link
$(link_test)/program: $(addprefix $(link_test)/,main.o host.o declares.o second.o library.so) $(engine) | \
		$(link_test)/plugin.so $(link_test)/plugin_other.so
	$(Q)$(link) $^ $(libs) -Xlinker -rpath='$$ORIGIN' -Xlinker --export-dynamic -ldl -o $@
$(link_test)/%.so: $(link_test)/%.o
	$(Q)$(link) -shared $< $(if $(filter library,$*),-Xlinker --version-script=tests/link/exports) -Xlinker -soname=$(@F) -o $@
$(link_test)/library.o $(link_test)/plugin.o: tests/link/first.cu
	@mkdir -p $(@D)
	$(call say,$(compiler),$< for $(@F:.o=.so))
	$(Q)$(compile) $(if $(filter library.o,$(@F)),-DLK_EXPORT) -c $< -o $@
# Another version of lk, a changed copy.
$(link_test)/other: tests/link/other_version $(wildcard lk/*.cuh)
	@mkdir -p $(@D)
	$(Q)tests/link/other_version $@
$(link_test)/plugin_other.o: tests/link/first.cu
$(link_test)/second.o: tests/link/second.cu
$(link_test)/second.o $(link_test)/plugin_other.o: $(link_test)/other
	$(call say,$(compiler),$(filter %.cu,$^) for $(@F))
	$(Q)$(subst -I$(LK_DIR) -I.,-I$(link_test)/other,$(compile)) -c $(filter %.cu,$^) -o $@
.PHONY: plan test-parts test-full test-fastmath test-mutants test-install test-aarch64 test-torch engine
.PHONY: sanitize sanitize-gpu sanitize-asan sanitize-tsan

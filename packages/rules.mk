# SPDX-License-Identifier: MIT
# The forms in which others take lk (README.md): the library, make install, make dist, and the bindings. Part of the Makefile.

# The library: where no GPU tells, machine code of these three. Of several, the last one's PTX too, without the letter, since
# PTX of compute_100f runs on nothing but 10.0 and 10.3 and that of compute_100 on all that is newer: 12.0, say, which none of
# the three's machine code runs on. 8.6 and 8.9 run that of 80, and 10.3 that of 100f: lk has no instruction that 100f lacks.
# ARCH=all is for a wheel: code of each card. What nvcc lists are numbers alone; families (f) came with 103. Where there are none,
# 100 without a letter runs on the same cards: README.md has the table.
listed := $(if $(have_nvcc),$(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null)))
family = $(if $(filter 103,$(listed)),$1,$(patsubst %f,%,$1))
taken = $(foreach a,$1,$(if $(filter $(patsubst %a,%,$(patsubst %f,%,$a)),$(listed)),$(call family,$a)))
lib_arches := $(strip $(if $(filter native,$(or $(capability),$(ARCH))),$(call taken,80 90a 100f),$(if \
	$(filter all,$(ARCH)),$(call taken,80 86 89 90a 100f 120f),$(arches))))
lib_ptx := $(if $(word 2,$(lib_arches)),$(patsubst %a,%,$(patsubst %f,%,$(lastword $(lib_arches)))))
lib_gencode := $(foreach a,$(lib_arches),-gencode arch=compute_$(a),code=sm_$(a)) \
	$(foreach a,$(lib_ptx),-gencode arch=compute_$(a),code=compute_$(a))

# The library's name has the minor version, since a new one may change the structs: lk/README.md.
version := $(subst $() ,.,$(shell sed -n 's/^\#define LK_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' lk/lk_base.cuh))
soname := liblk.so.$(basename $(version))
ifdef simt
library := $(out)/liblk_simt.so
lib_is := runs on the CPU and is for tests
exports := -Wl,--version-script=$(out)/lib/exports -Wl,-soname=liblk_simt.so
else
library := $(out)/liblk.so
lib_is := has machine code of $(lib_arches)$(if $(lib_ptx), and PTX of $(lib_ptx))
# It looks for cublasLt in the wheel nvidia-cublas, or nvidia-cublas-cu12, which lies so beside the package lk, and where nvcc
# found it, so that gcc links a program with liblk.so alone.
exports = -Xlinker --version-script=$(out)/lib/exports -Xlinker -soname=$(soname) \
	-Xlinker -rpath='$$ORIGIN/../../nvidia/$(if $(filter 12.%,$(cuda)),cublas,cu13)/lib' -Xlinker -rpath=$(CUDA_HOME)/lib64
endif
# GLIBC=2.28: the library runs on systems with that glibc and later, whatever this machine has. The linker is zig's, of PyPI's
# ziglang: it knows the symbols of each glibc, and needs no other system. Without GLIBC: this machine's glibc and later.
# MACHINE=aarch64: for such a processor, by aarch64-linux-gnu-g++ and zig, on any. CUDA_LIB= is a folder with that processor's
# libcudart_static.a and libcublasLt.so.13, as PyPI's nvidia-cuda-runtime and nvidia-cublas of that platform have them; for nvcc 12
# their -cu12.
machine := $(or $(filter x86_64 aarch64,$(MACHINE)),$(shell uname -m))
cross := $(if $(filter $(machine),$(shell uname -m)),,$(machine)-linux-gnu-)
GLIBC ?= $(if $(cross),2.28)
CUDA_LIB ?= $(CUDA_HOME)/lib64
link_library = $(link) -shared $(exports) $(filter %.o,$^) $(libs)
ifneq ($(GLIBC),)
link_library = $(PYTHON) -m ziglang c++ -target $(machine)-linux-gnu.$(GLIBC) -nostdlib++ -Xlinker --strip-debug -shared $(exports) \
	$(filter %.o,$^) $(CUDA_LIB)/libcudart_static.a $(firstword $(wildcard $(CUDA_LIB)/libcublasLt.so $(CUDA_LIB)/libcublasLt.so.*)) \
	$(foreach l,libstdc++.so libgcc_s.so.1,$(shell $(if $(cross),$(cross)g++,$(CXX)) -print-file-name=$l)) -lpthread -ldl -lrt
endif
into = $(DESTDIR)$(PREFIX)
headers := $(wildcard lk/*.cuh lk/*.md) lk/LICENSE # with the pages that the headers name
cmake_files := $(wildcard packages/cmake/*.cmake)

lib: ## use: builds liblk.so, every op and type, by nvcc; no GPU needed; BACKEND=cpu: liblk_simt.so
install: ## use: copies the headers and that library below PREFIX, with what CMake and pkg-config read
install-headers: ## use: copies the headers, their pages and what CMake reads
	install -d $(into)/include/lk $(into)/lib/cmake/lk
	install -m 644 lk/*.cuh lk/*.md lk/LICENSE $(into)/include/lk
	install -m 644 packages/cmake/*.cmake $(into)/lib/cmake/lk
uninstall: ## use: removes what install puts there; a library of another version stays
	cd $(into) && for link in lib/liblk.so lib/$(soname); do \
	test "$$(readlink -f $$link)" != "$$(readlink -f lib/liblk.so.$(version))" || rm -f $$link; done
	cd $(into) && rm -f lib/liblk.so.$(version) lib/liblk_simt.so lib/pkgconfig/lk.pc \
	$(headers:%=include/%) $(cmake_files:packages/cmake/%=lib/cmake/lk/%)
	cd $(into) && for folder in include/lk lib/cmake/lk; do test ! -d $$folder || rmdir --ignore-fail-on-non-empty $$folder; done
ifeq ($(lib_backend),$(BACKEND))
lib: $(library) | backend
	@echo "lk: $< $(lib_is)"
install: lib install-headers
	install $(library) $(into)/lib/$(if $(simt),,liblk.so.$(version))
ifndef simt
	cd $(into)/lib && ln -sf liblk.so.$(version) $(soname) && ln -sf $(soname) liblk.so
	install -d $(into)/lib/pkgconfig && sed 's/@version@/$(version)/' packages/cmake/lk.pc.in > $(into)/lib/pkgconfig/lk.pc
endif
else ifeq ($(lib_backend),gpu)
lib install:
	@$(MAKE) --no-print-directory $@ BACKEND=gpu why="nvcc is here; a library needs no GPU"
else
lib install:
	@echo "lk: make $@ needs nvcc, no GPU; $(NVCC) is not there. make install-headers copies the headers alone;" \
	"make $@ BACKEND=cpu takes the CPU simulator's liblk_simt.so, which is for tests." >&2; exit 1
endif
dist: ## use: makes a tarball of the sources and each op as one header that needs no other file, in build/dist
	@rm -rf build/dist && mkdir -p build/dist/lk && cp lk/*.md build/dist/lk
	@{ git ls-files 2>/dev/null | grep . || find . -name build -prune -o -name .git -prune -o -type f -print; } > build/dist/files
	@tar -czf build/dist/lk-$(version).tar.gz --sort=name --owner=0 --group=0 --transform 's:^\(\./\)\?:lk-$(version)/:' \
	-T build/dist/files
	@rm build/dist/files
	@for op in $(patsubst lk/%.cuh,%,$(filter-out lk/lk_%,$(files))) lk_scale; do \
	packages/cmake/one_file $$op > build/dist/lk_$${op#lk_}.h || exit 1; done
	@echo "lk: build/dist has" $$(ls build/dist)

# A build by another tool, whose output is only shown when it fails, or with V=1; a warning about lk's own files always.
log = $(out)/$@.log
hidden = > $(log) 2>&1 || { cat $(log); exit 1; }; grep -E '^[^ ]*(lk|simt|csrc|jax)/[^ /]*: warning:' $(log) || true
quiet = @mkdir -p $(out); echo "BUILD $@"; $1 $(if $(Q),$(hidden))
kernels = build/dist/$(if $(and $(filter gpu,$(lib_backend)),$(filter 12.%,$(cuda))),lk_kernels_cu12,lk_kernels)-*.whl
wheel: ## use: builds lk-kernels, a Python package, into build/dist, and tests it; for all cards, or those of ARCH=
	@mkdir -p $(out) build/dist; rm -f $(kernels); echo "BUILD $@, backend $(lib_backend)"
	@LK_BACKEND=$(lib_backend) $(if $(cross),MACHINE=$(machine) CUDA_LIB=$(CUDA_LIB)) $(PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w build/dist packages/wheel $(if $(Q),$(hidden))
	@$(if $(cross),echo "lk: built" $(kernels)"; it is not tested here",$(PYTHON) packages/wheel/test.py $(kernels))
torch: | backend ## use: builds the PyTorch binding in its folder and tests it; PYTHON= has torch 2.11 or later
	$(call quiet,LK_BACKEND=$(BACKEND) $(PYTHON) packages/torch/setup.py build_ext --inplace)
	@PYTHONPATH=packages/torch $(PYTHON) packages/torch/test.py $(ARGS)
	@PYTHONPATH=packages/torch $(PYTHON) packages/torch/test_transforms.py
	@PYTHONPATH=packages/torch $(PYTHON) packages/torch/test_patch.py
	@PYTHONPATH=packages/torch $(PYTHON) examples/torch/grpo.py
	@PYTHONPATH=packages/torch $(PYTHON) examples/torch/distill.py
	@PYTHONPATH=packages/torch $(PYTHON) examples/torch/mtp.py --check
	@PYTHONPATH=packages/torch $(PYTHON) examples/torch/parity.py --check
	@PYTHONPATH=packages/torch $(PYTHON) examples/torch/fp8_linear.py
wheels: wheel ## use: builds lk_torch for versions= of PyTorch as wheels that need no compiler, in build/dist, and tests each
	@$(PYTHON) packages/torch/wheels.py $(lib_backend) $(versions)
torch-families: | backend ## use: tries patch on each causal model of transformers, and writes README's list; CI does not
	$(call quiet,LK_BACKEND=$(BACKEND) $(PYTHON) packages/torch/setup.py build_ext --inplace)
	@PYTHONPATH=packages/torch $(PYTHON) packages/torch/test_families.py $(ARGS)
# After torch, where both are asked for: they build in one folder.
hub: | backend $(filter torch,$(MAKECMDGOALS)) ## use: builds the kernel for Hugging Face's `kernels`, in build/hub, and tests it
	$(call quiet,$(PYTHON) packages/hub/build.py $(BACKEND))
	@$(PYTHON) packages/hub/test.py $(BACKEND) $(ARGS)
jax: | backend ## use: builds the JAX binding in its folder and tests it; PYTHON= has jax 0.10 or later
	$(call quiet,$(PYTHON) packages/jax/build.py $(BACKEND))
	@$(PYTHON) packages/jax/test.py $(ARGS)

# A library exports lk's functions and nothing else: the simulator has CUDA functions of its own, which nobody must take for
# CUDA's.
lib_parts := $(addprefix $(out)/lib/,lk_scale $(ops))
lib_flags := $(lib_gencode) $(if $(cross),-ccbin $(cross)g++ -I$(CUDA_HOME)/include)
$(library) $(lib_parts:=.o): gencode := $(lib_flags)
$(library): $(lib_parts:=.o) $(engine) $(out)/lib/glibc | $(out)/lib/exports
	$(Q)$(link_library) -o $@
$(out)/lib/exports: packages/rules.mk
	@mkdir -p $(@D)
	@echo '{ global: lk_*; local: *; };' > $@
$(lib_parts:=.cu): $(out)/lib/%.cu: always # rewritten when an op gets another header
	@mkdir -p $(@D)
	@{ printf '\043define LK_EXPORT\n'; \
	for h in $(patsubst lk/%.cuh,%,$(wildcard lk/$*.cuh lk/$*_*.cuh)); do printf '\043include "lk/%s.cuh"\n' $$h; \
	printf "LK_DEFINE_$$(echo $$h | sed 's/^lk_//' | tr a-z A-Z)(%s)\n" f32 f16 bf16; done; } > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(out)/lib/arches: always # rewritten, so that all is compiled again, when they change
	@mkdir -p $(@D)
	@echo '$(lib_flags)' | cmp -s - $@ || echo '$(lib_flags)' > $@
$(out)/lib/glibc: always # likewise, so that the library is linked again
	@mkdir -p $(@D)
	@echo '$(GLIBC) $(CUDA_LIB)' | cmp -s - $@ || echo '$(GLIBC) $(CUDA_LIB)' > $@
$(lib_parts:=.o): %.o: %.cu $(out)/lib/arches
	$(call say,$(compiler),$<)
	$(Q)$(compile) -c $< -o $@
facts: # for packages/wheel/setup.py: CUDA's version, and what the library would have machine code and PTX of
	@echo "$(cuda)"; echo "$(lib_arches)"; echo "$(lib_ptx)"
api-pages: ## test: writes packages/torch/API.md and packages/jax/API.md from the docstrings
	@python3 packages/api.py
.PHONY: lib install install-headers uninstall dist wheel wheels torch torch-families hub jax facts api-pages

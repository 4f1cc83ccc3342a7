# SPDX-License-Identifier: MIT
# What measures, and what draws and writes tables of what was measured. Part of the Makefile.

results := bench/results
reached := ; $(results)/README.md says what an H200 reached
no_gpu = "lk: $1 measures a GPU and there is none here ($(why))$2"

# lk's own benches.
bench-%: | backend
ifeq ($(BACKEND),gpu)
	@$(MAKE) --no-print-directory $(out)/bench/$*
	$(out)/bench/$* $(ARGS)
else
	@echo $(call no_gpu,bench-$*,$(reached))
endif
$(out)/bench/%: bench/%.cu
	@mkdir -p $(@D)
	$(call say,$(compiler),$<)
	$(Q)$(compile) -DBENCH_COMMIT='"$(COMMIT)"' -DBENCH_CODE='"$(shell NVCC=$(NVCC) tests/code $*)"' $< $(libs) -o $@
ladder := $(addprefix $(out)/examples/,cross_entropy linear_cross_entropy)
ladder_head := op,direction,dtype,case,rung,idea,ms,gb_per_s,tflop_per_s,workspace_mb,gpu,commit
bench-ladder: $(if $(simt),,$(ladder)) | backend ## measure: each rung of the ladder on a GPU, into bench/results/<gpu>-ladder.csv
ifeq ($(BACKEND),gpu)
	@rm -f $(out)/ladder.rows; echo "$(ladder_head)" > $(out)/ladder.csv
	LADDER_CSV=$(out)/ladder.rows $(out)/examples/cross_entropy 4096 32768
	LADDER_CSV=$(out)/ladder.rows $(out)/examples/linear_cross_entropy 4096 2048 32768
	@sed 's/$$/,$(gpu_name),$(COMMIT)/' $(out)/ladder.rows >> $(out)/ladder.csv && \
	mv $(out)/ladder.csv $(results)/$(gpu_name)-ladder.csv
	@echo "lk: wrote $(results)/$(gpu_name)-ladder.csv; make ladder-plots draws it and writes examples/README.md's tables"
else
	@echo $(call no_gpu,$@,; make examples runs the rungs on the CPU)
endif
# Into <gpu>-parallel.csv: a rank of 2, 4, 8 on one GPU; with ARGS=--gpus and NCCL=DIR into <gpu>-x<number of GPUs>.csv.
gpu_count = $(shell nvidia-smi -L | wc -l)
bench-parallel: | backend ## measure: strong scaling of a head split over ranks; NCCL=DIR ARGS=--gpus: on all GPUs
ifeq ($(BACKEND),gpu)
	@$(MAKE) --no-print-directory $(out)/bench/parallel
	@echo "op,direction,dtype,case,ranks,provider,ms,efficiency,bytes,gpu,commit" > $(out)/parallel.csv
	BENCH_CSV=$(out)/parallel.csv BENCH_GPU=$(gpu_name) COMMIT=$(COMMIT) $(out)/bench/parallel $(ARGS)
	@mv $(out)/parallel.csv $(results)/$(gpu_name)$(if $(findstring --gpus,$(ARGS)),-x$(gpu_count),-parallel).csv
else
	@echo $(call no_gpu,$@)
endif

# lk beside others, from Python.
bench-parallel-peers: | backend ## measure: the same with Megatron's and TransformerEngine's heads, in PyTorch
ifeq ($(BACKEND),gpu)
	BENCH_CSV=$(results)/$(gpu_name)-x$(gpu_count).csv BENCH_GPU=$(gpu_name) COMMIT=$(COMMIT) \
	$(PYTHON) bench/parallel_peers.py $(ARGS)
else
	@echo "lk: $@ measures GPUs and there is none here ($(why))"
endif
ifeq ($(BACKEND),gpu)
compare = COMMIT=$(COMMIT) $(PYTHON) bench/$1 $(ARGS)
else
compare = @echo $(call no_gpu,$(basename $(firstword $1)),; see $(results)/h200-compare.md)
endif
compare: | backend ## measure: lk_torch beside PyTorch and other libraries on a GPU (bench/requirements.txt); compare-<op> one
	$(call compare,compare.py)
compare-%: | backend
	$(call compare,compare.py $*)
compare-calls: | backend ## measure: the calls from Python alone
	$(call compare,compare.py --calls)
frontier: | backend ## measure: linear_cross_entropy's time against its memory, lk at several budgets and others, on a GPU
	$(call compare,frontier.py)
leaderboard: | backend ## measure: modded-nanogpt's cross entropy beside lk's, on a GPU (bench/fetch_peers)
	$(call compare,leaderboard.py)
norm-fp8-peers: | backend ## measure: norms in 8 bits of lk, PyTorch, flashinfer, vLLM and quack on a GPU (bench/fetch_peers)
	$(call compare,norm_fp8_peers.py)
# Without a GPU it tries itself on tiny CPU tensors, as compare-smoke does.
hunt: | backend ## measure: draws shapes where lk_torch is slower than PyTorch, or than a neighbour; ARGS="--seconds S --seed N"
	COMMIT=$(COMMIT) $(PYTHON) bench/hunt.py $(if $(filter cpu,$(BACKEND)),--device cpu --smoke) $(ARGS)
compare-patch: | backend ## measure: steps of a Llama on a GPU: transformers' own, Liger's patch, lk_torch.patch
	$(call compare,patch.py)
compare-smoke: ## measure: tries all of these on tiny CPU tensors; needs lk_torch built with LK_BACKEND=cpu
	$(PYTHON) bench/compare.py --device cpu --smoke --provider lk $(ARGS)
	$(PYTHON) bench/compare.py --device cpu --smoke --provider lk --calls $(ARGS)
	$(PYTHON) bench/frontier.py --device cpu --smoke $(ARGS)
	$(PYTHON) bench/leaderboard.py --device cpu --smoke
	$(PYTHON) bench/norm_fp8_peers.py --device cpu --smoke
	$(PYTHON) bench/patch.py --device cpu --smoke
	$(PYTHON) bench/hunt.py --device cpu --smoke

# Pages and plots, from the CSV files. No GPU.
reference_csv = $(or $(CSV),$(lastword $(sort $(wildcard $(results)/*-reference.csv))),$(results)/h200-reference.csv)
ladder_csv = $(or $(firstword $(wildcard $(results)/*-ladder.csv)),$(results)/h200-ladder.csv)
readme: ## measure: writes README's tables and those of bench/results from their CSVs
	PYTHON="$(PYTHON)" bench/readme $(results)/h200.csv README.md
	bench/readme $(results)/h100.csv
reference: ## measure: writes bench/results/reference.md, lk beside xopes, of what `compare.py --reference` measured
	$(PYTHON) bench/plot.py --reference $(reference_csv) $(results)/reference.md
compare-plots: ## measure: plots and tables of what compare measured; needs matplotlib, as the next two do
	$(PYTHON) bench/plot.py $(results)/h200-compare.csv
	$(PYTHON) bench/plot.py $(results)/h100-compare.csv
scaling-plots: ## measure: a plot of what bench-parallel measured on one GPU and on several
	$(PYTHON) bench/plot.py --scaling $(results)/h200-parallel.csv $(sort $(wildcard $(results)/h200-x*.csv))
ladder-plots: ## measure: a plot and examples/README.md's tables of what bench-ladder measured
	$(PYTHON) bench/plot.py --ladder $(ladder_csv) examples/README.md
.PHONY: bench-ladder bench-parallel bench-parallel-peers compare compare-calls frontier leaderboard norm-fp8-peers compare-patch
.PHONY: compare-smoke hunt
.PHONY: readme reference compare-plots scaling-plots ladder-plots

# SPDX-License-Identifier: MIT
"""lk_torch.patch on a tiny random model of each ForCausalLM class of the installed transformers, against the model unpatched: loss
and gradients of a step, a step in bfloat16, generate, and unpatch. test_patch.py holds some of them to all it promises.

    python packages/torch/test_families.py [NAME...]      # `make torch-families`; results go to README.md when all were tried

A run goes on from where one of the same sources was ended: build/families has a line for each class."""
import copy
import functools
import hashlib
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import warnings

import test_patch
from test_patch import BF16, D, F32, F64, FLOOR, VOCAB, compare, off

import torch
import transformers

import lk_torch

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = dict(
    vocab_size=VOCAB, hidden_size=32, d_model=32, n_embd=32, intermediate_size=48, ffn_dim=48, decoder_ffn_dim=48,
    encoder_ffn_dim=48, num_hidden_layers=2, num_layers=2, n_layer=2, decoder_layers=2, encoder_layers=2,
    num_attention_heads=4, n_head=4, decoder_attention_heads=4, encoder_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=64, n_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    num_local_experts=4, num_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, is_decoder=True, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB, global_head_dim=8, output_router_logits=True, num_codebooks=4, backbone_hidden_size=32,
    hidden_size_global=32, encoder_hash_byte_group_vocab=64, o_groups=2, o_lora_rank=16, num_centroids=8,
    unpadded_vocab_size=VOCAB - 3)
# What a config needs beside these. None: as it is by default. Two layers of two kinds, where there are kinds.
LATENT, KINDS = dict(head_dim=None, num_key_value_heads=4), ["linear_attention", "full_attention"]
MORE = {
    "AXK1": LATENT, "AXK2": LATENT, "DeepseekV2": LATENT, "DeepseekV32": LATENT, "DeepseekV3": LATENT, "Glm4MoeLite": LATENT,
    "GlmMoeDsa": LATENT, "LongcatFlash": {**LATENT, "head_dim": 8}, "MiniCPM3": LATENT, "Youtu": LATENT, "Mistral4": LATENT,
    "BailingHybrid": dict(LATENT, layer_group_size=2), "KimiLinear": dict(LATENT, layer_types=KINDS),
    "Bamba": dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1]),
    "CsmDepthDecoder": dict(num_codebooks=16),
    "DeepseekV4": dict(output_router_logits=False), "Flint": dict(output_router_logits=False),
    "CodeGen": dict(rotary_dim=8), "GPTJ": dict(rotary_dim=8),
    "CohereCompass": dict(rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))),
    "Dbrx": dict(ffn_config=dict(hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2), n_heads=4, n_layers=2,
                 attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4), max_seq_len=64),
    "Dots3Note": dict(num_key_value_heads=4),
    "Dory": dict(num_hidden_layers=4, n_input_layers=1, n_output_layers=1),
    "Dots1": dict(num_key_value_heads=4, n_shared_experts=1),
    "FalconH1": dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1),
    "Gemma2": dict(final_logit_softcapping=3.0),
    "Gemma3n": dict(num_kv_shared_layers=0, laurel_rank=8, altup_num_inputs=2),
    "Gemma4": dict(num_kv_shared_layers=0), "Gemma4Unified": dict(num_kv_shared_layers=0),
    "GPTNeo": dict(attention_types=[[["global", "local"], 1]]),
    "GraniteMoeHybrid": dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, layer_types=KINDS),
    "Jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "Lfm2Moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention"]), "Lfm3": dict(num_hidden_layers=4),
    "Mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=2),
    "ProphetNet": dict(num_hidden_layers=None, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4,
                       num_decoder_attention_heads=4),
    "Qwen3Next": dict(num_hidden_layers=4), "Qwen3_5": dict(num_hidden_layers=4), "Qwen3_5Moe": dict(num_hidden_layers=4),
    "Qwen4Exp": dict(num_hidden_layers=4, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=16,
                     indexer_compress_ratio=4),
    "RecurrentGemma": dict(num_hidden_layers=3),
    "RoCBert": dict(pronunciation_vocab_size=64, shape_vocab_size=64, pronunciation_embed_dim=8, shape_embed_dim=8),
    "Xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "Zamba": dict(num_hidden_layers=4, layer_types=["linear_attention", "hybrid"] * 2, n_mamba_heads=2),
    "Zamba2": dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, num_mem_blocks=1, mamba_ngroups=1,
                   n_mamba_heads=4, mamba_headdim=16, mamba_d_state=8),
    "Zaya": dict(num_experts_per_tok=1)}


def tiny(kind, more):
    """The arguments of a config of this class: TINY's that it has, without dropout, and so for the configs in it."""
    default, kw = kind(), {}
    for name in {*TINY, *(n for n in dir(default) if not n.startswith("_"))}:
        if isinstance(inspect.getattr_static(kind, name, None), property):
            continue
        try:
            value = getattr(default, name)
        except Exception as error:
            if "per-layer" not in str(error):  # of configs whose layers differ
                continue
            value = None
        if name in TINY:
            kw[name] = TINY[name]
        elif isinstance(value, transformers.PretrainedConfig):
            kw[name] = {**tiny(type(value), {}), "model_type": value.model_type}
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            kw[name] = 0.0
    return {name: value for name, value in {**kw, **more}.items() if value is not None}


def build(cls):
    config = cls.config_class(**tiny(cls.config_class, MORE.get(cls.__name__[:-len("ForCausalLM")], {})))
    config._attn_implementation, config.use_cache = "eager", False
    with torch.device("meta"):
        model = runs(lambda: cls(config))
    if model is not None and (count := sum(p.numel() for p in model.parameters())) > 2**23:
        raise ValueError(f"it has {count} parameters")
    torch.manual_seed(1)
    model = cls(config)
    for name, p in model.named_parameters():
        p.data.add_(torch.randn(p.shape) * 0.2) if p.dim() == 1 else None
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear):
        torch.nn.init.normal_(head.weight, std=0.2)
    return model.to(D).train()


def gradients(model):
    model.zero_grad(set_to_none=True)
    ids = torch.randint(3, VOCAB - 8, (2, 11), generator=torch.Generator().manual_seed(2)).to(D)
    labels = ids.clone()
    labels[0, :5] = labels[1, 8] = -100
    torch.manual_seed(3)
    out = model(input_ids=ids, labels=labels)
    if out.loss is None:
        raise ValueError("no loss")
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def family(name):
    """(passed, left, or not built, and of what, or why)"""
    try:
        first = build(getattr(transformers, name))  # never called: some models keep a state of their last call
        theirs, ours = copy.deepcopy(first), copy.deepcopy(first)
        b = gradients(theirs)
        if not b[0].loss.isfinite():
            raise ValueError("the loss is not finite")
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    said = lk_torch.patch(ours)
    with warnings.catch_warnings(record=True) as words:
        warnings.simplefilter("always")
        a = gradients(ours)
    words = [str(w.message) for w in words if "lk_torch.patch" in str(w.message)]
    test_patch.verdict(f"{name}: a warning", not words, f"{words}")

    @functools.cache
    def others():  # weights off by a rounding: what a model makes of that
        noisy = [copy.deepcopy(first) for _ in range(4)]
        for model in noisy:
            for p in model.parameters():
                p.data *= 1 + 2.0**-23 * (torch.rand_like(p) - 0.5)
        return [gradients(model) for model in noisy]
    wide = runs(lambda: gradients(copy.deepcopy(first).to(F64)))
    if wide is None or not wide[0].loss.isfinite():
        wide = b
    compare(name, a, b, wide, FLOOR[F32], not said.heads, others)
    if half := runs(lambda: gradients(copy.deepcopy(first).to(BF16))):
        model = copy.deepcopy(first).to(BF16)
        lk_torch.patch(model)
        losses = [side[0].loss.detach() for side in (gradients(model), half)]
        test_patch.verdict(f"{name}: bfloat16", losses[0].dtype == losses[1].dtype and off(*losses) < 2.0**-4, f"{losses}")
    ids = torch.tensor([[5, 9, 7, 6]], device=D)
    ours.eval(), theirs.eval()
    new = lambda m: m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    if runs(lambda: new(theirs)) is not None:
        test_patch.verdict(f"{name}: generate", torch.equal(new(ours), new(theirs)), f"{new(ours)}, not {new(theirs)}")
    lk_torch.unpatch(ours)
    ours.train(), theirs.train()
    test_patch.verdict(f"{name}: unpatched", [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()])
    a, b = gradients(ours), gradients(theirs)
    test_patch.verdict(f"{name}: the unpatched model's bits", torch.equal(a[0].loss, b[0].loss))
    why = [what.removeprefix("left: ") for kind, _, what in said.rows if kind == name]
    norms = f"{said.norms} norm{'s' * (said.norms != 1)}"
    return ("passed", norms) if said.heads else ("left", why[0] if why else "it has no get_output_embeddings() or no labels")


def runs(f):
    try:
        return f()
    except Exception:
        return None


def page(results):
    """README.md's paragraphs of what passed, was left and could not be built."""
    short = lambda name: name.removesuffix("ForCausalLM")
    text = [f"transformers {transformers.__version__}, {len(results)} classes `...ForCausalLM`, tiny random models on the CPU:"]
    groups = {}
    for name, (what, of) in results.items():
        groups.setdefault("passed" if what == "passed" else f"{what}: {of}" if what == "left" else what, []).append(short(name))
    for what in sorted(groups, key=lambda what: (what != "passed", what)):
        text.append(f"**{what[0].upper()}{what[1:]}** ({len(groups[what])}): {', '.join(groups[what])}.")
    lines = "\n\n".join("\n".join(textwrap.wrap(p, 130, break_on_hyphens=False, break_long_words=False)) for p in text)
    path = f"{HERE}/README.md"
    with open(path) as f:
        old = f.read()
    mark = "<!-- written by make torch-families -->\n", "<!-- end -->\n"
    assert mark[0] in old and mark[1] in old
    with open(path, "w") as f:
        f.write(re.sub(f"(?s)({mark[0]}).*?({mark[1]})", lambda m: f"{m[1]}{lines}\n{m[2]}", old))


def late(*_):
    raise TimeoutError("after 300 s")


def main():
    names = [n for n in dir(transformers) if n.endswith("ForCausalLM") and not n.startswith("Auto")]
    sources = b"".join(open(p, "rb").read() for p in (__file__, test_patch.__file__, lk_torch._patch.__file__))
    key = f"{transformers.__version__}-{torch.__version__}-{hashlib.sha256(sources).hexdigest()[:12]}"
    os.makedirs("build/families", exist_ok=True)
    path, results = f"build/families/{key}.jsonl", {}
    if os.path.exists(path):
        with open(path) as f:
            results = dict(map(json.loads, f))
    signal.signal(signal.SIGALRM, late)
    asked = [n.removesuffix("ForCausalLM") + "ForCausalLM" for n in sys.argv[1:]]
    for name in asked or [n for n in names if n not in results]:
        failed = test_patch.totals[1]
        signal.alarm(300)
        try:
            result = family(name)
        except Exception as error:
            test_patch.verdict(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        signal.alarm(0)
        if test_patch.totals[1] > failed:
            result = "failed", ""
        print(f"{name:36} {result[0]}: {result[1]}", flush=True)
        results[name] = result
        with open(path, "a") as f:
            f.write(json.dumps([name, result]) + "\n")
    counts = {what: sum(r[0] == what for r in results.values()) for what in ("passed", "left", "not built", "failed")}
    if set(results) >= set(names) and not sys.argv[1:]:
        page(dict(sorted(results.items(), key=lambda item: item[0].lower())))
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    main()

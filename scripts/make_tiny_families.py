#!/usr/bin/env python3
"""Adds one tiny random checkpoint a model family to tests/data/tiny: a Hugging Face folder and its GGUF twin.

Run it as make_tiny_checkpoints.py, whose files, tokenizer and goldens it uses (families of that script are not made here):

    python3 scripts/make_tiny_families.py            # writes, then checks
    python3 scripts/make_tiny_families.py --check    # checks what is there
    python3 scripts/make_tiny_families.py olmo2      # one family alone

Weights are random, stored as F16; the logits are those of transformers in float32 (eager attention) on exactly these values. A GGUF twin
holds the same values under the names of the gguf package's own table, in the row order and with the metadata that the usual converter
writes, so its logits are the folder's. The check changes one setting at a time in transformers and shows that each moves the logits.
"""

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np

from make_tiny_checkpoints import (BOS, EOS, GGML, LONG, LONG_POSITIONS, MIN_EFFECT, ROOT, SHORT, TOLERANCE, VOCAB, add_text, choose_prompt,
                                   permute_rows, read_safetensors, transformers_model, write_json, write_safetensors, write_tokenizer_files)

WINDOW = 24  # shorter than either prompt
BASE = {
    "attention_dropout": 0.0, "bos_token_id": BOS, "eos_token_id": EOS, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
    "intermediate_size": 96, "max_position_embeddings": 2048, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
    "vocab_size": VOCAB,
}
GEMMA = {
    "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW, "tie_word_embeddings": True, "attention_bias": False,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 3.0], "long_factor": [1.0, 1.5, 2.5, 5.0, 9.0, 16.0]}

# name: (architecture's class, gguf architecture, settings, changes that must move the logits)
FAMILIES = {
    "mistral": ("MistralForCausalLM", "llama", {"model_type": "mistral", "sliding_window": WINDOW, "head_dim": 16}, [
        {"sliding_window": None}, {"sliding_window": WINDOW + 1}]),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 4,
                                            "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}, [
        {"rope_theta": 10000.0}]),
    "qwen2-window": ("Qwen2ForCausalLM", None, {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW,
                                                "max_window_layers": 2}, [{"max_window_layers": 1}, {"use_sliding_window": False}]),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", {**GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0}, [
        {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"sliding_window": WINDOW + 1},
        {"layer_types": ["full_attention", "sliding_attention"] * 2}, {"query_pre_attn_scalar": 24}, {"hidden_activation": "silu"}]),
    "gemma3": ("Gemma3ForCausalLM", "gemma3", {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window_pattern": 6,
                                               "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                                               "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, [
        {"sliding_window": WINDOW + 1}, {"sliding_window_pattern": 5}, {"rope_local_base_freq": 1000000.0}, {"rope_theta": 10000.0},
        {"rope_scaling": None}, {"query_pre_attn_scalar": 24}]),
    "gemma3-parts": ("Gemma3ForCausalLM", None, {
        **GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "rope_theta": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"], "final_logit_softcapping": 10.0,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}}}, [
        {"final_logit_softcapping": None}, {"query_pre_attn_scalar": 32}]),
    "phi3": ("Phi3ForCausalLM", "phi3", {"model_type": "phi3", "sliding_window": WINDOW, "partial_rotary_factor": 0.75,
                                         "max_position_embeddings": 1024, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE}, [
        {"sliding_window": None}, {"rope_scaling": {**LONGROPE, "long_factor": LONGROPE["short_factor"]}},
        {"original_max_position_embeddings": 16}, {"rope_scaling": None}]),
    "phi3-short": ("Phi3ForCausalLM", None, {"model_type": "phi3", "sliding_window": None, "partial_rotary_factor": 0.75,
                                             "max_position_embeddings": 512, "original_max_position_embeddings": 512,
                                             "rope_scaling": {**LONGROPE, "attention_factor": 1.2}}, [
        {"rope_scaling": {**LONGROPE, "attention_factor": 1.0}}, {"rope_scaling": None}]),
    "granite": ("GraniteForCausalLM", "granite", {"model_type": "granite", "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 1.5,
                                                  "residual_multiplier": 0.7, "attention_multiplier": 0.4, "logits_scaling": 0.8,
                                                  "tie_word_embeddings": True}, [
        {"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"attention_multiplier": 0.25}, {"logits_scaling": 1.0}]),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", {"model_type": "smollm3", "attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4,
                                                  "use_sliding_window": False, "rope_theta": 50000.0, "tie_word_embeddings": True}, [
        {"no_rope_layer_interval": 3}, {"no_rope_layers": [1, 1, 1, 1]}]),
    "llama-biased": ("LlamaForCausalLM", None, {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}, [
        {"hidden_act": "gelu_pytorch_tanh", "effect": 1e-3}, {"hidden_act": "silu"}]),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", {"model_type": "olmo2", "attention_bias": False, "rope_theta": 500000.0}, [
        {"rope_theta": 10000.0}]),
}
INTERLEAVED = ("llama", "granite", "smollm3")


def settings_of(name):
    cls, _, own, _ = FAMILIES[name]
    config = {"architectures": [cls], **BASE, **own}
    return {key: value for key, value in config.items() if value is not None or key in ("sliding_window", "rope_scaling")}


def random_weights(name, config, seed):
    """By the names and shapes of transformers' own model; scaled so that attention is peaked and residuals stay of order one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        write_json(Path(scratch) / "config.json", config)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(scratch))
    rng, out = np.random.default_rng(seed), {}
    unit_less_one = 1.0 if config["model_type"].startswith("gemma") else 0.0
    gains = {"embed_tokens": 2.0 if config["tie_word_embeddings"] else 8.0, "lm_head": 2.0, "q_proj": 1.6, "k_proj": 1.6, "qkv_proj": 1.6,
             "v_proj": 1.0, "o_proj": 1.0, "gate_proj": 1.2, "up_proj": 1.2, "gate_up_proj": 1.2, "down_proj": 1.0}
    if unit_less_one:
        # The embedding is scaled eightfold: smaller, or every token would predict itself; the last norm makes up for it.
        gains["embed_tokens"] = 0.7
    for tensor, value in model.state_dict().items():
        part = tensor.split(".")[-2]
        if tensor == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if tensor.endswith(".bias"):
            w = rng.standard_normal(value.shape) * 0.5
        elif value.ndim == 1:
            gain = 1.3 if part in ("q_norm", "k_norm") else 3.0 if unit_less_one and tensor == "model.norm.weight" else 1.0
            w = rng.uniform(0.5, 1.5, value.shape) * gain - unit_less_one
        else:
            w = rng.standard_normal(value.shape) * gains[part] / math.sqrt(value.shape[1])
        out[tensor] = w.astype(np.float16).astype(np.float32)
    return out


def write_folder(name, folder, config, weights):
    """What is stored: for `gemma3-parts` the text part inside a configuration for more, with the names that go with it."""
    if name == "gemma3-parts":
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config,
                 "torch_dtype": "float16"}
        config, weights = outer, {"language_model." + tensor: w for tensor, w in weights.items()}
    write_json(folder / "config.json", config)
    write_tokenizer_files(folder, "smollm")
    write_safetensors(folder / "model.safetensors", {n: ("F16", w) for n, w in weights.items()}, {"format": "pt"})


def write_twin(name, folder, config, weights):
    arch = FAMILIES[name][1]
    heads, kv_heads, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    head_dim = config.get("head_dim", hidden // heads)
    out = gguf.GGUFWriter(folder / f"{name}.gguf", arch)
    out.add_name(f"Greenroom tiny {name}")
    out.add_license("cc0-1.0")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_file_type(1)
    out.add_vocab_size(VOCAB)
    if arch in INTERLEAVED:
        out.add_rope_dimension_count(head_dim)
    if arch.startswith("gemma"):
        out.add_key_length(head_dim)
        out.add_value_length(head_dim)
    if arch == "gemma2":
        out.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        out.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("sliding_window") and arch != "qwen2":
        out.add_sliding_window(config["sliding_window"])
    if arch == "gemma3":
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if arch == "granite":
        out.add_attention_scale(config["attention_multiplier"])
        out.add_embedding_scale(config["embedding_multiplier"])
        out.add_residual_scale(config["residual_multiplier"])
        out.add_logit_scale(config["logits_scaling"])
    if arch == "phi3":
        original = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        out.add_rope_dimension_count(int(config["partial_rotary_factor"] * head_dim))
        out.add_rope_scaling_orig_ctx_len(original)
        out.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
    add_text(out, "smollm")
    names = gguf.get_tensor_name_map({a: k for k, a in gguf.MODEL_ARCH_NAMES.items()}[arch], config["num_hidden_layers"])
    for tensor, w in weights.items():
        if arch in INTERLEAVED and tensor.endswith(("q_proj.weight", "k_proj.weight")):
            w = permute_rows(w, heads if "q_proj" in tensor else kv_heads)
        if arch.startswith("gemma") and tensor.endswith("norm.weight"):
            w = w + 1
        kind = GGML.F32 if w.ndim == 1 else GGML.F16
        out.add_tensor(names.get_name(tensor, (".weight", ".bias")), gguf.quants.quantize(w, kind), raw_dtype=kind)
    if arch == "phi3":
        out.add_tensor("rope_factors_long.weight", np.array(config["rope_scaling"]["long_factor"], np.float32), raw_dtype=GGML.F32)
        out.add_tensor("rope_factors_short.weight", np.array(config["rope_scaling"]["short_factor"], np.float32), raw_dtype=GGML.F32)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def reference(config, weights):
    """transformers on these settings and weights."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_json(folder / "config.json", {**config, "torch_dtype": "float32"})
        write_safetensors(folder / "model.safetensors", {n: ("F32", w) for n, w in weights.items()}, {"format": "pt"})
        return transformers_model(folder)


def write_golden(name, folder, config, weights, seed):
    logits, out, gaps = reference(config, weights), {}, []
    for label, length in (("short", SHORT), ("long", LONG)):
        prompt, first, ids, rows, gap = choose_prompt(logits, seed, length)
        gaps.append(gap)
        out |= {f"{label}.prompt_ids": ("I32", np.array(prompt)), f"{label}.decode_ids": ("I32", np.array(ids)), f"{label}.decode_logits": ("F32", rows)}
        if label == "long":
            out["long.positions"] = ("I32", np.array(LONG_POSITIONS))
            first = first[LONG_POSITIONS]
        out[f"{label}.logits"] = ("F32", first)
    write_safetensors(folder / "golden.safetensors", out, {
        "format": "greenroom-tiny-1", "name": name, "family": config["model_type"], "weights": ".", "min_gap": f"{min(gaps):.4f}"})


def write(name):
    config = settings_of(name)
    seed = 100 + list(FAMILIES).index(name)
    weights = random_weights(name, config, seed)
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_folder(name, folder, config, weights)
    write_golden(name, folder, config, weights, seed)
    if FAMILIES[name][1]:
        twin = ROOT / f"gguf-{name}"
        shutil.rmtree(twin, ignore_errors=True)
        twin.mkdir()
        write_twin(name, twin, config, weights)
        shutil.copy(folder / "golden.safetensors", twin)


def check(name):
    folder, config = ROOT / name, settings_of(name)
    golden, meta = read_safetensors(folder / "golden.safetensors")
    stored, _ = read_safetensors(folder / "model.safetensors")
    weights = {tensor.removeprefix("language_model."): w for tensor, w in stored.items()}
    prompt, positions = golden["long.prompt_ids"].tolist(), golden["long.positions"]
    worst = np.abs(reference(config, weights)(prompt)[positions] - golden["long.logits"]).max()
    assert worst < TOLERANCE, f"{name}: {worst}"
    least = math.inf
    for change in FAMILIES[name][3]:
        change = dict(change)
        enough = change.pop("effect", MIN_EFFECT)
        effect = np.abs(reference({**config, **change}, weights)(prompt)[positions] - golden["long.logits"]).max()
        assert effect > enough, f"{name}: {change} would pass: {effect}"
        least = min(least, effect)
    size = sum(p.stat().st_size for p in folder.iterdir())
    assert size < 1_000_000, f"{name}: {size} bytes"
    print(f"{name:14} {size:7} bytes  std {golden['short.logits'].std():.2f}  min gap {meta['min_gap']}  smallest effect {least:.3f}", flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="check what is there, write nothing")
    arguments.add_argument("families", nargs="*", help="these alone")
    arguments = arguments.parse_args()
    for name in arguments.families or FAMILIES:
        if not arguments.check:
            write(name)
        check(name)


if __name__ == "__main__":
    main()

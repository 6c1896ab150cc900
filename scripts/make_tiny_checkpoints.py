#!/usr/bin/env python3
"""Makes tests/data/tiny: small random checkpoints and the logits that they must give.

Run it once, in a virtual environment outside the repository, when the set of checkpoints changes; the tests need only its output:

    python3 -m pip install torch transformers safetensors tokenizers numpy gguf
    python3 scripts/make_tiny_checkpoints.py           # writes, then checks
    python3 scripts/make_tiny_checkpoints.py --only NAME [NAME ...]   # writes these alone, then checks
    python3 scripts/make_tiny_checkpoints.py --check   # checks what is there

The logits come from transformers in float32 on the dequantised weights. The check reads every file back with its own readers and its own
numpy forward, compares the two, and shows that each likely mistake (rope style, q/k norm, rope scaling, nibble order, ...) moves the
logits by far more than the tolerance. Not here: models with real weights, and audio.

The output is a pure function of the seeds below and of the libraries' versions, which tests/data/tiny/README.md records.
"""

import argparse
import json
import math
import shutil
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny"
GGML = gguf.GGMLQuantizationType
SHORT, LONG, STEPS = 40, 120, 12
# Around the 64-token block border, and the end. The decode steps after the long prompt cross the border at 128.
LONG_POSITIONS = [0, 31, 61, 62, 63, 64, 65, 66, 95, 118, 119]
TOLERANCE = 2e-4  # between transformers and the numpy forward; the tests allow 1e-3
MIN_GAP = 0.05  # between the best and the second token of every greedy step, so that rounding cannot change the tokens
MIN_EFFECT = 0.05  # of every deliberate mistake


# ---------------------------------------------------------------- tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0..2
USER_DEFINED = ["<tool_call>"]  # id 3
BOS, EOS = 0, 2
MERGES = """t h|e r|i n|Ġ t|Ġ a|h e|r e|o n|Ġt he|a t|e n|o r|Ġ s|n d|Ġ w|o u|i s|Ġ o|in g|e s|Ġa nd|Ġ c|Ġ b|l l|u s|s er|i t|us er""".split("|")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER_TEXTS = [
    "", " ", "the", " the", "  the  thing", "Hello, world!\n", "there and then\tit is\r\n\r\nover", "user users serenade", "1234567 3.14",
    "it's, I'LL; we've", "naïve café — Ω 東京 🦊🇫🇷", "<|im_start|>user\nhi<|im_end|>\n", "<tool_call>{\"a\": 1}", "e\u0301 ﬁ", "\x00\x7f\u00a0\u200d", "   \n \n  x",
]


def byte_alphabet():
    """GPT-2's printable stand-in for every byte, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


TOKENS = SPECIAL + USER_DEFINED + byte_alphabet() + [m.replace(" ", "") for m in MERGES]
VOCAB = len(TOKENS)
assert VOCAB == 288 and len(set(TOKENS)) == VOCAB


def build_tokenizer(pre):
    """`pre`: "smollm" (single digits, GPT-2's expression) or "qwen2" (its own expression, NFC)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(m.split(" ")) for m in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=merges))
    byte_level = lambda regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    if pre == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), byte_level(True)]
    else:
        tokenizer.normalizer = normalizers.NFC()
        parts = [pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"), byte_level(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def write_tokenizer_files(folder, pre):
    (folder / "tokenizer.json").write_text(build_tokenizer(pre).to_str(pretty=False) + "\n", encoding="utf-8")
    added = {
        str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": t in SPECIAL}
        for i, t in enumerate(SPECIAL + USER_DEFINED)
    }
    write_json(folder / "tokenizer_config.json", {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": SPECIAL[0] if pre == "smollm" else None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[EOS],
        "model_max_length": 2048,
        "pad_token": SPECIAL[0],
        "tokenizer_class": "GPT2Tokenizer" if pre == "smollm" else "Qwen2Tokenizer",
        "unk_token": None,
    })
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "do_sample": False, "eos_token_id": [EOS, 0], "pad_token_id": 0})


def write_tokenizer_golden():
    cases = {}
    for pre in ("smollm", "qwen2"):
        tokenizer = build_tokenizer(pre)
        cases[pre] = [{"text": t, "ids": tokenizer.encode(t, add_special_tokens=False).ids} for t in TOKENIZER_TEXTS]
    text = json.dumps({"format": "greenroom-tiny-tokenizer-1", "cases": cases}, ensure_ascii=False, indent=1)
    (ROOT / "tokenizer-golden.json").write_text(text + "\n", encoding="utf-8")


# ---------------------------------------------------------------- models

@dataclass
class Shape:
    """One set of random weights and the hyperparameters that go with it."""

    family: str
    seed: int
    tied: bool
    head_dim: int = 16
    hidden: int = 64
    inter: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    theta: float = 10000.0
    eps: float = 1e-5
    scaling: dict = field(default_factory=dict)

    @property
    def pre(self):
        return "qwen2" if self.family == "qwen3" else "smollm"


LLAMA = Shape("llama", seed=11, tied=False)
LLAMA_TIED = Shape("llama", seed=12, tied=True)
LLAMA_V5 = Shape("llama", seed=11, tied=False, theta=25000.0)
LLAMA3 = Shape("llama", seed=13, tied=True, theta=500000.0, scaling={
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
})
# Wide enough for blocks of 256; a single layer keeps the files small.
LLAMA_WIDE = Shape("llama", seed=15, tied=False, head_dim=64, hidden=256, inter=256, layers=1)
QWEN3 = Shape("qwen3", seed=14, tied=True, head_dim=32, theta=1000000.0, eps=1e-6)


def random_weights(s):
    """Scaled so that attention is peaked and far, residuals stay of order one and logits have a standard deviation of about two."""
    rng = np.random.default_rng(s.seed)
    normal = lambda out, inp, gain: (rng.standard_normal((out, inp)) * gain / math.sqrt(inp)).astype(np.float32)
    norm = lambda n: rng.uniform(0.5, 1.5, n).astype(np.float32)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    w = {"model.embed_tokens.weight": normal(VOCAB, s.hidden, 2.0 if s.tied else 8.0)}
    for i in range(s.layers):
        p = f"model.layers.{i}."
        w[p + "input_layernorm.weight"] = norm(s.hidden)
        w[p + "self_attn.q_proj.weight"] = normal(q, s.hidden, 1.6)
        w[p + "self_attn.k_proj.weight"] = normal(kv, s.hidden, 1.6)
        w[p + "self_attn.v_proj.weight"] = normal(kv, s.hidden, 1.0)
        w[p + "self_attn.o_proj.weight"] = normal(s.hidden, q, 1.0)
        if s.family == "qwen3":
            w[p + "self_attn.q_norm.weight"] = norm(s.head_dim) * 1.3
            w[p + "self_attn.k_norm.weight"] = norm(s.head_dim) * 1.3
        w[p + "post_attention_layernorm.weight"] = norm(s.hidden)
        w[p + "mlp.gate_proj.weight"] = normal(s.inter, s.hidden, 1.2)
        w[p + "mlp.up_proj.weight"] = normal(s.inter, s.hidden, 1.2)
        w[p + "mlp.down_proj.weight"] = normal(s.hidden, s.inter, 1.0)
    w["model.norm.weight"] = norm(s.hidden)
    if not s.tied:
        w["lm_head.weight"] = normal(VOCAB, s.hidden, 2.0)
    return w


def hf_config(s, dtype, v5=False, quantization=None):
    c = {
        "architectures": ["Qwen3ForCausalLM" if s.family == "qwen3" else "LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.inter,
        "max_position_embeddings": 2048,
        "model_type": s.family,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": s.eps,
        "tie_word_embeddings": s.tied,
        "use_cache": True,
        "vocab_size": VOCAB,
    }
    if v5:
        c["dtype"] = dtype
        c["rope_parameters"] = {"rope_theta": s.theta, **(s.scaling or {"rope_type": "default"})}
    else:
        c["torch_dtype"] = dtype
        c["rope_theta"] = s.theta
        c["rope_scaling"] = s.scaling or None
    if s.family == "llama":
        c |= {"mlp_bias": False, "pretraining_tp": 1}
    else:
        c |= {"max_window_layers": s.layers, "sliding_window": None, "use_sliding_window": False}
    if quantization:
        c["quantization"] = quantization
        c["quantization_config"] = quantization
    return c


# ---------------------------------------------------------------- number formats and files

def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def to_bf16(x):
    """Float32 to the upper 16 bits, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


ENCODERS = {"F32": lambda x: x.astype("<f4"), "F16": lambda x: x.astype("<f2"), "BF16": to_bf16, "U32": lambda x: x.astype("<u4"),
            "I32": lambda x: x.astype("<i4")}
DECODERS = {"F32": lambda b: np.frombuffer(b, "<f4"), "F16": lambda b: np.frombuffer(b, "<f2").astype(np.float32),
            "BF16": lambda b: from_bf16(np.frombuffer(b, "<u2")), "U32": lambda b: np.frombuffer(b, "<u4"),
            "I32": lambda b: np.frombuffer(b, "<i4")}


def write_safetensors(path, tensors, metadata):
    """`tensors`: name -> (type name, array). Written here rather than by the library so that the bytes do not depend on its version."""
    header, blobs, at = {"__metadata__": metadata}, [], 0
    for name, (dtype, array) in sorted(tensors.items()):
        blob = ENCODERS[dtype](np.ascontiguousarray(array)).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_safetensors(path):
    """Name -> array; halves widened to float32."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    body = memoryview(data)[8 + size:]
    return {n: DECODERS[h["dtype"]](body[slice(*h["data_offsets"])]).reshape(h["shape"]) for n, h in header.items()}, metadata


def mlx_quantize(w, bits, group, dtype):
    """MLX's affine form: the end of the range farther from zero is met exactly, so a scale is negative where that end is the maximum."""
    g = w.reshape(w.shape[0], -1, group).astype(np.float32)
    low, high, top = g.min(-1), g.max(-1), (1 << bits) - 1
    scale = np.maximum((high - low) / top, 1e-7)
    from_low = np.abs(low) > np.abs(high)
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    q0 = np.round(edge / scale)
    scale = np.where(q0 == 0, scale, edge / np.where(q0 == 0, 1, q0))
    bias = np.where(q0 == 0, 0, edge)
    scale, bias = (DECODERS[dtype](ENCODERS[dtype](a.astype(np.float32)).tobytes()).reshape(a.shape) for a in (scale, bias))
    q = np.clip(np.round((g - bias[..., None]) / scale[..., None]), 0, top).astype(np.uint32)
    return pack_bits(q.reshape(w.shape[0], -1), bits), scale, bias


def pack_bits(codes, bits):
    """Codes of each row in consecutive bits from the lowest up, as little-endian words of 32."""
    stream = ((codes[..., None] >> np.arange(bits, dtype=np.uint32)) & 1).astype(np.uint8).reshape(codes.shape[0], -1)
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4")


def mlx_dequantize(words, scale, bias, bits, group, reverse=False):
    """`reverse` takes the elements of 32 from the wrong end: one of the deliberate mistakes."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little").reshape(words.shape[0], -1, bits)
    q = (stream.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(-1)
    if reverse:
        q = q.reshape(words.shape[0], -1, 32)[..., ::-1]
    q = q.reshape(words.shape[0], -1, group).astype(np.float32)
    return (q * scale[..., None] + bias[..., None]).reshape(words.shape[0], -1)


def mlx_scheme(quantization, stem):
    """Bits and group of a layer: its own entry, in whichever spelling, else the model's."""
    own = [v for k, v in quantization.items() if isinstance(v, dict) and (k == stem or k.endswith("." + stem) or stem.endswith("." + k))]
    scheme = own[0] if own else quantization
    return scheme["bits"], scheme["group_size"]


# gguf.quants dequantises the K types but does not quantise them.

def k_factors(x, top):
    """Blocks of factors as a half and 6-bit integers: (half, integers)."""
    d = (x.max(-1, keepdims=True) / top).astype(np.float16)
    q = np.round(x / np.where(d == 0, 1, d).astype(np.float32)).clip(0, top).astype(np.uint8)
    return d, q


def quantize_q45_k(w, bits):
    g = w.reshape(-1, 8, 32)
    low, high, top = np.minimum(g.min(-1), 0), g.max(-1), (1 << bits) - 1
    (d, sc), (dmin, mn) = k_factors((high - low) / top, 63), k_factors(-low, 63)
    scale, minimum = d.astype(np.float32) * sc, dmin.astype(np.float32) * mn
    q = np.round((g + minimum[..., None]) / np.where(scale == 0, 1, scale)[..., None]).clip(0, top).astype(np.uint8)
    packed = np.concatenate([sc[:, :4] | (sc[:, 4:] >> 4 << 6), mn[:, :4] | (mn[:, 4:] >> 4 << 6), (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4], -1)
    nibbles = (q[:, 0::2] & 15) | (q[:, 1::2] & 15) << 4
    parts = [d.view(np.uint8), dmin.view(np.uint8), packed]
    if bits == 5:
        parts.append(np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1))
    return np.concatenate([*parts, nibbles.reshape(len(g), 128)], -1)


def quantize_q6_k(w):
    g = w.reshape(-1, 16, 16)
    edge = np.take_along_axis(g, np.abs(g).argmax(-1)[..., None], -1)[..., 0]
    scale = edge / -32
    d = (np.abs(scale).max(-1, keepdims=True) / 127).astype(np.float16)
    sc = np.round(scale / d.astype(np.float32)).clip(-128, 127).astype(np.int8)
    step = d.astype(np.float32) * sc
    q = (np.round(g / np.where(step == 0, 1, step)[..., None]).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce((q >> 4) << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=2)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), sc.view(np.uint8), d.view(np.uint8)], -1)


def gguf_quantize(w, kind):
    own = {GGML.Q4_K: lambda w: quantize_q45_k(w, 4), GGML.Q5_K: lambda w: quantize_q45_k(w, 5), GGML.Q6_K: quantize_q6_k}
    if kind not in own:
        return gguf.quants.quantize(w, kind)
    data = own[kind](w).reshape(w.shape[0], -1)
    error = np.abs(gguf.quants.dequantize(data, kind) - w).max() / np.abs(w).max()
    assert error < {GGML.Q4_K: 0.1, GGML.Q5_K: 0.05, GGML.Q6_K: 0.03}[kind], f"{kind.name}: an error of {error}"
    return data


# ---------------------------------------------------------------- writers of checkpoints

def write_hf(folder, s, dtype, v5=False):
    torch_name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    write_json(folder / "config.json", hf_config(s, torch_name, v5))
    write_tokenizer_files(folder, s.pre)
    write_safetensors(folder / "model.safetensors", {n: (dtype, w) for n, w in random_weights(s).items()}, {"format": "pt"})


def write_mlx(folder, s, dtype, bits, group, layers=None):
    """`layers`: what differs, by name: a pair of bits and group, or False for a layer left as it was."""
    torch_name = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[dtype]
    own = {n: v and {"group_size": v[1], "bits": v[0]} for n, v in (layers or {}).items()}
    quantization = {"group_size": group, "bits": bits} | own
    write_json(folder / "config.json", hf_config(s, torch_name, quantization=quantization))
    write_tokenizer_files(folder, s.pre)
    out = {}
    for name, w in random_weights(s).items():
        stem = name.removesuffix("weight")
        if w.ndim == 1 or own.get(stem[:-1]) is False:
            out[name] = (dtype, w)
            continue
        words, scale, bias = mlx_quantize(w, *mlx_scheme(quantization, stem[:-1]), dtype)
        out |= {stem + "weight": ("U32", words), stem + "scales": (dtype, scale), stem + "biases": (dtype, bias)}
    write_safetensors(folder / "model.safetensors", out, {"format": "mlx"})


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in GGUF_NAMES:
        return GGUF_NAMES[stem] + ".weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def permute_rows(w, heads):
    """The two halves of each head interleaved: the row order of llama files, for rope on neighbouring pairs."""
    return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def llama3_divisors(s):
    """What the frequencies are divided by: 1 for short wavelengths, the factor for long ones, a blend between."""
    r = s.scaling
    wavelength = 2 * math.pi * s.theta ** (np.arange(0, s.head_dim, 2) / s.head_dim)
    turns = r["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - r["low_freq_factor"]) / (r["high_freq_factor"] - r["low_freq_factor"]), 0, 1)
    return (1 / ((1 - smooth) / r["factor"] + smooth)).astype(np.float32)


def add_text(out, pre):
    """The tokenizer, cut by the pre-tokenizer of this name, and the chat template."""
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(TOKENS)
    out.add_token_types([3] * len(SPECIAL) + [4] * len(USER_DEFINED) + [1] * (VOCAB - len(SPECIAL) - len(USER_DEFINED)))
    out.add_token_merges(MERGES)
    out.add_bos_token_id(BOS)
    out.add_eos_token_id(EOS)
    out.add_pad_token_id(0)
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)


def write_gguf(folder, s, name, dtype, embedding=None, finer=None):
    """`embedding`: its type where it differs; `finer`: that of v and down, as the mixed files have it."""
    out = gguf.GGUFWriter(folder / f"{name}.gguf", s.family)
    out.add_name(f"Greenroom tiny {name}")
    out.add_license("cc0-1.0")
    out.add_block_count(s.layers)
    out.add_context_length(2048)
    out.add_embedding_length(s.hidden)
    out.add_feed_forward_length(s.inter)
    out.add_head_count(s.heads)
    out.add_head_count_kv(s.kv_heads)
    out.add_layer_norm_rms_eps(s.eps)
    out.add_rope_freq_base(s.theta)
    out.add_file_type({GGML.F32: 0, GGML.F16: 1, GGML.Q4_0: 2, GGML.Q4_1: 3, GGML.Q8_0: 7, GGML.BF16: 32, GGML.Q5_0: 8,
                       GGML.Q5_1: 9, GGML.Q4_K: 15, GGML.Q5_K: 17, GGML.Q6_K: 18}[dtype])
    out.add_vocab_size(VOCAB)
    if s.family == "llama":
        out.add_rope_dimension_count(s.head_dim)
    else:
        out.add_key_length(s.head_dim)
        out.add_value_length(s.head_dim)
    add_text(out, s.pre)
    for tensor, w in random_weights(s).items():
        if s.family == "llama" and tensor.endswith(("q_proj.weight", "k_proj.weight")):
            w = permute_rows(w, s.heads if "q_proj" in tensor else s.kv_heads)
        kind = GGML.F32 if w.ndim == 1 else embedding if embedding is not None and "embed_tokens" in tensor else dtype
        if finer is not None and tensor.endswith(("v_proj.weight", "down_proj.weight")):
            kind = finer
        out.add_tensor(gguf_name(tensor), gguf_quantize(w, kind), raw_dtype=kind)
    if s.scaling:
        out.add_tensor("rope_freqs.weight", llama3_divisors(s), raw_dtype=GGML.F32)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


CASES = {
    "llama": (LLAMA, lambda f: write_hf(f, LLAMA, "F32")),
    "llama-tied-bf16": (LLAMA_TIED, lambda f: write_hf(f, LLAMA_TIED, "BF16")),
    "llama-f16": (LLAMA_V5, lambda f: write_hf(f, LLAMA_V5, "F16", v5=True)),
    "llama3-rope": (LLAMA3, lambda f: write_hf(f, LLAMA3, "F16")),
    "qwen3": (QWEN3, lambda f: write_hf(f, QWEN3, "BF16")),
    "llama-mlx4": (LLAMA, lambda f: write_mlx(f, LLAMA, "F16", 4, 64)),
    "llama-mlx8": (LLAMA, lambda f: write_mlx(f, LLAMA, "BF16", 8, 32)),
    "qwen3-mlx4": (QWEN3, lambda f: write_mlx(f, QWEN3, "BF16", 4, 32)),
    "llama-mlx2": (LLAMA, lambda f: write_mlx(f, LLAMA, "F32", 2, 32)),
    "llama-mlx3": (LLAMA_WIDE, lambda f: write_mlx(f, LLAMA_WIDE, "F16", 3, 128)),
    "llama-mlx5": (LLAMA, lambda f: write_mlx(f, LLAMA, "BF16", 5, 32)),
    "llama-mlx6": (LLAMA, lambda f: write_mlx(f, LLAMA, "F16", 6, 64)),
    "llama-mlx-mixed": (LLAMA, lambda f: write_mlx(f, LLAMA, "BF16", 4, 64, {
        "model.layers.0.self_attn.v_proj": (6, 64), "language_model.model.layers.1.mlp.down_proj": (8, 32), "layers.2.mlp.up_proj": (3, 64),
        "model.layers.1.self_attn.q_proj": False, "lm_head": (5, 32),
    })),
    "gguf-llama-f32": (LLAMA, lambda f: write_gguf(f, LLAMA, "llama-f32", GGML.F32)),
    "gguf-llama-f16": (LLAMA, lambda f: write_gguf(f, LLAMA, "llama-f16", GGML.F16)),
    "gguf-llama-bf16": (LLAMA, lambda f: write_gguf(f, LLAMA, "llama-bf16", GGML.BF16)),
    "gguf-llama-q8_0": (LLAMA, lambda f: write_gguf(f, LLAMA, "llama-q8_0", GGML.Q8_0)),
    "gguf-llama-q4_0": (LLAMA, lambda f: write_gguf(f, LLAMA, "llama-q4_0", GGML.Q4_0)),
    "gguf-llama-q4_1": (LLAMA_TIED, lambda f: write_gguf(f, LLAMA_TIED, "llama-q4_1", GGML.Q4_1, embedding=GGML.Q8_0)),
    "gguf-llama-q5_0": (LLAMA, lambda f: write_gguf(f, LLAMA, "llama-q5_0", GGML.Q5_0)),
    "gguf-llama-q5_1": (LLAMA_TIED, lambda f: write_gguf(f, LLAMA_TIED, "llama-q5_1", GGML.Q5_1)),
    "gguf-llama-q4_k": (LLAMA_WIDE, lambda f: write_gguf(f, LLAMA_WIDE, "llama-q4_k", GGML.Q4_K, embedding=GGML.Q5_0, finer=GGML.Q6_K)),
    "gguf-llama-q5_k": (LLAMA_WIDE, lambda f: write_gguf(f, LLAMA_WIDE, "llama-q5_k", GGML.Q5_K)),
    "gguf-llama-q6_k": (LLAMA_WIDE, lambda f: write_gguf(f, LLAMA_WIDE, "llama-q6_k", GGML.Q6_K)),
    "gguf-qwen3-q8_0": (QWEN3, lambda f: write_gguf(f, QWEN3, "qwen3-q8_0", GGML.Q8_0)),
    "gguf-llama3-rope-f16": (LLAMA3, lambda f: write_gguf(f, LLAMA3, "llama3-rope-f16", GGML.F16)),
}


# ---------------------------------------------------------------- the independent reading and forward

@dataclass
class Loaded:
    """A checkpoint as read from its files alone: Hugging Face names, float32, rows in file order."""

    w: dict
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    inv_freq: np.ndarray
    unscaled_inv_freq: np.ndarray
    interleaved: bool


def load_folder(folder, reverse_words=False):
    c = json.loads((folder / "config.json").read_text())
    raw, _ = read_safetensors(folder / "model.safetensors")
    w = {}
    for name, tensor in raw.items():
        stem = name.removesuffix("weight")
        if stem + "scales" in raw and name.endswith("weight"):
            bits, group = mlx_scheme(c["quantization"], stem[:-1])
            tensor = mlx_dequantize(tensor, raw[stem + "scales"], raw[stem + "biases"], bits, group, reverse_words)
        if name.endswith("weight"):
            w[name] = tensor
    rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"], **(c.get("rope_scaling") or {})}
    plain = 1 / rope["rope_theta"] ** (np.arange(0, c["head_dim"], 2) / c["head_dim"])
    scaled = plain.copy()
    if rope.get("rope_type") == "llama3":
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        for i, f in enumerate(plain):
            turns = original * f / (2 * math.pi)
            blend = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            scaled[i] = f if blend >= 1 else f / factor if blend <= 0 else (1 - blend) * f / factor + blend * f
    return Loaded(w, c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"], scaled, plain, False)


def load_gguf(path):
    reader = gguf.GGUFReader(path)
    get = lambda key: reader.fields[key].contents()
    arch = get("general.architecture")
    hf_names = {gguf_name(n): n for n in random_weights(QWEN3 if arch == "qwen3" else LLAMA)}
    w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]).astype(np.float32) for t in reader.tensors}
    divisors = w.pop("rope_freqs.weight", 1.0)
    heads = get(f"{arch}.attention.head_count")
    key_length = f"{arch}.attention.key_length"
    head_dim = get(key_length) if key_length in reader.fields else get(f"{arch}.embedding_length") // heads
    plain = 1 / get(f"{arch}.rope.freq_base") ** (np.arange(0, head_dim, 2) / head_dim)
    return Loaded({hf_names[n]: t for n, t in w.items()}, get(f"{arch}.block_count"), heads, get(f"{arch}.attention.head_count_kv"), head_dim,
                  get(f"{arch}.attention.layer_norm_rms_epsilon"), plain / divisors, plain, arch == "llama")


def load(folder, **mistakes):
    files = list(folder.glob("*.gguf"))
    return load_gguf(files[0]) if files else load_folder(folder, **mistakes)


def forward(m, ids, swap_rope=False, no_scaling=False, no_qk_norm=False, swap_groups=False, theta_10000=False):
    """Logits of every position, [len(ids), vocab], in float64 arithmetic. The flags are the deliberate mistakes."""
    w, n = m.w, len(ids)
    rms = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + m.eps) * g
    inv_freq = m.unscaled_inv_freq if no_scaling else m.inv_freq
    if theta_10000:
        inv_freq = 1 / 10000.0 ** (np.arange(0, m.head_dim, 2) / m.head_dim)
    angle = np.arange(n)[:, None] * inv_freq
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(x):
        pairs = (slice(0, None, 2), slice(1, None, 2)) if m.interleaved != swap_rope else (slice(0, m.head_dim // 2), slice(m.head_dim // 2, None))
        a, b, out = x[..., pairs[0]], x[..., pairs[1]], np.empty_like(x)
        out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, b * cos + a * sin
        return out

    x = w["model.embed_tokens.weight"][ids].astype(np.float64)
    for layer in range(m.layers):
        t = lambda name: w[f"model.layers.{layer}.{name}.weight"].astype(np.float64)
        has = lambda name: f"model.layers.{layer}.{name}.weight" in w
        h = rms(x, t("input_layernorm"))
        q, k, v = ((h @ t(f"self_attn.{c}_proj").T).reshape(n, -1, m.head_dim) for c in "qkv")
        if has("self_attn.q_norm") and not no_qk_norm:
            q, k = rms(q, t("self_attn.q_norm")), rms(k, t("self_attn.k_norm"))
        q, k = rotate(q), rotate(k)
        y = np.empty_like(q)
        for head in range(m.heads):
            g = head % m.kv_heads if swap_groups else head * m.kv_heads // m.heads
            score = q[:, head] @ k[:, g].T / math.sqrt(m.head_dim)
            score[np.triu_indices(n, 1)] = -np.inf
            p = np.exp(score - score.max(-1, keepdims=True))
            y[:, head] = p / p.sum(-1, keepdims=True) @ v[:, g]
        x = x + y.reshape(n, -1) @ t("self_attn.o_proj").T
        h = rms(x, t("post_attention_layernorm"))
        gate = h @ t("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ t("mlp.up_proj").T)) @ t("mlp.down_proj").T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms(x, w["model.norm.weight"]) @ head.T.astype(np.float64)


# ---------------------------------------------------------------- goldens

def plain_folder(folder, s, scratch):
    """A float32 Hugging Face folder that transformers can load: the folder itself, or one made from the dequantised weights."""
    if folder.name in ("llama", "llama-tied-bf16", "llama-f16", "llama3-rope", "qwen3"):
        return folder
    m = load(folder)
    w = dict(m.w)
    if m.interleaved:
        for name in [n for n in w if n.endswith(("q_proj.weight", "k_proj.weight"))]:
            heads = s.heads if "q_proj" in name else s.kv_heads
            w[name] = w[name].reshape(heads, -1, 2, s.hidden).swapaxes(1, 2).reshape(w[name].shape)
    write_json(scratch / "config.json", hf_config(s, "float32"))
    write_safetensors(scratch / "model.safetensors", {n: ("F32", t) for n, t in w.items()}, {"format": "pt"})
    return scratch


def transformers_model(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    return logits


def greedy(logits, prompt):
    """(logits of the prompt, greedy ids, logits after each, smallest gap between best and second)."""
    ids, first, rows = list(prompt), logits(prompt), []
    best, out = first[-1], []
    gap = float("inf")
    for _ in range(STEPS):
        top = np.sort(best)
        gap = min(gap, float(top[-1] - top[-2]))
        out.append(int(best.argmax()))
        ids.append(out[-1])
        best = logits(ids)[-1]
        rows.append(best)
    return first, out, np.stack(rows), gap


def choose_prompt(logits, seed, length):
    """The first random prompt whose greedy steps are all clear, and varied enough to show a stuck position."""
    for attempt in range(200):
        prompt = np.random.default_rng([seed, length, attempt]).integers(0, VOCAB, length).tolist()
        found = greedy(logits, prompt)
        if found[3] >= MIN_GAP and len(set(found[1])) >= 6:
            return prompt, *found
    raise SystemExit("no prompt with clear greedy steps")


def write_golden(folder, s, name):
    with tempfile.TemporaryDirectory() as scratch:
        logits = transformers_model(plain_folder(folder, s, Path(scratch)))
        out, gaps = {}, []
        for label, length in (("short", SHORT), ("long", LONG)):
            prompt, first, ids, rows, gap = choose_prompt(logits, s.seed, length)
            gaps.append(gap)
            out |= {f"{label}.prompt_ids": ("I32", np.array(prompt)), f"{label}.decode_ids": ("I32", np.array(ids)),
                    f"{label}.decode_logits": ("F32", rows)}
            if label == "long":
                out["long.positions"] = ("I32", np.array(LONG_POSITIONS))
                first = first[LONG_POSITIONS]
            out[f"{label}.logits"] = ("F32", first)
    weights = next((p.name for p in folder.glob("*.gguf")), ".")
    write_safetensors(folder / "golden.safetensors", out, {
        "format": "greenroom-tiny-1", "name": name, "family": s.family, "weights": weights, "min_gap": f"{min(gaps):.4f}",
    })


# ---------------------------------------------------------------- the check

def mistakes_of(s):
    out = {"rope style": {"swap_rope": True}, "kv head order": {"swap_groups": True}}
    if s.scaling:
        out["no rope scaling"] = {"no_scaling": True}
    if s.theta != 10000:
        out["rope base"] = {"theta_10000": True}
    if s.family == "qwen3":
        out["no q/k norm"] = {"no_qk_norm": True}
    return out


def check_case(folder, s):
    golden, meta = read_safetensors(folder / "golden.safetensors")
    m = load(folder)
    worst, effects = 0.0, {}
    for label in ("short", "long"):
        prompt, ids = golden[f"{label}.prompt_ids"], golden[f"{label}.decode_ids"]
        got = forward(m, np.concatenate([prompt, ids]))
        positions = golden["long.positions"] if label == "long" else np.arange(len(prompt))
        want, steps = golden[f"{label}.logits"], golden[f"{label}.decode_logits"]
        worst = max(worst, np.abs(got[positions] - want).max(), np.abs(got[len(prompt):] - steps).max())
        chosen = np.concatenate([got[len(prompt) - 1:-1]]).argmax(-1)
        assert (chosen == ids).all(), f"{folder.name}: greedy tokens differ"
        for what, flags in mistakes_of(s).items():
            effects[what, label] = np.abs(forward(m, prompt, **flags)[positions] - want).max()
        if "mlx" in folder.name:
            effects["word order", label] = np.abs(forward(load(folder, reverse_words=True), prompt)[positions] - want).max()
    assert worst < TOLERANCE, f"{folder.name}: transformers and numpy differ by {worst}"
    assert min(effects.values()) > MIN_EFFECT, f"{folder.name}: a mistake would pass: {effects}"
    size = sum(p.stat().st_size for p in folder.iterdir())
    assert size < 1_000_000, f"{folder.name}: {size} bytes"
    std = golden["short.logits"].std()
    assert 1 < std < 3, f"{folder.name}: logits' deviation {std}"
    least = min(effects, key=effects.get)
    print(f"{folder.name:22} {size:7} bytes  std {std:.2f}  min gap {meta['min_gap']}  numpy differs by {worst:.1e}  "
          f"smallest effect {effects[least]:.2f} ({least[0]}, {least[1]})", flush=True)
    return size


def check_against_mlx():
    """Our packing and MLX's own, where MLX is installed."""
    try:
        import mlx.core as mx
    except ImportError:
        print("mlx is not installed: its own quantiser was not compared")
        return
    for name in (name for name in CASES if "mlx" in name):
        q = json.loads((ROOT / name / "config.json").read_text())["quantization"]
        raw = mx.load(str(ROOT / name / "model.safetensors"))
        ours = load_folder(ROOT / name).w
        worst = 0.0
        for tensor in [n for n in raw if n.endswith(".scales")]:
            stem = tensor.removesuffix("scales")
            scales, biases = (raw[stem + part].astype(mx.float32) for part in ("scales", "biases"))
            bits, group = mlx_scheme(q, stem[:-1])
            theirs = np.array(mx.dequantize(raw[stem + "weight"], scales, biases, group_size=group, bits=bits))
            worst = max(worst, np.abs(theirs - ours[stem + "weight"]).max())
        assert worst < 1e-6, f"{name}: mlx dequantises differently, by {worst}"
        print(f"{name}: mlx {mx.__version__} dequantises to the same values ({worst:.1e})")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="check what is there, write nothing")
    arguments.add_argument("--only", nargs="+", metavar="NAME", choices=CASES, help="write these alone")
    arguments = arguments.parse_args()
    if not arguments.check:
        for name in arguments.only or CASES:
            s, write = CASES[name]
            shutil.rmtree(ROOT / name, ignore_errors=True)
            (ROOT / name).mkdir(parents=True)
            write(ROOT / name)
            write_golden(ROOT / name, s, name)
        if not arguments.only:
            write_tokenizer_golden()
    total = sum(check_case(ROOT / name, s) for name, (s, _) in CASES.items())
    check_against_mlx()
    assert total < 10_000_000, f"{total} bytes in all"
    print(f"{len(CASES)} checkpoints, {total} bytes")


if __name__ == "__main__":
    main()

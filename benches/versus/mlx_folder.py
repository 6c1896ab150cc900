"""An MLX model folder with the weights of a GGUF file, for mlx-lm.

usage: mlx_folder.py MODEL.gguf FOLDER

llama and qwen architectures. Blocks of Q4_0, Q4_1 and Q8_0 become MLX's affine codes in groups of 32 without any loss: `d · q + m` is
MLX's `scale · q + bias`, and the offsets 8 and 128 are powers of two. Other types are widened to f32 (what MLX then computes is another, slower
thing, which the folder's `widened` in config.json counts). The last token of the vocabulary ends an answer, which is hardly ever drawn: mlx-lm cannot be asked to ignore the end.
"""

import json
import shutil
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoTokenizer

GROUP = 32
# Architectures whose rows of queries and keys are stored as neighbouring pairs for the rope.
INTERLEAVED = {"llama"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main():
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    work = folder.with_name(folder.name + ".part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    reader = gguf.GGUFReader(model)
    config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name).to_dict()
    weights, bits, widened = {}, {}, 0
    for tensor in reader.tensors:
        name, suffix = named(tensor.name)
        rows = order(tensor, config)
        codes = affine(tensor, rows)
        if codes is None:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            weights[f"{name}.{suffix}"] = mx.array(np.ascontiguousarray(values if rows is None else values[rows]))
            widened += len(values.shape) > 1
            continue
        bits[name] = codes.pop("bits")
        weights |= {f"{name}.{part}": mx.array(value) for part, value in codes.items()}
    if bits:
        most = max(set(bits.values()), key=list(bits.values()).count)
        own = {name: {"group_size": GROUP, "bits": count} for name, count in bits.items() if count != most}
        config["quantization"] = {"group_size": GROUP, "bits": most, **own}
    # The last id of the vocabulary: an answer is whole when its tokens are, and not before.
    config |= {"tie_word_embeddings": "lm_head.weight" not in weights, "eos_token_id": config["vocab_size"] - 1, "widened": widened}
    mx.save_safetensors(str(work / "model.safetensors"), weights, {"format": "mlx"})
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(work)
    (work / "config.json").write_text(json.dumps(config, indent=1, default=str))
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)


def named(name):
    """A tensor's name in the folder, and what of it this is: weight or bias."""
    stem, _, suffix = name.rpartition(".")
    if stem in OUTSIDE:
        return OUTSIDE[stem], suffix
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK:
        return f"model.layers.{parts[1]}.{BLOCK[parts[2]]}", suffix
    sys.exit(f"versus: the tensor {name} is not known to the converter for mlx-lm")


def order(tensor, config):
    """The order of rows in which a head's first half is rotated with its second, or None where it is so already."""
    if config["model_type"] not in INTERLEAVED or not any(f".{kind}." in tensor.name for kind in ("attn_q", "attn_k")):
        return None
    heads = config["num_attention_heads" if ".attn_q." in tensor.name else "num_key_value_heads"]
    count = tensor.data.shape[0]
    return np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(count)


def affine(tensor, rows):
    """Codes, scales and biases as MLX has them, or None where the type has no such form."""
    kind = tensor.tensor_type
    sizes = {Type.Q4_0: 18, Type.Q4_1: 20, Type.Q8_0: 34}
    if kind not in sizes:
        return None
    data = tensor.data if rows is None else tensor.data[rows]
    blocks = np.ascontiguousarray(data).reshape(data.shape[0], -1, sizes[kind])
    scales = blocks[..., 0:2].copy().view(np.float16)[..., 0]
    if kind == Type.Q8_0:
        # A signed code plus 128 flips its highest bit.
        codes = (blocks[..., 2:] ^ 0x80).reshape(data.shape[0], -1)
        return packed(codes, 8, scales, scales * np.float16(-128))
    head = 4 if kind == Type.Q4_1 else 2
    biases = blocks[..., 2:4].copy().view(np.float16)[..., 0] if kind == Type.Q4_1 else scales * np.float16(-8)
    quarters = blocks[..., head:]
    # Low halves of the bytes are the block's first 16 values.
    codes = np.concatenate([quarters & 15, quarters >> 4], axis=-1).reshape(data.shape[0], -1)
    return packed(codes[:, 0::2] | codes[:, 1::2] << 4, 4, scales, biases)


def packed(codes, bits, scales, biases):
    words = np.ascontiguousarray(codes).view(np.uint32)
    return {"bits": bits, "weight": words, "scales": np.ascontiguousarray(scales), "biases": np.ascontiguousarray(biases)}


main()

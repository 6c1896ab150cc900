#!/usr/bin/env python3
"""Makes tests/data/quantised/golden.safetensors: quantised rows and the values that they stand for.

Run it once, in a virtual environment outside the repository, when the set of types changes; the tests need only its output:

    python3 -m pip install numpy gguf mlx[cpu]
    python3 scripts/make_quantised_goldens.py

GGUF's types: blocks of `gguf.quants.quantize` where it can, and random bytes with sane halves (both signs, zero, subnormal) for all,
dequantised by `gguf.quants.dequantize`. MLX's: codes, scales and biases of `mx.quantize`, dequantised by `mx.dequantize` in float32.

Tensors, for each type NAME: `NAME.data` U8 [rows, bytes], `NAME.values` F32 [rows, cols]; MLX's also `NAME.scales` and `NAME.biases`, U8 [rows, bytes],
with NAME = `mlx-BITS-GROUP-TYPE`. The output is a pure function of the seed and of the libraries' versions.
"""

import json
import struct
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

OUT = Path(__file__).resolve().parent.parent / "tests" / "data" / "quantised" / "golden.safetensors"
COLS = 512
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
MLX_TYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def random_rows(rng, name, rows):
    """Random bytes, with halves that are numbers."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (rows * COLS // block, size), dtype=np.uint8)
    blocks[0, :] = 0xFF
    for at in HALVES[name]:
        halves = rng.normal(0, 0.05, len(blocks)).astype(np.float16)
        halves[:3] = [0.5, 0.0, 6e-8]
        blocks[:, at:at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def gguf_tensors(rng):
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        rows = [random_rows(rng, name, 4)]
        try:
            rows.append(gguf.quants.quantize(rng.normal(0, 1, (2, COLS)).astype(np.float32), kind))
        except NotImplementedError:
            print(f"{name}: random blocks alone")
        data = np.concatenate(rows)
        yield f"{name}.data", data
        yield f"{name}.values", gguf.quants.dequantize(data, kind).astype("<f4")


def mlx_tensors(rng):
    as_bytes = lambda a: np.array(a.view(mx.uint8))
    for bits in (2, 3, 4, 5, 6, 8):
        for (kind, dtype), group in zip(MLX_TYPES.items(), (32, 64, 128)):
            w = mx.array(rng.normal(0, 1, (3, COLS)).astype(np.float32)).astype(dtype)
            codes, scales, biases = mx.quantize(w, group_size=group, bits=bits)
            wide = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
            name = f"mlx-{bits}-{group}-{kind}"
            yield f"{name}.data", as_bytes(codes)
            yield f"{name}.scales", as_bytes(scales)
            yield f"{name}.biases", as_bytes(biases)
            yield f"{name}.values", np.array(wide)


def main():
    rng = np.random.default_rng(2026)
    header, blobs, at = {"__metadata__": {"gguf": "0.19.0", "mlx": mx.__version__}}, [], 0
    for name, array in [*gguf_tensors(rng), *mlx_tensors(rng)]:
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": {1: "U8", 4: "F32"}[array.itemsize], "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    OUT.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()

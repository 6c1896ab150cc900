"""llama.cpp's own server, from the wheel of xllamacpp, until the process is ended.

usage: llama_server.py MODEL PORT THREADS SLOTS CONTEXT REMEMBERS

CONTEXT is shared evenly by the slots. With REMEMBERS 0 no prompt is remembered: every one is computed. With 1 a slot takes up the
prompt that it had before, which is llama.cpp's default.
"""

import signal
import sys

import xllamacpp


def main():
    model, (port, threads, slots, context, remembers) = sys.argv[1], map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = context
    params.kv_unified = False
    params.cache_prompt = remembers != 0
    params.cache_ram_mib = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


main()

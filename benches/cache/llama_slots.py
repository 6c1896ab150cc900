"""llama.cpp's own server from the wheel of xllamacpp, with one slot whose state can be saved to a file, until the process is ended.

usage: llama_slots.py MODEL PORT THREADS CONTEXT FOLDER

All else is as llama-server has it by itself.
"""

import os
import signal
import sys

import xllamacpp


def main():
    model, folder, (port, threads, context) = sys.argv[1], sys.argv[5], map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = 1
    params.n_ctx = context
    params.slot_save_path = os.path.join(folder, "")
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


main()

"""llama.cpp's own HTTP server, through xllamacpp. Run by the Python of the environment that holds it.

python llama_server.py MODEL.gguf PORT THREADS PARALLEL CONTEXT
"""

import sys
import threading

import xllamacpp


def main() -> None:
    model, port, threads, parallel, context = sys.argv[1], *map(int, sys.argv[2:6])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = parallel
    params.n_ctx = context * parallel
    params.n_gpu_layers = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

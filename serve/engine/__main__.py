"""`python -m serve.engine ADDRESS FD`: the engine process. Started by ProcessClient only."""

import sys

from serve.engine.build import build_engine_core
from serve.engine.engine_process import run_engine_process

if __name__ == "__main__":
    run_engine_process(sys.argv[1:], build_engine_core)

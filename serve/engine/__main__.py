"""`python -m serve.engine ADDRESS FD`: the engine process. Started by ProcessClient only."""

import sys

from serve.config import let_idle_threads_sleep

if __name__ == "__main__":
    let_idle_threads_sleep()  # torch comes with what follows

    from serve.engine.build import build_engine_core, import_worker
    from serve.engine.process.engine_process import run_engine_process

    run_engine_process(sys.argv[1:], build_engine_core, import_worker)

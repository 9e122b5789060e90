"""`python -m serve.engine ADDRESS FD`: the engine process. Started by ProcessClient only."""

import sys

from serve.engine.engine_process import main

sys.exit(main())

"""What every test needs before its imports."""

from __future__ import annotations

import os

# Triton decides at import whether its kernels are compiled or interpreted, and torch imports it.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""The command `serve-llm`, from its first instruction: what needs no flags is answered at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from serve import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    tokens = sys.argv[1:] if argv is None else list(argv)
    if tokens == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return 0
    from serve.commands import run  # late: reading flags takes many times as long to import

    return run(tokens)


if __name__ == "__main__":
    sys.exit(main())

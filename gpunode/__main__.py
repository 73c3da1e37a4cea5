"""``python -m gpunode``, and where the program `gpunode` starts."""

import signal
import sys

from gpunode import quick


def main() -> None:
    """Run the command line in `sys.argv`, and exit as docs/exit-codes.md says."""
    try:
        code = quick.run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    if code is not None:
        quick.leave(code)
    from gpunode.cli import main as parse_and_run

    parse_and_run()


if __name__ == "__main__":
    main()

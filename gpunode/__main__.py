"""``python -m gpunode``, and where the program `gpunode` starts."""

import io
import os
import signal
import sys


def main() -> None:
    """Run the command line in `sys.argv`, and exit as docs/exit-codes.md says."""
    fill_closed()
    for stream in (sys.stdout, sys.stderr):  # a locale without UTF-8 can't show every character of a message
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent left it ignored, no child's exit is reported
    # these must not end a service before it has set its handlers; other commands unblock them
    # (commands/session.py)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGUSR1))
    try:
        from gpunode.cli import main as parse_and_run

        parse_and_run()
    except KeyboardInterrupt:  # Ctrl-C in the tenth of a second before commands handle it themselves
        sys.exit(128 + signal.SIGINT)


def fill_closed() -> None:
    """Put /dev/null where the shell closed a standard stream (``>&-``).

    Its number would go to the next file or socket that is opened, and what is printed would end up in there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


if __name__ == "__main__":
    main()

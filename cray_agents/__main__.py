"""`cray-agents` and `python -m cray_agents`: the command line, from first import to end."""

import signal
import sys


def main() -> None:
    """Run a command. A Ctrl-C ends it with exit code 130, also while Python imports."""
    try:
        from cray_agents.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # in Python's teardown it would be a traceback


if __name__ == "__main__":
    main()

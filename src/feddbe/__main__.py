"""Entry point of `feddbe` and `python -m feddbe`, without imports that would delay Ctrl-C."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command line; Ctrl-C prints one line, also during imports."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
            signal.signal(signal.SIGINT, _interrupt)
        from feddbe.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("feddbe: stopped", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once during an import.

    An exception inside an import may get lost, or cross C++ code and abort.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"feddbe: stopped\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

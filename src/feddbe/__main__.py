"""The way in, `feddbe` or `python -m feddbe`: so light that Ctrl-C finds it awake at once."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """The command line; Ctrl-C while it is still being imported is one line, too."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored, as by nohup
            signal.signal(signal.SIGINT, _interrupt)
        from feddbe.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("feddbe: stopped", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """In the middle of an import an exception may get lost, or cross C++ and abort; so it ends at once then,
    as by a kill, which a run survives."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"feddbe: stopped\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

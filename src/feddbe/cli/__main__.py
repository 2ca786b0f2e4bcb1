import sys

from feddbe.cli import main

sys.exit(main())

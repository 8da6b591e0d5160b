"""``python -m layerflow.hosts``: a host process. Started by a server, never by hand."""

from __future__ import annotations

import os
import sys

from layerflow.hosts.arguments import connect
from layerflow.hosts.process import HostMain


def main() -> None:
    """Serve one server until it is gone."""
    code = HostMain(*connect("layerflow.hosts", __doc__ or "")).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: native libraries hang and crash in their destructors, and threads may be left in calls.
    os._exit(code)


if __name__ == "__main__":
    main()

"""All that is on a page, as one value that becomes JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feddbe.page.blocks import Block
from feddbe.page.clients import data, each, fair, joined
from feddbe.page.overview import learning, summary
from feddbe.page.represented import over_rounds, representations
from feddbe.page.setup import configuration, costs, versions
from feddbe.page.sources import Sources
from feddbe.results.extent import finished
from feddbe.show.canvas import COLOURS, STYLES
from feddbe.show.embedding import LABELS

__all__ = ["content"]

NAMED = 6
"""Methods that the title has the names of."""
_SECTIONS = (
    summary, learning, each, fair, joined, data, over_rounds, representations, costs, configuration, versions,
)  # fmt: skip


def content(sources: Sources, failed: Sequence[str] = (), *, first: Sequence[Block] = ()) -> dict[str, Any]:
    """The title, the sections that have something to show, `first` these, and the colours that pictures have,
    too; `failed`: what is to be said of runs that could not be read."""
    documents = sources.documents
    names = list(dict.fromkeys(document["method"] for document in documents))
    methods = ", ".join(names) if len(names) <= NAMED else f"{len(names)} methods"
    places = ", ".join(dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents))
    going = sum(not finished(document) for document in documents)
    about = [f"{len(documents)} run{'s' * (len(documents) != 1)}", f"{going} not finished" * bool(going)]
    return {
        "title": f"{methods} on {places}" if documents else "No run yet",
        "about": ", ".join(filter(None, about)),
        "failed": list(failed),
        "sections": [*first, *(part for make in _SECTIONS for part in make(sources))] if documents else [],
        "palette": {
            "lines": list(COLOURS),
            "dashes": [[] if style == "-" else list(style[1]) for style in STYLES],
            "labels": list(LABELS),
        },
    }

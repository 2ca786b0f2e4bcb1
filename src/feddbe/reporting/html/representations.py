"""The part of a page about analyses of representations: a section for each kind."""

from __future__ import annotations

from feddbe.reporting.build_figures import analysis_figures
from feddbe.reporting.html.blocks import Block, ReportRuns, figure_block, section
from feddbe.reporting.html.overview import measuring
from feddbe.reporting.representations import analysis_groups, analysis_title
from feddbe.runs.analysis import load_embedding

_MAX_POINTS = 24_000
"""Points of the scatter plots of an analysis."""


def representations_section(runs: ReportRuns) -> list[Block]:
    """Return a section for each kind of analysis that the runs have."""
    by_name = dict(zip(runs.names, runs.documents, strict=True))
    figures = analysis_figures(runs.documents, load_embedding, runs.names, max_points=_MAX_POINTS)
    sections = []
    for kind, found in analysis_groups(runs.documents, runs.names):
        commands = measuring((by_name[run], one) for run, one in found)
        sections += section(kind, analysis_title(found), [figure_block(figures[kind])], commands)
    return sections

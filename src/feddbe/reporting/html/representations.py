"""The report's sections about analyses of representations, one for each kind."""

from __future__ import annotations

from feddbe.reporting.build_figures import analysis_figures
from feddbe.reporting.html.blocks import Block, ReportRuns, figure_block, section
from feddbe.reporting.html.overview import analysis_commands
from feddbe.reporting.representations import analysis_title, group_analyses
from feddbe.runs.analysis import load_embedding

_MAX_POINTS = 24_000
"""Points of the scatter plots of an analysis."""


def representations_section(runs: ReportRuns) -> list[Block]:
    """Return a section for each kind of analysis that the runs have."""
    by_name = dict(zip(runs.names, runs.documents, strict=True))
    figures = analysis_figures(runs.documents, load_embedding, runs.names, max_points=_MAX_POINTS)
    sections = []
    for kind, analyses in group_analyses(runs.documents, runs.names):
        commands = analysis_commands((by_name[run], analysis) for run, analysis in analyses)
        sections += section(kind, analysis_title(analyses), [figure_block(figures[kind])], commands)
    return sections

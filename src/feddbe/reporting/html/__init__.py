"""Runs as a page."""

from feddbe.reporting.html.page import as_json, content, render, report, studied, write_report

__all__ = ["as_json", "content", "render", "report", "studied", "write_report"]

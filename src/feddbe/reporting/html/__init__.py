"""Runs as a page."""

from feddbe.reporting.html.page import as_json, page_content, render, report, studied_folders, write_report

__all__ = ["as_json", "page_content", "render", "report", "studied_folders", "write_report"]

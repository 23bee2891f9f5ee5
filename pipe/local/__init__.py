"""Pipelines within one process."""

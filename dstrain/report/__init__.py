"""Reporting: metrics, events, sinks."""

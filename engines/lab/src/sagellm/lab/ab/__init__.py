"""Compares configurations on one trace, request by request: what differs, and how sure that is."""

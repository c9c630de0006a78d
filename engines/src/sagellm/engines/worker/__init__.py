"""The side of a step that has tokens and KV: it computes what the core planned."""

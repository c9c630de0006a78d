"""A request on its way: checked and tokenized, queued, driven, and turned into outputs."""

"""The text that the embedded model learns from, all of it written or generated here."""

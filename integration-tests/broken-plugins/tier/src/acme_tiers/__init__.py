"""Five tiers of KV, each with one fault that people really make."""

"""Five eviction policies, each with one fault that people really make."""

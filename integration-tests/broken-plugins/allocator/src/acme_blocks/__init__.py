"""Five allocators of KV blocks, each with one fault that people really make."""

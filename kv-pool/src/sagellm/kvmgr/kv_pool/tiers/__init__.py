"""KV beyond the device, tier by tier."""

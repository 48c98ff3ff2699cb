"""The platform: gateway, pool, store, scheduler."""

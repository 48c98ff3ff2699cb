"""HTTP of the gateway: routing, keys and roles, bodies, errors, metrics, the OpenAPI document."""

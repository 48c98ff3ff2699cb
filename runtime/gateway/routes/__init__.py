"""Routes of the gateway: each is declared at its handler, with role, body and answer.

GET /openapi.json lists them all (http/routing.py). Any answer has `x-request-id` and
`openai-processing-ms`; http/middleware.py adds them. Any failure is
`{"error": {"message", "type", "param", "code"}}` (http/error_envelope.py).
"""

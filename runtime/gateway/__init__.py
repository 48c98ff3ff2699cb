"""The gateway: the HTTP APIs of the platform, OpenAI's, Anthropic's and ours."""

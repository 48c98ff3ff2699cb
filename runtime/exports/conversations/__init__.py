"""Conversations: a run's messages matched to its calls, in OpenAI's chat shape, and in pairs."""

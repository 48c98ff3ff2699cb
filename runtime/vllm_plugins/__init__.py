"""Code inside a vLLM server; of this package it imports cray_agents.processes alone."""

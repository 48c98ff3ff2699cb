"""Support of the tests: sites, gateways, corpora, and the tools that keep documents true."""

"""Data commands: `dataset`, `export`, `import`, `batch` and `upload`."""

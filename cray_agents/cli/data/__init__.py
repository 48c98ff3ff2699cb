"""`dataset`, `export`, `import`, `batch` and `upload`."""

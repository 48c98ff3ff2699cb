"""Segments: the store's files of checksummed lines, one writer a file, sealed when finished.

line_format.py turns an event into a line and its facts.
writer.py appends, and notices when another process took the writer for dead.
sealed.py makes a sealed file: plain zstd with a footer.
reader.py reads past any damage; repair.py reports and repairs it, and seals what dead writers left.
"""

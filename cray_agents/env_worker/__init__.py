"""Environment worker: runs environments of other frameworks for loops, in a Python of their own.

The folder stands alone: it imports nothing but the standard library and, in each adapter, the
framework that the adapter is for. It speaks to the platform by HTTP. Read next:
leased_runs.py (leases), slot.py (a process that carries out runs), adapters.py (their list).
"""

"""Imported last by what forks processes: their garbage collector skips what is imported by then.

Else each collection in each process goes through half a million objects, and copies their pages.
"""

import gc

gc.collect()
gc.freeze()

"""The compiled library in C: products, attention, recurrent layers and whole decode steps with bits of their own.

It is compiled at installation, where a C compiler is found. Begin with `library.py`, then `products.py`; each header
says what its C code does. The library checks nothing, so these modules check all shapes, dtypes and layouts before a
call.
"""

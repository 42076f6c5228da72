"""The compiled library in C: products, attention, recurrent layers and whole decode steps with bits of their own.

It is compiled at installation, where a C compiler is found. Begin with `native_library.py`, then `products.py`. Each
header says what its C code does. The library checks nothing, so these modules check all shapes, dtypes and layouts
before a call.
"""

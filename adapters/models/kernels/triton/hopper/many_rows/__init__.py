"""Products of many rows on Hopper: tiles that fit the number of processors, and parts of those with packed weights.

Begin with `fitted_tiles.py`. May import the kernels' common parts. `cuda/products.py` launches the first, and
`cuda/packing/many_rows.py` what `left_side.py` is for.
"""

"""Parts of products of many rows with packed weights on Hopper.

Begin with `left_side.py`. May import the kernels' common parts; `cuda/packing/many_rows.py` launches what is here.
"""

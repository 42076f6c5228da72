import re, subprocess
import torch
from tests.models.kernels.compiled_kernels import compile_for, TARGETS, make, CPU
from adapters.checkpoint.packed_matrix import MXFP4
from adapters.models.numerics.synthetic import random_matrix
from adapters.models.kernels.cuda.packed import pack_steps
from adapters.models.kernels.cuda import packed_groups as pg
from attrs import evolve
with compile_for(TARGETS['sm_90'], '/tmp/tc-experts19') as found:
    w = pack_steps(random_matrix((512, 2880), MXFP4, 'w'), CPU, converts_e4m3=True)
    w = evolve(w, words=w.words[None].expand(4, -1, -1, -1), levels=w.levels[None].expand(4, -1, -1, -1, -1))
    w = evolve(w, words=w.words.contiguous(), levels=w.levels.contiguous())
    chosen = torch.zeros(1024, 4, dtype=torch.int32)
    for pairs in (4096, 160):
        tile = pg.choose_packed_group_tile(pairs, 4, w, 227 << 10, hopper=True)
        print(tile, w.pieces, w.piece, w.block_form.block)
        d = pg.deal_pairs(chosen, None, tile.pairs, 4, True)
        pg.multiply_packed_groups(make(1024, 2880), w, make(4096, 512), d, tile, share=4, gated=0, processors=132, pdl=True)
for k in found.kernels:
    out = subprocess.run(['/work/wt/triton/triton/backends/nvidia/bin/cuobjdump', '-res-usage', str(k.binary)], capture_output=True, text=True).stdout
    print(k.name, k.shared, re.findall(r'REG:\d+ STACK:\d+', out), k.binary)

import sys, attrs, torch, traceback
from types import SimpleNamespace
from adapters.checkpoint.packed_matrix import MXFP4, StepLayout
from adapters.models.numerics.synthetic import random_matrix
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda import packed
from adapters.models.kernels.cuda import packed_groups as pg
import adapters.models.kernels.cuda.experts as ex
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.tiles import count_parts
from adapters.models.kernels.triton_launch import launch
from benchmarks.cuda_model import bandwidth
from benchmarks.hybrid_kernels import replay_us
from trial.old_few import multiply_few as old_few
D=torch.device("cuda"); BF=torch.bfloat16
Q4=StepLayout("uint4", 32, per=8, inner=True, least="own")
FP8=StepLayout("e4m3", 128, scale="float32"); Q8=StepLayout("int8", 32)
SHAPES={"gptoss":(32,4,2880,2880,False,MXFP4),"30b-mxfp4":(128,8,2048,768,True,MXFP4),"30b-q4":(128,8,2048,768,True,Q4),"30b-fp8":(128,8,2048,768,True,FP8),"30b-q8":(128,8,2048,768,True,Q8),
 "26b":(128,8,2816,704,False,None),"30b":(128,8,2048,768,True,None)}
T=pg.PackedGroupTile
def best(limit):
    return lambda w: max(c for c in range(1, max(1,limit//w.block_form.block)+1) if w.piece//w.block_form.block % c == 0)
PV={"old":None,
 "c16 a3 r128 x2":dict(ahead=best(384),registers=128,resident=2),
 "c16 a1 r80 x3":dict(ahead=best(128),registers=80,resident=3),
 "c32 a1 r80 x3":dict(columns=32,ahead=best(128),registers=80,resident=3),
 "c32 a1 r128 x2":dict(columns=32,ahead=best(128),registers=128,resident=2),
 "c32 a1 r96 x2":dict(columns=32,ahead=best(128),registers=96,resident=2)}
G=ex.GroupTile
def gv(depth_k):
    from adapters.models.kernels.cuda.tiles import choose_tile_of_pairs
    return {"old":None,"ahead":choose_tile_of_pairs(depth_k,BF,227<<10)}
def old_packed(x,w,out,d,tile,share,k):
    form=w.block_form; each=w.piece//form.block
    apart=[o.stride(0) for o in w.tensors]
    parts=count_parts(w.outputs,16); 
    ahead=max(c for c in range(1,128//form.block+1) if each%c==0)
    rounds=min(8,parts,count_parts(len(d.tiles)*parts,3*k.processors))
    grid=(len(d.tiles)*count_parts(w.outputs,16*rounds),)
    launch(old_few,grid,*w.tensors,x,out,d.pairs,d.tiles,d.total,*apart,w.outputs,w.columns,w.blocks,each,rounds,SHARE=share,PIECES=w.pieces,BLOCK_M=8,BLOCK_N=16,AHEAD=ahead,EVEN=w.columns==w.pieces*w.piece,FORM=form,GATED=out.shape[1]*2==w.outputs,EARLY=d.is_early,**(launch_options(8,k.pdl)|{"maxnreg":80}))
def make(N,K,layout,E,seed):
    if layout is None:
        return torch.empty(E,N,K,device=D,dtype=BF).normal_(0,K**-.5)
    m=packed.pack_steps(random_matrix((N,K),layout,f"w{seed}",D,K**-.5),D,converts_e4m3=True)
    def st(t): return None if t is None else torch.stack([t.roll(e,0) for e in range(E)])
    return attrs.evolve(m,words=st(m.words),scale=st(m.scale),inner=st(m.inner),least=st(m.least),own=st(m.own))
def size(w): return w.numel()*2 if isinstance(w,torch.Tensor) else sum(t.numel()*t.element_size() for t in (w.words,w.scale,w.inner,w.least,w.own) if t is not None)
def main(names,rowlist,only):
    speed=max(bandwidth().values()); print("bw",speed/1e12)
    k=TritonKernels(D); g=k.grouped_experts
    for name in names:
        E,top,H,I,gated,layout=SHAPES[name]
        L=[]
        while True:
            L.append((make(2*I,H,layout,E,2*len(L)),make(H,I,layout,E,2*len(L)+1)))
            if len(L)*(size(L[0][0])+size(L[0][1]))*top/E>2e8: break
        act=(size(L[0][0])+size(L[0][1]))/E
        gen=torch.Generator(device=D).manual_seed(1)
        for rows in rowlist:
            bucket=max(4,rows)
            chosen=torch.full((bucket,top),E,dtype=torch.int32,device=D)
            for r in range(rows): chosen[r]=torch.randperm(E,generator=gen,device=D)[:top].int()
            n=len(chosen[:rows].unique()); limit=1e6*n*act/speed
            x=torch.randn(bucket,H,generator=gen,device=D).to(BF)
            inner=torch.randn(bucket*top,I,generator=gen,device=D).to(BF)
            ref=None; line=[]
            variants=PV if layout is not None else gv(H)
            for v,how in variants.items():
                if only and v not in only: continue
                try:
                    both=torch.zeros(bucket*top,I if gated else 2*I,device=D,dtype=BF); out=torch.zeros(bucket*top,H,device=D,dtype=BF)
                    def tile(w,K):
                        if layout is not None:
                            if how is None: return None
                            t=T(8,16,1,8); return attrs.evolve(t,**{a:(b(w) if callable(b) else b) for a,b in how.items()})
                        return ex.choose_group_tile(bucket*top,E,BF,g.shared) if how is None else gv(K)[v]
                    def mult(x,w,out,d,t,share):
                        if layout is None: g._multiply_groups(x,w,out,d,t,share)
                        elif t is None: old_packed(x,w,out,d,t,share,g)
                        else: pg.multiply_packed_groups(x,w,out,d,t,share=share,processors=g.processors,pdl=g.pdl)
                    tg,td=tile(L[0][0],H),tile(L[0][1],I)
                    if layout is None and (tg is None or td is None): continue
                    h=8 if tg is None else tg.pairs
                    def gate(l,d): mult(x,l[0],both,d,tg,top)
                    def down(l,d): mult(inner if not gated else both,l[1],out,attrs.evolve(d,is_early=True),td,1)
                    d0=g.deal_pairs(chosen,None,h,E)
                    def three(l):
                        d=g.deal_pairs(chosen,None,h,E); gate(l,d); down(l,d)
                    t3=replay_us(L,three); tg_=replay_us(L,lambda l: gate(l,d0)); td_=replay_us(L,lambda l: down(l,d0)); two=replay_us(L,lambda l:(gate(l,d0),down(l,d0)))
                    both.zero_(); out.zero_(); three(L[0]); torch.cuda.synchronize()
                    got=(both[:rows*top].clone(),out[:rows*top].clone())
                    if ref is None: ref=got; same="ref"
                    else: same=all(torch.equal(a.view(torch.int16),b.view(torch.int16)) for a,b in zip(got,ref))
                    print(f"{name:10s} rows {rows:3d} experts {n:3d} limit {limit:6.1f} | {v:14s} deal+2 {t3:6.1f} two {two:6.1f} ({100*limit/two:3.0f}%) gate {tg_:6.1f} down {td_:6.1f} same {same} nan {bool(got[1].isnan().any())}",flush=True)
                except Exception as e:
                    print(name,rows,v,"FAILED",repr(e)[:300],flush=True); traceback.print_exc(limit=3)
        del L; torch.cuda.empty_cache()
if __name__=="__main__":
    a=sys.argv[1].split(","); rows=[int(r) for r in sys.argv[2].split(",")]
    main(a,rows,sys.argv[3].split(",") if len(sys.argv)>3 else None)

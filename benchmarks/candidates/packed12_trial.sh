                say("from end to end", name, label, " ".join(f"{n} {sum(d)/len(d):.2f}" for (k, n), d in sorted(deltas.items())))
        shard.close(); del shard, weights, kernels; packed_ahead.choose_ahead_tile = AHEAD_CHOICE; gc.collect(); torch.cuda.empty_cache()
action, _, share = what.partition(":")
numbers = map(int, share.split("/")) if share else ()
{"bits-wide": partial(bits, "wide"), "bits-single": partial(bits, "single"), "narrow": narrow, "wide": wide, "kern": kern, "widekern": widekern, "decode": model, "decode-warm": partial(model, 2, True), "prefill": partial(model, 12, False, "prefill"), "prefill-warm": partial(model, 2, True, "prefill")}[action](*numbers)
P
export PYTHONPATH=$PWD:$PYTHONPATH
R="python3 $OUT/p12.py"
for f in q4_k fp8 q8_0 awq; do
for i in 0 1; do timeout 50 $R kern:$i/2 $f > $OUT/warm-$f-$i.log 2>&1 & done
timeout 50 $R decode-warm $f > $OUT/warm-$f-d.log 2>&1 &
timeout 50 $R bits-wide $f > $OUT/bitsw-$f.log 2>&1 &
done
wait
echo "warm after $SECONDS s"; tail -qn 1 $OUT/warm-*.log | cut -c1-160
for f in q4_k fp8 q8_0 awq q6_k iq4_xs; do timeout 40 $R bits-single $f > $OUT/bitss-$f.log 2>&1 & done
for f in q6_k iq4_xs; do timeout 40 $R bits-wide $f > $OUT/bitsw-$f.log 2>&1 & done
timeout 40 $R prefill-warm bf16 q4_k > $OUT/warm-p.log 2>&1 &
wait
grep -h BITS $OUT/bits?-*.log | cut -c1-700; echo "bits after $SECONDS s"
timeout 55 $R decode q4_k awq fp8 q8_0 > $OUT/decode.log 2>&1; grep -v loaded $OUT/decode.log | cut -c1-420 | tail -75; echo "decode after $SECONDS s"
timeout 20 $R prefill bf16 q4_k fp8 > $OUT/prefill.log 2>&1; grep prefill $OUT/prefill.log | tail -24; echo "prefill after $SECONDS s"
timeout 20 $R wide q4_k fp8 > $OUT/wide.log 2>&1; tail -50 $OUT/wide.log | cut -c1-200
timeout 15 $R narrow q4_k fp8 > $OUT/narrow.log 2>&1; tail -20 $OUT/narrow.log | cut -c1-300
echo "done after $SECONDS s"

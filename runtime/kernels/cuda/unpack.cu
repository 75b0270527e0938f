// Int8 weights from kernel order (layout.py, act_bits 8) back to rows: out [N, K], for products that want them so.
// A warp moves 16 rows of one chunk of 64 columns. Macros: none of its own.

extern "C" __global__ void __launch_bounds__(256)
unpack(const uint4* __restrict__ W, u8* out, int N, int chunks) {
  pdl_launch_dependents();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int chunk = blockIdx.x * 8 + (threadIdx.x >> 5), tile = blockIdx.y;
  if (chunk < chunks) {
    const uint4* from = W + ((u64)tile * chunks + chunk) * 64 + lane;
    const uint4 q[2] = {load_weights(from), load_weights(from + 32)};
    pdl_wait();                                          // whoever reads `out` now is done before it is written
    const u64 width = (u64)chunks * 64;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u8* to = out + (u64)(tile * 16 + g) * width + chunk * 64 + h * 32 + t * 8;
      if (tile * 16 + g < N) *(uint2*)to = make_uint2(q[h].x, q[h].z);
      if (tile * 16 + g + 8 < N) *(uint2*)(to + 8 * width) = make_uint2(q[h].y, q[h].w);
    }
  } else {
    pdl_wait();
  }
}

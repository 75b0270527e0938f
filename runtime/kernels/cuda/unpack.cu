// Int8 weights from kernel order (layout.py, act_bits 8) back to rows: out [N, K], for products that want them so.
// A warp moves 16 rows of one chunk of 64 columns. Macros: none of its own.

extern "C" __global__ void __launch_bounds__(256)
unpack(const uint4* __restrict__ W, u8* out, int N, int chunks) {
  pdl_launch_dependents();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int chunk = blockIdx.x * 8 + (threadIdx.x >> 5), tile = blockIdx.y;
  if (chunk < chunks) {
    const uint4* from = W + ((u64)tile * chunks + chunk) * 64 + unit_place(lane);
    const uint4 q[2] = {load_weights(from), load_weights(from + 32)};   // of rows g and g + 8
    pdl_wait();                                          // whoever reads `out` now is done before it is written
    const u64 width = (u64)chunks * 64;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = tile * 16 + half * 8 + g;
      if (row < N) *(uint4*)(out + row * width + chunk * 64 + t * 16) = q[half];
    }
  } else {
    pdl_wait();
  }
}
